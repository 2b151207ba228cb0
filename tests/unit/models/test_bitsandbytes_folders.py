import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models.model_folder import read_model_folder, tiny_random
from nemo_rl_cpp.models.weights import initialize_weights, load_weights, named_views, save_weights
from reference import bitsandbytes
from safetensors.numpy import load_file, save_file

SIZES = {"vocab_size": 32, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "max_position_embeddings": 64}  # fmt: skip


def quantised(folder, kind, **changes):
    """Write a model whose layers' matrices are quantised; return the tensors of its file."""
    model = C.DecoderModel(tiny_random(SIZES).native(), torch.float32, False)
    initialize_weights(model, 3, std=0.1)
    save_weights(model, folder, tiny_random(SIZES).config)
    plain, made = load_file(folder / "model.safetensors"), {}
    for name, w in plain.items():
        if "_proj" not in name:
            made[name] = w
        elif kind == "int8":
            made |= bitsandbytes.in_8_bits(name, w)
        else:
            made |= bitsandbytes.in_nf4(name, w, nested=kind == "nf4 twice")
    save_file(made | changes, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": kind != "int8"}
    (folder / "config.json").write_text(json.dumps(config))
    return made


def loaded(folder, dtype, quantization=None):
    opened = replace(read_model_folder(folder), quantization=quantization)
    opened.check_weights()
    model = C.DecoderModel(opened.native(), dtype, False)
    load_weights(model, folder)
    return model


@pytest.mark.parametrize("kind", ["nf4", "nf4 twice", "int8"])
def test_weights_loaded_from_bitsandbytes_folders_match_a_reference_decoder(tmp_path, kind):
    made = quantised(tmp_path, kind)
    model = loaded(tmp_path, torch.float32)
    for name, view in named_views(model.specs, model.compute).items():
        want = bitsandbytes.decoded(name, made) if "_proj" in name else made[name]
        assert np.array_equal(view.numpy(), want), name


@pytest.mark.parametrize("kind", ["nf4", "nf4 twice"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_base_keeps_bitsandbytes_nf4_weights_exactly_and_stores_v_proj_in_8_bits(tmp_path, kind, dtype):
    made = quantised(tmp_path, kind)
    model = loaded(tmp_path, dtype, "nf4")
    assert len(model.blocks) == 14
    for spec in model.blocks:
        w, exact = torch.empty(spec.shape, dtype=dtype), torch.from_numpy(bitsandbytes.decoded(spec.name, made))
        if ".v_proj." in spec.name:
            blocks = C.zero_blocks(*exact.shape, "q8_0")
            assert model.blocks_of(spec).shape[1] == blocks.shape[1]
            C.pack_blocks(exact, blocks)
            C.unpack_blocks(blocks, exact)
        C.unpack_blocks(model.blocks_of(spec), w, spec.begin)
        assert torch.equal(w, exact.to(dtype)), spec.name


def test_unsupported_bitsandbytes_formats_are_errors_that_name_the_tensor(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    changed = {f"{name}.quant_map": np.zeros(16, np.float32)}
    quantised(tmp_path, "nf4", **changed)
    with pytest.raises(ModelFolderError, match=r"up_proj.weight is not a matrix in nf4 .*quant_map differs"):
        loaded(tmp_path, torch.float32)
    quantised(tmp_path, "int8", **{name.replace("weight", "weight_format"): np.array(2, np.uint8)})
    with pytest.raises(ModelFolderError, match="up_proj.weight_format is not 0"):
        loaded(tmp_path, torch.float32)
    made = quantised(tmp_path, "nf4")
    state = made.pop(f"{name}.quant_state.bitsandbytes__nf4")
    save_file(made | {f"{name}.quant_state.bitsandbytes__fp4": state}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError, match="fp4, but only nf4 is read"):
        loaded(tmp_path, torch.float32)
