"""Tinker's API over the tiny model, in this process, at a free port."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_cpp.serving.http_server import HttpServer, listen
from nemo_rl_cpp.tinker.adapters import Base
from nemo_rl_cpp.tinker.app import make_app
from nemo_rl_cpp.tinker.service import Service
from nemo_rl_cpp.tinker.store import Store
from safetensors.torch import load_file, save_file
from served import make_folder

KEY = "tml-none"


def make_model(folder: Path) -> Path:
    """A tiny model whose frozen head is large enough that adapters below it can learn."""
    file = make_folder(folder) / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] * 20}, file, metadata={"format": "pt"})
    return folder


def tiny_base(model: Path) -> Base:
    return Base.load(
        str(model), "tiny", precision="float32", max_batch_size=16, cache_bytes=50_000_000, max_length=None
    )


@contextmanager
def serving(folder: Path, make: Callable[[Path], Path] = make_model) -> Iterator[tuple[str, Service]]:
    """The URL of a server, and what it holds; its model and checkpoints lie in the folder."""
    base = tiny_base(make(folder / "model"))
    service = Service(base, Store(folder / "checkpoints"))
    server = HttpServer(make_app(service), listen("127.0.0.1", 0), log_level="warning", most_connections=None)
    server.start()
    try:
        yield server.url, service
    finally:
        server.stop()
        service.worker.shut_down()
