import pytest
import tiny
from nemo_rl_cpp.config import find_config
from nemo_rl_cpp.config.loader import kind_of

GUESS_NUMBER = """
defaults: {parent}
{section}:
  max_rollout_turns: 3
  num_prompts_per_step: 7
  num_generations_per_prompt: 4
  max_num_steps: 3
  val_at_end: false
policy:
  train_global_batch_size: 28
  train_micro_batch_size: 28
  max_total_sequence_length: 32
  generation:
    max_new_tokens: 2
    stop_strings: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
data:
  _override_: true
  train: {{dataset_name: guess_number, max_number: 7, prompt: "=", num_samples: 1400}}
  default: {{env_name: guess_number}}
env:
  _override_: true
  guess_number: {{max_guesses: 3, higher: "+", lower: "="}}
"""

CRITIC = ["value.train_global_batch_size=28", "ppo.policy_training_start_step=1", "ppo.ppo_epochs=1"]
ALGORITHMS = {
    "dapo": ("dapo_tiny.yaml", ["grpo.dynamic_sampling_max_gen_batches=20"]),
    "prorlv2": ("prorlv2_tiny.yaml", ["grpo.dynamic_sampling_max_gen_batches=20"]),
    "rloo": ("rloo_tiny.yaml", []),
    "ppo": ("ppo_tiny.yaml", CRITIC),
    "vapo": ("vapo_tiny.yaml", CRITIC),
    "ppo, raw_reward": ("ppo_tiny_raw_reward.yaml", ["ppo.policy_training_start_step=0", "ppo.ppo_epochs=1"]),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_equal_generation_and_training_logprobs_in_multi_turn_rollouts(tmp_path, algorithm):
    parent, overrides = ALGORITHMS[algorithm]
    path = tmp_path / "conversation.yaml"
    path.write_text(GUESS_NUMBER.format(parent=find_config(parent), section=kind_of(parent)))
    run = tiny.train(tmp_path, *overrides, config=path)
    trained = [row for row in run.history if "loss" in row]
    assert len(trained) >= 1 and len(run.history) == 3
    for row in run.history:
        assert row["avg_turns_per_sample"] > 1.3 and row["mean_env_tokens_per_sample"] > 0.3
    for row in trained:
        assert row["token_mult_prob_error"] == 1.0
        assert row["max_logprob_gap"] == row["logprob_mismatched_tokens"] == 0
        assert row["gen_kl_error"] == 0.0 and row["probs_ratio_min"] == row["probs_ratio_max"] == 1.0
