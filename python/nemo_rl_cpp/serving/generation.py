"""An HTTP server for the policy of a training run. It generates with a separate engine, while the weights do not
change."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.data.interfaces import ServerAddress, TokenizerType
from nemo_rl_cpp.distributed.cluster import Cluster
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.models.generation.base_engine import STREAMS
from nemo_rl_cpp.models.generation.distributed import DedicatedGeneration, EngineWorker
from nemo_rl_cpp.models.generation.interfaces import Answer, GenerationInterface, Pause, Prompts, Responses
from nemo_rl_cpp.models.generation.native import NativeGeneration, native_runner
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.serving.engine import Sampling
from nemo_rl_cpp.serving.model import EngineSizes, Limits, ServedModel, engine_thread
from nemo_rl_cpp.serving.rollouts import HEADER, Rollout, Rollouts

if TYPE_CHECKING:
    from nemo_rl_cpp.serving.http_server import HttpServer

_PATIENCE_S = 30.0


def _saved(tokenizer: TokenizerType) -> tempfile.TemporaryDirectory:
    """Save the tokenizer's files to a new temporary folder, and return it as a `TemporaryDirectory`."""
    folder = tempfile.TemporaryDirectory(prefix="nemo_rl_cpp_tokenizer_", ignore_cleanup_errors=True)
    tokenizer.save_pretrained(folder.name)
    return folder


@dataclass(eq=False, repr=False)
class ServedGeneration(GenerationInterface):
    """A generation engine for the training loop that also serves the model over HTTP, between `prepare_for_generation`
    and `finish_generation`; at other times requests wait. Those in flight at the end get up to 30 s to finish."""

    inner: NativeGeneration
    model: ServedModel
    server: HttpServer
    version: Callable[[], int]  # returns the step of the current weights
    api_key: str
    sampling: Mapping[str, Sampling]  # the sampling parameters of training ("train") and validation ("val")
    owns_process = True  # `shutdown` ends the server's threads

    def __post_init__(self) -> None:
        self.reports_finished, self._folder = self.inner.reports_finished, _saved(self.model.tokenizer)
        # these concern only the training loop's engine; the server gets a new KV cache whenever it opens
        for name in ("invalidate_kv_cache", "weight_digest", "get_logger_metrics", "clear_logger_metrics"):
            setattr(self, name, getattr(self.inner, name))

    # ---- as an engine

    def prepare_for_generation(self) -> bool:
        """Prepare the training loop's engine and open the server."""
        done = self.inner.prepare_for_generation()
        self.model.engine.open(self.version())
        return done

    def generate(self, data: Prompts, greedy: bool = False, **beside: object) -> Answer:
        """Generate with the loop's engine like `NativeGeneration.generate`, while the server's requests wait."""
        with self.model.engine.model_lock:
            return self.inner.generate(data, greedy, **beside)

    def generate_until(self, batch: RaggedBatch, pause: Pause, *given: object) -> Responses | None:
        """Generate like `NativeGeneration.generate_until`. At the pause, close the server until the next
        `prepare_for_generation`, because the weights are about to change."""
        with self.model.engine.model_lock:
            responses = self.inner.generate_until(batch, pause, *given)
        if responses is None:
            self.model.engine.close(_PATIENCE_S)
        return responses

    def resume(self, *given: object) -> Responses | None:
        """Continue the paused generation like `NativeGeneration.resume`, while the server's requests wait."""
        with self.model.engine.model_lock:
            return self.inner.resume(*given)

    def finish_generation(self) -> bool:
        """Close the server until the next `prepare_for_generation`, and finish the engine's generation."""
        self.model.engine.close(_PATIENCE_S)
        return self.inner.finish_generation()

    def shutdown(self) -> bool:
        self.server.stop()
        self.model.engine.shut_down()
        self._folder.cleanup()
        return self.inner.shutdown()

    # ---- for agents

    @property
    def address(self) -> ServerAddress:
        return self.address_with(self._folder.name)

    def address_with(self, tokenizer: str) -> ServerAddress:
        """Return the server's URL, key, model name and limits for clients, and `tokenizer`, a folder with its files."""
        url, model = f"{self.server.url}/v1", self.model
        return ServerAddress(url, self.api_key, model.names[0], HEADER, tokenizer, model.max_model_len)

    def begin_rollout(self, name: str, stream: str, greedy: bool = False) -> str:
        """Return the key that a rollout's requests must send. Responses are sampled with the parameters of `stream`,
        "train" or "val", or greedily if `greedy`. They are seeded by `name`, which is the same in every validation,
        whereas each call returns a new key."""
        sampling = Sampling(0.0, 1.0, 0) if greedy else self.sampling[stream]
        return self.model.rollouts.register(f"{self.version()}-{name}", STREAMS[stream], sampling, name)

    def end_rollout(self, key: str) -> Rollout:
        """Return the requests and responses of a rollout; its later requests are rejected."""
        return self.model.rollouts.take(key)


class ServedDedicatedGeneration(DedicatedGeneration):
    """A generation engine in a worker that only generates, which also serves its weights over HTTP as a
    `ServedGeneration`. Agents send their requests to the worker; this process gets a rollout's tokens at its end."""

    owns_process = True  # `shutdown` removes the tokenizer's folder

    def __init__(self, cluster: Cluster, config: PolicyConfig, tokenizer: TokenizerType, seed: int) -> None:
        super().__init__(cluster, config, tokenizer, seed)
        self._folder = _saved(tokenizer)
        self.group.call_all("serve_engine", self._number, partial(_serve_worker, seed))
        url = self._ask("address_with", "")[0].base_url
        print(f"the policy is served at {url} while rollouts are made", flush=True)

    @property
    def address(self) -> ServerAddress:
        return self._ask("address_with", self._folder.name)[0]

    def begin_rollout(self, name: str, stream: str, greedy: bool = False) -> str:
        """Return the key that a rollout's requests must send (see `ServedGeneration.begin_rollout`)."""
        return self._ask("begin_rollout", name, stream, greedy)[0]

    def end_rollout(self, key: str) -> Rollout:
        """Return the requests and responses of a rollout, as `ServedGeneration.end_rollout` does."""
        return self._ask("end_rollout", key)[0]

    def shutdown(self) -> bool:
        self._folder.cleanup()
        return super().shutdown()


def _serve_worker(seed: int, worker: EngineWorker, engine: NativeGeneration) -> ServedGeneration:
    listener = listener_of(worker.config)
    return serve_policy(worker, engine, worker.config, lambda: worker.weight_version or 0, seed, listener)


def _sampling(inner: NativeGeneration, stream: str) -> Sampling:
    """Return the sampling parameters of the stream `stream`, "train" or "val", which requests of a rollout get."""
    found = inner.sampling(False, stream)
    return Sampling(0.0) if found.greedy else Sampling(found.temperature, found.top_p, found.top_k)


def serve_policy(
    policy: Policy | EngineWorker, inner: NativeGeneration, config: PolicyConfig, version: Callable[[], int], seed: int,
    listener: socket.socket,
) -> ServedGeneration:  # fmt: skip
    """Start an HTTP server for the model, folder and tokenizer of `policy` at the socket `listener`, and return `inner`
    as an engine that also answers over HTTP, from the first `prepare_for_generation` on. `version` returns the step of
    the current weights; `seed` seeds sampling. `listener` is closed if the server cannot start. Raise ValueError if the
    KV cache cannot hold a sequence of full length."""
    from nemo_rl_cpp.serving import app, http_server  # need the extra `serve`

    generation = config.generation
    with ExitStack() as stack:
        stack.callback(listener.close)
        variable = generation.http_server.api_key_variable
        key = secrets.token_urlsafe(24) if variable is None else os.environ.get(variable)
        if not key:
            raise ValueError(f"policy.generation.http_server.api_key_variable is {variable}, which is not set")
        model = _model(policy, inner, config, version, seed)
        stack.callback(model.engine.shut_down)
        server = http_server.HttpServer(app.make_app(model, key), listener)
        stack.callback(server.stop)
        server.start()
        print(f"the policy is served at {server.url}/v1 while rollouts are made", flush=True)
        stack.pop_all()
    sampling = {stream: _sampling(inner, stream) for stream in ("train", "val")}
    return ServedGeneration(inner, model, server, version, key, sampling)


def listener_of(config: PolicyConfig) -> socket.socket | None:
    """Return a socket that listens at the address in `policy.generation.http_server`, or None if `expose_http_server`
    is not set. Raise ValueError if the address is in use."""
    if not config.generation.expose_http_server:
        return None
    from nemo_rl_cpp.serving.http_server import listen  # needs the extra `serve`

    settings = config.generation.http_server
    return listen(settings.host, settings.port, "policy.generation.http_server")


def _model(
    policy: Policy | EngineWorker, inner: NativeGeneration, config: PolicyConfig, version: Callable[[], int], seed: int
) -> ServedModel:
    """Return the policy as a model to serve. Its engine starts closed, with a KV cache of the size of `inner`'s."""
    generation, folder, tokenizer = config.generation, policy.folder, policy.tokenizer
    settings, stops = generation.http_server, generation.stop_strings or ()
    longest = generation.effective_max_model_len(config.max_total_sequence_length)
    ends = generation.stop_token_ids
    if ends is None:
        ends = end_token_ids(folder.path, folder.config, tokenizer)
    runner, cache_bytes = native_runner(policy.model, generation), inner.cache_bytes_now()
    fits = runner.longest_sequence(generation.prefill_chunk_tokens, cache_bytes)
    if longest > fits:
        raise ValueError(
            f"policy.generation.expose_http_server: sequences have up to {longest} tokens, but {cache_bytes / 1e9:.3g} GB of keys and values hold "
            f"one of {fits}: raise policy.generation.kv_cache_gb, or lower policy.generation.vllm_cfg.max_model_len"
        )
    sizes = EngineSizes(longest, None, settings.max_batch_size, generation.prefill_chunk_tokens)
    texts = (stops,) if isinstance(stops, str) else tuple(stops)
    most_new = generation.max_new_tokens or longest
    engine = engine_thread(runner, tokenizer, sizes, cache_bytes, version(), is_open=False)
    return ServedModel(
        (config.model_name, "policy"), tokenizer, engine, int(folder.config["vocab_size"]), longest, tuple(ends), Rollouts(seed),
        limits=Limits(settings.max_queue, int(settings.max_body_mb * (1 << 20)), settings.request_timeout_s),
        default=replace(_sampling(inner, "train"), max_new_tokens=most_new, stop_strings=texts),
    )  # fmt: skip
