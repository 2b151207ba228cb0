"""Generation on the native engine: token ids in, token ids out, with the log-probability of every sampled token."""

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.models.generation.base_engine import STREAMS, BaseEngine, GenerationRequest
from nemo_rl_cpp.models.generation.interfaces import OnFinished, Pause, Responses
from nemo_rl_cpp.models.model_folder import ModelFolder

_UNLIMITED_SLOTS = 1 << 20


def native_runner(model: C.DecoderModel, config: GenerationConfig | Mapping[str, object]) -> C.NativeModelRunner:
    """Return the object through which the generation engine runs `model`. It reads the model's weights in place.

    On a CUDA device, decode steps run as CUDA graphs unless `config.vllm_cfg.enforce_eager`. On the CPU, depending on
    `config.packed_weights`, decode steps of small batches read a copy of the bfloat16 weights that is packed losslessly
    into 12 bits per weight. Neither changes the results."""
    config = as_model(config, GenerationConfig, "policy.generation")
    return C.NativeModelRunner(model, enforce_eager=config.vllm_cfg.enforce_eager, packed_weights=config.packed_weights)


class NativeGeneration(BaseEngine):
    """NeMo RL's generation interface on the C++ engine. A row's response never depends on the other rows of the batch
    or on engine limits. Equal prompts are prefilled once. `agree` returns the minimum of a number over a model's
    tensor-parallel ranks, which must schedule the same steps and so use one KV-cache limit; None: there is one rank."""

    def __init__(
        self,
        runner: C.ModelRunner,
        config: GenerationConfig | Mapping[str, object],
        tokenizer: TokenizerType,
        **options: object,
    ) -> None:
        super().__init__(config, tokenizer, **options)
        self._runner = runner
        self._vocab_size = runner.vocab_size()
        self.agree: Callable[[int], int] | None = None
        self._knows_bytes = False
        self._engine = C.Engine(
            runner,
            max_batch_size=self.config.max_batch_size or _UNLIMITED_SLOTS,
            prefill_chunk_tokens=self.config.prefill_chunk_tokens,
            max_model_len=self.max_model_len,
        )
        self.prepare_for_generation()

    def _respond(
        self, asked: GenerationRequest, on_finished: OnFinished | None, pause: Pause | None = None
    ) -> Responses | None:
        ids, offsets, index = _distinct_prompts(asked.batch)
        self._runner.keep_activations(pause is None and asked.stream == "train")
        requests = self._requests(asked, index)
        return _responses(self._engine.generate(ids, offsets, requests, on_finished, *(pause or ())))

    def generate_until(
        self, batch: RaggedBatch, pause: Pause, greedy: bool = False, on_finished: OnFinished | None = None
    ) -> Responses | None:
        """Generate like `generate`, but stop each response at the point `pause`. Return None if any response has
        stopped there; then `resume` continues all of them. Where a response stops depends only on `pause`, which counts
        the tokens of each response.

        Raise ValueError if `pause.keep_cache` is set and the KV cache cannot hold all responses at once."""
        return self._respond(self._asked(batch, greedy), on_finished, pause)

    def resume(self, on_finished: OnFinished | None = None) -> Responses | None:
        """Continue the generation that `generate_until` has paused, with the model's current weights, and return all
        responses. Return None if nothing is paused."""
        return _responses(self._engine.resume(on_finished)) if self._engine.paused else None

    def _requests(self, asked: GenerationRequest, prompt_index: Tensor) -> C.GenerationRequests:
        index: dict[tuple[str, ...], int] = {}  # the distinct sets of stop strings
        chosen = [index.setdefault(texts, len(index)) for texts in asked.stops]
        if any(index) and not self._knows_bytes:
            self._engine.set_token_bytes(self._token_bytes)
            self._knows_bytes = True
        return C.GenerationRequests(
            prompt_index=prompt_index, draw_ids=asked.draws, sample_index=asked.samples,
            streams=torch.full((asked.batch.size,), STREAMS[asked.stream]), max_new_tokens=asked.max_new_tokens,
            stop_set=torch.tensor(chosen), seed=self.seed, rule=self.sampling_rule(asked.greedy, asked.stream),
            stop_token_ids=self._stop_token_ids, stop_sets=[[text.encode() for text in texts] for texts in index],
        )  # fmt: skip

    # ---- memory, weights and metrics

    def prepare_for_generation(self, *args: object, **kwargs: object) -> bool:
        """Limit the KV cache to the memory that is free now, on all tensor-parallel ranks to the smallest of their
        limits. The engine allocates the cache with the first batch, and only what its requests need."""
        limit = self.cache_bytes_now()
        self._engine.set_max_cache_bytes(limit if self.agree is None else self.agree(limit))
        return True

    def finish_generation(self, *args: object, **kwargs: object) -> bool:
        self._engine.release_cache()
        return True

    shutdown = finish_generation

    def cache_bytes_now(self) -> int:
        return self.cache_bytes(torch.device(getattr(self._runner, "device", "cpu")))

    def get_logger_metrics(self) -> dict[str, float]:
        """Return metrics since the last `clear_logger_metrics`:

        steps, generated_tokens, prefill_tokens (including recomputation after a preemption), decode_tokens,
        draft_tokens (computed as drafts, csrc/generation/drafts.h), accepted_draft_tokens (part of decode_tokens),
        shared_prompt_tokens (not prefilled, because prompts are shared), mean_batch_size (sequences per step),
        peak_blocks (largest number of KV-cache blocks in use), preemptions, forward_seconds, sampling_seconds."""
        metrics = dict(self._engine.metrics)
        sequence_steps = metrics.pop("sequence_steps")
        return metrics | {"mean_batch_size": sequence_steps / max(metrics["steps"], 1)}

    def clear_logger_metrics(self) -> None:
        self._engine.reset_metrics()


def _responses(generated: C.GenerationArrays | None) -> Responses | None:
    if generated is None:
        return None
    truncated = generated.finish_reasons == int(C.FinishReason.length)
    return Responses(generated.token_ids, generated.offsets, generated.logprobs, truncated)


def _distinct_prompts(batch: RaggedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token ids and offsets of the distinct prompts of a batch, and the index of each row's prompt [B]."""
    index: dict[tuple[int, ...], int] = {}
    ids, offsets = batch.tokens["input_ids"].tolist(), batch.offsets.tolist()
    rows = [tuple(ids[start:end]) for start, end in pairwise(offsets)]
    chosen = [index.setdefault(row, len(index)) for row in rows]
    sizes = torch.tensor([0] + [len(prompt) for prompt in index])
    flat = torch.tensor([token for prompt in index for token in prompt], dtype=torch.int64)
    return flat, sizes.cumsum(0), torch.tensor(chosen)


def engine_options(policy: PolicyConfig, config: GenerationConfig, options: dict[str, object]) -> dict[str, object]:
    """Return `options` with the key `max_model_len`, unless they have it: the policy's maximum sequence length, or that
    of `config` (vllm_cfg.max_model_len) if it is lower."""
    longest = policy.generation.effective_max_model_len(policy.max_total_sequence_length)
    shorter = min(config.vllm_cfg.max_model_len or longest, longest)  # an evaluation may set a shorter length
    return {"max_model_len": shorter, **options}


def generation_on(
    model: C.DecoderModel, folder: ModelFolder, policy: PolicyConfig, tokenizer: TokenizerType | None, digest: Callable[[], str],
    config: GenerationConfig | None = None, **options: object,
) -> NativeGeneration:  # fmt: skip
    """Return an engine that reads the weights of `model` in place. `folder` defines the end tokens, `policy` the
    maximum sequence length. `config`: the generation settings (None: the section `policy.generation`). `digest` and
    `options` are arguments of `NativeGeneration`."""
    config = config or policy.generation
    options = engine_options(policy, config, options)
    options.setdefault("end_token_ids", end_token_ids(folder.path, folder.config, tokenizer))
    return NativeGeneration(native_runner(model, config), config, tokenizer, digest=digest, **options)
