"""Small policies and critics on either backend, and batches for them."""

import torch
from nemo_rl_cpp.config.policy import PolicyConfig, ValueConfig
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer

BASE = dict(
    model_name="tiny-random", precision="float32", train_global_batch_size=12, train_micro_batch_size=12, max_total_sequence_length=16,
    optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3, "weight_decay": 0.1}},
)  # fmt: skip


def make(cls, config_cls=PolicyConfig, model_type=None, paths=None, cluster=None, **changes):
    values = {**BASE, **changes}
    if model_type is not None:
        own = values.get("hf_config_overrides", {})
        values["hf_config_overrides"] = {"model_type": model_type, "initializer_range": 0.1, **own}
    config = config_cls(**values)
    config.fill_defaults() if config_cls is PolicyConfig else config.fill_batching()
    return cls(cluster, config, tiny_tokenizer(), seed=1, **(paths or {}))


def hf_policy(model_type=None, paths=None, **changes):
    from nemo_rl_cpp.models.hf.trained import HfPolicy

    return make(HfPolicy, model_type=model_type, paths=paths, backend="hf", **changes)


def hf_value(model_type=None, paths=None, **changes):
    from nemo_rl_cpp.models.hf.trained import HfValue

    return make(HfValue, ValueConfig, model_type, paths, backend="hf", **changes)


FAST = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "weight_decay": 0.1}}


def groups(random, rows=12):
    """Return samples of 5 to 9 tokens in groups of 4, which share a prompt of 4 tokens. The rest is trained."""
    ids = torch.randint(4, 14, (rows, 9), generator=random)
    lengths = torch.randint(5, 10, (rows,), generator=random)
    ids[:, :4] = ids[::4].repeat_interleave(4, 0)[:, :4]
    position = torch.arange(9)[None]
    mask = ((position >= 4) & (position < lengths[:, None])).float()
    return {
        "input_ids": ids, "input_lengths": lengths, "token_mask": mask, "sample_mask": torch.ones(rows),
        "group_id": torch.arange(rows) // 4,
    }  # fmt: skip


def batch(seed=0):
    """Return 12 samples of 5 to 9 tokens in groups of 4, with all inputs of the losses."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 14, (12, 9), generator=random)
    lengths = torch.randint(5, 10, (12,), generator=random)
    position = torch.arange(9)[None]
    mask = ((position >= 4) & (position < lengths[:, None])).float()
    advantages = torch.randn(12, 1, generator=random).expand(12, 9).contiguous()
    near = lambda: -2.5 + 0.3 * torch.randn(12, 9, generator=random)  # noqa: E731
    return {
        "input_ids": ids, "input_lengths": lengths, "token_mask": mask, "sample_mask": (torch.arange(12) != 5).float(),
        "advantages": advantages, "group_id": torch.arange(12) // 4, "rewards": (advantages[:, 0] > 0).float(),
        "generation_logprobs": near() * mask, "prev_logprobs": near() * mask, "reference_policy_logprobs": near() * mask,
        "returns": torch.randn(12, 9, generator=random) * mask, "values": torch.randn(12, 9, generator=random) * mask,
    }  # fmt: skip


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
