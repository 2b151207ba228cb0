"""The server of a run: made of its policy and its section `policy.generation`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.data.token_bytes import token_bytes_table
from nemo_rl_cpp.models.generation.native import NativeGeneration, native_runner
from nemo_rl_cpp.serving.command import check_installed
from nemo_rl_cpp.serving.engine_thread import EngineThread, engine_maker
from nemo_rl_cpp.serving.generation import ServedGeneration, trained_sampling
from nemo_rl_cpp.serving.model import Limits, ServedModel
from nemo_rl_cpp.serving.requests import Sampling
from nemo_rl_cpp.serving.rollouts import Rollouts

if TYPE_CHECKING:
    from nemo_rl_cpp.config.policy import PolicyConfig
    from nemo_rl_cpp.models.policy.lm_policy import Policy


def serve_policy(
    policy: Policy, inner: NativeGeneration, config: PolicyConfig, version: Callable[[], int], seed: int
) -> ServedGeneration:
    """Starts the server of a policy in training; it answers from the next `prepare_for_generation` on.

    Args:
        inner: the engine of the loop.
        version: the step whose weights are in place.
        seed: of the run, part of every draw.

    Raises ValueError where a package is missing, or nothing can listen at `http_server`'s address.
    """
    check_installed("policy.generation.expose_http_server")
    if not isinstance(inner, NativeGeneration):
        raise ValueError(
            f"policy.generation.expose_http_server is true, but the engine is {type(inner).__name__}, and only NativeGeneration can be served"
        )
    from nemo_rl_cpp.serving.http_server import HttpServer, listen

    generation, folder, tokenizer = config.generation, policy.folder, policy.tokenizer
    settings = generation.http_server
    listener = listen(settings.host, settings.port, "policy.generation.http_server")
    longest = generation.effective_max_model_len(config.max_total_sequence_length)
    vocab_size = int(folder.config["vocab_size"])
    ends = generation.stop_token_ids
    if ends is None:
        ends = end_token_ids(folder.path, folder.config, tokenizer)
    sampling = trained_sampling(generation)
    make = engine_maker(
        native_runner(policy.model, generation), max_batch_size=settings.max_batch_size,
        prefill_chunk_tokens=generation.prefill_chunk_tokens, max_model_len=longest,
        cache_bytes=inner.cache_bytes_now(), token_bytes=lambda: token_bytes_table(tokenizer, vocab_size),
    )  # fmt: skip
    limits = Limits(
        max_queue=settings.max_queue, max_body_bytes=int(settings.max_body_mb * (1 << 20)), request_timeout_s=settings.request_timeout_s
    )  # fmt: skip
    stops = generation.stop_strings or ()
    model = ServedModel(
        (config.model_name, "policy"), tokenizer, EngineThread(make, version(), is_open=False), vocab_size, longest, tuple(ends),
        Rollouts(seed), limits=limits,
        default=Sampling(
            sampling.temperature, sampling.top_p, sampling.top_k, generation.max_new_tokens or longest,
            stop_strings=(stops,) if isinstance(stops, str) else tuple(stops),
        ),
    )  # fmt: skip
    variable = settings.api_key_variable
    key = secrets.token_urlsafe(24) if variable is None else os.environ.get(variable)
    if not key:
        raise ValueError(f"policy.generation.http_server.api_key_variable is {variable}, but that variable is not set")
    server = HttpServer(model, listener, key)
    server.start()
    print(f"the policy is served at {server.url}/v1 while rollouts are made", flush=True)
    return ServedGeneration(
        inner, model, server, version, api_key=key, sampling=sampling, validation=trained_sampling(generation, validation=True)
    )  # fmt: skip
