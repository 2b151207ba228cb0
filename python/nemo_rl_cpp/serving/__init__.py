"""An HTTP server for a model, with the routes of OpenAI and vLLM, on the engine that training uses."""

import importlib.util


def check_installed(what: str, extra: str = "serve") -> None:
    """Raise ValueError if packages of this package's extra `extra` ("serve" or "tinker") are missing. `what` is the
    command or configuration key that needs them, for the message."""
    packages = ["starlette", "uvicorn", *(["tinker"] if extra == "tinker" else [])]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{what} needs the package {' and '.join(missing)}: run `pip install 'nemo-rl-cpp[{extra}]'`")
