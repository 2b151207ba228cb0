import json

import nemo_rl_cpp
import pytest
import torch
from nemo_rl_cpp import errors
from nemo_rl_cpp.checks import model
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.models.hf.trained import open_frozen
from nemo_rl_cpp.models.hf_config import TINY_CONFIG
from nemo_rl_cpp.models.model_folder import open_model_folder
from nemo_rl_cpp.models.parameter_shapes import parameter_shapes
from nemo_rl_cpp.serving.model import EngineSizes, Limits, load_model
from safetensors.torch import save_file


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with model.safetensors and an index of shards, of which the index is ignored with a warning."""
    monkeypatch.setattr(errors, "_SAID", set())
    shapes = parameter_shapes(open_model_folder("tiny-random").native())
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    return tmp_path


@pytest.mark.parametrize("checked", [False, True], ids=["loaded twice", "checked, then loaded"])
def test_warnings_about_a_model_folder_are_given_only_once(folder, checked, capsys):
    if checked:
        config = load_grpo_config("grpo_tiny.yaml", [f"policy.model_name={folder}", "~policy.hf_config_overrides"])
        said = " ".join(finding.message for finding in model.check(config))
    else:
        open_model_folder(str(folder))
        said = capsys.readouterr().err
    assert said.count("model.safetensors counts") == 1
    open_model_folder(str(folder))
    assert capsys.readouterr().err == ""


def train(path):
    nemo_rl_cpp.train_grpo(path, ["1+1="], lambda completions, **_: [0.0] * len(completions), num_steps=1)


def serve(path):
    return load_model(path, served_name=None, precision="float32", sizes=EngineSizes(), limits=Limits())


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize(
    "read",
    [nemo_rl_cpp.load, nemo_rl_cpp.TextGenerator, serve, open_model_folder, lambda path: open_frozen(path, "float32", device="cpu"), train],
    ids=["load", "generate", "serve", "open", "hf", "train"],
)  # fmt: skip
def test_model_folder_that_contains_a_lora_adapter_file_is_an_error_in_every_loading_function(folder, file, read):
    (folder / file).write_text("{}")
    with pytest.raises(ValueError, match=rf"holds {file}, an adapter, .* or remove {file} to use the model without it"):
        read(str(folder))


def test_model_folder_with_a_lora_adapter_subfolder_loads_without_the_adapter(folder):
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    open_model_folder(str(folder)).check_weights()
