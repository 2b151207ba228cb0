import pytest
import tiny
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment

TERMS = {
    "entropy bonus": ("loss_fn.entropy_coef=0.5",),
    "high entropy": ("loss_fn.top_entropy_quantile=0.2",),
    "clip_cov": ("loss_fn.name=clip_cov", "loss_fn.clip_cov_ratio=0.05", "loss_fn.clip_cov_lb=0.0"),
    "kl_cov": ("loss_fn.name=kl_cov", "loss_fn.kl_cov_ratio=0.05", "policy.train_global_batch_size=8"),
    "seq-tis": ("loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_type=seq-tis",
                "loss_fn.truncated_importance_sampling_ratio=2.0"),
    "max_rl": ("grpo.adv_estimator.name=max_rl",),
    "remax": ("grpo.adv_estimator.name=remax",),
    "optimal_token_baseline": ("grpo.adv_estimator.name=optimal_token_baseline",),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return weights(tmp_path_factory.mktemp("plain"))[0]


def weights(folder, *overrides):
    """Return the digest of the weights after two steps, and the metrics of both steps."""
    with tiny.make(folder, *tiny.SMALL, "grpo.max_num_steps=2", *overrides) as run:
        run.train()
        return run.policy.weight_digest(), run.history


@pytest.mark.parametrize("name", TERMS)
def test_each_optional_loss_term_changes_the_trained_weights_reproducibly(name, plain, tmp_path):
    first, history = weights(tmp_path / "1", *TERMS[name])
    again, _ = weights(tmp_path / "2", *TERMS[name])
    assert first == again
    assert (first == plain) == (name == "seq-tis")  # the native engine's weights are the trainer's: their ratio is 1
    if name == "entropy bonus":
        assert history[0]["entropy"] > 0
    if name == "high entropy":
        assert history[0]["selected_tokens_share"] == pytest.approx(0.2, abs=0.03)


def test_bypass_mode_does_not_change_the_weights_if_generation_and_training_logprobs_are_equal(tmp_path):
    halves = ("policy.train_global_batch_size=8",)
    assert weights(tmp_path / "1", *halves)[0] == weights(tmp_path / "2", *halves, "loss_fn.bypass_mode=true")[0]


def test_remax_run_subtracts_the_reward_of_the_greedy_response_to_the_same_prompt(tmp_path):
    with tiny.make(tmp_path, *tiny.SMALL, "grpo.max_num_steps=1", "grpo.adv_estimator.name=remax") as run:
        seen = []
        add = run.advantages.add
        run.advantages.add = lambda batch: seen.append(batch) or add(batch)
        run.train()
        batch = seen[0]
        baselines = batch.samples["reward_baseline"].view(8, 4)
        assert (baselines == baselines[:, :1]).all()
        assert run.history[0]["greedy_reward"] == pytest.approx(float(baselines[:, 0].mean()))
        expected = batch.by_token(batch.rewards - batch.samples["reward_baseline"])
        assert (batch.advantages == expected).all()


def ones(completions, **columns):
    return [1.0 for _ in completions]


def test_reward_penalties_also_apply_to_the_greedy_responses_of_remax(tmp_path):
    unwanted = (
        "reward_penalties.penalize_unwanted_tokens=true",
        f"reward_penalties.token_ids={{unwanted: {[*range(16)]}}}",
    )
    options = (*tiny.SMALL, *unwanted, "grpo.adv_estimator.name=remax", "grpo.max_num_steps=1")
    row = tiny.train(tmp_path, *options, environment=RewardFunctionEnvironment(ones)).history[0]
    assert (row["accuracy"], row["reward"], row["greedy_reward"]) == (1, 0, 0)
