import pytest
import torch
from nemo_rl_cpp.models.weight_files import RawTensor, TensorEntry, split_experts
from nemo_rl_cpp.models.weights import FILE_DTYPES, joined_experts

PREFIX = "model.layers.3.mlp.experts."
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}


def raw(tensor: torch.Tensor) -> RawTensor:
    return RawTensor(
        NAMES[tensor.dtype], list(tensor.shape), memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
    )


def read(tensors: dict[str, torch.Tensor], is_gpt_oss=True) -> dict[str, torch.Tensor]:
    return {
        name: torch.frombuffer(bytearray(part.data), dtype=FILE_DTYPES[part.dtype]).view(part.shape)
        for name, part in split_experts(((name, raw(tensor)) for name, tensor in tensors.items()), is_gpt_oss)
    }


def test_interleaved_expert_tensors_of_gpt_oss_are_split_into_one_matrix_per_projection():
    """One expert, D = 1, I = 2: columns are gate 0, up 0, gate 1, up 1."""
    found = read({
        PREFIX + "gate_up_proj": torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), PREFIX + "gate_up_proj_bias": torch.tensor([[5.0, 6.0, 7.0, 8.0]]),
        PREFIX + "down_proj": torch.tensor([[[9.0], [10.0]]]), PREFIX + "down_proj_bias": torch.tensor([[11.0]]),
    })  # fmt: skip
    assert {name.removeprefix(PREFIX + "0."): tensor.tolist() for name, tensor in found.items()} == {
        "gate_proj.weight": [[1.0], [3.0]], "up_proj.weight": [[2.0], [4.0]], "gate_proj.bias": [5.0, 7.0], "up_proj.bias": [6.0, 8.0],
        "down_proj.weight": [[9.0, 10.0]], "down_proj.bias": [11.0],
    }  # fmt: skip


def test_expert_tensors_with_stacked_gate_and_up_rows_are_split_into_one_matrix_per_projection():
    """Two experts, D = 1, I = 2: rows are gate 0, gate 1, up 0, up 1."""
    stacked = {
        PREFIX + "gate_up_proj": torch.arange(8.0).view(2, 4, 1),
        PREFIX + "down_proj": torch.arange(4.0).view(2, 1, 2),
    }
    assert {name.removeprefix(PREFIX): tensor.tolist() for name, tensor in read(stacked, is_gpt_oss=False).items()} == {
        "0.gate_proj.weight": [[0.0], [1.0]], "0.up_proj.weight": [[2.0], [3.0]], "1.gate_proj.weight": [[4.0], [5.0]],
        "1.up_proj.weight": [[6.0], [7.0]], "0.down_proj.weight": [[0.0, 1.0]], "1.down_proj.weight": [[2.0, 3.0]],
    }  # fmt: skip


def test_shapes_of_stacked_expert_tensors_are_split_without_reading_the_weights():
    entries = [
        (PREFIX + "gate_up_proj", TensorEntry("BF16", [1, 6, 8], 0, 96)),
        (PREFIX + "down_proj", TensorEntry("BF16", [8, 3], 96, 144)),
    ]
    shapes = {name.removeprefix(PREFIX): entry.shape for name, entry in split_experts(entries, False)}
    assert shapes == {"0.gate_proj.weight": [3, 8], "0.up_proj.weight": [3, 8], "down_proj": [8, 3]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joining_split_expert_tensors_restores_the_fused_tensors(dtype):
    shapes = {
        "gate_up_proj": (3, 8, 10), "gate_up_proj_bias": (3, 10), "down_proj": (3, 5, 8), "down_proj_bias": (3, 8),
    }  # fmt: skip
    given = {PREFIX + name: torch.randn(shape).to(dtype) for name, shape in shapes.items()} | {
        "model.norm.weight": torch.ones(8, dtype=dtype)
    }
    again = dict(joined_experts(read(given), is_gpt_oss=True))
    assert again.keys() == given.keys() and all(torch.equal(again[name], given[name]) for name in given)


@pytest.mark.parametrize("scales_first", [False, True])
@pytest.mark.parametrize("matrix", ["gate_up_proj", "down_proj"])
def test_dequantised_mxfp4_experts_are_bit_identical_to_transformers(matrix, scales_first):
    """All bytes and all scales are tested, except the scale 255, which means NaN."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 255, 16), generator=generator, dtype=torch.uint8)
    scales = torch.arange(255, dtype=torch.uint8).expand(2, 6, 255).contiguous()
    halves = {f"{PREFIX}{matrix}_blocks": blocks, f"{PREFIX}{matrix}_scales": scales}
    found = read(dict(reversed(halves.items())) if scales_first else halves)
    want = read({PREFIX + matrix: convert_moe_packed_tensors(blocks, scales)})
    assert found.keys() == want.keys() and found
    assert all(torch.equal(found[name].view(torch.int16), want[name].view(torch.int16)) for name in want)


def test_shapes_of_mxfp4_expert_tensors_become_bfloat16_shapes_without_reading_the_weights():
    blocks, scales = TensorEntry("U8", [2, 6, 1, 16], 0, 192), TensorEntry("U8", [2, 6, 1], 192, 204)
    entries = [(PREFIX + "gate_up_proj_blocks", blocks), (PREFIX + "gate_up_proj_scales", scales)]
    shapes = {name: (entry.dtype, entry.shape) for name, entry in split_experts(entries, True)}
    assert shapes == {f"{PREFIX}{e}.{half}_proj.weight": ("BF16", [3, 32]) for e in range(2) for half in ("gate", "up")}


def test_mxfp4_expert_tensors_without_scales_are_reported_by_name():
    (name, _), *rest = split_experts([(PREFIX + "down_proj_blocks", TensorEntry("U8", [1, 4, 1, 16], 0, 64))], True)
    assert name == PREFIX + "down_proj_blocks without " + PREFIX + "down_proj_scales, or the reverse" and not rest
