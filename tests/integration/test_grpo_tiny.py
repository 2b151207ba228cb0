import re

import pytest
import tiny
import torch
from nemo_rl_cpp import run_grpo_math
from tiny_layers import LAYERS

NEMOTRON_3 = tiny.MAMBA2 | {
    "hybrid_override_pattern": "ME*E", "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5, "moe_latent_size": 32,
}  # fmt: skip
LEARNERS = [
    pytest.param(layers, seed, marks=() if (name, seed) == ("plain", 2) else pytest.mark.long, id=f"{name}-{seed}")
    for name, layers, seeds in (("plain", {}, (1, 2, 3)), ("experts", tiny.EXPERTS, (2,)), ("recurrent", tiny.RECURRENT, (1, 2, 3)), ("mamba2", tiny.MAMBA2, (2,)))
    for seed in seeds
]  # fmt: skip


@pytest.mark.parametrize("layers, seed", LEARNERS)
def test_grpo_learns_to_reverse_digits(tmp_path, layers, seed):
    run = tiny.train(
        tmp_path, *tiny.FAST, *tiny.shaped(layers), f"grpo.seed={seed}", "grpo.max_num_steps=200", until=0.9
    )
    rewards = [row["reward"] for row in run.history]
    assert rewards[0] < 0.2
    assert sum(rewards[-5:]) / 5 > 0.9
    assert all(row["max_logprob_gap"] == 0.0 and row["logprob_mismatched_tokens"] == 0 for row in run.history)
    if not layers:  # on numbers that were not trained on
        assert run.validation.validator.run(run.state.step).metrics["accuracy"] > 0.85


BALANCED = [
    *tiny.shaped(NEMOTRON_3), "policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.moe_router_bias_update_rate=0.25",
]  # fmt: skip


def test_router_bias_update_balances_experts_and_does_not_depend_on_the_micro_batch_size(tmp_path):
    def biases(name, *overrides):
        run = tiny.train(tmp_path / name, *tiny.SMALL, *BALANCED, "grpo.max_num_steps=1", *overrides)
        assert run.history[0]["max_logprob_gap"] == 0.0
        assert all(load.sum() == 0 for _, load in run.policy.model.routers)
        return torch.stack([bias for bias, _ in run.policy.model.routers])

    found = biases("packed")
    assert found.shape == (2, 6) and {-0.25, 0.25} <= set(found.flatten().tolist()) <= {-0.25, 0.0, 0.25}
    single = ("policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=3")
    assert torch.equal(found, biases("single", *single))
    assert torch.equal(found, biases("recomputed", "policy.megatron_cfg.activation_checkpointing=true"))
    run = tiny.train(tmp_path / "more", *tiny.SMALL, *BALANCED, "grpo.max_num_steps=3")
    assert [row["max_logprob_gap"] for row in run.history] == [0.0] * 3


def test_moe_load_balancing_loss_does_not_depend_on_the_micro_batch_size(tmp_path):
    experts = tiny.shaped(tiny.EXPERTS | {"router_aux_loss_coef": 0.5})
    wanted = (*experts, "policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false")

    def row(name, kind, *overrides):
        kind = f"policy.megatron_cfg.moe_router_load_balancing_type={kind}"
        run = tiny.train(tmp_path / name, *tiny.SMALL, *wanted, kind, "grpo.max_num_steps=1", *overrides)
        assert run.history[0]["max_logprob_gap"] == 0.0
        return run.history[0]

    packed, off = row("packed", "seq_aux_loss"), row("off", "none")
    single = row("single", "aux_loss", "policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=3")
    for name in ("moe/load_balancing_loss", "grad_norm"):
        assert single[name] == pytest.approx(packed[name], rel=1e-5)
    assert packed["moe/load_balancing_loss"] > 1 and "moe/load_balancing_loss" not in off
    assert packed["grad_norm"] != pytest.approx(off["grad_norm"], rel=1e-3) and packed["reward"] == off["reward"]


def test_router_bias_increases_for_underloaded_experts_and_decreases_for_overloaded_experts(tmp_path):
    policy = tiny.make(tmp_path, *tiny.SMALL, *BALANCED).policy
    (bias, load), other = policy.model.routers
    bias.copy_(torch.arange(6.0))
    load.copy_(torch.tensor([7, 0, 3, 3, 4, 1]))  # 3 on average
    policy._update_router_biases()
    assert bias.tolist() == [-0.25, 1.25, 2.0, 3.0, 3.75, 5.25] and load.tolist() == [0] * 6
    assert other[0].tolist() == [0.0] * 6


def test_run_ends_and_saves_the_batch_if_a_gradient_is_not_finite(tmp_path, capsys):
    """A learning rate of 1e30 ruins the weights in the first step."""
    options = ["policy.optimizer.kwargs.lr=1e30", "checkpointing.enabled=false", f"logger.log_dir={tmp_path}"]
    assert run_grpo_math.main(["--config", "grpo_tiny.yaml", *tiny.SMALL, *options]) == 1
    (batch,) = tmp_path.rglob("replay/nonfinite_policy_batch.pt")
    shown, error = capsys.readouterr()
    assert str(batch) in error
    assert re.match(r"error: policy: the (loss|gradient).* were not updated; the batch was written to [^\n]*\n$", error)
    assert {"input_ids", "input_lengths", "token_mask", "advantages", "generation_logprobs"} <= set(torch.load(batch))
    assert "failed" in shown


@pytest.mark.parametrize("updates", [1, 4])
def test_grpo_trains_identical_weights_with_reused_and_recomputed_logprobs_and_activations(tmp_path, updates):
    options = (*tiny.SMALL, "grpo.max_num_steps=4", f"policy.train_global_batch_size={32 // updates}")
    digests, ratios, reused = [], [], []
    for reuse, gigabytes in (("auto", "null"), ("auto", 0), ("never", "null"), ("always", "null")):
        how = (f"policy.reuse_generation_logprobs={reuse}", f"policy.kept_activations_gb={gigabytes}")
        run = tiny.train(tmp_path / f"{reuse}-{gigabytes}", *options, *how)
        digests.append(run.policy.weight_digest())
        ratios.append([row["probs_ratio_max"] for row in run.history])
        reused.append([row["reused_forward_share"] for row in run.history])
    assert len(set(digests)) == 1
    assert ratios[0] == ratios[1] == ratios[2] == ratios[3]
    assert reused[0] == reused[3] == [0, *[pytest.approx(1 / updates, abs=0.1)] * 3]
    assert reused[1] == reused[2] == [0] * 4
    if updates > 1:
        assert max(ratios[0]) > 1.0  # later updates of a step are off-policy


def test_backward_pass_is_skipped_for_groups_with_equal_rewards(tmp_path):
    run = tiny.train(tmp_path, *tiny.SMALL, "grpo.max_num_steps=6", "loss_fn.reference_policy_kl_penalty=0")
    equal = [row["zero_std_groups"] > 0 for row in run.history]
    assert [row["zero_gradient_share"] > 0 for row in run.history] == equal and any(equal)


def flip_one_bit(policy):
    """Flip the highest bit of one weight's mantissa, which changes the weight by a quarter to a half."""
    weight = policy.state_dict()["lm_head.weight"].view(torch.int32)
    weight[7, 5] ^= 1 << 22


def with_a_fault(run):
    """Return the run, which flips a bit of a weight after the rollouts of the second step."""
    roll_out = run.collector.roll_out

    def generate(prompts):
        result = roll_out(prompts)
        if run.state.step == 1:
            flip_one_bit(run.policy)
        return result

    run.collector.roll_out = generate
    return run


def test_prompts_that_leave_no_room_for_a_response_are_cut_and_not_trained(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"question": "{"1" * length}=", "answer": "1"}}\n' for length in (3, 30) * 4))
    columns = f"dataset_name: ResponseDataset, data_path: {file}, input_key: question, output_key: answer"
    processor = "processor: raw_completion_data_processor, env_name: reverse_digits"
    data = ("~data.train.num_digits", f"data.train={{{columns}, {processor}}}")
    run = tiny.train(tmp_path, *tiny.SMALL, *data, "grpo.max_num_steps=1")
    assert (run.history[0]["cut_prompts_rate"], run.history[0]["num_masked_samples"]) == (0.5, 16)


def test_flipped_weight_bit_between_generation_and_training_ends_the_run_with_an_error(tmp_path):
    run = with_a_fault(tiny.make(tmp_path, *tiny.SMALL, "grpo.max_num_steps=4"))
    with pytest.raises(RuntimeError, match="the weights have changed between generation"):
        run.train()
    assert run.state.step == 1


@pytest.mark.parametrize("reuse", ["auto", "never"])
def test_flipped_weight_bit_is_visible_in_token_mult_prob_error_and_max_logprob_gap(tmp_path, reuse):
    reused = f"policy.reuse_generation_logprobs={reuse}"
    run = with_a_fault(tiny.make(tmp_path, *tiny.SMALL, "grpo.max_num_steps=3", reused))
    run.collector.refit.verify_before_training = lambda: None  # let the fault through to the metrics
    run.train()
    clean, faulty, after = run.history
    for row in (clean, after):  # after: generation and training both read the changed weight, and agree again
        assert row["token_mult_prob_error"] == 1.0
    assert faulty["token_mult_prob_error"] > 1.0
    if reuse == "auto":
        assert clean["max_logprob_gap"] == 0.0 and faulty["max_logprob_gap"] > 0.0
        assert faulty["logprob_mismatched_tokens"] > 0


ARCHITECTURES = LAYERS | {
    "mistral": {}, "olmo2": {}, "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "glm4_moe": {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "use_qk_norm": True, "routed_scaling_factor": 2.5},
}  # fmt: skip
IN_FLOAT32 = (
    "gemma2",
    "phi3",
    "qwen2_moe",
    "qwen3_5_text",
    "gpt_oss",
    "nemotron_h with latent experts",
    "deepseek_v3",
    "lfm2",
)


@pytest.mark.parametrize(
    "architecture, precision", [*((name, "bfloat16") for name in ARCHITECTURES), *((name, "float32") for name in IN_FLOAT32)]
)  # fmt: skip
def test_generation_and_training_logprobs_are_equal_for_every_architecture(architecture, precision, tmp_path):
    made = {"model_type": architecture.partition(" ")[0]} | ARCHITECTURES[architecture]
    if not architecture.startswith("nemotron_h"):
        gated = (
            "qwen3_5",
            "qwen3_next",
            "deepseek",
            "glm4_moe_lite",
            "granitemoe",
            "lfm2",
        )  # these have no other activation than SiLU
        made |= {"sliding_window": 9, "hidden_act": "silu" if architecture.startswith(gated) else "gelu_pytorch_tanh"}
    made = {key: "null" if value is None else value for key, value in made.items()}
    run = tiny.train(tmp_path, *tiny.SMALL, *tiny.shaped(made), f"policy.precision={precision}", "grpo.max_num_steps=3")
    assert [row["max_logprob_gap"] for row in run.history] == [0.0] * 3
    assert all(row["grad_norm"] > 0 for row in run.history)
