"""An HTTP server for a model, with the routes of OpenAI and vLLM, on the engine that training uses."""

import importlib.util


def check_installed(what: str) -> None:
    """Raise ValueError if the packages of the extra `serve` are missing."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{what} needs the package {' and '.join(missing)}: run `pip install 'nemo-rl-cpp[serve]'`")
