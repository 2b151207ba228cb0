"""The common part of all engines: the settings (`policy.generation`), the requests, and the responses."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.data.boundaries import end_token_ids_of_tokenizer
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.data.texts import token_bytes_table
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.metrics.memory import available_bytes
from nemo_rl_cpp.models.generation.interfaces import Answer, GenerationInterface, OnFinished, Prompts, Responses

STREAMS = {"train": 0, "val": 1, "eval": 2}
"""Stream of samples -> its number, which is part of the seed of sampling (csrc/common/random.h)."""


class Sampling(NamedTuple):
    """The sampling settings; a top_k of 0 means no top-k."""

    temperature: float
    top_p: float
    top_k: int
    greedy: bool


class GenerationRequest(NamedTuple):
    """The prompts and settings of one `generate` call, with B rows. `stream` is "train", "val" or "eval" for all rows.
    Each row has `max_new_tokens`, `draws` and `samples` (`draw_ids` and `sample_index` in `GenerationDatumSpec`), int64
    [B], and its distinct stop strings `stops`."""

    batch: RaggedBatch
    greedy: bool
    stream: str
    max_new_tokens: Tensor
    draws: Tensor
    samples: Tensor
    stops: list[tuple[str, ...]]


class BaseEngine(GenerationInterface):
    """The base class of generation engines; subclasses implement `_respond`. By default an engine holds no memory
    between two `generate` calls. A row's response depends only on its prompt, its sampling settings and the seed of its
    sampling: `seed`, stream, draw id and sample index (see `GenerationDatumSpec`). A response includes the end token or
    stop string that ends it, so that training sees exactly the sampled tokens.

    Args:
        config: section `policy.generation`, as a configuration object or a mapping.
        tokenizer: provides the pad token, and the bytes of each token, in which stop strings are matched.
        end_token_ids: tokens that end a response if `stop_token_ids` is null; None: the tokenizer's end tokens.
        max_model_len: longest sequence, prompt plus response; None: `vllm_cfg.max_model_len`, or no limit.
        digest: returns a digest of the engine's weights.
        memory_share: share of this machine's free memory that this engine may use.

    Raises ValueError for unknown keys and invalid values (temperature < 0, top_p outside (0, 1], ...)."""

    reports_finished = True
    owns_process = False
    _vocab_size: int

    def __init__(
        self,
        config: GenerationConfig | Mapping[str, object],
        tokenizer: TokenizerType,
        *,
        end_token_ids: Sequence[int] | None = None,
        max_model_len: int | None = None,
        seed: int = 42,
        digest: Callable[[], str] | None = None,
        memory_share: float = 1.0,
    ) -> None:
        self.config = config = as_model(config, GenerationConfig, "policy.generation")
        self.tokenizer = tokenizer
        self.seed = int(seed) & 0xFFFFFFFF
        self.max_model_len = max_model_len or config.vllm_cfg.max_model_len or 0
        if (ends := config.stop_token_ids) is None:
            ends = end_token_ids_of_tokenizer(tokenizer) if end_token_ids is None else end_token_ids
        self._stop_token_ids = [int(token) for token in ends]
        self._digest, self._memory_share = digest, memory_share
        self._next_draw_id = 0
        self.sampling_rule(greedy=False, stream="train")  # reports bad values now rather than at the first step

    # ---- token ids in, token ids out

    def generate(self, data: Prompts, greedy: bool = False, on_finished: OnFinished | None = None) -> Answer:
        """Return a response for every row: `Responses` for a RaggedBatch; a `GenerationOutputSpec` for padded prompts
        with the keys of `GenerationDatumSpec`.

        `greedy` takes the most likely token each time, and reports log-probabilities at temperature 1 without top-k and
        top-p. Rows of the stream "val" use val_temperature, val_top_p and val_top_k if these are set. A prompt that
        leaves no room under max_model_len gets an empty response that is marked as truncated.

        Between two engine steps, `on_finished(rows, token_ids)` receives the rows whose responses have just ended, and
        these responses. Each row is reported once, but rows that end in the last step are not reported. If
        `on_finished` raises an error, the generation ends.

        Raises ValueError for lengths or other arguments that do not match the rows, for an unknown stream, or rows of
        several streams; RuntimeError if the model's logits are not finite; KeyboardInterrupt after Ctrl-C."""
        batch = RaggedBatch.of(data)
        responses = self._respond(self._asked(batch, greedy), on_finished)
        return responses if batch is data else responses.padded(batch, getattr(self.tokenizer, "pad_token_id", None))

    def _asked(self, batch: RaggedBatch, greedy: bool) -> GenerationRequest:
        """Return the request for the prompts `batch`, with new `draw_ids`, which seed sampling, if it has none."""
        size, draws = batch.size, batch.get("draw_ids")
        if draws is None:
            draws = torch.arange(self._next_draw_id, self._next_draw_id + size)
            self._next_draw_id += size
        return GenerationRequest(
            batch=batch,
            greedy=greedy,
            stream=_the_stream(batch.get("stream"), size),
            max_new_tokens=self._max_new_tokens(batch.lengths),
            draws=_row_integers("draw_ids", draws, size),
            samples=_row_integers("sample_index", batch.get("sample_index", torch.zeros(size)), size),
            stops=self._stop_texts(batch.get("stop_strings"), size),
        )

    @abstractmethod
    def _respond(self, asked: GenerationRequest, on_finished: OnFinished | None) -> Responses:
        """Return the responses for all rows, and call `on_finished` with those that have ended."""

    def _room(self, asked: GenerationRequest) -> list[int]:
        """Return each response's maximum number of tokens, so that prompt and response fit in `max_model_len`."""
        if not self.max_model_len:
            return asked.max_new_tokens.tolist()
        left = self.max_model_len - asked.batch.lengths
        return torch.minimum(asked.max_new_tokens, left).clamp(min=0).tolist()

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return token_bytes_table(self.tokenizer, self._vocab_size)

    # ---- weights and memory

    def prepare_for_generation(self, *args: object, **kwargs: object) -> bool:
        """Do nothing: the engine reads the weights in place, and begins every `generate` with an empty KV cache."""
        return True

    finish_generation = shutdown = invalidate_kv_cache = prepare_for_generation

    def weight_digest(self) -> str:
        """Return the digest of the engine's weights. Raise RuntimeError if the engine was created without `digest`."""
        if self._digest is None:
            raise RuntimeError(f"this {type(self).__name__} was made without `digest`")
        return self._digest()

    # ---- settings

    def sampling(self, greedy: bool, stream: str) -> Sampling:
        """Return the sampling settings of a stream. For greedy decoding the temperature is 1, without top-k and top-p,
        because log-probabilities are computed with these settings."""

        def setting(name: str, default: float) -> float:
            validation = getattr(self.config, f"val_{name}") if stream == "val" else None
            value = getattr(self.config, name) if validation is None else validation
            return default if value is None else value

        temperature, top_p, top_k = setting("temperature", 1.0), setting("top_p", 1.0), int(setting("top_k", 0))
        greedy = greedy or temperature == 0
        return Sampling(1.0 if greedy else temperature, top_p, max(top_k, 0), greedy)

    def sampling_rule(self, greedy: bool, stream: str) -> C.SamplingRule:
        """Return the settings of `sampling` in the form that the native sampler takes."""
        return C.SamplingRule(**self.sampling(greedy, stream)._asdict())

    def _max_new_tokens(self, lengths: Tensor) -> Tensor:
        """Return the maximum response length, int64 [B], for prompts of the lengths `lengths` [B]."""
        limit = self.config.max_new_tokens
        if limit is None and not self.max_model_len:
            raise ValueError("policy.generation.max_new_tokens is null and no longest sequence is known: set one")
        if limit is None:
            return (self.max_model_len - lengths).clamp(min=1)
        return torch.full_like(lengths, limit)

    def _stop_texts(self, per_row: Sequence[str | Sequence[str] | None] | None, rows: int) -> list[tuple[str, ...]]:
        """Return the distinct stop strings of each row: the configuration's, followed by the row's own in `per_row`."""
        per_row = [None] * rows if per_row is None else list(per_row)
        if len(per_row) != rows:
            raise ValueError(f"stop_strings: {len(per_row)} entries for {rows} rows")
        common = _strings_of(self.config.stop_strings)
        return [tuple(dict.fromkeys(common + _strings_of(row))) for row in per_row]

    def cache_bytes(self, device: torch.device) -> int:
        """Return the KV cache's size in bytes: kv_cache_gb, or half of this engine's share of the free memory."""
        if self.config.kv_cache_gb:
            return int(self.config.kv_cache_gb * 1e9)
        free = available_bytes()
        if device.type == "cuda":
            reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            free = torch.cuda.mem_get_info(device)[0] + reserved
        return max(int(free * self._memory_share) // 2, 1)


class StopStrings:
    """A search for stop strings in the bytes of a response's tokens, one token after the other, as in the native
    engine. `token_bytes` holds the bytes of each token of the vocabulary."""

    def __init__(self, stops: Sequence[str], token_bytes: Sequence[bytes]) -> None:
        self._stops, self._token_bytes = [text.encode() for text in stops], token_bytes
        self._kept = max(map(len, self._stops), default=1) - 1  # last bytes that may begin a stop string
        self._tail = b""

    def end_at(self, token: int) -> bool:
        """Return whether the bytes so far, including the next token's (`token`), contain a stop string."""
        if not self._stops:
            return False
        text = self._tail + (self._token_bytes[token] if token < len(self._token_bytes) else b"")
        self._tail = text[-self._kept :] if self._kept else b""
        return any(stop in text for stop in self._stops)


class ResponseBuffer:
    """The responses of a batch of `count` rows, each stored when it ends. A row that is never stored, because its
    prompt leaves no room for a response, has an empty response that is marked as truncated."""

    def __init__(self, count: int, on_finished: OnFinished | None) -> None:
        self.on_finished = on_finished
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self.truncated = [True] * count

    def put(self, row: int, tokens: list[int], logprobs: list[float], truncated: bool) -> None:
        self.tokens[row], self.logprobs[row], self.truncated[row] = tokens, logprobs, truncated

    def tell(self, rows: list[int]) -> None:
        """Call `on_finished` with the rows `rows`, whose responses have ended, and their token ids."""
        if rows and self.on_finished is not None:
            self.on_finished(rows, [list(self.tokens[row]) for row in rows])

    def responses(self, version: int | None = None) -> Responses:
        """Return all responses, with `version` as the version of the weights that generated them."""
        return Responses(
            torch.tensor(list(chain.from_iterable(self.tokens)), dtype=torch.int64),
            offsets_of(torch.tensor([len(row) for row in self.tokens])),
            torch.tensor(list(chain.from_iterable(self.logprobs)), dtype=torch.float32), torch.tensor(self.truncated, dtype=torch.bool), version,
        )  # fmt: skip


def _strings_of(value: str | Sequence[str] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _row_integers(name: str, values: Tensor | Sequence[int], rows: int) -> Tensor:
    result = torch.as_tensor(values).to("cpu", torch.int64)
    if result.shape != (rows,):
        raise ValueError(f"{name}: expected one integer for each of {rows} rows, got shape {tuple(result.shape)}")
    return result


def _the_stream(value: str | Sequence[str | None] | None, rows: int) -> str:
    """Return the stream ("train", "val" or "eval") that all `rows` rows share, "train" for None. Raise ValueError if
    `value` names several streams or an unknown one."""
    per_row = [value] * rows if value is None or isinstance(value, str) else list(value)
    streams = sorted({row or "train" for row in per_row})
    if len(per_row) != rows or len(streams) != 1 or streams[0] not in STREAMS:
        raise ValueError(f"stream: expected one of {', '.join(STREAMS)} for all {rows} rows, got {value!r}")
    return streams[0]
