"""An object in a worker: a small model, or a tensor-parallel slice of it, which returns what the whole model would
return."""

import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.models.hf_config import TINY_CONFIG, canonical_config
from nemo_rl_cpp.models.model_folder import ModelFolder
from nemo_rl_cpp.models.weights import Slices, named_views
from row_batch import padded_rows

B, S = 6, 14
LLAMA = {"vocab_size": 131, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
MODELS = {
    "llama_gqa": LLAMA,
    "llama_mha_tied": LLAMA | {"num_key_value_heads": 4, "tie_word_embeddings": True, "vocab_size": 128},
    "qwen2_biases": LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3_head_norms": LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "gemma2_windows": LLAMA | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "sliding_window": 6},
    "granite_factors": LLAMA | {
        "model_type": "granite", "architectures": ["GraniteForCausalLM"], "residual_multiplier": 0.3, "attention_multiplier": 0.25,
    },
    "llama_all_biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "many_blocks": LLAMA | {"vocab_size": 2048 * 3 + 100},
}  # fmt: skip


def folder(name, value_head=False):
    return ModelFolder(canonical_config(TINY_CONFIG | MODELS[name]), None, seed=3, value_head=value_head)


def rows(vocab):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, vocab, (B, S), generator=generator)
    ids[1:3, :4] = ids[0, :4]  # the three samples of a group share their prompt
    lengths = torch.tensor([14, 12, 9, 14, 7, 11])
    mask = (torch.arange(S) < lengths[:, None]) & (torch.arange(S) >= 4)
    slopes = torch.randn(B, S, generator=generator)
    return ids, padded_rows(ids, lengths, mask, torch.tensor([0, 0, 0, 1, 2, 3])), slopes * mask


class SlicePlayer:
    """A model named in MODELS, or a slice of it. Its weights are random, and larger than those of a newly initialised
    model."""

    def __init__(self, model, dtype, tensor_size, value_head, ranks):
        self.folder = folder(model, value_head)
        self.ranks = ranks.split(tensor_size)
        self.native = self.folder.native()
        self.slices = Slices.of(self.native, self.ranks)
        self.model = C.DecoderModel(self.native, dtype, True, "cpu", self.ranks.tensor)
        whole = torch.randn(self.slices.whole.total, generator=torch.Generator().manual_seed(1)) * 0.2
        for name, view in named_views(self.slices.whole.specs, whole).items():
            if name.endswith("norm.weight"):
                view += 1
        masters = self.slices.take(whole)
        self.model.masters.copy_(masters)
        self.model.masters_changed()
        self.trainer = C.Trainer(self.model, self.ranks.communicator)

    def whole(self, flat):
        found = self.slices.gather(flat, "test")
        return None if found is None else named_views(self.slices.whole.specs, found)

    def weights(self):
        return self.whole(self.model.compute)

    def answers(self, temperature=1.0, top_p=1.0, top_k=0, checkpoint=False):
        """Return everything that a model computes. Gradients and updated weights are returned on the first rank, for
        the whole model."""
        ids, batch, slopes = rows(self.native["vocab_size"])
        dtype = self.trainer.out_dtype
        out = torch.zeros(B, S, dtype=dtype)
        self.trainer.zero_grad()
        unfiltered = torch.zeros_like(out) if top_p < 1 or top_k else None
        self.trainer.forward(
            batch, list(range(B)), temperature, True, True, checkpoint, out, top_p=top_p, top_k=top_k, unfiltered=unfiltered
        )  # fmt: skip
        d_out = slopes.to(dtype).masked_fill(torch.isinf(out), 0.0)
        self.trainer.backward(d_out, None if unfiltered is None else 0.5 * slopes.to(dtype))
        scored = torch.zeros_like(out)
        self.trainer.forward(batch, list(range(B)), temperature, True, False, False, scored, top_p=top_p, top_k=top_k)
        answers = {
            "logits": self.trainer.logits(ids[0]), "logprobs": out, "scored": scored, "unfiltered": unfiltered,
            "finite": self.trainer.grads_are_finite(),
        }  # fmt: skip
        step = self.trainer.step(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, max_grad_norm=1.0)
        return answers | {
            "norm": step.grad_norm, "grads": self.whole(self.trainer.grads), "weights": self.weights(),
            "digest": self.model.digest(), "repeated": self.repeated(),
        }  # fmt: skip

    def repeated(self):
        """Return the one-dimensional parameters that every slice holds completely."""
        return {
            s.name: self.model.compute[s.offset : s.offset + s.shape[0]].clone()
            for s in self.model.specs
            if s.split < 0 and len(s.shape) == 1
        }


def player(model, dtype, tensor_size, value_head, ranks):
    return SlicePlayer(model, dtype, tensor_size, value_head, ranks)
