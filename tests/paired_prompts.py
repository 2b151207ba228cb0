"""Prompts that are answered twice each, for tests of non-native generators, and functions that read the responses."""

import torch


def prompts(count=6, seed=0):
    """Return prompts of 2 to 8 tokens, each twice."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (count,), generator=random).repeat_interleave(2)
    ids = torch.randint(4, 14, (count, 8), generator=random).repeat_interleave(2, 0)
    return {
        "input_ids": ids, "input_lengths": lengths, "draw_ids": torch.arange(count).repeat_interleave(2),
        "sample_index": torch.tensor([0, 1]).repeat(count), "stream": "train",
    }  # fmt: skip


def texts(out, data):
    """Return the token ids of each response."""
    ends = out["unpadded_sequence_lengths"].tolist()
    return [row[begin:end].tolist() for row, begin, end in zip(out["output_ids"], data["input_lengths"].tolist(), ends)]


def to_train(data, out, generations):
    """Return the prompts `data`, in groups of `generations`, with their responses `out` as a batch to train on."""
    total, position = out["unpadded_sequence_lengths"], torch.arange(out["output_ids"].shape[1])[None]
    return {
        "input_ids": out["output_ids"], "input_lengths": total, "sample_mask": torch.ones(len(total)), "generation_logprobs": out["logprobs"],
        "token_mask": ((position >= data["input_lengths"][:, None]) & (position < total[:, None])).float(),
        "group_id": torch.arange(len(total)) // generations,
    }  # fmt: skip
