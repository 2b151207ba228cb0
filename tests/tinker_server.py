"""Tinker's API for the tiny model, in this process, at a free port."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_cpp.serving.http_server import HttpServer, listen
from nemo_rl_cpp.serving.model import EngineSizes
from nemo_rl_cpp.tinker.adapters import Base
from nemo_rl_cpp.tinker.app import make_app
from nemo_rl_cpp.tinker.service import Service
from nemo_rl_cpp.tinker.store import Store
from safetensors.torch import load_file, save_file
from served import make_folder

KEY = "tml-none"


def make_model(folder: Path, **more: object) -> Path:
    """Write a tiny model whose frozen LM head is large enough for the adapters below it to learn. Return its folder."""
    file = make_folder(folder, **more) / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] * 20}, file, metadata={"format": "pt"})
    return folder


def tiny_base(model: Path) -> Base:
    return Base.load(str(model), "tiny", "float32", EngineSizes(kv_cache_gb=0.05, max_batch_size=16))


@contextmanager
def serving(folder: Path, make: Callable[[Path], Path] = make_model) -> Iterator[tuple[str, Service]]:
    """Serve a model, and yield the URL and the service. Model and checkpoints are stored in `folder`."""
    base = tiny_base(make(folder / "model"))
    service = Service(base, Store(folder / "checkpoints"))
    server = HttpServer(make_app(service), listen("127.0.0.1", 0), log_level="warning", most_connections=None)
    server.start()
    try:
        yield server.url, service
    finally:
        server.stop()
        service.worker.shut_down()
