import numpy as np
import pytest
import tiny
import torch
from nemo_rl_cpp.algorithms.advantage_estimator import OPDAdvantageEstimator
from nemo_rl_cpp.algorithms.algorithm import TokenAdvantages
from nemo_rl_cpp.algorithms.build import build_run
from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn
from nemo_rl_cpp.algorithms.teachers import Teachers, check_vocabulary
from nemo_rl_cpp.config import ConfigError, load_grpo_config, load_ppo_config
from nemo_rl_cpp.config.distillation import DistillationLossConfig
from nemo_rl_cpp.config.loop import AdvEstimatorConfig, GAEConfig
from nemo_rl_cpp.config.loss import ClippedPGLossConfig
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.distributed.ragged_batch import offsets_of
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.rollouts.batches import TrainBatch
from reference import advantages as slow

KINDS = ("reverse", "forward", "mixed", "jensen")
GAP = "on_policy_distillation/teacher_student_logprob_gap_mean"


def estimator(kind="reverse", weight=0.5, cap=10.0, **settings):
    loss = DistillationLossConfig(kl_type=kind, mixed_kl_weight=weight, max_teacher_ratio=cap)
    return OPDAdvantageEstimator(AdvEstimatorConfig(name="opd", **settings), loss)


@pytest.mark.parametrize("cases", [100, pytest.param(2500, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_distillation_advantages_match_the_reference_and_ignore_values_at_masked_tokens(kind, cases):
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(cases):
        rows, columns = rng.integers(1, 5), rng.integers(1, 6)
        student, teacher = -rng.exponential(2.0, (2, rows, columns))
        mask = (rng.random((rows, columns)) < 0.7).astype(float)
        student[mask == 0], teacher[mask == 0] = np.nan, np.inf
        student[(mask != 0) & (rng.random((rows, columns)) < 0.05)] = -np.inf  # removed by top-k or top-p
        alpha, weight, cap = rng.choice([1.0, 0.3]), rng.choice([0.0, 0.4]), rng.choice([1.5, 10.0])
        rewards, groups = rng.choice([0.0, 1.0], rows), rng.integers(0, 2, rows)
        settings = {"proximal_teacher_alpha": float(alpha), "subtract_global_baseline": bool(rng.random() < 0.5)}
        made = estimator(kind, 0.25, float(cap), outcome_advantage_weight=float(weight), **settings)
        padded = made.compute_advantage(
            None, torch.tensor(rewards), torch.tensor(mask), teacher_logprobs=torch.tensor(teacher), prev_logprobs=torch.tensor(student),
            group_id=torch.tensor(groups),
        )  # fmt: skip
        base, std = slow.group_baseline(groups, rewards, np.ones(rows), leave_one_out=True)
        outcome = np.repeat(weight * slow.grpo(rewards, base, std, normalize=True)[:, None], columns, 1)
        expected = slow.opd(
            teacher, student, mask, kind, 0.25, cap, alpha, settings["subtract_global_baseline"], outcome
        )
        np.testing.assert_allclose(padded.numpy(), expected, rtol=1e-6, atol=1e-6)
        ragged = made.compute_advantage(
            None, torch.tensor(rewards), torch.tensor(mask).ravel(), teacher_logprobs=torch.tensor(teacher).ravel(),
            prev_logprobs=torch.tensor(student).ravel(), group_id=torch.tensor(groups),
            offsets=offsets_of(torch.full((rows,), columns)),
        )  # fmt: skip
        torch.testing.assert_close(ragged, padded.ravel(), rtol=0, atol=0)
        assert all(np.isfinite(value) for value in made.last_metrics.values())


def of_ppo(**settings):
    return OPDAdvantageEstimator(GAEConfig(name="opd", **settings), ClippedPGLossConfig())


@pytest.mark.parametrize("cases", [100, pytest.param(2500, marks=pytest.mark.long)])
def test_ppo_distillation_advantages_with_a_critic_match_a_reference_implementation(cases):
    rng = np.random.default_rng(7)
    for _ in range(cases):
        rows, columns = rng.integers(1, 5), rng.integers(1, 6)
        student, teacher = -rng.exponential(2.0, (2, rows, columns))
        mask, values = (rng.random((rows, columns)) < 0.7).astype(float), rng.normal(0, 1, (rows, columns))
        student[(mask != 0) & (rng.random((rows, columns)) < 0.05)] = -np.inf  # removed by top-k or top-p
        rewards, normalize, centre = rng.normal(0, 1, rows), bool(rng.random() < 0.5), bool(rng.random() < 0.5)
        alpha, weight = float(rng.choice([1.0, 0.3])), float(rng.choice([0.0, 0.4]))
        given = {"gae_lambda": 0.8, "gae_gamma": 0.9, "normalize_advantages": normalize}
        made = of_ppo(
            **given, proximal_teacher_alpha=alpha, outcome_advantage_weight=weight, subtract_global_baseline=centre
        )
        of_tokens = {"mask": mask, "teacher_logprobs": teacher, "prev_logprobs": student, "values": values}
        tensors = {name: torch.tensor(each) for name, each in of_tokens.items()}
        advantages, returns = made.compute_advantage(None, torch.tensor(rewards), **tensors)
        outcome, targets, _ = slow.gae(rewards, values, mask, 0.9, 0.8, normalize=normalize)
        expected = slow.opd(teacher, student, mask, alpha=alpha, centre=centre, outcome=weight * outcome)
        np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-6, atol=1e-6)
        if weight:
            np.testing.assert_allclose(returns.numpy()[mask != 0], targets[mask != 0], rtol=1e-6, atol=1e-6)
        else:
            assert returns is None  # there is no critic
        ragged = made.compute_advantage(
            None, torch.tensor(rewards), offsets=offsets_of(torch.full((rows,), columns)),
            **{name: each.ravel() for name, each in tensors.items()},
        )  # fmt: skip
        torch.testing.assert_close(ragged[0], advantages.ravel(), rtol=0, atol=0)


def test_ppo_advantages_and_loss_with_a_teacher_match_hand_computed_values():
    """The critic's errors are 0.25 - 0.5 and 1 - 0.25, so GAE with lambda 0.5 gives (0.125, 0.75), and the critic's
    targets are (0.625, 1). The teacher's gaps are (0.5, -0.25). With the weight 2 the advantages are (0.75, 1.25), and
    the loss at a ratio of 1 is their mean, negated."""
    student, teacher = torch.tensor([-9.0, -1.0, -2.0, -9.0]), torch.tensor([0.0, -0.5, -2.25, 0.0])
    of_tokens = {
        "input_ids": torch.arange(4), "token_mask": torch.tensor([0.0, 1.0, 1.0, 0.0]), "generation_logprobs": student,
        "teacher_logprobs": teacher, "values": torch.tensor([7.0, 0.5, 0.25, 7.0]),
    }  # fmt: skip
    batch = TrainBatch(
        offsets_of(torch.tensor([4])), of_tokens, {"sample_mask": torch.ones(1), "rewards": torch.ones(1)}
    )
    settings = {"gae_lambda": 0.5, "normalize_advantages": False, "outcome_advantage_weight": 2.0}
    metrics = TokenAdvantages(of_ppo(**settings)).add(batch)
    assert batch.advantages.tolist() == pytest.approx([0.0, 0.75, 1.25, 0.0])
    assert batch.returns[1:3].tolist() == pytest.approx([0.625, 1.0])
    assert metrics[GAP] == pytest.approx(0.125)
    data = {name: batch[name] for name in ("advantages", "token_mask", "sample_mask", "generation_logprobs")}
    loss = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))
    result = loss.native(student[None, 1:], data | {"prev_logprobs": student[None]}, 1.0, 2.0)
    assert float(result.loss) == pytest.approx(-1.0)
    assert result.grad_logprobs[0].tolist() == pytest.approx([-0.375, -0.625, 0.0])


@pytest.mark.parametrize("kind", KINDS)
def test_expectation_of_the_distillation_policy_gradient_is_the_gradient_of_the_kl_divergence(kind):
    """Over all tokens of a vocabulary of 6, E_p[A grad log p] = -grad D(student, teacher)."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    log_q = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    p, q = log_p.exp(), log_q.exp()
    reverse, forward = (p * (log_p - log_q)).sum(), (q * (log_q - log_p)).sum()
    middle = ((p + q) / 2).log()
    jensen = 0.5 * (p * (log_p - middle)).sum() + 0.5 * (q * (log_q - middle)).sum()
    divergence = {"reverse": reverse, "forward": forward, "mixed": 0.25 * forward + 0.75 * reverse, "jensen": jensen}
    (exact,) = torch.autograd.grad(divergence[kind], logits, retain_graph=True)
    advantages = estimator(kind, 0.25, cap=1e6).compute_advantage(
        None, None, torch.ones(1, 6), teacher_logprobs=log_q[None], prev_logprobs=log_p.detach()[None]
    )
    (sampled,) = torch.autograd.grad((p.detach() * advantages[0] * log_p).sum(), logits)
    torch.testing.assert_close(-sampled, exact, rtol=1e-9, atol=1e-12)


class TwoModels:
    """A fake policy with the teachers "a" and "b", whose log-probabilities are 1 and 2 on every scored token."""

    def get_teacher_logprobs(self, data, teacher):
        asked = data["token_mask"] * data["sample_mask"][:, None]
        return {"teacher_logprobs": asked * {"a": 1.0, "b": 2.0}[teacher]}


def batch_of(lengths):
    tokens = int(sum(lengths))
    return TrainBatch(
        offsets_of(torch.tensor(lengths)), {"input_ids": torch.arange(tokens), "token_mask": torch.ones(tokens)},
        {"sample_mask": torch.tensor([1.0, 1.0, 0.0])},
    )  # fmt: skip


def test_each_response_is_scored_by_the_teacher_of_its_task_or_by_the_default_teacher():
    batch = batch_of([2, 1, 2])
    Teachers(TwoModels(), {"sums": "a", "games": "b"}, "games").add_logprobs(
        batch, {"task_name": ["sums", "x", "sums"]}
    )
    assert batch.teacher_logprobs.tolist() == [1.0, 1.0, 2.0, 0.0, 0.0] and batch.sample_mask.tolist() == [1, 1, 0]
    with pytest.raises(ValueError, match=r"^the task x has no teacher; .*has sums, games: add it there[^\n]*$"):
        Teachers(TwoModels(), {"sums": "a", "games": "b"}, None).add_logprobs(batch, {"task_name": ["sums", "x", "x"]})


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Return a folder with the student's weights after some updates towards small digits on random data."""
    tiny.one_thread()
    folder = tmp_path_factory.mktemp("teacher")
    config = load_grpo_config("grpo_tiny.yaml", ["policy.optimizer.kwargs.lr=5e-3"]).policy
    policy = Policy(None, config, tiny_tokenizer(), seed=42, init_reference_model=False)
    loss = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids = torch.randint(4, 14, (256, 8), generator=generator)
        batch = {
            "input_ids": ids, "input_lengths": torch.full((256,), 8), "token_mask": torch.ones(256, 8),
            "sample_mask": torch.ones(256), "advantages": torch.where(ids < 8, 1.0, -1.0),
        }  # fmt: skip
        policy.train(batch | {"generation_logprobs": policy.get_logprobs(batch)["logprobs"]}, loss)
    policy.save_checkpoint(folder)
    return folder


def opd_keys(folder, *overrides, section="grpo"):
    return [
        f"{section}.adv_estimator.name=opd", "on_policy_distillation.enabled=true",
        f"++on_policy_distillation.teacher_model_by_agent_name.reverse_digits={folder}", *overrides,
    ]  # fmt: skip


def refused(*overrides, load=load_grpo_config, file="grpo_tiny.yaml"):
    with pytest.raises(ConfigError) as caught:
        load(file, list(overrides))
    return str(caught.value)


def test_error_for_an_invalid_teacher_configuration_states_the_reason():
    assert "opd, which needs a teacher: set on_policy_distillation.enabled=true" in refused(
        "grpo.adv_estimator.name=opd"
    )
    assert "names no teacher" in refused("on_policy_distillation.enabled=true")
    assert "loads teachers that adv_estimator.name grpo does not ask" in refused(*opd_keys("x")[1:])
    assert "default_teacher_alias is y, but the teachers are reverse_digits" in refused(
        *opd_keys("x", "on_policy_distillation.default_teacher_alias=y")
    )
    assert "scored by the native core" in refused(*opd_keys("x", "policy.backend=hf"))
    assert "read by adv_estimator.name opd only" in refused("grpo.adv_estimator.proximal_teacher_alpha=0.5")
    assert "sampled tokens, not the whole vocabulary" in refused(
        *opd_keys("x", "++on_policy_distillation.full.enabled=true")
    )


def test_teacher_configuration_of_ppo_is_validated_like_that_of_grpo():
    keys = opd_keys("x", section="ppo")
    alone, mixed = (load_ppo_config("ppo_tiny.yaml", [*keys, *more]) for more in (
        ["ppo.policy_training_start_step=0"], ["ppo.adv_estimator.outcome_advantage_weight=0.5"],
    ))  # fmt: skip
    assert alone.teachers == mixed.teachers and list(alone.teachers.values()) == ["x"]
    assert list(alone.trained_models()) == ["policy"] and list(mixed.trained_models()) == ["policy", "value"]

    def wrong(*overrides):
        return refused(*overrides, load=load_ppo_config, file="ppo_tiny.yaml")

    assert "ppo.adv_estimator.name is opd, which needs a teacher" in wrong(keys[0])
    assert "name gae does not ask: set ppo.adv_estimator.name to opd" in wrong(*keys[1:])
    assert "gae_lambda has no effect with adv_estimator.name opd and outcome_advantage_weight 0" in wrong(
        *keys, "ppo.adv_estimator.gae_lambda=0.5"
    )
    assert "must be 0 with adv_estimator.name opd and outcome_advantage_weight 0: there is no critic" in wrong(*keys)


def test_on_policy_distillation_accepts_one_response_per_prompt():
    alone = ["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=32"]
    assert load_grpo_config("grpo_tiny.yaml", opd_keys("x", *alone)).teachers
    assert "alone in its group" in refused(*opd_keys("x", *alone, "grpo.adv_estimator.outcome_advantage_weight=0.5"))


def test_distillation_teacher_with_a_different_vocabulary_is_an_error(teacher):
    tokenizer = tiny_tokenizer()
    check_vocabulary(tokenizer, str(teacher), "teacher.model_name")
    tokenizer.backend_tokenizer.add_tokens(["<more>"])
    with pytest.raises(ValueError, match=r"^teacher.model_name: \S+ has another vocabulary than [^\n]*$"):
        check_vocabulary(tokenizer, str(teacher), "teacher.model_name")


def test_distillation_teacher_gives_the_logprobs_of_a_policy_with_the_same_weights(teacher):
    tiny.one_thread()
    config = load_grpo_config("grpo_tiny.yaml").policy
    student = Policy(None, config, tiny_tokenizer(), seed=1, init_reference_model=False, teachers={"key": str(teacher)})
    own = config.model_copy(update={"model_name": str(teacher)})
    alone = Policy(None, own, tiny_tokenizer(), seed=1, init_reference_model=False)
    data = {
        "input_ids": torch.randint(4, 14, (6, 9)), "input_lengths": torch.full((6,), 9), "token_mask": torch.ones(6, 9),
        "sample_mask": torch.ones(6),
    }  # fmt: skip
    scored = student.get_teacher_logprobs(data, str(teacher))["teacher_logprobs"]
    assert torch.equal(scored, alone.get_logprobs(data)["logprobs"])
    assert not torch.equal(scored, student.get_logprobs(data)["logprobs"])


def run_config(folder, teacher, steps, topk=(), **loss):
    """Return the configuration of a run that distils `teacher` into the tiny model, without checkpoints."""
    same = load_grpo_config(
        "grpo_tiny.yaml", ["policy.train_global_batch_size=128", "policy.optimizer.kwargs.lr=2e-3"]
    ).model_dump()
    return {name: same[name] for name in ("policy", "data", "env")} | {
        "distillation": {"max_num_steps": steps, "max_num_epochs": 1000, "val_period": 0} | dict(topk),
        "teacher": {"model_name": str(teacher)}, "loss_fn": loss, "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder), "tensorboard_enabled": False, "monitor_gpus": False},
    }  # fmt: skip


def is_near(history):
    """Return whether the mean log-probability gap of the last five steps is below half of that of the first two."""
    gaps = [-row[GAP] for row in history]
    return len(gaps) > 6 and np.mean(gaps[-5:]) < 0.5 * np.mean(gaps[:2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reverse", "jensen"])
def test_distillation_run_reduces_the_logprob_gap_to_its_teacher(teacher, tmp_path, kind):
    tiny.one_thread()
    with build_run(run_config(tmp_path, teacher, 60, kl_type=kind)) as run:
        run.after_step.append(lambda result: result.state.stop("near") if is_near(run.history) else None)
        run.train()
    assert is_near(run.history), run.history


@pytest.mark.slow
def test_ppo_distillation_run_reduces_the_logprob_gap_and_resumes_bit_identically(teacher, tmp_path):
    keys = (
        *tiny.SMALL_PPO, *opd_keys(teacher, section="ppo"), "ppo.adv_estimator.outcome_advantage_weight=0.1",
        "ppo.policy_training_start_step=2", "checkpointing.enabled=true", "checkpointing.save_period=12",
        "checkpointing.metric_name=null",
    )  # fmt: skip

    def trained(folder, steps):
        with tiny.make(tmp_path / folder, *keys, f"ppo.max_num_steps={steps}", config="ppo_tiny.yaml") as run:
            run.train()
        return run, [{key: row[key] for key in (GAP, "reward", "critic/loss", "weights/digest")} for row in run.history]

    whole, history = trained("whole", 24)
    _, first = trained("parts", 12)
    rest, second = trained("parts", 24)
    assert first + second == history
    for ours, expected in zip(rest.models.values(), whole.models.values(), strict=True):
        assert ours.weight_digest() == expected.weight_digest()
    gaps = [-row[GAP] for row in history]
    assert np.mean(gaps[-5:]) < 0.5 * np.mean(gaps[:3]), gaps
