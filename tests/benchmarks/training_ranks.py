"""The work of one process of bench_ranks.py. It is a module, because workers load it by its name."""

import time

import torch
from harness import peak_mb
from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.models.hf_config import TINY_CONFIG, canonical_config
from nemo_rl_cpp.models.model_folder import ModelFolder
from nemo_rl_cpp.models.policy.micro_batches import MicroBatching, plan

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
WAYS = {"after": (False, False), "beside": (True, False), "sharded": (True, True)}
ADAMW = {"lr": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}
"""A learning rate of 0 keeps the weights, so that every step has the same gradient."""


class Bench:
    """In a worker: one model, and a trainer for each way."""

    def __init__(self, args, names, ranks):
        self.ranks, self.before = ranks, peak_mb()
        folder = ModelFolder(canonical_config(TINY_CONFIG | SMOLLM2 | {"num_hidden_layers": args.layers}), None, seed=1)
        self.model = C.DecoderModel(folder.native(), getattr(torch, args.precision), True)
        self.model.masters.normal_(std=0.02, generator=torch.Generator().manual_seed(3))
        self.model.masters_changed()
        self.trainers = {}
        for name in names:
            beside, sharded = WAYS.get(name, (False, False))
            self.trainers[name] = C.Trainer(
                self.model, ranks.communicator, ranks.beside() if beside else None, sharded and ranks.size > 1
            )
        count, length = args.samples, args.length
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(0, SMOLLM2["vocab_size"], (count, length), generator=generator)
        lengths, ones = torch.full((count,), length), torch.ones(count, length)
        self.batch = RaggedBatch.of(
            {"input_ids": ids, "input_lengths": lengths, "token_mask": ones, "sample_mask": ones[:, 0]}
        )
        each = count // ranks.size
        rows = list(range(ranks.rank * each, (ranks.rank + 1) * each))
        wanted = torch.ones(count * length, dtype=torch.bool)
        wanted[self.batch.starts] = False
        batching = MicroBatching(max_samples=each, max_tokens=0, share_prefix=False)
        self.native, (self.rows,) = plan(self.batch, wanted, rows, batching)
        self.slope = torch.where(wanted, -1.0 / count / length, 0.0)

    def step(self, name):
        """Return (seconds until the last backward pass has ended, seconds of the step, gradient norm)."""
        trainer = self.trainers[name]
        if self.ranks.communicator is not None:
            self.ranks.communicator.barrier(phase="begin")
        began = time.perf_counter()
        trainer.zero_grad()
        out = torch.zeros(self.batch.num_tokens)
        trainer.forward(self.native, self.rows, 1.0, False, True, False, out)
        trainer.begin_sum()
        trainer.backward(self.slope)
        trained = time.perf_counter() - began
        norm = trainer.step(**ADAMW).grad_norm
        return trained, time.perf_counter() - began, norm

    def grown(self):
        return peak_mb() - self.before


def bench(args, names, ranks):
    return Bench(args, names, ranks)
