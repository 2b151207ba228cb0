from types import SimpleNamespace

import pytest
import torch
from nemo_rl_cpp.models.hf.flat_model import FlatModel
from nemo_rl_cpp.models.hf.outputs import ModelRows, outputs_of
from nemo_rl_cpp.models.hf.trainer import HfTrainer
from nemo_rl_cpp.models.policy.train_step import Scoring
from torch import nn

V = 29


class Head(nn.Module):
    """A language model whose logits for a token are a row of a weight matrix."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(V, V, generator=generator).to(dtype))

    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(logits=self.weight[input_ids] * 1.0)


def rows():
    """Return the input of two samples with seven tokens to score."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V, (2, 6), generator=generator)
    row, column = torch.tensor([0, 0, 0, 1, 1, 1, 1]), torch.tensor([1, 2, 4, 0, 1, 2, 4])
    return ModelRows(ids, torch.arange(6).expand(2, -1), row, column, ids[row, column + 1], torch.arange(7))


def reference(module, picked, scoring):
    """Return (log-probabilities under `scoring`, log-probabilities without top-k and top-p), computed in loops over the
    vocabulary."""
    logits = module(picked.input_ids).logits[picked.row, picked.column].float() / scoring.temperature
    raw = torch.log_softmax(logits, -1).gather(-1, picked.targets[:, None])[:, 0]
    masked = logits.clone()
    for place, line in enumerate(logits.detach().tolist()):
        order = sorted(range(V), key=lambda token: (line[token], token))
        kept = [token for token in order if not scoring.top_k or line[token] >= sorted(line)[-scoring.top_k]]
        weights = torch.softmax(torch.tensor([line[token] for token in kept]), 0).cumsum(0).tolist()
        kept = [
            token for token, sum_so_far in zip(kept, weights) if sum_so_far > 1 - scoring.top_p or token == kept[-1]
        ]
        for token in set(range(V)) - set(kept):
            masked[place, token] = -torch.inf
    return torch.log_softmax(masked, -1).gather(-1, picked.targets[:, None])[:, 0], raw


@pytest.mark.parametrize("chunk", [1, 3, 7, None])
@pytest.mark.parametrize(
    "scoring", [Scoring(), Scoring(0.7), Scoring(0.9, 0.8, 9)], ids=["plain", "temperature", "filtered"]
)
def test_logprob_chunk_size_does_not_change_logprobs_or_gradients(chunk, scoring):
    module, picked = Head(), rows()
    got = outputs_of(module, picked, scoring, unfiltered=True, chunk=chunk)
    expected, raw = reference(module, picked, scoring)
    kept = torch.ones(7, dtype=torch.bool) if got.removed is None else ~got.removed
    assert torch.equal(kept, expected.isfinite())
    torch.testing.assert_close(got.scored[kept], expected[kept])
    torch.testing.assert_close(got.unfiltered, raw)
    slopes = torch.linspace(-1, 1, 7)
    torch.autograd.backward([got.scored, got.unfiltered], [slopes * kept, slopes + 0.5])
    (theirs,) = torch.autograd.grad(
        (expected.masked_fill(~kept, 0.0) * slopes * kept + raw * (slopes + 0.5)).sum(), module.weight
    )
    torch.testing.assert_close(module.weight.grad, theirs)
    whole = outputs_of(module, picked, scoring, unfiltered=True, chunk=7)
    assert torch.equal(whole.scored, got.scored) and torch.equal(whole.unfiltered, got.unfiltered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprob_computation_saves_only_the_logits_for_the_backward_pass(dtype):
    module, kept = Head(dtype), []

    def keep(tensor):
        kept.append((tensor.dtype, tensor.numel()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs_of(module, rows(), Scoring(0.7, 0.8, 9), unfiltered=True, chunk=2)
    large = [what for what in kept if what[1] >= 7 * V and what[1] != V * V]
    assert large == [(dtype, 2 * 6 * V)]


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.last = (nn.Linear(3, 3) for _ in range(3))
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_steps_of_the_transformers_backend_do_not_change_frozen_parameters(dtype):
    """Frozen parameters get no weight decay either; the others get the steps of torch's AdamW without the frozen
    ones."""
    torch.manual_seed(0)
    module = Layers()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = torch.optim.AdamW(
        [nn.Parameter(before[name].clone()) for name in before if "frozen" not in name], lr=0.1, weight_decay=0.5
    )
    trainer = HfTrainer(FlatModel(module, dtype, True), packed=False)
    for step in range(3):
        gradients = torch.randn(36, generator=torch.Generator().manual_seed(step))
        gradients[12:24] = 0
        trainer.zero_grad()
        trainer.grads.copy_(gradients)
        trainer.step(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.5, max_grad_norm=0.0)
        places = [*gradients[:12].split([9, 3]), *gradients[24:].split([9, 3])]
        for parameter, gradient in zip(optimizer.param_groups[0]["params"], places):
            parameter.grad = gradient.view(parameter.shape).clone()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in optimizer.param_groups[0]["params"]])
    masters = trainer.model.masters
    torch.testing.assert_close(torch.cat([masters[:12], masters[24:]]), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(masters[12:24], torch.cat([before[f"frozen.{part}"].flatten() for part in ("weight", "bias")]))
    for name, parameter in module.named_parameters():
        assert parameter.dtype == dtype and torch.equal(parameter, before[name].to(dtype)) == ("frozen" in name)
    assert not trainer.exp_avg[12:24].any()
