"""Quantised matrices for tests (csrc/ops/weight_blocks.h), and their blocks in the order of a file."""

import torch
from nemo_rl_cpp._native import C

SINGLE = C.cpu_capability() in ("base", "avx2", "avx512")
"""Whether products with x in bfloat16 take dequantised weights in float32, since the processor has no instructions for bfloat16."""


def matrix_of(w, kind):
    matrix = C.zero_blocks(*w.shape, kind)
    C.pack_blocks(w, matrix)
    return matrix


def blocks_of(w, kind):
    return C.read_block_rows(matrix_of(w, kind), w.shape[1], 0, len(w))


def blocks_in(model, spec):
    """Return the blocks of the parameter `spec` of a quantised model."""
    return C.read_block_rows(model.blocks_of(spec), spec.shape[1], spec.begin, spec.shape[0])


def kind_in(model, spec):
    return {34: "q8_0", 18: "q4_0", 20: "nf4"}[model.blocks_of(spec).shape[1] * 32 // spec.shape[1]]


def dense(matrix, columns, dtype=torch.float32):
    w = torch.empty(len(matrix), columns, dtype=dtype)
    C.unpack_blocks(matrix, w)
    return w
