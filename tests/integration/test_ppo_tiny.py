import pytest
import tiny
from nemo_rl_cpp.algorithms.step import NothingToTrainOnError

SMALL = (*tiny.SMALL_PPO, "ppo.ppo_epochs=1", "ppo.policy_training_start_step=0")


def train(folder, *overrides, config="ppo_tiny.yaml", **options):
    return tiny.train(folder, *overrides, config=config, **options)


SEEDS = {"ppo_tiny.yaml": (2,), "vapo_tiny.yaml": (), "ppo_tiny_raw_reward.yaml": ()}


def check(config, learned):
    """Check that the run learned, also on numbers that were not trained on, with bit-exact log-probabilities in every
    step that trains the policy."""
    assert learned.first < 0.2 and learned.last > 0.9 and learned.held_out > 0.8
    trained = [row for row in learned.history if "loss" in row]
    assert all(row["max_logprob_gap"] == row["logprob_mismatched_tokens"] == 0 for row in trained)
    assert learned.has_critic == (config != "ppo_tiny_raw_reward.yaml")
    if learned.has_critic:
        assert max(row["critic/explained_var"] for row in learned.history) > 0.1


@pytest.mark.parametrize("config, seed", tiny.seeds_of(SEEDS))
def test_ppo_learns_to_reverse_digits(tmp_path, config, seed):
    check(config, tiny.learn(config, seed, tmp_path))


def test_critic_metrics_are_logged_at_every_ppo_step(tmp_path):
    run = train(tmp_path, *SMALL, "ppo.max_num_steps=4")
    for row in run.history:
        assert row["refit/bytes"] == 0 and row["critic/grad_norm"] > 0 and row["grad_norm"] > 0
        assert (
            row["critic/global_valid_toks"] == row["global_valid_toks"] == row["total_num_tokens"] - 32 * 4
        )  # prompts
        assert row["critic/values_min"] <= row["critic/values_mean"] <= row["critic/values_max"]
    assert run.history[0]["critic/values_max"] == 0.0  # a fresh critic
    assert len({row["weights/digest"] for row in run.history}) == 4


@pytest.mark.parametrize(
    "key, words",
    [("overlong_filtering=true", "32 of them because they were cut off; raise policy.generation.max_new"),
     ("seq_logprob_error_threshold=0.5", "0 of them because they were cut off; look at ppo.seq_logprob_error")],
)  # fmt: skip
def test_ppo_run_ends_with_an_error_before_the_update_if_all_samples_of_a_step_are_masked(tmp_path, key, words):
    """All responses are cut off after their first token, which masks them only with overlong filtering. The other key
    masks every response, since the smallest error is 1."""
    run = tiny.make(tmp_path, *SMALL, "policy.generation.max_new_tokens=1", f"ppo.{key}", "policy.generation.stop_token_ids=[]",
                    config="ppo_tiny.yaml")  # fmt: skip
    before = run.policy.weight_digest(), run.critic.model.weight_digest()
    with pytest.raises(NothingToTrainOnError, match=f"all 32 samples of this step are masked, {words}"):
        run.train()
    assert (run.policy.weight_digest(), run.critic.model.weight_digest()) == before


@pytest.mark.parametrize("epochs, updates", [(1, 1), (2, 4)])
def test_ppo_weights_are_identical_with_reused_and_recomputed_generation_logprobs(tmp_path, epochs, updates):
    options = (
        *SMALL, "ppo.max_num_steps=3", f"policy.train_global_batch_size={32 // updates}", f"ppo.ppo_epochs={epochs}",
    )  # fmt: skip
    digests = []
    for reuse in ("auto", "never", "always"):
        run = train(tmp_path / reuse, *options, f"policy.reuse_generation_logprobs={reuse}")
        digests.append((run.policy.weight_digest(), run.critic.model.weight_digest()))
    assert digests[0] == digests[1] == digests[2]
    if epochs > 1:
        assert max(row["probs_ratio_max"] for row in run.history) > 1.0  # later passes are off-policy


def test_use_kl_in_reward_changes_the_advantages_and_adds_no_kl_term_to_the_loss(tmp_path):
    kl = ("ppo.skip_reference_policy_logprobs_calculation=false", "loss_fn.use_kl_in_reward=true")
    options = (*SMALL, "ppo.max_num_steps=3", *kl)
    weights = {}
    for penalty in (1e-3, 1.0):
        run = train(tmp_path / str(penalty), *options, f"loss_fn.reference_policy_kl_penalty={penalty}")
        weights[penalty] = run.policy.weight_digest()
        assert all(row["kl_penalty"] == 0.0 for row in run.history)  # none in the loss
    assert weights[1e-3] != weights[1.0]
