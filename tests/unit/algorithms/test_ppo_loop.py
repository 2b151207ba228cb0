import pytest
import torch
from loop_fakes import Policy, fake_run, logged, train
from nemo_rl_cpp.algorithms.step import critic_metrics
from nemo_rl_cpp.algorithms.step_metrics import mean_over_epochs


class Critic:
    """A fake critic that gives every token the value 0.25, and records its training calls."""

    def __init__(self, events):
        self.events, self.version, self.trained = events, 0, []

    def get_values(self, data):
        self.events.append("values")
        return {"values": 0.25 * data["token_mask"].float()}

    def train(self, data, loss_fn):
        self.events.append("train critic")
        self.trained.append(dict(data))
        self.version += 1
        metrics = {"loss": [0.1, 0.2], "returns_mean": [0.2, 0.3], "values_mean": [0.1, 0.1], "returns_sq_mean": [0.3, 0.2],
                   "residual_sq_mean": [0.2, 0.1], "values_min": [-1.0, -2.0], "values_max": [0.5, 0.25], "vf_clipfrac": [0.0, 0.1],
                   "lr": [2e-3, 2e-3], "num_valid_samples": [4, 4]}  # fmt: skip
        return {"loss": torch.tensor([0.3]), "grad_norm": torch.tensor([2.0]), "all_mb_metrics": metrics}

    save_checkpoint = Policy.save_checkpoint
    keep_bad_batches = Policy.keep_bad_batches
    non_finite_parameters = Policy.non_finite_parameters
    checkpoint_bytes = Policy.checkpoint_bytes
    learning_rate = 2e-3


def make(folder, *overrides, critic=Critic, **options):
    once = ("ppo.policy_training_start_step=0", "ppo.ppo_epochs=1")
    return fake_run(folder, "ppo", *once, *overrides, critic=critic, **options)


def test_ppo_step_calls_policy_and_critic_in_the_expected_order(tmp_path):
    run = train(make(tmp_path, "ppo.max_num_steps=1", "ppo.ppo_epochs=3", "checkpointing.enabled=false"))
    epoch = ["train critic", "train"]  # critic before actor
    generation = ["prepare_for_generation", "generate", "finish_generation"]
    assert run.policy.events == [*generation, "values", *epoch * 3]


def test_only_the_critic_is_trained_before_policy_training_start_step(tmp_path):
    warm_up = ("ppo.ppo_epochs=2", "ppo.policy_training_start_step=2")
    run = train(make(tmp_path, "ppo.max_num_steps=3", *warm_up, "checkpointing.enabled=false"))
    assert run.critic.model.version == 6 and run.policy.version == 2
    digests = [row["train/weights/digest"] for row in logged(run).values()]
    assert digests == [f"{0:016x}"] * 3
    first, _, last = logged(run).values()
    assert "train/loss" not in first and "train/critic/loss" in first and "train/loss" in last


def test_all_ppo_epochs_use_the_values_and_returns_computed_after_the_rollout(tmp_path):
    run = train(make(tmp_path, "ppo.max_num_steps=1", "ppo.ppo_epochs=2", "ppo.adv_estimator.normalize_advantages=false",
                     "ppo.adv_estimator.gae_lambda=1.0", respond=lambda prompt, key: "2" if key[2] < 2 else "1"))  # fmt: skip
    critic = run.critic.model.trained[0]
    mask, rewards = critic["token_mask"], critic["rewards"]
    assert rewards.tolist() == [1.0, 1.0, 0.0, 0.0] * 2
    torch.testing.assert_close(critic["returns"] * mask, rewards[:, None] * mask)  # lambda and gamma 1: the reward
    torch.testing.assert_close(critic["advantages"] * mask, (rewards[:, None] - 0.25) * mask)
    for batch in run.critic.model.trained:  # values and returns stay those of the rollout
        assert torch.equal(batch["values"], critic["values"]) and torch.equal(batch["returns"], critic["returns"])


def test_only_ppo_epochs_after_the_first_use_old_logprobs(tmp_path):
    run = make(tmp_path, "ppo.max_num_steps=1", "ppo.ppo_epochs=2")
    seen, step = [], run.policy.train
    run.policy.train = lambda data, *args, **kwargs: (
        seen.append("prev_logprobs" in data),
        step(data, *args, **kwargs),
    )[1]
    train(run)
    assert seen == [False, True]


def test_ppo_run_with_raw_reward_advantages_trains_and_saves_no_critic(tmp_path):
    raw = ("ppo.adv_estimator.name=raw_reward", "ppo.adv_estimator.normalize_advantages=false")
    run = train(make(tmp_path, *raw, "ppo.max_num_steps=2", critic=None))
    assert run.models == {"policy": run.policy}
    batch = run.policy.trained[0]
    assert "returns" not in batch and "values" not in batch
    mask = batch["token_mask"]
    torch.testing.assert_close(batch["advantages"] * mask, batch["rewards"][:, None] * mask)
    assert not any("critic" in name for name in logged(run)[1])
    assert not (tmp_path / "checkpoints" / "step_2" / "value").exists()


def test_ppo_step_logs_every_expected_metric(tmp_path):
    run = train(make(tmp_path, "ppo.max_num_steps=2", "ppo.ppo_epochs=2"))
    row = logged(run)[1]
    critic = {"loss", "grad_norm", "values_mean", "values_min", "values_max", "returns_mean", "explained_var", "vf_clipfrac", "returns_sq_mean",
              "residual_sq_mean", "lr"}  # fmt: skip
    common = {"loss", "grad_norm", "reward", "accuracy", "advantages/mean", "baseline_reward/pct_mixed", "lr",
              "token_mult_prob_error", "weights/digest"}  # fmt: skip
    expected = {f"critic/{name}" for name in critic} | common | {"last_epoch/critic/loss", "last_epoch/loss"}
    assert {f"train/{name}" for name in expected} <= set(row)
    timing = logged(run, "timing/train/")[1]
    stages = ("value_inference", "value_training", "policy_training", "generation")
    assert {f"timing/train/{stage}" for stage in stages} <= set(timing)


def test_critic_metrics_match_hand_computed_values():
    metrics = critic_metrics(Critic([]).train({}, None))
    assert metrics["critic/loss"] == pytest.approx(0.3) and metrics["critic/grad_norm"] == 2.0
    assert metrics["critic/values_min"] == -2.0 and metrics["critic/values_max"] == 0.5
    assert metrics["critic/lr"] == 2e-3
    assert metrics["critic/explained_var"] == pytest.approx(1 - (0.3 - (0.5 - 0.2) ** 2) / (0.5 - 0.5**2))


@pytest.mark.parametrize("critic, policy", [(1, 2), (2, 1), (3, 2)])
def test_ppo_step_logs_metrics_averaged_over_epochs_and_those_of_each_models_last_epoch(critic, policy):
    epochs = [{"loss": 1.0, "values_min": 2.0, "once": 5.0}, {"loss": 3.0, "values_min": 1.0}]
    last = {"last_epoch/loss": 3.0, "last_epoch/values_min": 1.0}
    assert mean_over_epochs(epochs) == {"loss": 2.0, "values_min": 1.0, "once": 5.0, **last}
    assert mean_over_epochs(epochs[:1], []) == epochs[0]  # one epoch of the critic, before the policy is trained
    of_models = [{"critic/loss": float(i)} for i in range(critic)], [{"loss": 10.0 + i} for i in range(policy)]
    found = mean_over_epochs(*of_models)
    assert found["last_epoch/critic/loss"] == critic - 1 and found["last_epoch/loss"] == 9 + policy
