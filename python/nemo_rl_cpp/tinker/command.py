"""`nemo-rl-cpp serve --tinker`."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import threading
from pathlib import Path

_PACKAGES = ("tinker", "starlette", "uvicorn")


def serve_tinker(arguments: argparse.Namespace, key: str | None) -> int:
    """Serve until Ctrl-C or SIGTERM. Return the exit status."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"serve --tinker needs {' and '.join(missing)}: run `pip install 'nemo-rl-cpp[tinker]'`")
    import torch
    import uvicorn

    from nemo_rl_cpp.serving.http_server import listen
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
    service = Service(base, Store(Path(arguments.tinker)))
    config = uvicorn.Config(
        make_app(service, key, int(arguments.max_body_mb * (1 << 20))), http="h11", ws="none", lifespan="off", log_config=None,
        access_log=False, timeout_graceful_shutdown=5, server_header=False, timeout_keep_alive=75,
    )  # fmt: skip
    server, ended = uvicorn.Server(config), threading.Event()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    thread.start()
    host, port = listener.getsockname()[:2]
    print(
        f"Tinker's API for {base.names[0]} at http://{host}:{port}, checkpoints in {arguments.tinker}; Ctrl-C ends it. Clients:\n"
        f"  TINKER_BASE_URL=http://{host}:{port} TINKER_API_KEY={'tml-...' if key else 'tml-none'}",
        flush=True,
    )
    try:
        while not ended.wait(1.0):
            if not (thread.is_alive() and service.worker.is_alive):
                raise RuntimeError("a thread of the server has ended; what it said is above: start the server again")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        server.should_exit = True
        thread.join(10.0)
        service.worker.shut_down()
    return 0
