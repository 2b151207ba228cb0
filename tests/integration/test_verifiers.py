"""An unchanged task set of the package verifiers trains the policy through its HTTP server."""

import pytest
import tiny

pytest.importorskip("verifiers")

OVERRIDES = (
    "data.default.env_name=verifiers", "~data.train.num_digits", "++data.train.dataset_name=verifiers", "++data.train.taskset=digit_taskset",
    "data.validation=null", "++env.verifiers={harness:{id:nemo_rl_cpp_chat},max_turns:1,max_tokens:1,renderer:{name:default},timeout_s:120}",
    "policy.generation.expose_http_server=true", "policy.generation.max_new_tokens=1", "policy.optimizer.kwargs.lr=1e-2", "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=16",
)  # fmt: skip


def test_run_with_a_verifiers_environment_learns_and_trains_only_on_sampled_tokens(tmp_path, monkeypatch):
    from nemo_rl_cpp.environments import verifiers_environment

    told, metrics = [], verifiers_environment._metrics

    def watch(trace):
        told.extend(branch.token_ids for branch in trace.branches)
        return metrics(trace)

    monkeypatch.setattr(verifiers_environment, "_metrics", watch)
    run = tiny.make(tmp_path, *OVERRIDES, "grpo.max_num_steps=20")
    trained = []
    tiny.watch_training(run, lambda batch: trained.extend(row.tolist() for row in batch.rows(batch.input_ids)))
    with run:
        run.train()
    rewards = [row["accuracy"] for row in run.history]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards
    for row in run.history:
        assert row["token_mult_prob_error"] == 1 and row["max_logprob_gap"] == 0 and row["agent_errors"] == 0
        assert row["right"] == row["accuracy"] and row["agent_calls_left_out"] == 0
    assert len(trained) == 20 * 16 and sorted(trained) == sorted(told)  # verifiers' own record of each rollout's tokens
    print("rewards:", [round(r, 2) for r in rewards])
