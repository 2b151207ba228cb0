import pytest
import torch
from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models.weight_files import fill_parameters, head_differs, raw_tensors, weight_files
from safetensors.torch import save_file

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def test_tensors_read_from_safetensors_files_equal_the_saved_tensors(tmp_path):
    saved = {f"{name}.{n}": torch.randn(n, 3).to(dtype) for name, dtype in DTYPES.items() for n in (1, 5)}
    saved["empty"] = torch.zeros(0, 4)
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    seen = set()
    for name, raw in raw_tensors(weight_files(tmp_path)):
        seen.add(name)
        assert (DTYPES[raw.dtype], raw.shape) == (saved[name].dtype, list(saved[name].shape))
        assert bytes(raw.data) == saved[name].flatten().view(torch.uint8).numpy().tobytes()
    assert seen == set(saved)


def fill(shapes, given):
    put = {}
    fill_parameters("folder", shapes, ((name, torch.zeros(shape)) for name, shape in given.items()), put.__setitem__)
    return set(put)


def test_error_for_weight_files_lists_missing_misshaped_and_unexpected_tensors():
    with pytest.raises(
        ValueError,
        match=r"the weights in folder do not fit its config.json: missing: b; of the wrong shape: a is \[2\], expected \[3\]; unexpected: c",
    ):
        fill({"a": [3], "b": [1]}, {"a": [2], "c": [1]})


def test_weight_files_may_contain_an_unused_lm_head_and_known_extra_tensors():
    assert fill({"model.a": [3]}, {"a": [3], "lm_head.weight": [9], "x.rotary_emb.inv_freq": [4]}) == {"model.a"}
    assert fill({"a": [3], "score.weight": [1]}, {"a": [3]}) == {"a"}
    with pytest.raises(ValueError, match="missing: lm_head.weight"):
        fill({"lm_head.weight": [3]}, {})


def test_weight_files_may_store_a_tied_embedding_as_lm_head():
    assert fill({"model.embed_tokens.weight": [3]}, {"lm_head.weight": [3]}) == {"model.embed_tokens.weight"}
    assert fill({"model.embed_tokens.weight": [3]}, {"lm_head.weight": [3], "model.embed_tokens.weight": [3]}) == {
        "model.embed_tokens.weight"
    }
    with pytest.raises(ModelFolderError, match="unexpected: model.a .a second model.a."):
        fill({"model.a": [3]}, {"a": [3], "model.a": [3]})


@pytest.mark.parametrize("one", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("other", ["F32", "BF16"])
def test_lm_head_and_tied_embedding_stored_in_different_dtypes_are_compared_by_value(one, other, tmp_path):
    numbers = torch.arange(-8.0, 8.0).reshape(8, 2)  # exact in every dtype
    for changed in (False, True):
        head = numbers.clone()
        head[7, 1] += 1.0 * changed
        save_file(
            {"lm_head.weight": head.to(DTYPES[one]), "model.embed_tokens.weight": numbers.to(DTYPES[other])},
            tmp_path / "model.safetensors",
        )
        assert head_differs(tmp_path) is changed


def test_weight_shards_without_an_index_file_are_an_error(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(
        ModelFolderError,
        match="has no weights.*model-00001-of-00002.safetensors, which counts only where model.safetensors.index.json names it",
    ):
        weight_files(tmp_path)
