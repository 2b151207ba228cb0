"""Whole runs on an emulated GPU: they take the way of a GPU, and train what the CPU trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_emulation import build

TESTS = Path(__file__).resolve().parents[2]
LORA = ("policy.dtensor_cfg.lora_cfg.enabled=true",)


def model(**overrides):
    return tuple(f"++policy.hf_config_overrides.{key}={value}" for key, value in overrides.items())


EXPERTS = model(model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
RECURRENT = model(model_type="qwen3_5_text", full_attention_interval=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
                  linear_value_head_dim=32)  # fmt: skip
LATENT = model(model_type="deepseek_v3", num_key_value_heads=4, head_dim=8, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
               qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=1, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
               n_group=1, topk_group=1, n_shared_experts=1)  # fmt: skip
RUNS = {
    "dense": ("policy.dtensor_cfg.activation_checkpointing=true", "policy.generation.top_p=0.8", "loss_fn.entropy_coef=0.01"),
    "small states": ("policy.precision=bfloat16", "++policy.optimizer.kwargs.exp_avg_dtype=bfloat16",
                     "++policy.optimizer.kwargs.store_param_remainders=true"),
    "lora over q4_0": (*LORA, "policy.quantization=q4_0", "policy.precision=bfloat16"),
    "experts": EXPERTS,
    "experts, lora over q8_0": (*EXPERTS, *LORA, "policy.quantization=q8_0"),
    "recurrent over nf4": (*RECURRENT, *LORA, "policy.quantization=nf4"),
    "latent attention": LATENT,
    "windows and sinks": model(model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "mamba": model(model_type="nemotron_h", hybrid_override_pattern="M*-", num_hidden_layers=3, mlp_hidden_act="relu2", n_groups=2,
                   mamba_num_heads=4, ssm_state_size=16, mamba_head_dim=32, layer_norm_epsilon=1e-5),
    "short convolutions": model(model_type="lfm2", layer_types="[conv,full_attention]"),
}  # fmt: skip
WORKER = """
import sys
if "nemo_rl_cpp.distributed.worker" in sys.orig_argv:
    from cuda_emulation import gpu
    gpu.emulate({library!r})
"""
PROGRAM = """
import json, sys
from pathlib import Path
from cuda_emulation import gpu
gpu.emulate(sys.argv[1])
import tiny
tiny.one_thread()
folder, overrides = Path(sys.argv[2]), sys.argv[3:]
one, two = (), tiny.workers(2)
apart = (*two, "policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1")
blocks = ("policy.gradient_blocks=2", "cluster.worker_timeout_s=60")
WAYS = {"cpu": ("cluster.device=cpu",), "cuda": ("cluster.device=cuda",)}
if overrides == ["several processes"]:
    overrides = ["policy.precision=bfloat16"]
    WAYS = {name: ("cluster.device=cuda", *blocks, *ranks) for name, ranks in (("one", one), ("two", two), ("apart", apart))}
rows = {}
for way, place in WAYS.items():
    place = ("grpo.max_num_steps=2", *place, "policy.kept_activations_gb=0")
    with tiny.make(folder / way, *tiny.SMALL, *tiny.SAVED_AT_THE_END, *place, *overrides) as run:
        run.train()
        rows[way] = run.history
keys = ("loss", "grad_norm", "reward", "token_mult_prob_error", "max_logprob_gap", "weights/digest")
(folder / "rows.json").write_text(json.dumps({way: [{key: row[key] for key in keys} for row in of] for way, of in rows.items()}))
"""


@pytest.fixture(scope="module")
def device(objects, tmp_path_factory):
    return build.build_device(objects, tmp_path_factory.mktemp("device"))


def rows_of(device, folder, *overrides):
    """Return the metrics of the steps of PROGRAM's runs, by the way of each run."""
    (folder / "sitecustomize.py").write_text(WORKER.format(library=str(device)))
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{TESTS}"}
    program = [sys.executable, "-c", PROGRAM, str(device), str(folder), *overrides]
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "rows.json").read_text())


@pytest.mark.slow
def test_processes_that_share_an_emulated_gpu_train_the_bits_of_one_process(device, tmp_path):
    rows = rows_of(device, tmp_path, "several processes")
    assert rows["one"] == rows["two"] == rows["apart"] and len(rows["one"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_run_on_an_emulated_gpu_is_exact_and_trains_as_on_the_cpu(run, device, tmp_path):
    rows = rows_of(device, tmp_path, *RUNS[run])
    for own, same in zip(rows["cuda"], rows["cpu"], strict=True):
        assert own["token_mult_prob_error"] == 1.0 and own["max_logprob_gap"] == 0.0
        bound = 1e-3 if "policy.precision=bfloat16" in RUNS[run] else 1e-5
        for key in ("loss", "grad_norm", "reward"):
            assert own[key] == pytest.approx(same[key], rel=bound, abs=bound * 1e-2), key
