import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nemo_rl_cpp.files.plain_state import check_state, read_state, write_state

STATE = {
    "cache": {
        "message_log": [[{"role": "user", "content": "héé\n", "token_ids": torch.tensor([1, 2], dtype=torch.int64)}]],
        "rewards": torch.tensor([0.1, -math.inf], dtype=torch.float32),
        "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
    },
    "numbers": [1, -(2**62), 0.1, 1e-320, True, None],
    "odd": [math.nan, math.inf, -math.inf],
    "tuple": (1, ("a", [2])),
    "set": {3, 1},
    "keys": {1: "one", (2, 3): "pair", None: 0},
    "tagged": {"~": "tensor", "value": "000000"},
    "bytes": b"\x00\xff",
    "path": Path("a/b"),
    "array": np.arange(6, dtype=np.float64).reshape(2, 3),
    "scalar": np.float32(0.1),
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (isinstance(a, float) and a != a and b != b)


def test_nested_state_saved_as_json_and_safetensors_is_read_back_equal(tmp_path):
    write_state(tmp_path / "s", STATE)
    assert same(STATE, read_state(tmp_path / "s"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.json", "s.safetensors"]


def test_equal_states_are_saved_as_byte_identical_files(tmp_path):
    for name in ("a", "b"):
        write_state(tmp_path / name, STATE)
    for suffix in ("json", "safetensors"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text() | st.binary()
KEYS = st.text() | st.integers()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner)))
def test_random_nested_values_are_read_back_equal_from_a_state_file(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("s") / "x"
    write_state(path, value)
    assert same(value, read_state(path))


class Foreign:
    pass


def test_unsupported_state_value_is_an_error_that_names_the_value_before_a_file_is_written(tmp_path):
    state = {"extra_env_info": [{"board": Foreign()}]}
    said = r"rollouts.extra_env_info\[0\].board is a Foreign, which no checkpoint can hold"
    with pytest.raises(ValueError, match=said):
        check_state(state, "rollouts")
    with pytest.raises(ValueError, match="is a Foreign"):
        write_state(tmp_path / "s", state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "tree", [{"~": "os.system", "value": "true"}, {"~": "tensor", "value": "9"}, {"~": "tuple", "value": 3}, {"~": []}]
)
def test_state_file_that_this_package_did_not_write_is_an_error(tmp_path, tree):
    (tmp_path / "s.json").write_text(json.dumps({"a": tree}))
    with pytest.raises(ValueError, match="not what this program writes"):
        read_state(tmp_path / "s")
