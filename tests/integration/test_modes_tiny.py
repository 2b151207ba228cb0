import pytest
import tiny


def of(history, name):
    return [row[name] for row in history]


def check(mode, learned):
    """Check that the run learned, also on numbers that were not trained on, with bit-exact log-probabilities in every
    step."""
    assert learned.first < 0.2 and learned.last > 0.9 and learned.held_out > 0.85
    assert set(of(learned.history, "token_mult_prob_error")) == {1.0}
    assert set(of(learned.history, "max_logprob_gap")) == {0.0}
    WHAT_SHOWS[mode](learned.history)


@pytest.mark.parametrize("mode, seed", tiny.seeds_of({"dapo": (2,), "prorlv2": (), "rloo": ()}))
def test_dapo_prorlv2_and_rloo_learn_to_reverse_digits(tmp_path, mode, seed):
    """RLOO trains until 0.93, because its accuracy on held-out numbers lags."""
    check(mode, tiny.learn(f"{mode}_tiny.yaml", seed, tmp_path, 0.93 if mode == "rloo" else 0.9))


def dapo_shows(history):
    assert (
        history[0]["num_masked_samples"] > 0 and history[-1]["truncation_rate"] < 0.1
    )  # overlong filtering; it learned to end
    assert min(of(history, "dynamic_sampling_num_gen_batches")) >= 1
    assert max(of(history, "probs_ratio_max")) > 1.28 >= max(of(history, "probs_ratio_clamped_max")) - 1e-6
    assert min(of(history, "probs_ratio_clamped_min")) >= 0.8 - 1e-6
    assert max(of(history, "reward")) <= 1.0 and min(of(history, "reward")) < -0.5  # scaled to [-1, 1]


def prorlv2_shows(history):
    assert max(of(history, "kl_penalty")) > 0.0  # the reference model is in use
    assert set(of(history, "is_oob_ratio")) == {0.0}  # generation is the training forward: ICE-POP has nothing to drop
    assert set(of(history, "sampling_importance_ratio")) == {1.0}
    assert set(of(history, "advantage/degenerate_whitening")) == {0.0}
    assert history[0]["truncation_rate"] > 0.5 and history[-1]["truncation_rate"] < 0.1  # the penalty taught it to end


def rloo_shows(history):
    assert set(of(history, "probs_ratio_max")) == {1.0} == set(of(history, "probs_ratio_min"))  # one update a step


WHAT_SHOWS = {"dapo": dapo_shows, "prorlv2": prorlv2_shows, "rloo": rloo_shows}


def test_run_initialised_from_a_checkpoint_uses_that_checkpoint_as_reference_model(tmp_path):
    """The ProRLv2 guide resets the reference model by a new run from a checkpoint, whose KL is 0 in its first step."""
    options = (*tiny.SMALL, "checkpointing.enabled=true", "checkpointing.metric_name=null")
    first = tiny.train(tmp_path / "first", *options, "grpo.max_num_steps=3", config="prorlv2_tiny.yaml")
    assert first.history[0]["kl_penalty"] == 0.0 < first.history[-1]["kl_penalty"]
    weights = tmp_path / "first" / "checkpoints" / "step_3" / "policy" / "weights"
    second = tiny.train(
        tmp_path / "second", *options, "grpo.max_num_steps=2", f"policy.model_name={weights}", "policy.hf_config_overrides={}",
        config="prorlv2_tiny.yaml",
    )  # fmt: skip
    assert second.history[0]["weights/digest"] == first.policy.weight_digest()
    assert second.history[0]["kl_penalty"] == 0.0 < second.history[1]["kl_penalty"]
