"""The server of a run: made of its policy and its section `policy.generation`."""

import os
import secrets
import socket
from collections.abc import Callable

from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.data.token_bytes import token_bytes_table
from nemo_rl_cpp.models.generation.native import NativeGeneration, native_runner
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.serving.command import check_installed
from nemo_rl_cpp.serving.engine_thread import EngineThread, engine_maker, longest_in_cache
from nemo_rl_cpp.serving.generation import ServedGeneration, trained_sampling
from nemo_rl_cpp.serving.model import Limits, ServedModel
from nemo_rl_cpp.serving.requests import Sampling
from nemo_rl_cpp.serving.rollouts import Rollouts


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
