import numpy as np
import pytest
import tiny
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.algorithms.build import build_run
from nemo_rl_cpp.algorithms.loss import TopKDistillationLossFn, divergence
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.config.distillation import DistillationLossConfig
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.distributed.ranks import Ranks
from nemo_rl_cpp.models.hf_config import native_config
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.models.policy.micro_batches import MicroBatching
from nemo_rl_cpp.models.policy.train_step import MicroBatchRunner, Scoring
from nemo_rl_cpp.models.weights import initialize_weights
from reference import distillation as slow
from test_distillation import run_config

CONFIG = dict(model_type="qwen3", vocab_size=61, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=True)  # fmt: skip
KINDS = ("forward", "reverse", "mixed")


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("zero_outside", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_topk_distillation_divergences_match_a_reference_implementation(kind, zero_outside, count):
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(count):
        V, k = int(rng.integers(2, 30)), int(rng.integers(1, 9))
        k = min(k, V)
        p, q = (torch.tensor(rng.normal(0, 3, V)).log_softmax(0) for _ in range(2))
        ids = q.topk(k).indices
        entropy = -(p.exp() * p).sum() if zero_outside and kind != "forward" else None
        cfg = DistillationLossConfig(kl_type=kind, mixed_kl_weight=0.3, zero_outside_topk=zero_outside)
        whole = p.tolist() if zero_outside else None
        ours = divergence(p[ids], q[ids], entropy, cfg)
        expected = slow.topk_divergence(p[ids].tolist(), q[ids].tolist(), kind, 0.3, whole)
        assert float(ours) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def model_of(seed):
    model = C.DecoderModel(native_config(CONFIG), torch.float64, True)
    initialize_weights(model, seed, std=0.2)
    return model


def taught_batch(k=5):
    """Return (four ragged samples of two prompts with a teacher's k most likely tokens, their token ids, the teacher's
    log-probabilities)."""
    random = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, 61, (n,), generator=random) for n in (7, 3)]
    sizes = ((0, 4), (0, 6), (1, 5), (1, 2))  # (group, tokens of the response)
    rows = [torch.cat([prompts[g], torch.randint(0, 61, (n,), generator=random)]) for g, n in sizes]
    masks = [torch.cat([torch.zeros(len(prompts[g])), torch.ones(n)]) for g, n in sizes]
    pad = torch.nn.utils.rnn.pad_sequence
    batch = RaggedBatch.of({
        "input_ids": pad(rows, batch_first=True), "input_lengths": torch.tensor([len(row) for row in rows]),
        "token_mask": pad(masks, batch_first=True), "sample_mask": torch.tensor([1.0, 0.5, 1.0, 1.0]), "group_id": torch.tensor([0, 0, 1, 1]),
    })  # fmt: skip
    teacher = C.Trainer(model_of(8))
    logp = [torch.log_softmax(teacher.logits(row) / 0.9, 1) for row in rows]
    before = torch.cat([torch.cat([of_row[:1], of_row[:-1]]) for of_row in logp])
    top = before.topk(k, dim=1)
    batch.tokens["candidate_ids"], batch.tokens["candidate_teacher_logprobs"] = top.indices, top.values
    return batch, rows, before


def train(settings, batching, model=None, **shared):
    model = model or model_of(3)
    trainer, batch = C.Trainer(model), taught_batch()[0]
    way = MicroBatchRunner(trainer, TopKDistillationLossFn(settings), batching, Scoring(0.9), **shared)
    return way.forward_backward(batch, 0, batch.size), trainer.grads.clone()


WHOLE = MicroBatching(max_samples=100)
SETTINGS = [dict(kl_type=kind, zero_outside_topk=z) for kind in KINDS for z in (False, True)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_topk_distillation_loss_is_the_sum_of_reference_divergences_over_tokens(settings):
    batch, rows, before = taught_batch()
    result, _ = train(settings, WHOLE)
    trainer, total, place = C.Trainer(model_of(3)), 0.0, 0
    count = float((batch.tokens["token_mask"] * batch.by_token(batch.samples["sample_mask"])).sum())
    for row, weight in zip(rows, batch.samples["sample_mask"].tolist(), strict=True):
        logp = torch.log_softmax(trainer.logits(row) / 0.9, 1)
        for t in range(len(row)):
            if batch.tokens["token_mask"][place]:
                ids = batch.tokens["candidate_ids"][place]
                whole = logp[t - 1].tolist() if settings["zero_outside_topk"] else None
                p, q = logp[t - 1][ids].tolist(), before[place][ids].tolist()
                total += weight * slow.topk_divergence(p, q, settings["kl_type"], 0.5, whole)
            place += 1
    assert result.loss == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_topk_distillation_gradient_matches_finite_differences(settings):
    model = model_of(3)
    _, grads = train(settings, WHOLE, model)
    for place in torch.randperm(len(grads), generator=torch.Generator().manual_seed(1))[:6].tolist():
        kept, sides = float(model.masters[place]), []
        for step in (1e-6, -1e-6):
            model.masters[place] = kept + step
            model.masters_changed()
            sides.append(train(settings, WHOLE, model)[0].loss)
        model.masters[place] = kept
        model.masters_changed()
        assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(float(grads[place]), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "batching", [MicroBatching(max_samples=1), MicroBatching(max_samples=2, share_prefix=False), MicroBatching(max_tokens=20)], ids=str
)  # fmt: skip
def test_topk_distillation_gradient_does_not_depend_on_the_micro_batch_size(batching):
    settings = dict(kl_type="mixed", zero_outside_topk=True)
    whole, expected = train(settings, WHOLE)
    parts, grads = train(settings, batching)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert (grads - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_topk_distillation_gradient_equals_the_sum_of_the_gradients_of_two_ranks(settings):
    whole, expected = train(settings, WHOLE)
    (first, ours), (second, theirs) = (train(settings, WHOLE, ranks=Ranks(rank, 2), blocks=2) for rank in (0, 1))
    assert min(ours.norm(), theirs.norm()) > 0.1 * expected.norm()
    assert first.loss + second.loss == pytest.approx(whole.loss, rel=1e-12)
    assert (ours + theirs - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("side,kind", [("teacher", "forward"), ("teacher", "mixed"), ("student", "reverse")])
def test_topk_distillation_training_reduces_the_divergence_from_the_teacher(tmp_path, side, kind):
    tiny.one_thread()
    config = load_grpo_config("grpo_tiny.yaml").policy
    Policy(None, config, tiny_tokenizer(), seed=77, init_reference_model=False).save_checkpoint(tmp_path / "teacher")
    topk = {"topk_logits_k": 6, "topk_of": side}
    with build_run(run_config(tmp_path / "logs", tmp_path / "teacher", 25, topk, kl_type=kind)) as run:
        run.train()
    losses = [row["loss"] for row in run.history]
    assert np.mean(losses[-3:]) < 0.5 * np.mean(losses[:2]), losses
