"""Serve a model with the options of the command `serve`."""

import argparse
import sys

import torch

from nemo_rl_cpp.serving.app import make_app
from nemo_rl_cpp.serving.http_server import HttpServer, listen, serve_until_ended
from nemo_rl_cpp.serving.model import EngineSizes, Limits, load_model


def serve(arguments: argparse.Namespace, key: str | None) -> int:
    """Serve the model of `arguments` until Ctrl-C or SIGTERM; return the exit status. `key`: bearer token or None."""
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    listener = listen(arguments.host, arguments.port)  # fails before a model is loaded if the port is in use
    model = load_model(
        arguments.model,
        served_name=arguments.served_model_name,
        precision=arguments.precision,
        quantization=arguments.quantization,
        device=arguments.device,
        sizes=EngineSizes(arguments.max_model_len, arguments.kv_cache_gb, arguments.max_batch_size),
        limits=Limits(arguments.max_queue, int(arguments.max_body_mb * (1 << 20)), arguments.request_timeout),
        seed=arguments.seed,
    )

    def greet() -> None:
        if key is None and arguments.host not in ("127.0.0.1", "localhost", "::1"):
            print(f"warning: whoever reaches {arguments.host} may use this server: give it --api-key", file=sys.stderr)
        weights = f"weights {model.engine.state.version}, digest {model.digest}"
        limits = f"sequences of up to {model.max_model_len} tokens"
        print(f"serving {model.names[0]} at {server.url}/v1 ({weights}, {limits}); Ctrl-C ends it", flush=True)

    server = HttpServer(make_app(model, key), listener)
    serve_until_ended(server, model.engine, greet)
    return 0
