"""Remarks about a model folder are said once, whoever finds them first."""

import json

import pytest
import torch
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.models import model_folder
from nemo_rl_cpp.models.hf_config import TINY_CONFIG, parameter_shapes
from nemo_rl_cpp.models.model_folder import open_model_folder
from nemo_rl_cpp.preflight import model
from safetensors.torch import save_file


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A whole file of weights beside an index that is left over: model.safetensors counts, which is said."""
    monkeypatch.setattr(model_folder, "_SAID", set())
    shapes = parameter_shapes(open_model_folder("tiny-random").native())
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    return tmp_path


def test_loading_says_it_once(folder, capsys):
    open_model_folder(str(folder))
    said = capsys.readouterr().err
    assert said.count("warning: ") == 1 and "model.safetensors counts" in said
    open_model_folder(str(folder))
    assert capsys.readouterr().err == ""


def test_what_the_check_said_is_not_repeated(folder, capsys):
    config = load_grpo_config("grpo_tiny.yaml", [f"policy.model_name={folder}", "~policy.hf_config_overrides"])
    assert any("model.safetensors counts" in finding.message for finding in model.check(config))
    open_model_folder(str(folder))
    assert capsys.readouterr().err == ""
