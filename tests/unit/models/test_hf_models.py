import json

import pytest
import torch
from hf_players import batch, hf_policy, hf_value, make, relative
from nemo_rl_cpp.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn, MseValueLossConfig, MseValueLossFn
from nemo_rl_cpp.config.policy import HfConfig, ValueConfig
from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models.hf.trained import config_object, open_frozen
from nemo_rl_cpp.models.lm_value import Value
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.models.policy.train_step import NonFiniteError
from nemo_rl_cpp.models.weights import named_views

pytestmark = pytest.mark.slow  # transformers is imported
pytest.importorskip("transformers")

FIVE = ("gemma", "phi", "olmo", "gpt_neox", "mixtral")
LOSSES = {
    "grpo": dict(reference_policy_kl_penalty=0.05),
    "gspo": dict(token_level_loss=False, sequence_level_importance_ratios=True, ratio_clip_min=3e-1, ratio_clip_max=4e-1),
    "prorlv2": dict(
        use_importance_sampling_correction=True, truncated_importance_sampling_type="icepop", truncated_importance_sampling_ratio=5.0,
        truncated_importance_sampling_ratio_min=0.5, use_on_policy_kl_approximation=True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return a model folder that both backends load."""
    folder = tmp_path_factory.mktemp("llama") / "model"
    make(Policy, hf_config_overrides={"initializer_range": 0.1}).save_checkpoint(folder)
    return str(folder)


@pytest.mark.parametrize("name", LOSSES)
def test_ten_training_steps_with_transformers_match_those_of_the_native_trainer(name, llama):
    native, ours = make(Policy, model_name=llama), hf_policy(model_name=llama)
    loss = ClippedPGLossFn(ClippedPGLossConfig(**LOSSES[name]))
    start = {k: v.clone() for k, v in ours.state_dict().items()}
    for step in range(10):
        data = batch(step)
        expected, got = native.train(data, loss), ours.train(data, loss)
        assert relative(got["loss"], expected["loss"]) <= 1e-4
        assert relative(got["grad_norm"], expected["grad_norm"]) <= 1e-4
        if step == 0:  # the buffers hold the (clipped) gradients of the step
            scale = min(1.0, 1.0 / float(expected["grad_norm"]))
            theirs, own = (named_views(p.slices.own.specs, p.trainer.grads) for p in (native, ours))
            assert set(theirs) == set(own)
            for k in theirs:
                assert relative(own[k] / scale, theirs[k]) <= 1e-4 or not theirs[k].any(), k
        for key, values in expected["all_mb_metrics"].items():
            assert got["all_mb_metrics"][key] == pytest.approx(values, rel=1e-4, abs=1e-6), key
    moved = {k: v - start[k] for k, v in native.state_dict().items()}
    for k, v in ours.state_dict().items():
        assert relative(v, native.state_dict()[k]) <= 1e-4, k
    assert sum(float(m.norm()) for m in moved.values()) > 0.1


def test_transformers_backend_logprobs_with_top_k_and_top_p_match_the_native_trainer(llama):
    generation = {"temperature": 0.7, "top_k": 9, "top_p": 0.8}
    native, ours = (
        make(Policy, model_name=llama, generation=generation),
        hf_policy(model_name=llama, generation=generation),
    )
    data = batch(3)
    expected, got = native.get_logprobs(data)["logprobs"], ours.get_logprobs(data)["logprobs"]
    assert (expected == 0).sum() > (data["token_mask"] == 0).sum()  # some are removed
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    reference = native.get_reference_policy_logprobs(data)["reference_logprobs"]
    torch.testing.assert_close(
        ours.get_reference_policy_logprobs(data)["reference_logprobs"], reference, rtol=1e-4, atol=1e-5
    )
    data["prev_logprobs"] = expected
    loss = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.1))
    expected, got = native.train(data, loss), ours.train(data, loss)
    assert relative(got["grad_norm"], expected["grad_norm"]) <= 1e-4


@pytest.mark.parametrize("model_type", ["llama", *FIVE, "gemma2"])
def test_transformers_backend_gives_equal_gradients_for_packed_padded_and_unbatched_samples(model_type):
    window = {"sliding_window": 3} if model_type == "gemma2" else {}
    gradients, logprobs, data = {}, {}, batch(1)
    loss = ClippedPGLossFn(ClippedPGLossConfig())
    for way, packing, size in (("packed", True, 12), ("padded", False, 12), ("alone", False, 1)):
        policy = hf_policy(
            model_type, sequence_packing={"enabled": packing}, train_micro_batch_size=size, logprob_batch_size=size,
            hf_config_overrides=window,
        )  # fmt: skip
        assert policy.trainer.packed == packing
        logprobs[way] = policy.get_logprobs(data)["logprobs"]
        policy.train(data, loss)
        gradients[way] = policy.trainer.grads.clone()
    for way in ("padded", "alone"):
        torch.testing.assert_close(logprobs["packed"], logprobs[way], rtol=1e-5, atol=1e-5)
        assert relative(gradients["packed"], gradients[way]) <= 1e-5


def test_transformers_backend_pads_samples_of_architectures_that_do_not_support_packing(capsys):
    policy = hf_policy("bloom", sequence_packing={"enabled": True})
    assert not policy.trainer.packed and "does not keep the packed samples of a bloom apart" in capsys.readouterr().err
    data, alone = batch(2), hf_policy("bloom", sequence_packing={"enabled": False}, logprob_batch_size=1)
    torch.testing.assert_close(
        policy.get_logprobs(data)["logprobs"], alone.get_logprobs(data)["logprobs"], rtol=1e-5, atol=1e-5
    )


def test_activation_checkpointing_in_transformers_does_not_change_gradients():
    gradients = []
    for checkpointing in (False, True):
        policy = hf_policy(
            "gemma",
            dtensor_cfg={"activation_checkpointing": checkpointing},
            hf_config_overrides={"attention_dropout": 0.5},
        )
        calls = []
        layer = next(
            m for m in policy.model.module.modules() if hasattr(m, "gradient_checkpointing") and hasattr(m, "self_attn")
        )
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
        policy.train(batch(), ClippedPGLossFn(ClippedPGLossConfig()))
        gradients.append(policy.trainer.grads.clone())
        assert len(calls) == 1 + checkpointing
    assert torch.equal(*gradients)


def test_bfloat16_policy_of_the_transformers_backend_has_float32_master_weights_and_gradients():
    policy = hf_policy("gemma", precision="bfloat16")
    assert policy.model.compute.dtype == torch.bfloat16 and policy.model.masters.dtype == torch.float32
    exact = hf_policy("gemma")
    assert torch.equal(policy.model.masters, exact.model.compute)  # not those of rounded weights
    data, loss = batch(), ClippedPGLossFn(ClippedPGLossConfig())
    rough, fine = policy.train(data, loss), exact.train(data, loss)
    assert policy.trainer.grads.dtype == torch.float32
    assert 0 < relative(rough["grad_norm"], fine["grad_norm"]) < 0.05
    assert torch.equal(policy.model.masters.bfloat16(), policy.model.compute)


@pytest.mark.parametrize(
    ("model_type", "precision"), [("gemma", "float32"), ("mixtral", "bfloat16"), ("gpt_neox", "float32")]
)
def test_checkpoint_of_the_transformers_backend_resumes_bit_identically(model_type, precision, tmp_path):
    from transformers import AutoModelForCausalLM

    loss = ClippedPGLossFn(ClippedPGLossConfig())
    whole = hf_policy(model_type, precision=precision)
    whole.train(batch(0), loss)
    whole.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    paths = {"weights_path": tmp_path / "weights", "optimizer_path": tmp_path / "optimizer"}
    again = hf_policy(model_type, paths, precision=precision)
    assert again.weight_digest() == whole.weight_digest()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=getattr(torch, precision))
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, whole.state_dict()[name]), name
    assert (tmp_path / "weights" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "weights" / "generation_config.json").read_text())["eos_token_id"] == 2
    for step in (1, 2):
        assert again.train(batch(step), loss)["loss"] == whole.train(batch(step), loss)["loss"]
    assert again.weight_digest() == whole.weight_digest()
    assert torch.equal(again.trainer.exp_avg_sq, whole.trainer.exp_avg_sq)


VALUE_LOSS = MseValueLossFn(MseValueLossConfig(cliprange=0.2))


def test_ten_critic_steps_with_transformers_match_those_of_the_native_critic(llama):
    native, ours = make(Value, ValueConfig, model_name=llama), hf_value(model_name=llama)
    assert not ours.get_values(batch())["values"].any()
    for step in range(10):
        expected, got = native.train(batch(step), VALUE_LOSS), ours.train(batch(step), VALUE_LOSS)
        assert relative(got["loss"], expected["loss"]) <= 1e-4
        assert relative(got["grad_norm"], expected["grad_norm"]) <= 1e-4
    torch.testing.assert_close(
        ours.get_values(batch(11))["values"], native.get_values(batch(11))["values"], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("model_type", FIVE)
def test_critic_of_every_transformers_architecture_can_be_saved_and_loaded(model_type, tmp_path):
    from transformers import AutoModelForSequenceClassification

    value = hf_value(model_type)
    for step in range(2):
        value.train(batch(step), VALUE_LOSS)
    value.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    paths = {"weights_path": tmp_path / "weights", "optimizer_path": tmp_path / "optimizer"}
    again = hf_value(model_type, paths)
    assert again.weight_digest() == value.weight_digest() and again.state_dict()["score.weight"].any()
    theirs, told = AutoModelForSequenceClassification.from_pretrained(tmp_path / "weights", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert torch.equal(theirs.score.weight, value.state_dict()["score.weight"])
    assert again.train(batch(2), VALUE_LOSS)["loss"] == value.train(batch(2), VALUE_LOSS)["loss"]
    assert again.weight_digest() == value.weight_digest()


def test_critic_checkpoint_of_the_native_backend_loads_in_the_transformers_backend(llama, tmp_path):
    native = make(Value, ValueConfig, model_name=llama)
    native.train(batch(), VALUE_LOSS)
    native.save_checkpoint(tmp_path / "weights")
    ours = hf_value(model_name=str(tmp_path / "weights"))
    torch.testing.assert_close(
        ours.get_values(batch(1))["values"], native.get_values(batch(1))["values"], rtol=1e-4, atol=1e-5
    )


def test_transformers_backend_reports_and_saves_a_batch_with_nan_advantages(tmp_path):
    policy = hf_policy("gemma")
    policy.keep_bad_batches(tmp_path)
    before, data = policy.weight_digest(), batch()
    data["advantages"][2, 4] = float("nan")
    with pytest.raises(NonFiniteError, match="sample 2, token"):
        policy.train(data, ClippedPGLossFn(ClippedPGLossConfig()))
    assert (tmp_path / "nonfinite_policy_batch.pt").is_file() and policy.weight_digest() == before
    assert policy.non_finite_parameters() == []
    with torch.no_grad():
        policy.model.module.model.norm.weight[3] = float("inf")
    assert policy.non_finite_parameters() == ["model.norm.weight"]


def test_bfloat16_reference_model_keeps_its_float32_rope_buffers(llama):
    _, module = open_frozen(str(llama), "bfloat16", device="cpu")
    assert module.model.rotary_emb.inv_freq.dtype == torch.float32
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("model_type", ["phi", "gpt_neox"])
def test_critic_can_be_initialised_from_the_layers_of_a_language_model(model_type, tmp_path):
    hf_policy(model_type).save_checkpoint(tmp_path / "weights")
    critic = hf_value(model_name=str(tmp_path / "weights"))
    policy = hf_policy(model_name=str(tmp_path / "weights"))
    body = next(name for name in policy.state_dict() if "layers.1" in name and name.endswith("weight"))
    tensors = {name.rpartition("layers.")[2]: tensor for name, tensor in critic.state_dict().items()}
    assert torch.equal(tensors[body.rpartition("layers.")[2]], policy.state_dict()[body])


def test_transformers_backend_reads_a_mistral_with_layer_types_as_ministral(tmp_path):
    raw = {"model_type": "mistral", "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    found = config_object(raw, tmp_path, HfConfig(), "policy.model_name")
    assert found.model_type == "ministral" and found.layer_types == raw["layer_types"]
    assert config_object(raw | {"model_type": "llama"}, tmp_path, HfConfig(), "").model_type == "llama"


def test_transformers_backend_reads_infinity_as_transformers_5_writes_it(tmp_path):
    raw = {"model_type": "nemotron_h", "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert list(config_object(raw, tmp_path, HfConfig(), "").time_step_limit) == [0.0, float("inf")]


def test_missing_or_unexpected_weights_of_a_transformers_checkpoint_are_errors(llama, tmp_path):
    """transformers itself would initialise missing weights at random."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(llama, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    head = tensors.pop("lm_head.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"1 tensors are missing, first lm_head.weight"):
        hf_policy(model_name=str(tmp_path / "model"))
    save_file(
        {**tensors, "lm_head.weight": head, "model.layers.9.mlp.up_proj.weight": head.clone()},
        file,
        metadata={"format": "pt"},
    )
    with pytest.raises(ModelFolderError, match=r"1 tensors belong to no parameter"):
        hf_policy(model_name=str(tmp_path / "model"))
    with pytest.raises(ModelFolderError, match="knows no model_type 'no_such'"):
        hf_policy("no_such")
    with pytest.raises(ModelFolderError, match="policy.max_total_sequence_length is 600"):
        hf_policy("gemma", max_total_sequence_length=600)
