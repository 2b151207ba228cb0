"""An HTTP server for a model, with the routes of OpenAI and vLLM, on the engine that training uses."""

import importlib.util


def check_installed(what: str, extra: str = "serve") -> None:
    """Raise ValueError if packages of the extra `serve` or `tinker` are missing."""
    packages = ["starlette", "uvicorn", *(["tinker"] if extra == "tinker" else [])]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{what} needs the package {' and '.join(missing)}: run `pip install 'nemo-rl-cpp[{extra}]'`")
