"""Tests of the forecast of a step's duration. No test depends on the speed of the machine."""

import sys

import pytest
import torch
from nemo_rl_cpp import cli
from nemo_rl_cpp.algorithms import build
from nemo_rl_cpp.algorithms import step_time as forecast
from nemo_rl_cpp.algorithms.step_time import (
    Costs,
    Rates,
    Shape,
    few_layers,
    layers_of_all_kinds,
    measured_step_time,
    step_time,
)
from nemo_rl_cpp.checks import has_time_forecast
from nemo_rl_cpp.checks.data import Lengths, mean_lengths
from nemo_rl_cpp.config import load_distillation_config, load_grpo_config, load_ppo_config, load_sft_config
from nemo_rl_cpp.models.model_folder import tiny_random
from tiny import EXPERTS, LATENT, MAMBA2, RECURRENT, shaped

LAYER = 4 * 64 * 64 + 3 * 64 * 128  # q, k, v, o of 4 heads of 16, and the MLP: the sizes of grpo_tiny.yaml
HEAD, KEY = 2 * 64 * 16, 4 * 64


def native(overrides=None, **fields):
    sizes = load_grpo_config("configs/grpo_tiny.yaml").policy.hf_config_overrides
    return tiny_random({**sizes, **(overrides or {})}, **fields).native()


def test_estimated_flops_per_token_match_hand_computed_values_for_every_kind_of_layer():
    costs = Costs.of(native())
    assert (costs.layers, costs.head, costs.per_key) == (2 * 2 * LAYER, HEAD, 2 * KEY)
    assert costs.forward(10, 5.5, 3) == 10 * (4 * LAYER + 2 * KEY * 5.5) + 3 * HEAD
    assert Costs.of(native(value_head=True)).head == 0
    assert (
        Costs.of(native(RECURRENT)).per_key == KEY
        and Costs.of(native(MAMBA2 | {"num_hidden_layers": 4})).per_key == KEY
    )
    router, expert = 64 * 8, 3 * 64 * 64  # 2 of 8 experts process a token
    assert Costs.of(native(EXPERTS)).layers == 2 * 2 * (4 * 64 * 64 + router + 2 * expert)


@pytest.mark.parametrize(("kind", "count"), [({}, 1), (EXPERTS, 1), (RECURRENT, 2), (MAMBA2, 3)])
def test_truncated_model_for_timing_has_every_kind_of_layer_and_a_proportional_flop_count(kind, count):
    whole = native(kind | {"num_hidden_layers": 4})
    assert layers_of_all_kinds(whole) == count
    part, all_layers = Costs.of(few_layers(whole, count, 4)), Costs.of(whole)
    assert part.head == all_layers.head / 4
    if 4 % count == 0:
        assert (part.layers * 4 / count, part.per_key * 4 / count) == (all_layers.layers, all_layers.per_key)


def test_step_time_estimate_is_the_sum_of_prefill_decode_training_and_optimizer_time():
    config, shape = load_grpo_config("configs/grpo_tiny.yaml"), Shape(32, 8, 5, 3)
    layers = 32 * 5 * (4 * LAYER + 2 * KEY * 2.5), 32 * 8 * 3 * (4 * LAYER + 2 * KEY * 6.5)
    prompts, responses = layers[0], layers[1] + 32 * 8 * 3 * HEAD
    costs, rates = {"policy": Costs.of(native())}, {"policy": Rates(10.0, 2.0, 7.0, 5000.0)}
    seconds = 2 * prompts + 10 * responses, 7 * (prompts + responses) + 5000
    assert step_time(config, shape, costs, rates, kept=0.0) == pytest.approx(seconds)
    # half of the tokens need no forward pass through the layers, whose backward pass takes twice as long
    spared = seconds[1] - 7 / 3 * 0.5 * sum(layers)
    assert step_time(config, shape, costs, rates, kept=0.5) == pytest.approx((seconds[0], spared))
    # micro-batches of 4 of the 8 responses compute each prompt twice; two optimizer steps, the reference model scores
    config.policy.sequence_packing.enabled = False
    config.policy.train_micro_batch_size, config.policy.train_global_batch_size = 4, 128
    config.loss_fn.reference_policy_kl_penalty = 0.1
    twice = 9 * (2 * prompts + responses) + 2 * 5000
    assert step_time(config, shape, costs, rates, kept=0.0) == pytest.approx((seconds[0], twice))


def test_step_time_estimate_of_ppo_includes_the_critic():
    config, shape = load_ppo_config("configs/ppo_tiny.yaml"), Shape(2, 4, 5, 3)
    config.policy.train_global_batch_size, config.value.train_global_batch_size = 8, 4
    costs = {"policy": Costs(10.0, 1.0, 0.0), "value": Costs(20.0, 0.0, 0.0)}
    rates = {"policy": Rates(1.0, 1.0, 1.0, 0.0), "value": Rates(0.0, 100.0, 1000.0, 3.0)}
    policy, value = 34 * 10 + 24, 34 * 20  # 2 prompts of 5 tokens, 8 responses of 3
    epochs = config.loop.critic_epochs
    critic = (epochs * 1000 + 100) * value + epochs * 2 * 3
    assert step_time(config, shape, costs, rates, kept=0.0) == (policy, config.loop.policy_epochs * policy + critic)


def test_step_time_estimate_assumes_responses_of_the_maximum_length():
    config = load_grpo_config("configs/grpo_tiny.yaml")
    lengths = mean_lengths(config)
    assert lengths == (4, 0) and Shape.of(config, lengths) == Shape(32, 8, 4, 3)  # as "123>"
    assert Shape.of(config, None) == Shape(32, 8, 13, 3)  # sequences of max_total_sequence_length, 16
    answers = load_sft_config("configs/sft_arithmetic_smollm2.yaml")
    assert Shape.of(answers, Lengths(30.0, 4.0)) == Shape(answers.sft.num_prompts_per_step, 1, 26, 4)
    limit = answers.policy.max_total_sequence_length
    assert Shape.of(answers, Lengths(3.0 * limit, 4.0)) == Shape(answers.sft.num_prompts_per_step, 1, limit - 4, 4)
    answers.data.max_input_seq_length = 50  # rows of unknown length: longer ones are cut
    assert Shape.of(answers, None) == Shape(answers.sft.num_prompts_per_step, 1, 0, 50)


def test_forecast_of_a_short_run_reads_no_rows(monkeypatch):
    calls, config = [], load_grpo_config("configs/grpo_tiny.yaml")
    monkeypatch.setattr(forecast, "mean_lengths", calls.append)
    assert forecast.time_text(config, 20, forecast.LONG_RUN) is None and not calls
    forecast.time_text(config, 20)
    assert calls == [config]


@pytest.mark.parametrize(
    "kind",
    [EXPERTS, RECURRENT, MAMBA2, LATENT | {"model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 1}],
    ids=["experts", "recurrent", "mamba2", "latent"],
)
def test_step_time_measurement_runs_every_kind_of_layer_and_keeps_the_random_state(kind):
    config = load_grpo_config("grpo_tiny.yaml", [*shaped(kind), "++policy.hf_config_overrides.num_hidden_layers=4"])
    before = torch.get_rng_state()
    generation, training = measured_step_time(config, Shape(4, 2, 5, 3))
    assert generation > 0 and training > 0 and torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_step_time_measurement_supports_critics_and_lora_on_a_quantised_base(precision):
    ppo = load_ppo_config("configs/ppo_tiny.yaml", [f"policy.precision={precision}"])
    lora = (
        "++policy.dtensor_cfg.lora_cfg.enabled=true",
        "++policy.dtensor_cfg.lora_cfg.merge=false",
        "++policy.quantization=q4_0",
    )
    grpo = load_grpo_config("configs/grpo_tiny.yaml", [*lora, f"policy.precision={precision}"])
    assert min(measured_step_time(ppo, Shape(4, 2, 5, 3))) > 0 and min(measured_step_time(grpo, Shape(4, 2, 5, 3))) > 0


@pytest.mark.slow
def test_check_command_prints_an_estimate_of_the_step_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(forecast, "_SHORT", 0.0)
    folders = f"checkpointing.checkpoint_dir={tmp_path / 'results'}", f"logger.log_dir={tmp_path / 'logs'}"
    words = ["--config", "configs/grpo_tiny.yaml", *folders, "grpo.max_num_steps=1", "data.validation=null"]
    assert cli.main(["check", *words]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("a step takes at most about ") and "(generation " in line
    assert ", if every response has 3 tokens; 1 steps " in line
    monkeypatch.setattr(forecast, "_SHORT", 1e9)
    assert cli.main(["check", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "a step takes less than a second"


@pytest.mark.slow
def test_long_run_prints_an_estimate_of_its_remaining_time_before_it_loads_the_model(tmp_path, capsys, monkeypatch):
    folders = f"checkpointing.checkpoint_dir={tmp_path / 'results'}", f"logger.log_dir={tmp_path / 'logs'}"
    words = ["--config", "configs/grpo_tiny.yaml", *folders, "data.validation=null", "checkpointing.save_period=1"]
    assert cli.main(["train", *words, "grpo.max_num_steps=1"]) == 0
    assert "a step takes" not in capsys.readouterr().out  # a measurement would delay so short a run noticeably
    monkeypatch.setattr(build, "LONG_RUN", 0.0)
    monkeypatch.setattr(forecast, "_SHORT", 0.0)
    assert cli.main(["train", *words, "grpo.max_num_steps=3"]) == 0  # goes on from step 1
    out = capsys.readouterr().out
    assert "; 2 steps " in out[out.index("a step takes at most about ") : out.index("loading the model")]


def test_check_command_prints_no_step_time_estimate_for_unsupported_configurations(capsys):
    def of(*overrides, load=load_grpo_config, config="configs/grpo_tiny.yaml"):
        return has_time_forecast(load(config, list(overrides)))

    assert of() and of(load=load_ppo_config, config="configs/ppo_tiny.yaml")
    vllm = "policy.generation.backend=vllm", "policy.generation.vllm_cfg.server_url=http://127.0.0.1:8123"
    assert not of(*vllm)
    assert not of("policy.backend=hf") and not of("cluster.device=cuda") and not of("grpo.max_rollout_turns=2")
    assert not of("cluster.executor=processes", "cluster.gpus_per_node=2")
    assert not of("policy.model_name=nobody/is-not-here")
    assert not of(load=load_distillation_config, config="configs/distillation_arithmetic_smollm2.yaml")
    assert cli.main(["check", "--config", "grpo_tiny.yaml", *vllm]) == 0
    assert "a step takes" not in capsys.readouterr().out


def test_check_command_without_torch_succeeds_without_a_step_time_estimate(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "nemo_rl_cpp.algorithms.step_time", None)  # its import fails
    assert cli.main(["check", "--config", "grpo_tiny.yaml"]) == 0
    assert "a step takes" not in capsys.readouterr().out
