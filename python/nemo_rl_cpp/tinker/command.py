"""The command `nemo-rl-cpp serve --tinker`."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

_PACKAGES = ("tinker", "starlette", "uvicorn")


def serve_tinker(arguments: argparse.Namespace, key: str | None) -> int:
    """Serve until Ctrl-C or SIGTERM, and return the exit status."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"serve --tinker needs {' and '.join(missing)}: run `pip install 'nemo-rl-cpp[tinker]'`")
    import torch

    from nemo_rl_cpp.serving.http_server import HttpServer, listen, serve_until_ended
    from nemo_rl_cpp.serving.model import EngineSizes
    from nemo_rl_cpp.tinker.adapters import Base
    from nemo_rl_cpp.tinker.app import make_app
    from nemo_rl_cpp.tinker.service import Service
    from nemo_rl_cpp.tinker.store import Store

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    listener = listen(arguments.host, arguments.port)
    sizes = EngineSizes(arguments.max_model_len, arguments.kv_cache_gb, arguments.max_batch_size)
    base = Base.load(
        arguments.model, arguments.served_model_name, precision=arguments.precision, max_batch_size=sizes.max_batch_size,
        cache_bytes=sizes.cache_bytes(), max_length=sizes.max_model_len,
    )  # fmt: skip
    service = Service(base, Store(Path(arguments.tinker), "--tinker"))
    app = make_app(service, key, int(arguments.max_body_mb * (1 << 20)))
    server = HttpServer(app, listener, log_level="warning", most_connections=None)  # clients poll for many results

    def greet() -> None:
        print(
            f"Tinker's API for {base.names[0]} at {server.url}, checkpoints in {arguments.tinker}; Ctrl-C ends it. Clients:\n"
            f"  TINKER_BASE_URL={server.url} TINKER_API_KEY={'tml-...' if key else 'tml-none'}",
            flush=True,
        )

    serve_until_ended(server, service.worker, greet)
    return 0
