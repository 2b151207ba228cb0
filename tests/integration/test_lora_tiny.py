import pytest
import tiny
import torch
from safetensors.torch import load_file
from test_several_processes import BESIDE, BLOCKS, KL, SHARDED, trained
from test_tensor_parallel import TP, is_exact
from tiny import workers

pytestmark = pytest.mark.usefixtures("forked_workers")
LORA = "policy.dtensor_cfg.lora_cfg"
ON = (f"{LORA}.enabled=true", f"{LORA}.dim=4", "policy.optimizer.kwargs.lr=1e-2")
SOME = (f"{LORA}.match_all_linear=false", f"{LORA}.target_modules=[q_proj,v_proj,up_proj]")
RECURRENT_INPUTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
BF16 = ("policy.precision=bfloat16",)
APART = (f"++{LORA}.merge=false",)
RECURRENT = tiny.shaped(tiny.RECURRENT)
MAMBA = tiny.shaped({
    "model_type": "nemotron_h", "hybrid_override_pattern": "M-*E", "n_groups": 2, "mamba_num_heads": 4, "ssm_state_size": 16,
    "mamba_head_dim": 16, "n_routed_experts": 3, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
})  # fmt: skip
MEGATRON = (
    "policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false", f"{LORA}.enabled=false",
    "++policy.megatron_cfg.peft={enabled:true,dim:4}", "policy.megatron_cfg.optimizer.lr=1e-2",
)  # fmt: skip
EXPERTS = (f"{LORA}.match_all_linear=false", f"{LORA}.target_modules=['*_proj','*.experts']")
MIXTURE = tiny.shaped({
    "model_type": "qwen2_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
})  # fmt: skip


def on(more):
    """Return ON, without the learning rate if `more` enables Megatron's backend, which does not read it."""
    return ON[:2] if set(MEGATRON) <= set(more) else ON


@pytest.mark.parametrize(
    "more",
    [(), (*BF16, *KL, *SOME), APART, (*APART, *BF16, *KL, *SOME), MEGATRON, (*MEGATRON, "policy.megatron_cfg.peft.merge=false", *BF16, *KL),
     *((*family, *how) for family in (RECURRENT, (*MIXTURE, *EXPERTS), (*MAMBA, *EXPERTS)) for how in ((*BF16, *KL), APART))],
    ids=["float32", "bfloat16_kl_some", "apart", "apart_bfloat16_kl_some", "megatron", "megatron_apart_bfloat16_kl", "recurrent_bfloat16_kl",
         "recurrent_apart", "mixture_bfloat16_kl", "mixture_apart", "mamba_bfloat16_kl", "mamba_apart"],
)  # fmt: skip
def test_lora_run_has_equal_generation_and_training_logprobs_and_unchanged_base_weights(tmp_path, more):
    with tiny.make(tmp_path, *tiny.SMALL, *on(more), *more, "grpo.max_num_steps=4") as run:
        start = {name: view.clone() for name, view in run.policy.state_dict().items()}
        run.train()
        assert is_exact(run.history) and run.history[-1]["grad_norm"] > 0
        changed = {name for name, view in run.policy.state_dict().items() if not torch.equal(view, start[name])}
    parts = ("q_proj", "v_proj", "up_proj") if set(SOME) <= set(more) else ("_proj", *RECURRENT_INPUTS)
    assert changed == {name for name in start if any(f"{part}.weight" in name for part in parts)}
    if set(KL) <= set(more):  # the reference is the base model: the first step's divergence is 0, later ones' is not
        kl = [row["kl_penalty"] for row in run.history if "kl_penalty" in row]
        assert kl and kl[0] == 0 and kl[-1] > 0


@pytest.mark.parametrize(
    "config, merge, family",
    [("grpo_tiny.yaml", "true", ()), ("grpo_tiny.yaml", "false", ()), ("ppo_tiny.yaml", "true", ()), ("grpo_tiny.yaml", "false", RECURRENT),
     ("grpo_tiny.yaml", "true", (*MIXTURE, *EXPERTS)), ("grpo_tiny.yaml", "true", MEGATRON), ("grpo_tiny.yaml", "false", (*MAMBA, *EXPERTS))],
    ids=["grpo", "grpo_apart", "ppo", "grpo_recurrent_apart", "grpo_mixture", "grpo_megatron", "grpo_mamba_apart"],
)  # fmt: skip
def test_resumed_lora_run_ends_with_bit_identical_weights_and_metrics(tmp_path, config, merge, family):
    more = (*on(family), *BF16, *KL, *SOME) if config.startswith("grpo") else (
        *ON, "policy.megatron_cfg.enabled=false", "++policy.dtensor_cfg.enabled=true", "value.megatron_cfg.enabled=false", "++value.dtensor_cfg.enabled=true", "++value.dtensor_cfg.lora_cfg.enabled=true",
        "value.optimizer={kwargs:{lr:1e-2}}", "ppo.policy_training_start_step=1",
    )  # fmt: skip
    more += (f"++{LORA}.merge={merge}", *family)
    if config.startswith("ppo"):
        more += (f"++value.dtensor_cfg.lora_cfg.merge={merge}",)
    straight = trained(tmp_path / "straight", 4, *more, config=config)
    for steps in (2, 4):
        resumed = trained(tmp_path / "resumed", steps, *more, config=config)
    folder = straight.checkpoint
    assert resumed.tensors == straight.tensors
    models = ("policy", "value") if config.startswith("ppo") else ("policy",)
    for model in models:
        adapter = load_file(folder / model / "weights" / "adapter" / "adapter_model.safetensors")
        assert all(t.dtype == torch.float32 for t in adapter.values()) and any(t.any() for n, t in adapter.items() if "lora_B" in n)  # fmt: skip
        own = {t.numpy().tobytes(): t for t in adapter.values()}  # q, k and v may have one A
        size = sum(t.numel() for t in own.values())
        moments = load_file(folder / model / "optimizer" / "optimizer.safetensors")
        assert set(moments) == {"exp_avg", "exp_avg_sq"} and size <= moments["exp_avg"].numel() < 1.2 * size + 64
    if len(models) == 2:
        assert "base_model.model.score.weight" in adapter


def test_resuming_with_changed_lora_settings_is_an_error(tmp_path):
    trained(tmp_path, 1, *ON, *SOME)
    for change, said in (
        ((f"{LORA}.dim=8",), "lora_cfg.dim"),
        ((f"{LORA}.alpha=8",), "lora_cfg.alpha"),
        ((f"{LORA}.target_modules=[k_proj]",), "lora_cfg.target_modules"),
        ((f"{LORA}.enabled=false",), "lora_cfg.enabled"),
    ):
        with pytest.raises(ValueError, match=said):
            trained(tmp_path, 2, *ON, *SOME, *change)


def test_lora_weights_are_bit_identical_on_one_and_two_processes(tmp_path):
    """Gradients are summed after the backward pass, during it, or into shards."""
    for merging, ways in (((), (("end", ()), ("beside", BESIDE), ("shards", SHARDED))), (APART, (("apart", BESIDE),))):
        one = trained(tmp_path / f"one{len(merging)}", 2, *ON, *BF16, *BLOCKS, *merging)
        for name, adding in ways:
            two = trained(tmp_path / name, 2, *ON, *BF16, *BLOCKS, *merging, *workers(2), *adding)
            assert one[:2] == two[:2], name


@pytest.mark.parametrize("merging", [(), APART], ids=["merged", "apart"])
def test_lora_adapters_trained_on_two_tensor_parallel_ranks_equal_those_of_one_process(tmp_path, merging):
    """The sliced run then resumes in one process."""
    one, alone = tiny.saved(tmp_path / "1", 2, *tiny.SMALL, *ON, *BLOCKS, *merging)
    two, sliced = tiny.saved(tmp_path / "2", 2, *tiny.SMALL, *ON, *BLOCKS, *merging, *workers(2), *TP)
    assert is_exact(two)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-5)
    first, second = (load_file(at / "policy/weights/adapter/adapter_model.safetensors") for at in (alone, sliced))
    for name, tensor in first.items():
        assert (second[name] - tensor).norm() <= 5e-3 * tensor.norm(), name
    go_on, _ = tiny.saved(tmp_path / "2", 3, *tiny.SMALL, *ON, *BLOCKS, *merging)
    assert is_exact(go_on)
