import pytest
import torch
from models import build, by_checkpoint_names, compute_in_float64, recur_in_float64
from nemo_rl_cpp._native import C
from nemo_rl_cpp.algorithms.loss import MseValueLossConfig, MseValueLossFn
from nemo_rl_cpp.config.policy import ValueConfig
from nemo_rl_cpp.models.hf_config import native_config, read_config
from nemo_rl_cpp.models.lm_value import Value
from nemo_rl_cpp.models.weights import load_weights, named_views
from test_hf_model import ragged_batch

# the decoders themselves are compared in test_hf_model.py
NAMES = ("llama_tied", "granite_tied_biases", "phi3", "gemma3", "gemma4", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_moe", "qwen3_next", "nemotron_h_experts", "granite_4_experts", "lfm2_moe")  # fmt: skip


def pair(name, folder, dtype):
    """Return (transformers' decoder, a score matrix, the native critic with the same weights)."""
    hf = build(name, folder, dtype)
    score = torch.randn(1, hf.config.hidden_size, dtype=dtype, generator=torch.Generator().manual_seed(7)) * 0.3
    model = C.DecoderModel(native_config(read_config(folder), value_head=True, max_length=128), dtype, True)
    load_weights(model, folder)
    weights = named_views(model.specs, model.masters)
    assert not weights["score.weight"].any()  # a causal checkpoint has none: it starts at zero
    weights["score.weight"].copy_(score)
    return hf, score.requires_grad_(True), model


def hf_values(hf, score, ids, mask):
    """Return transformers' value of the state before each token in `mask`, [B, S]; 0 at other tokens."""
    hidden = hf.model(input_ids=ids).last_hidden_state
    values = torch.nn.functional.pad((hidden @ score.T)[:, :-1, 0], (1, 0))
    return torch.where(mask, values, torch.zeros_like(values))


def value_loss(values, returns, old, mask, cliprange=0.2):
    clipped = torch.clamp(values, old - cliprange, old + cliprange)
    return 0.5 * (torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) * mask).sum() / (mask.sum() + 1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_critic_values_and_gradients_match_transformers(name, tmp_path, monkeypatch):
    hf, score, model = pair(name, tmp_path, torch.float64)
    if name.startswith(("qwen3_5", "qwen3_next")):
        recur_in_float64(monkeypatch)
    if name == "gemma4":
        compute_in_float64(hf, monkeypatch)
    trainer = C.Trainer(model)
    batch, ids, lengths, mask = ragged_batch()
    random = torch.Generator().manual_seed(5)
    returns = torch.randn(ids.shape, dtype=torch.float64, generator=random)
    expected = hf_values(hf, score, ids, mask)
    old = expected.detach() + 0.3 * torch.randn(ids.shape, dtype=torch.float64, generator=random)
    value_loss(expected, returns, old, mask).backward()

    values = torch.zeros(ids.shape, dtype=torch.float64)
    trainer.forward(batch, list(range(len(lengths))), 1.0, False, True, False, values)
    assert (values - expected).abs().max() <= 1e-5 * expected.abs().max()  # angles of rope are float32
    loss = MseValueLossFn(MseValueLossConfig(cliprange=0.2))
    data = {
        "returns": returns,
        "values": old,
        "token_mask": mask.double(),
        "sample_mask": torch.ones(len(lengths), dtype=torch.float64),
    }
    trainer.backward(loss.native(values, data, None, mask.sum().double()).grad_values)
    grads = named_views(model.specs, trainer.grads)
    assert (grads["score.weight"] - score.grad).norm() <= 1e-5 * score.grad.norm()
    gradients = {f"model.{name}": parameter.grad for name, parameter in hf.model.named_parameters()}
    for parameter_name, gradient in by_checkpoint_names(gradients, hf.config.model_type).items():
        ours = grads[parameter_name]
        assert (ours - gradient).norm() <= 1e-5 * gradient.norm() + 1e-12, parameter_name


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3"])
def test_saved_critic_loads_in_transformers_as_a_sequence_classification_model(name, tmp_path):
    from transformers import AutoModelForSequenceClassification

    build(name, tmp_path / "in")
    config = ValueConfig(model_name=str(tmp_path / "in"), precision="float32", train_global_batch_size=1, train_micro_batch_size=1,
                         max_total_sequence_length=64)  # fmt: skip
    config.fill_batching()
    value = Value(None, config, None)
    value.state_dict()["score.weight"].normal_()
    value.save_checkpoint(tmp_path / "out")
    hf = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(3, 40)[None]
    ours = value.get_values(
        {"input_ids": torch.nn.functional.pad(ids, (0, 1), value=5), "input_lengths": torch.tensor([38])}
    )["values"]
    torch.testing.assert_close(ours[0, -1], hf(input_ids=ids).logits[0, 0].detach(), rtol=1e-4, atol=1e-5)
    again = Value(None, config.model_copy(update={"model_name": str(tmp_path / "out")}), None)
    assert again.weight_digest() == value.weight_digest()
