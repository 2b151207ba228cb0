"""What vLLM in a process of the run's own and vLLM behind a server have in common: what they are asked, and what comes of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from hashlib import blake2b
from itertools import chain
from struct import pack
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from nemo_rl_cpp.data.token_bytes import token_bytes_table
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.models.generation.interfaces import GenerationDatumSpec, GenerationInterface, Responses
from nemo_rl_cpp.models.generation.settings import STREAMS, EngineSettings, ragged_prompts, row_integers, the_stream

if TYPE_CHECKING:
    from nemo_rl_cpp.config.policy import PolicyConfig
    from nemo_rl_cpp.data.interfaces import TokenizerType
    from nemo_rl_cpp.models.generation.interfaces import GenerationOutputSpec
    from nemo_rl_cpp.models.generation.refit import Moved
    from nemo_rl_cpp.models.json_values import JsonObject

Finished = Callable[[list[int], list[list[int]]], None]


class WeightsOwner(Protocol):
    """The trainer, as far as vLLM needs it: a policy in this process."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """The present weights by the names of the model's checkpoints."""

    def saved_config(self) -> JsonObject:
        """config.json of a checkpoint."""


class Request(NamedTuple):
    """One response that vLLM is asked for. `row` is that of the batch, `room` the most tokens that it may have."""

    row: int
    prompt: list[int]
    room: int
    seed: int
    stops: tuple[str, ...]


class Asked(NamedTuple):
    """What `generate` asks of vLLM. `sampling` are fields of vLLM's SamplingParams that all requests share."""

    requests: list[Request]
    sampling: dict[str, float]


class VllmEngine(EngineSettings, GenerationInterface):
    """NeMo RL's generation interface on vLLM, wherever it runs.

    vLLM generates nothing before the first `update_weights`. A sample is drawn by vLLM with a seed of its own, made from (seed, stream,
    draw id, sample, length of the prompt), so that a run that is repeated asks for the same. vLLM's log-probabilities are not those of
    training to the bit.

    Args:
        config: section `policy`.
        vocab_size: rows of the model's embedding.
        tokenizer, end_token_ids, seed: as of `EngineSettings`.

    Attributes:
        weight_version: of the weights that vLLM has; None before the first refit.
    """

    reports_finished = True
    owns_process = True

    def __init__(
        self, config: PolicyConfig, vocab_size: int, tokenizer: TokenizerType, *, end_token_ids: list[int] | None = None, seed: int = 42
    ) -> None:  # fmt: skip
        generation = config.generation
        longest = generation.effective_max_model_len(config.max_total_sequence_length)
        super().__init__(generation, tokenizer, end_token_ids=end_token_ids, max_model_len=longest, seed=seed)
        self.sampling(greedy=False, stream="train")  # reports bad values now rather than at the first step
        self.weight_version: int | None = None
        self._digest: str | None = None
        self._vocab_size = vocab_size

    # ---- token ids in, token ids out

    def generate(
        self, data: RaggedBatch | BatchedDataDict[GenerationDatumSpec], greedy: bool = False, on_finished: Finished | None = None
    ) -> Responses | BatchedDataDict[GenerationOutputSpec]:  # fmt: skip
        """A response for every row, as `NativeGeneration.generate` gives it; the token or the text that ends a response stays part of it.

        Raises ValueError for rows that do not fit their lengths, unknown streams, or rows of several streams at once; VllmError
        before the first refit; WorkerLostError when vLLM has ended, or has made no step for vllm_cfg.timeout_s.
        """
        batch = data if isinstance(data, RaggedBatch) else ragged_prompts(data)
        stream = the_stream(data.get("stream"), batch.size)
        room = self.max_new_tokens(batch.lengths)
        room = torch.minimum(room, self.max_model_len - batch.lengths).clamp(min=0).tolist()
        draws = self.draw_ids(data.get("draw_ids"), batch.size).tolist()
        samples = row_integers("sample_index", data.get("sample_index", torch.zeros(batch.size)), batch.size).tolist()
        texts = self.stop_texts(data.get("stop_strings"), batch.size)
        prompts = [row.tolist() for row in batch.rows(batch.tokens["input_ids"])]
        requests = [
            Request(row, prompts[row], room[row], self._seed_of(STREAMS[stream], draws[row], samples[row], len(prompts[row])), tuple(texts[row]))
            for row in range(batch.size)
            if room[row] > 0
        ]  # fmt: skip
        answers = Answers(batch.size, on_finished)
        if requests:
            self._answer(Asked(requests, self._sampling_arguments(greedy, stream)), answers)
        responses = answers.responses(self.weight_version)
        return responses if batch is data else responses.padded(batch, getattr(self.tokenizer, "pad_token_id", None))

    @abstractmethod
    def _answer(self, asked: Asked, answers: Answers) -> None:
        """Lets vLLM answer all requests, by the weights of `weight_version`."""

    def _sampling_arguments(self, greedy: bool, stream: str) -> dict[str, float]:
        sampling = self.sampling(greedy, stream)
        if sampling.greedy:
            return {"temperature": 0.0}
        return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}

    def _seed_of(self, stream: int, draw: int, sample: int, length: int) -> int:
        """63 bits of the key of a response. The prompt's length sets the turns of a conversation apart."""
        digest = blake2b(pack("<IIqqq", self.seed, stream, draw, sample, length), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _token_bytes(self) -> list[bytes]:
        """The bytes of all tokens: stop strings are looked for in them."""
        return token_bytes_table(self.tokenizer, self._vocab_size)

    def _check_version(self, version: int | None) -> None:
        if version != self.weight_version:
            raise RuntimeError(
                f"vLLM answered with weights of version {version}, and version {self.weight_version} was sent"
            )

    # ---- weights and memory

    @abstractmethod
    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> Moved:
        """Brings the weights to vLLM, in its own types where they differ; those of `version` from then on.

        Raises RuntimeError when what arrived has another digest than what was sent, or a parameter of vLLM's model got nothing; vLLM
        generates nothing then.
        """

    def weight_digest(self) -> str:
        """Of the weights that arrived at the last refit, 32 hexadecimal digits. RuntimeError before the first."""
        if self._digest is None:
            raise RuntimeError("vLLM has no weights before the first sync_weights")
        return self._digest

    def invalidate_kv_cache(self) -> bool:
        """Nothing to do: vLLM forgets keys and values with each refit."""
        return True


class Answers:
    """The responses as they end.

    Args:
        count: rows of the batch. A row that is never asked for has no room: its response is empty and truncated.
        on_finished: told of rows that ended while others run.
    """

    def __init__(self, count: int, on_finished: Finished | None) -> None:
        self.on_finished = on_finished
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self.truncated = [True] * count

    def put(self, row: int, tokens: list[int], logprobs: list[float], truncated: bool) -> None:
        """A response that has ended."""
        self.tokens[row], self.logprobs[row], self.truncated[row] = tokens, logprobs, truncated

    def tell(self, rows: list[int]) -> None:
        """These have ended, and others run."""
        if rows and self.on_finished is not None:
            self.on_finished(rows, [list(self.tokens[row]) for row in rows])

    def responses(self, version: int | None) -> Responses:
        """All of them. RuntimeError where a log-probability is not finite: vLLM's logits are not then."""
        logprobs = torch.tensor(list(chain.from_iterable(self.logprobs)), dtype=torch.float32)
        if not bool(torch.isfinite(logprobs).all()):
            raise RuntimeError("vLLM gave a log-probability that is not finite: the model's logits are not")
        return Responses(
            torch.tensor(list(chain.from_iterable(self.tokens)), dtype=torch.int64),
            offsets_of(torch.tensor([len(row) for row in self.tokens])), logprobs, torch.tensor(self.truncated), version,
        )  # fmt: skip


def vocabulary_of(config: JsonObject) -> int:
    """Rows of the embedding of a config.json; 0 where it does not say."""
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0)
