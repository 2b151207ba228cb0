"""Save nested plain data with tensors without pickle: in NAME.json and, for tensors, NAME.safetensors.

write_state(folder / "sampler", {"cache": {"ids": tensor}, "counts": [1, 2]})
read_state(folder / "sampler")"""

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_cpp.files.yaml_text import Plain

_TAG = "~"


def write_state(path: Path, value: object) -> None:
    """Write `value` to the file `path`.json, and its tensors, if it has any, to `path`.safetensors. Raise ValueError if
    `check_state` would raise it for `value`."""
    tensors: dict[str, torch.Tensor] = {}
    tree = _encode(value, "", tensors)
    path.with_name(f"{path.name}.json").write_text(json.dumps(tree, allow_nan=False) + "\n", encoding="utf-8")
    if tensors:
        save_file(tensors, path.with_name(f"{path.name}.safetensors"))


def read_state(path: Path) -> object:
    """Return what `write_state` wrote, with the same types. Raise ValueError for files of another origin."""
    tree = json.loads(path.with_name(f"{path.name}.json").read_text(encoding="utf-8"))
    file = path.with_name(f"{path.name}.safetensors")
    try:
        return _decode(tree, load_file(file) if file.is_file() else {})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}.json is not what this program writes ({error})") from error


def check_state(value: object, name: str = "") -> None:
    """Raise ValueError with the name and type of the first entry of `value` that cannot be written. `name`: the name of
    `value` itself in the message. Allowed are None, booleans, numbers, strings, bytes, paths, lists, tuples, sets,
    dictionaries, tensors and NumPy arrays, in any nesting."""
    _encode(value, name, {})


def _encode(value: object, name: str, tensors: dict[str, torch.Tensor]) -> Plain:
    if isinstance(value, torch.Tensor):
        return _tensor("tensor", value, tensors)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return _tensor(kind, torch.from_numpy(np.array(value)), tensors)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {str(key): _encode(item, f"{name}.{key}" if name else key, tensors) for key, item in value.items()}
        items = value.items()
        pairs = [[_encode(key, name, tensors), _encode(item, f"{name}[{key!r}]", tensors)] for key, item in items]
        return {_TAG: "dict", "value": pairs}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        encoded = [_encode(item, f"{name}[{i}]", tensors) for i, item in enumerate(items)]
        kind = next(kind for kind in (list, tuple, frozenset, set) if isinstance(value, kind))
        return encoded if kind is list else {_TAG: kind.__name__, "value": encoded}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, Path):
        return {_TAG: "path", "value": str(value)}
    types = "numbers, texts, lists, dictionaries or tensors"
    kind = type(value).__name__
    raise ValueError(f"{name or 'the state'} is a {kind}, which no checkpoint can hold: use {types}")


def _tensor(kind: str, tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    name = f"{len(tensors):06d}"
    tensors[name] = tensor.detach().cpu().contiguous().clone()
    return {_TAG: kind, "value": name}


def _decode(node: Plain, tensors: dict[str, torch.Tensor]) -> object:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if _TAG not in node:
        return {key: _decode(item, tensors) for key, item in node.items()}
    kind, value = node[_TAG], node["value"]
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](_decode(item, tensors) for item in value)
    if kind == "dict":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value}
    if kind == "tensor":
        return tensors[value]
    if kind in ("array", "scalar"):
        array = tensors[value].numpy()
        return array if kind == "array" else array[()]
    plain = {"float": float, "bytes": base64.b64decode, "path": Path}
    return plain[kind](value)
