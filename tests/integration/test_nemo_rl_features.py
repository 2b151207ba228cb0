import pytest
import tiny
from nemo_rl_cpp.algorithms.loop import train_loop
from nemo_rl_cpp.checks import preflight
from nemo_rl_cpp.config import load_ppo_config
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment


def first_is_even(completions, **columns):
    return [float(text[:1] in set("02468")) for text in completions]


def last_is_low(completions, **columns):
    return [float(text[-1:] in set("01234")) for text in completions]


def test_length_penalty_changes_the_training_reward_but_not_the_accuracy(tmp_path):
    environment = RewardFunctionEnvironment(first_is_even)
    run = tiny.train(
        tmp_path, *tiny.SMALL, "+grpo.length_penalty.default={pass_rate_length_penalty_weight: 0.5}",
        "grpo.max_num_steps=1", environment=environment,
    )  # fmt: skip
    row = run.history[0]
    assert row["length_penalty/adjusted_frac"] > 0 > row["length_penalty/reward_delta_mean"]
    assert row["accuracy"] == pytest.approx(row["length_penalty/env_reward_mean"])
    assert row["reward"] == pytest.approx(row["accuracy"] + row["length_penalty/reward_delta_mean"])


PPO = (*tiny.SMALL_PPO, "ppo.ppo_epochs=1")


def test_critic_warm_start_loads_the_critic_weights_but_not_the_optimizer_state(tmp_path):
    first = tiny.train(
        tmp_path / "a", *PPO, "ppo.max_num_steps=2", "checkpointing.enabled=true", "checkpointing.save_period=2", config="ppo_tiny.yaml",
    )  # fmt: skip
    checkpoint = tmp_path / "a" / "checkpoints" / "step_2"
    warm = tiny.make(tmp_path / "b", *PPO, f"ppo.warm_start_value_checkpoint={checkpoint}", config="ppo_tiny.yaml")
    cold = tiny.make(tmp_path / "c", *PPO, config="ppo_tiny.yaml")
    digests = [run.critic.model.weight_digest() for run in (first, warm, cold)]
    assert digests[0] == digests[1] != digests[2]
    assert warm.policy.weight_digest() == cold.policy.weight_digest()
    assert warm.critic.model.schedule.lr == cold.critic.model.schedule.lr and warm.state.step == 0


@pytest.mark.parametrize("epochs, critic, expected", [(2, "null", (2, 2)), (1, 3, (1, 3)), (3, 1, (3, 1))])
def test_critic_trains_critic_ppo_epochs_times_on_each_batch(tmp_path, epochs, critic, expected):
    run = tiny.make(
        tmp_path, *tiny.SMALL_PPO, f"ppo.ppo_epochs={epochs}", f"ppo.critic_ppo_epochs={critic}", "ppo.max_num_steps=1",
        "ppo.policy_training_start_step=0", config="ppo_tiny.yaml",
    )  # fmt: skip
    passes = {"policy": 0, "value": 0}
    for name, part in (("policy", run.policy), ("value", run.critic)):

        def counted(*args, name=name, train=part.train, **options):
            passes[name] += 1
            return train(*args, **options)

        part.train = counted
    train_loop(run)
    assert (passes["policy"], passes["value"]) == expected


def test_critic_warm_start_without_a_critic_is_an_error_before_the_run(tmp_path):
    start = f"ppo.warm_start_value_checkpoint={tmp_path}"
    config = load_ppo_config("ppo_tiny.yaml", [start, f"checkpointing.checkpoint_dir={tmp_path}/none"])
    [finding] = [finding for finding in preflight(config) if finding.level == "error"]
    assert finding.key == "ppo.warm_start_value_checkpoint" and "value/weights" in finding.message
    with pytest.raises(ValueError, match="ppo.warm_start_value_checkpoint is .*value/weights is not there"):
        tiny.make(tmp_path / "run", *PPO, start, config="ppo_tiny.yaml")
