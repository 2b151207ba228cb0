from functools import partial

import pytest
import tiny
import torch
from nemo_rl_cpp.config import find_config
from nemo_rl_cpp.rollouts.batches import build_train_batch

SMALL = ("grpo.num_prompts_per_step=7", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=28")
make, train = (partial(function, config="grpo_guess_number.yaml") for function in (tiny.make, tiny.train))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("packing", [True, False])
def test_generation_and_training_logprobs_are_equal_in_every_turn_of_multi_turn_grpo(tmp_path, precision, packing):
    run = train(
        tmp_path, *SMALL, "grpo.max_num_steps=5", f"policy.precision={precision}",
        f"policy.sequence_packing.enabled={packing}".lower(),
    )  # fmt: skip
    assert len(run.history) == 5
    for row in run.history:
        assert row["avg_turns_per_sample"] > 1.5 and row["mean_env_tokens_per_sample"] > 0.5
        assert row["token_mult_prob_error"] == 1.0 and row["max_logprob_gap"] == 0.0
        assert row["logprob_mismatched_tokens"] == 0
        assert row["gen_kl_error"] == 0.0 and row["probs_ratio_min"] == row["probs_ratio_max"] == 1.0
        # the model's tokens are trained, the environment's are not
        assert row["global_valid_toks"] == pytest.approx(28 * row["mean_gen_tokens_per_sample"])


def test_advantages_at_environment_tokens_do_not_change_the_gradient(tmp_path):
    run = make(tmp_path, *SMALL)
    rollouts = run.collector.make(0, run.timer).samples
    batch = build_train_batch(rollouts, pad_token_id=0)
    batch["advantages"] = torch.randn(batch["input_ids"].shape, generator=torch.Generator().manual_seed(3))
    outside = batch["token_mask"] == 0
    assert sum(len(m["token_ids"]) for log in rollouts["message_log"] for m in log if m["role"] == "environment") > 20
    gradients = []
    for noise in (0.0, 1e6):
        batch["advantages"][outside] = noise
        batch["generation_logprobs"][outside] = -noise
        run.policy.trainer.zero_grad()
        run.policy.train(batch, run.loss_fn, eval_mode=False)
        gradients.append(run.policy.trainer.grads.clone())
        if noise == 0.0:
            fresh = make(tmp_path, *SMALL)  # the same first weights again
            run.policy = fresh.policy
    assert gradients[0].norm() > 0
    assert torch.equal(gradients[0], gradients[1])


TWO_TASKS = """
defaults: {parent}
data:
  _override_: true
  train:
    - {{dataset_name: reverse_digits, num_digits: 3, env_name: reverse_digits}}
    - {{dataset_name: guess_number, max_number: 7, prompt: "=", num_samples: 800, env_name: guess_number}}
env:
  _override_: true
  reverse_digits: {{}}
  guess_number: {{max_guesses: 3, higher: "+", lower: "="}}
policy:
  generation:
    max_new_tokens: 3
    stop_strings: null
"""


def test_each_task_of_a_multi_task_run_is_scored_by_its_own_environment(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(TWO_TASKS.format(parent=find_config("grpo_guess_number.yaml")))
    run = make(tmp_path, *SMALL, "grpo.max_num_steps=6", config=path)
    seen = []
    roll_out = run.collector.roll_out

    def watched(prompts):
        rollouts, metrics = roll_out(prompts)
        seen.append(rollouts)
        return rollouts, metrics

    run.collector.roll_out = watched
    run.train()
    turns = {"reverse_digits": set(), "guess_number": set()}
    for rollouts in seen:
        for task, log, reward in zip(rollouts["task_name"], rollouts["message_log"], rollouts["total_reward"].tolist()):
            turns[task].add(sum(message["role"] == "assistant" for message in log))
            if task == "reverse_digits":
                said = log[1]["content"]
                assert reward == pytest.approx(sum(a == b for a, b in zip(said.strip(), log[0]["content"][-2::-1])) / 3)
            else:
                assert reward in (0.0, 1.0)
    assert turns == {"reverse_digits": {1}, "guess_number": {1, 2, 3}}
    for row in run.history:
        assert row["max_logprob_gap"] == 0.0 and row["token_mult_prob_error"] == 1.0
    names = set().union(*run.history)
    assert {"guess_number/solved", "reverse_digits/exactly_right"} <= names


def test_grpo_learns_binary_search_in_a_number_guessing_game(tmp_path):
    run = make(tmp_path, "grpo.max_num_steps=260")
    run.after_step.append(tiny.StopWhenLearned(run, 0.65))
    run.train()
    rewards = [row["reward"] for row in run.history]
    assert rewards[0] < 0.45  # who guesses blindly wins 3 in 7
    assert sum(rewards[-5:]) / 5 > 0.65
