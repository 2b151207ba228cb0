"""The policy of a run behind HTTP: the engine of the loop, and requests that are answered while the weights stand still."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.data.texts import token_bytes_table
from nemo_rl_cpp.models.generation.base_engine import STREAMS
from nemo_rl_cpp.models.generation.interfaces import GenerationInterface, Responses
from nemo_rl_cpp.models.generation.native import NativeGeneration, native_runner
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.serving.command import check_installed
from nemo_rl_cpp.serving.engine import EngineThread, Sampling, engine_maker, longest_in_cache
from nemo_rl_cpp.serving.model import Limits, ServedModel
from nemo_rl_cpp.serving.rollouts import HEADER, Rollout, Rollouts, TrainedSampling

if TYPE_CHECKING:
    from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
    from nemo_rl_cpp.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
    from nemo_rl_cpp.models.generation.native import NativeGeneration
    from nemo_rl_cpp.serving.http_server import HttpServer
    from nemo_rl_cpp.serving.model import ServedModel

_PATIENCE_S = 30.0


@dataclass(frozen=True)
class ServerAddress:
    """Where an agent finds the policy.

    Attributes:
        base_url: of an OpenAI client: it ends in /v1.
        model: its name.
        header: which names the rollout that a request belongs to.
        tokenizer: a folder with the tokenizer's files, for clients that tokenise themselves.
        max_model_len: tokens of the longest sequence.
    """

    base_url: str
    api_key: str
    model: str
    header: str
    tokenizer: str
    max_model_len: int


class ServedGeneration(GenerationInterface):
    """An engine of the loop and the server beside it, which have one model and never compute at the same time.

    Requests are answered between `prepare_for_generation` and `finish_generation`; at other times they wait. Those under way at
    `finish_generation` get up to 30 s to end, since the weights are about to change.

    Args:
        inner: the engine of the loop.
        version: the step whose weights are in place.
        sampling: of the stream "train"; `validation` of the stream "val".
    """

    def __init__(
        self, inner: NativeGeneration, model: ServedModel, server: HttpServer, version: Callable[[], int], *, api_key: str,
        sampling: TrainedSampling, validation: TrainedSampling,
    ) -> None:  # fmt: skip
        self.inner, self.model, self.server = inner, model, server
        self._version, self._api_key = version, api_key
        self._sampling = {"train": sampling, "val": validation}
        self._tokenizer_folder: Path | None = None

    # ---- as an engine

    owns_process = True  # a server with threads, which `shutdown` ends

    @property
    def reports_finished(self) -> bool:
        return self.inner.reports_finished

    def prepare_for_generation(self, *args: object, **kwargs: object) -> bool:
        """As `GenerationInterface`; opens the server."""
        done = self.inner.prepare_for_generation(*args, **kwargs)
        self.model.engine.open(self._version())
        return done

    def generate(
        self, data: RaggedBatch | BatchedDataDict[GenerationDatumSpec], greedy: bool = False, **beside: object
    ) -> Responses | BatchedDataDict[GenerationOutputSpec]:
        """As `GenerationInterface`. The server's requests wait meanwhile."""
        with self.model.engine.set_aside():
            return self.inner.generate(data, greedy, **beside)

    def finish_generation(self, *args: object, **kwargs: object) -> bool:
        """As `GenerationInterface`; closes the server until the next weights."""
        self.model.engine.close(_PATIENCE_S)
        return self.inner.finish_generation(*args, **kwargs)

    def shutdown(self) -> bool:
        self.server.stop()
        self.model.engine.shut_down()
        if self._tokenizer_folder is not None:
            shutil.rmtree(self._tokenizer_folder, ignore_errors=True)
            self._tokenizer_folder = None
        return self.inner.shutdown()

    def invalidate_kv_cache(self) -> bool:
        """As the engine of the loop; the server's cache begins anew with every opening."""
        return self.inner.invalidate_kv_cache()

    def weight_digest(self) -> str:
        return self.inner.weight_digest()

    def get_logger_metrics(self) -> dict[str, float]:
        return self.inner.get_logger_metrics()

    def clear_logger_metrics(self) -> None:
        self.inner.clear_logger_metrics()

    # ---- for agents

    @property
    def address(self) -> ServerAddress:
        if self._tokenizer_folder is None:
            self._tokenizer_folder = Path(tempfile.mkdtemp(prefix="nemo_rl_cpp_tokenizer_"))
            self.model.tokenizer.save_pretrained(str(self._tokenizer_folder))
        return ServerAddress(
            f"{self.server.url}/v1", self._api_key, self.model.names[0], HEADER, str(self._tokenizer_folder), self.model.max_model_len
        )  # fmt: skip

    def begin_rollout(self, name: str, stream: str, greedy: bool = False) -> str:
        """Requests that name the returned key belong to one rollout from here on, sampled as the stream's are.

        The draws follow from `name`, which validations repeat; the key begins with the step and is not used twice.
        """
        sampling = TrainedSampling(0.0, 1.0, 0) if greedy else self._sampling[stream]
        return self.model.rollouts.register(f"{self._version()}-{name}", STREAMS[stream], sampling, name)

    def end_rollout(self, key: str) -> Rollout:
        """What the rollout has asked and been given."""
        return self.model.rollouts.take(key)


def trained_sampling(config: Mapping[str, object] | object, validation: bool = False) -> TrainedSampling:
    """The distribution of `policy.generation`, for training or validation."""

    def setting(name: str, default: float) -> float:
        value = getattr(config, f"val_{name}") if validation else None
        value = getattr(config, name) if value is None else value
        return default if value is None else value

    temperature = float(setting("temperature", 1.0))
    if temperature == 0:
        return TrainedSampling(0.0, 1.0, 0)
    return TrainedSampling(temperature, float(setting("top_p", 1.0)), max(int(setting("top_k", 0)), 0))


def serve_policy(
    policy: Policy, inner: NativeGeneration, config: PolicyConfig, version: Callable[[], int], seed: int,
    listener: socket.socket | None = None,
) -> ServedGeneration:  # fmt: skip
    """Starts the server of a policy in training; it answers from the next `prepare_for_generation` on.

    Args:
        inner: the engine of the loop.
        version: the step whose weights are in place.
        seed: of the run, part of every draw.
        listener: a socket that listens already; None: one at `http_server`'s address. A failure closes it.

    Raises ValueError where a package is missing, nothing can listen at the address, or the cache holds no sequence of full length.
    """
    if not isinstance(inner, NativeGeneration):
        raise ValueError(
            f"policy.generation.expose_http_server is true, but the engine is {type(inner).__name__}, and only NativeGeneration can be served"
        )
    listener = listener or listener_of(config)
    from nemo_rl_cpp.serving.http_server import HttpServer

    generation = config.generation
    model = server = None
    try:
        key = key_of(generation.http_server.api_key_variable)
        model = _model(policy, inner, config, version, seed)
        server = HttpServer(model, listener, key)
        server.start()
        print(f"the policy is served at {server.url}/v1 while rollouts are made", flush=True)
        return ServedGeneration(
            inner, model, server, version, api_key=key, sampling=trained_sampling(generation), validation=trained_sampling(generation, validation=True)
        )  # fmt: skip
    except BaseException:
        if server is not None:
            server.stop()
        if model is not None:
            model.engine.shut_down()
        listener.close()
        raise


def listener_of(config: PolicyConfig) -> socket.socket | None:
    """A socket that listens at `http_server`'s address; None without expose_http_server.

    Raises ValueError where a package is missing, or the address cannot be had: before a model is loaded.
    """
    if not config.generation.expose_http_server:
        return None
    check_installed("policy.generation.expose_http_server")
    from nemo_rl_cpp.serving.http_server import listen

    settings = config.generation.http_server
    return listen(settings.host, settings.port, "policy.generation.http_server")


def key_of(variable: str | None) -> str:
    """The key that requests must carry: the variable's, or a new one. ValueError where the variable is not set."""
    key = secrets.token_urlsafe(24) if variable is None else os.environ.get(variable)
    if not key:
        raise ValueError(f"policy.generation.http_server.api_key_variable is {variable}, but that variable is not set")
    return key


def _model(
    policy: Policy, inner: NativeGeneration, config: PolicyConfig, version: Callable[[], int], seed: int
) -> ServedModel:
    """The policy as it is served, its engine closed."""
    generation, folder, tokenizer = config.generation, policy.folder, policy.tokenizer
    settings = generation.http_server
    longest = generation.effective_max_model_len(config.max_total_sequence_length)
    vocab_size = int(folder.config["vocab_size"])
    ends = generation.stop_token_ids
    if ends is None:
        ends = end_token_ids(folder.path, folder.config, tokenizer)
    sampling = trained_sampling(generation)
    runner, cache_bytes = native_runner(policy.model, generation), inner.cache_bytes_now()
    fits = longest_in_cache(runner, cache_bytes)
    if longest > fits:
        raise ValueError(
            f"policy.generation.expose_http_server: sequences have up to {longest} tokens, but {cache_bytes / 1e9:.3g} GB of keys and values hold "
            f"one of {fits}: raise policy.generation.kv_cache_gb, or lower policy.generation.vllm_cfg.max_model_len"
        )
    make = engine_maker(
        runner, max_batch_size=settings.max_batch_size, prefill_chunk_tokens=generation.prefill_chunk_tokens, max_model_len=longest,
        cache_bytes=cache_bytes, token_bytes=lambda: token_bytes_table(tokenizer, vocab_size),
    )  # fmt: skip
    limits = Limits(
        max_queue=settings.max_queue, max_body_bytes=int(settings.max_body_mb * (1 << 20)), request_timeout_s=settings.request_timeout_s
    )  # fmt: skip
    stops = generation.stop_strings or ()
    return ServedModel(
        (config.model_name, "policy"), tokenizer, EngineThread(make, version(), is_open=False), vocab_size, longest, tuple(ends),
        Rollouts(seed), limits=limits,
        default=Sampling(
            sampling.temperature, sampling.top_p, sampling.top_k, generation.max_new_tokens or longest,
            stop_strings=(stops,) if isinstance(stops, str) else tuple(stops),
        ),
    )  # fmt: skip
