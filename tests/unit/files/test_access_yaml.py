import enum
import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from nemo_rl_cpp.config.access import as_number, to_json, to_plain
from nemo_rl_cpp.files.yaml_text import dump_yaml
from pydantic import BaseModel


class Inner(BaseModel):
    project: str = "p"


class Outer(BaseModel):
    inner: Inner = Inner()
    level: int = 3


class Color(enum.Enum):
    RED = "red"


def test_to_plain_converts_python_objects_of_configurations_to_json_types():
    value = {"m": Outer(), "p": Path("x/y"), "a": np.arange(2), "s": np.float32(0.5), "t": (1, 2), "c": Color.RED}
    assert to_plain(value) == {
        "m": {"inner": {"project": "p"}, "level": 3}, "p": "x/y", "a": [0, 1], "s": 0.5, "t": [1, 2], "c": "red",
    }  # fmt: skip


def test_non_finite_numbers_are_written_to_json_as_words_and_read_back():
    text = json.dumps(to_json({"a": [math.nan, math.inf, -math.inf, 1.0]}), allow_nan=False)
    values = [as_number(value) for value in json.loads(text)["a"]]
    assert math.isnan(values[0]) and values[1:] == [math.inf, -math.inf, 1.0]
    assert as_number("accuracy") is None and as_number(True) == 1.0


@pytest.mark.parametrize("value", [
    {"lr": 1e-6, "eps": 1e-08, "big": 1e22, "n": 3, "f": 2.0, "none": None, "flag": True},
    {"words": ["yes", "null", "1e-6", "", " padded ", "a: b", "# no", "plain/path-1.txt", "ünï", "line\nbreak", "'\"\\"]},
    {"nested": [{"name": "torch.optim.AdamW", "kwargs": {"betas": [0.9, 0.999]}}, [[1], []], {}], "empty": {}},
    {"inf": math.inf, "minus": -math.inf, "1": "number as key"},
    [1, "two"],
    {},
])  # fmt: skip
def test_values_written_to_yaml_are_read_back_equal(value):
    assert yaml.safe_load(dump_yaml(value)) == value


def test_nan_written_to_yaml_is_read_back_as_nan():
    assert math.isnan(yaml.safe_load(dump_yaml({"x": math.nan}))["x"])
