from dataclasses import replace

import nemo_rl_cpp
import pytest
import served
import tiny
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.generate import TextGenerator
from nemo_rl_cpp.models.gguf_export import export_gguf
from nemo_rl_cpp.models.model_folder import read_model_folder
from nemo_rl_cpp.models.weights import load_weights
from nemo_rl_cpp.serving.model import EngineSizes, Limits, load_model
from test_lora_tiny import BF16, EXPERTS, KL, LORA, MAMBA, MIXTURE, ON, RECURRENT, SOME
from test_several_processes import BLOCKS, trained
from test_tensor_parallel import is_exact
from tiny import workers
from tiny_layers import LAYERS

FUSED = tiny.shaped(LAYERS["qwen3_next"] | {"model_type": "qwen3_next"})
PARTS = (f"{LORA}.match_all_linear=false", f"{LORA}.target_modules=[in_proj_z,in_proj_b]")  # of fused projections


@pytest.mark.parametrize(
    "more, kind",
    [((), "q8_0"), *(((*BF16, *KL, *SOME), kind) for kind in ("q8_0", "q4_0", "nf4")), ((*RECURRENT, *BF16, *KL), "nf4"),
     ((*MIXTURE, *BF16, *KL, *EXPERTS), "q4_0"), ((*MAMBA, *BF16, *KL, *EXPERTS), "q8_0")],
    ids=["float32", "q8_0", "q4_0", "nf4", "recurrent", "mixture", "mamba"],
)  # fmt: skip
def test_lora_run_on_a_quantised_base_has_equal_generation_and_training_logprobs(tmp_path, more, kind):
    with tiny.make(tmp_path, *tiny.SMALL, *ON, *more, f"policy.quantization={kind}", "grpo.max_num_steps=4") as run:
        model = run.policy.model
        before = [model.blocks_of(spec).clone() for spec in model.blocks]
        run.train()
        assert is_exact(run.history) and run.history[-1]["grad_norm"] > 0
        assert all(torch.equal(model.blocks_of(spec), old) for spec, old in zip(model.blocks, before, strict=True))
    if more:  # the reference is the base, so the first step's divergence is 0 and later ones' is not
        kl = [row["kl_penalty"] for row in run.history if "kl_penalty" in row]
        assert kl and kl[0] == 0 and kl[-1] > 0


@pytest.mark.parametrize(
    "family", [SOME, FUSED, (*MIXTURE, *EXPERTS), (*MAMBA, *EXPERTS)], ids=["attention", "fused", "mixture", "mamba"]
)
def test_adapter_only_checkpoint_of_a_quantised_base_resumes_bit_identically(tmp_path, family):
    more = (*ON, *BF16, *KL, *family, "policy.quantization=q4_0")
    straight = trained(tmp_path / "straight", 4, *more)
    for steps in (2, 4):
        resumed = trained(tmp_path / "resumed", steps, *more)
    assert resumed.tensors == straight.tensors
    weights = straight.checkpoint / "policy" / "weights"
    assert (weights / "adapter" / "adapter_model.safetensors").is_file() and (weights / "config.json").is_file()
    assert not list(weights.glob("*.safetensors"))
    with pytest.raises(ValueError, match=r"policy.quantization: 'q4_0' -> 'q8_0'"):
        trained(tmp_path / "resumed", 5, *more, "policy.quantization=q8_0")
    with pytest.raises(ValueError, match="lora_cfg.merge: false -> true") as error:
        trained(tmp_path / "resumed", 5, *more, "policy.quantization=null")
    assert "megatron_cfg" not in str(error.value)  # its default follows, but no key of it has an effect


def test_ppo_run_with_quantised_policy_and_critic_resumes_bit_identically(tmp_path):
    more = (
        *ON, *BF16, "policy.megatron_cfg.enabled=false", "++policy.dtensor_cfg.enabled=true", "value.megatron_cfg.enabled=false", "++value.dtensor_cfg.enabled=true", "++value.dtensor_cfg.lora_cfg.enabled=true",
        "value.optimizer={kwargs:{lr:1e-2}}", "ppo.policy_training_start_step=1", "policy.quantization=q4_0", "++value.quantization=q8_0",
    )  # fmt: skip
    straight = trained(tmp_path / "straight", 4, *more, config="ppo_tiny.yaml")
    for steps in (2, 4):
        resumed = trained(tmp_path / "resumed", steps, *more, config="ppo_tiny.yaml")
    assert resumed.tensors == straight.tensors
    assert not list((straight.checkpoint / "value" / "weights").glob("*.safetensors"))


def test_lora_adapters_on_a_quantised_base_are_bit_identical_on_one_and_two_processes(tmp_path, forked_workers):
    more = (*ON, *BF16, *BLOCKS, "policy.quantization=q4_0")
    one, two = trained(tmp_path / "one", 2, *more), trained(tmp_path / "two", 2, *more, *workers(2))
    assert one[:2] == two[:2]


def frozen(folder, dtype):
    """Return the native model of a checkpoint as evaluations and the server load it."""
    opened = read_model_folder(folder)
    opened.check_weights()
    model = C.DecoderModel(opened.native(), dtype, False)
    opened.fill(model)
    return model


def test_adapter_only_checkpoint_loads_with_its_base_model_but_not_as_a_full_model(tmp_path):
    ids = torch.arange(12)
    with tiny.make(tmp_path, *tiny.SMALL, *ON, *BF16, "policy.quantization=q8_0", "grpo.max_num_steps=2") as run:
        run.train()
        run.policy.save_checkpoint(tmp_path / "weights")
        expected = C.Trainer(run.policy.model).logits(ids)
    assert torch.equal(C.Trainer(frozen(tmp_path / "weights", torch.bfloat16)).logits(ids), expected)
    with pytest.raises(ValueError, match="holds an adapter and no weights: name its base tiny-random"):
        tiny.make(tmp_path, *ON, f"policy.model_name={tmp_path / 'weights'}", "policy.hf_config_overrides={}")
    with pytest.raises(ValueError, match="holds an adapter and no weights: name its base tiny-random"):
        nemo_rl_cpp.Model(str(tmp_path / "weights"))
    with pytest.raises(ValueError, match="it holds adapter/, an adapter of tiny-random in q8_0: .*merge_and_unload"):
        export_gguf(tmp_path / "weights", tmp_path / "a.gguf", "q8_0")


GPT_OSS = tiny.shaped({"model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2})


@pytest.mark.parametrize(
    "family, adapted",
    [((), ()), (MIXTURE, EXPERTS), (GPT_OSS, EXPERTS), (FUSED, PARTS), (MAMBA, EXPERTS)],
    ids=["dense", "mixture", "gpt_oss", "fused_parts", "mamba"],
)
def test_generate_command_loads_an_adapter_checkpoint_and_quantises_the_base_model(tmp_path, family, adapted):
    """The text engine, which does not import torch, gives the trainer's tokens."""
    with tiny.make(tmp_path, *tiny.SMALL, *BF16, *family, "grpo.max_num_steps=1") as run:
        run.policy.save_checkpoint(tmp_path / "base")
    base = tmp_path / "base"
    more = (f"policy.model_name={base}", "policy.hf_config_overrides={}", f"policy.tokenizer.name={base}", *adapted)
    with tiny.make(tmp_path / "run", *tiny.SMALL, *ON, *BF16, *more, "policy.quantization=q4_0", "grpo.max_num_steps=2") as run:  # fmt: skip
        run.train()
        run.policy.save_checkpoint(tmp_path / "weights")
        trained_logits = C.Trainer(run.policy.model).logits(torch.arange(12))
    assert torch.equal(C.Trainer(frozen(tmp_path / "weights", torch.bfloat16)).logits(torch.arange(12)), trained_logits)
    generator = TextGenerator(str(tmp_path / "weights"))
    done = generator.generate("12 + 30 =", greedy=True, max_new_tokens=12)
    model, prompt = frozen(tmp_path / "weights", torch.bfloat16), generator._encode("12 + 30 =")
    for token in done.token_ids:
        assert int(C.Trainer(model).logits(torch.tensor(prompt))[-1].argmax()) == token
        prompt = [*prompt, token]


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "nf4"])
def test_generate_load_and_serve_compute_with_the_same_quantised_matrices(kind, tmp_path):
    folder = served.make_folder(tmp_path / "model")
    model = C.DecoderModel(replace(read_model_folder(folder), quantization=kind).native(), torch.float32, False)
    load_weights(model, folder)
    ours, loaded = load_model(
        str(folder), served_name=None, precision="float32", quantization=kind, sizes=EngineSizes(kv_cache_gb=0.05), limits=Limits()
    ), nemo_rl_cpp.load(folder, precision="float32", quantization=kind)  # fmt: skip
    ours.engine.close(patience=0)
    assert f"{model.digest():016x}" == ours.digest
    text = TextGenerator(folder, precision="float32", quantization=kind).generate(
        "hello", greedy=True, max_new_tokens=24
    )
    assert text.text.startswith(loaded.generate("hello", max_new_tokens=24)[0]) and len(text.token_ids) > 4
    ids = loaded.tokenizer.encode("hello")
    for token in text.token_ids:
        assert int(C.Trainer(model).logits(torch.tensor(ids))[-1].argmax()) == token
        ids = [*ids, token]


def test_merging_lora_adapters_into_a_quantised_base_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="lora_cfg.merge is true, but policy.quantization q4_0 has no room"):
        tiny.make(tmp_path, *ON, "policy.quantization=q4_0", f"{LORA}.merge=true")
