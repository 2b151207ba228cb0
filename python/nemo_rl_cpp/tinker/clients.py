"""Tinker's clients in this process. They have the SDK's methods and train the same models as the server, without HTTP.

Every method returns an `APIFuture` at once; `.result()` or `await` gives the result. Calls run in the order in which
they are made, in one thread. Their argument types are in `nemo_rl_cpp.tinker.types`, or in the SDK's `tinker.types`."""

from __future__ import annotations

import functools
import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.serving.model import EngineSizes
from nemo_rl_cpp.tinker import types
from nemo_rl_cpp.tinker.adapters import Base, Shape
from nemo_rl_cpp.tinker.models import CustomLoss, Model, Models
from nemo_rl_cpp.tinker.store import Facts, Place, Store
from nemo_rl_cpp.tinker.worker import APIFuture, Sampler

P, S, T = ParamSpec("P"), TypeVar("S"), TypeVar("T")


def _async(call: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Awaitable[T]]:
    """Return the SDK's `..._async` variant of a method: a coroutine function that returns what the method returns."""

    @functools.wraps(call)
    async def call_async(self: S, *args: P.args, **options: P.kwargs) -> T:
        return call(self, *args, **options)

    return call_async


def _awaited(call: Callable[Concatenate[S, P], Awaitable[T]]) -> Callable[Concatenate[S, P], Awaitable[T]]:
    """Return the variant of a method for which the SDK's coroutine function returns the result, not a future of it."""

    @functools.wraps(call)
    async def call_async(self: S, *args: P.args, **options: P.kwargs) -> T:
        return await call(self, *args, **options)

    return call_async


class ServiceClient(AbstractContextManager["ServiceClient"]):
    """A Tinker service in this process: a base model, and the thread that trains its LoRA models and samples from them.
    The methods that make a client return a future of it.

    Args:
        model: a Hugging Face folder, a packaged model, a name on the Hub, a run's checkpoint, or "tiny-random".
        folder: the folder of the checkpoints.
        precision: "float32", "float64" or "bfloat16".
        quantization: the format of the base model's matrices: "q8_0", "q4_0" or "nf4"; None: as `precision`.
        max_batch_size: the number of responses generated concurrently.
        cache_gb: size of the KV cache of one sampler, in GB.
        max_length: the maximum number of tokens of a sequence; None: as many as the model and the KV cache allow."""

    def __init__(
        self, model: str, folder: str | Path = "results/tinker", *, precision: str = "bfloat16", quantization: str | None = None,
        max_batch_size: int = 64, cache_gb: float = 1.0, max_length: int | None = None,
    ) -> None:  # fmt: skip
        base = Base.load(str(model), None, precision, EngineSizes(max_length, cache_gb, max_batch_size), quantization)
        self._core, self._session = Models(base, Store(Path(folder))), str(uuid.uuid4())
        self._numbers = itertools.count()

    def close(self) -> None:
        """End the thread after its current call, and unlock the checkpoint folder."""
        self._core.worker.shut_down()
        self._core.store.close()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def create_lora_training_client(
        self, rank: int = 32, seed: int | None = None, train_mlp: bool = True, train_attn: bool = True
    ) -> APIFuture[TrainingClient]:
        """Make a LoRA model with new adapters. B is 0, so its outputs equal the base model's; `seed` initializes A."""
        model = self._model(Shape(rank, train_mlp, train_attn))

        def create() -> TrainingClient:
            self._core.create(model, seed or 0)
            return TrainingClient(self._core, model)

        return self._core.worker.do(create)

    def create_training_client_from_state(self, path: str) -> APIFuture[TrainingClient]:
        """Make a LoRA model from the checkpoint `path`, a tinker:// path, without its optimizer state."""
        return self._from_state(path, optimizer=False)

    def create_training_client_from_state_with_optimizer(self, path: str) -> APIFuture[TrainingClient]:
        """Make a LoRA model from the checkpoint `path`, a tinker:// path, with its optimizer state."""
        return self._from_state(path, optimizer=True)

    def create_sampling_client(self, model_path: str | None = None) -> APIFuture[SamplingClient]:
        """Make a client that samples from a checkpoint, or from the base model if `model_path` is None."""
        return self._core.worker.do(lambda: SamplingClient(self._core, self._core.sampler(model_path)))

    def _from_state(self, path: str, *, optimizer: bool) -> APIFuture[TrainingClient]:
        def load() -> TrainingClient:
            place = Place.of(path)
            model = self._model(self._core.store.facts(place).shape)
            self._core.load(model, place, optimizer=optimizer)
            return TrainingClient(self._core, model)

        return self._core.worker.do(load)

    def _model(self, shape: Shape) -> Model:
        return Model(f"{self._session}:train:{next(self._numbers)}", Facts(self._core.base.names[0], shape))

    create_lora_training_client_async = _awaited(create_lora_training_client)
    create_training_client_from_state_async = _awaited(create_training_client_from_state)
    create_training_client_from_state_with_optimizer_async = _awaited(create_training_client_from_state_with_optimizer)
    create_sampling_client_async = _awaited(create_sampling_client)


@dataclass(eq=False)
class TrainingClient:
    """The client of one LoRA model in training. A ServiceClient makes it."""

    _core: Models
    _model: Model

    @property
    def model_id(self) -> str:
        return self._model.id

    def get_tokenizer(self) -> TokenizerType:
        return self._core.base.tokenizer

    def forward(
        self, data: Sequence[types.Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Compute a built-in loss (`nemo_rl_cpp.tinker.types.LOSSES`), summed over tokens, without its gradient."""
        return self._do(lambda core, model: core.forward(model, data, loss_fn, loss_fn_config, backward=False))

    def forward_backward(
        self, data: Sequence[types.Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Compute a built-in loss, summed over tokens, and accumulate its gradient for the next optimizer step."""
        return self._do(lambda core, model: core.forward(model, data, loss_fn, loss_fn_config, backward=True))

    def forward_backward_custom(
        self, data: Sequence[types.Datum], loss_fn: CustomLoss
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Compute your own loss, and accumulate its gradient for the next optimizer step.

        `loss_fn(data, logprobs)` returns a scalar tensor and metrics; `logprobs` are the log-probabilities of the
        targets of each datum. It runs in the models' thread, so it must not wait for a client."""
        return self._do(lambda core, model: core.forward_backward_custom(model, data, loss_fn))

    def optim_step(self, adam_params: types.AdamParams) -> APIFuture[dict[str, float]]:
        """Update the adapters with AdamW, and reset the gradient to zero. The result holds the metrics of the step."""
        return self._do(lambda core, model: core.step(model, adam_params))

    def save_state(self, name: str, *, overwrite: bool = False) -> APIFuture[str]:
        """Save the model with its optimizer state; the result is the checkpoint's tinker:// path."""
        return self._do(lambda core, model: core.save(model, "weights", name, overwrite=overwrite))

    def load_state(self, path: str) -> APIFuture[None]:
        """Load the adapters of a checkpoint into this model, and reset its optimizer."""
        return self._do(lambda core, model: core.load(model, Place.of(path), optimizer=False))

    def load_state_with_optimizer(self, path: str) -> APIFuture[None]:
        """Load the adapters and the optimizer state of the checkpoint `path`, a tinker:// path, into this model."""
        return self._do(lambda core, model: core.load(model, Place.of(path), optimizer=True))

    def save_weights_for_sampler(self, name: str) -> APIFuture[str]:
        """Save the adapters for sampling; the result is the checkpoint's tinker:// path."""
        return self._do(lambda core, model: core.save(model, "sampler_weights", name))

    def save_weights_external(self, name: str) -> APIFuture[Path]:
        """Save the adapters in PEFT's format, as the checkpoint `name`; the result is their folder."""
        return self._do(lambda core, model: core.store.folder(Place.of(core.save(model, "external_weights", name))))

    def save_weights_and_get_sampling_client(self) -> APIFuture[SamplingClient]:
        """Return a sampler of the current weights, which are kept in memory."""
        return self._do(lambda core, model: SamplingClient(core, core.snapshot(model)))

    def _do(self, call: Callable[[Models, Model], T]) -> APIFuture[T]:
        return self._core.worker.do(lambda: call(self._core, self._model))

    forward_async = _async(forward)
    forward_backward_async = _async(forward_backward)
    forward_backward_custom_async = _async(forward_backward_custom)
    optim_step_async = _async(optim_step)
    save_state_async = _async(save_state)
    load_state_async = _async(load_state)
    load_state_with_optimizer_async = _async(load_state_with_optimizer)
    save_weights_for_sampler_async = _async(save_weights_for_sampler)
    save_weights_external_async = _async(save_weights_external)
    save_weights_and_get_sampling_client_async = _awaited(save_weights_and_get_sampling_client)


@dataclass(eq=False)
class SamplingClient:
    """A client that samples from weights that do not change. A ServiceClient or a TrainingClient makes it."""

    _core: Models
    _sampler: Sampler
    _id: str = field(default_factory=lambda: str(uuid.uuid4()))
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def get_tokenizer(self) -> TokenizerType:
        return self._core.base.tokenizer

    def sample(
        self, prompt: types.Tokens, num_samples: int, sampling_params: types.SamplingParams, include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0, topk_sample_logprobs: int = 0,
    ) -> APIFuture[types.SampleResponse]:  # fmt: skip
        """Generate `num_samples` responses to a prompt. Their log-probabilities are the model's at temperature 1,
        without top-k or top-p. Requests made before an earlier one is complete are generated together with it."""
        request = types.SampleRequest(
            types.tokens_of(prompt, "the prompt"), num_samples, sampling_params, include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs, topk_sample_logprobs=topk_sample_logprobs,
        )  # fmt: skip
        draws = f"{self._id}:{next(self._numbers)}"
        job = functools.partial(self._core.sample, self._sampler, request, draws)
        return self._core.worker.do(job, is_short=True)

    def compute_logprobs(self, prompt: types.Tokens) -> APIFuture[list[float | None]]:
        """Return a future of each prompt token's log-probability given the preceding ones (None for the first)."""
        tokens = types.tokens_of(prompt, "the prompt")
        return self._core.worker.do(lambda: self._core.prompt_logprobs(self._sampler, tokens))

    sample_async = _awaited(sample)
    compute_logprobs_async = _awaited(compute_logprobs)
