"""The recipe "an architecture" of CONTRIBUTING.md, followed for EXAONE 4 without sliding windows. It normalises after
attention and MLP, like OLMo 2, and each query and key head separately, like Qwen 3. No entry of SUPPORTED_ARCHITECTURES
has both."""

import json

import pytest
import torch
from model_folders import write_tokenizer
from models import BASE
from nemo_rl_cpp._native import C
from nemo_rl_cpp.generate import TextGenerator
from nemo_rl_cpp.models.architectures import SUPPORTED_ARCHITECTURES, Architecture
from nemo_rl_cpp.models.hf_config import native_config, read_config
from nemo_rl_cpp.models.weights import load_weights, named_views, save_weights
from row_batch import padded_rows

ENTRY = Architecture(
    "Exaone4",
    {
        "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "sliding_window": 4096,
    },
    biases=(),
    qk_norm="head",
    norms={"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
    layer_types=lambda form: form["layer_types"],
)  # fmt: skip


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def model(request, tmp_path, monkeypatch):
    """Return (transformers' model, the native model with its weights, their folder)."""
    from transformers import AutoModelForCausalLM, Exaone4Config

    monkeypatch.setitem(SUPPORTED_ARCHITECTURES, "exaone4", ENTRY)
    config = Exaone4Config(
        **BASE, head_dim=16, hidden_act="gelu_pytorch_tanh", sliding_window=None, layer_types=["full_attention"] * 3
    )
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config, dtype=request.param, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in hf.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (weight.dim() == 1))
    folder = tmp_path / "model"
    hf.save_pretrained(folder)
    write_tokenizer(folder)
    decoder = C.DecoderModel(native_config(read_config(folder)), request.param, True)
    load_weights(decoder, folder)
    return hf, decoder, folder


def test_newly_registered_architecture_matches_transformers_in_logits_gradients_and_text(model, tmp_path):
    from transformers import AutoModelForCausalLM

    hf, decoder, folder = model
    exact = decoder.masters.dtype == torch.float64
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[:, :7] = False
    weight = torch.randn(ids.shape, dtype=decoder.masters.dtype, generator=torch.Generator().manual_seed(5)) * mask
    logits = hf(input_ids=ids).logits
    picked = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    (picked * weight[:, 1:]).sum().backward()

    trainer = C.Trainer(decoder)
    torch.testing.assert_close(
        trainer.logits(ids[0]), logits[0].detach().to(trainer.logits(ids[0]).dtype), rtol=1e-4, atol=2e-4
    )
    batch = padded_rows(ids, torch.tensor([40, 40]), mask, torch.tensor([-1, -1]))
    out = torch.zeros(ids.shape, dtype=decoder.masters.dtype)
    trainer.forward(batch, [0, 1], 1.0, False, True, False, out)
    trainer.backward(weight)
    gradients = named_views(decoder.specs, trainer.grads)
    assert set(gradients) == {name for name, _ in hf.named_parameters()}
    for name, parameter in hf.named_parameters():
        assert (gradients[name] - parameter.grad).norm() <= (1e-6 if exact else 1e-3) * parameter.grad.norm(), name

    if exact:
        return
    save_weights(decoder, tmp_path / "out", read_config(folder))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "exaone4"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert torch.equal(again(input_ids=ids).logits, logits)
    prompt = torch.arange(3, 12)[None]
    theirs = hf.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=2)[0, 9:].tolist()
    ours = TextGenerator(folder, precision="float32").generate(
        "w0 w1 w2 w3 w4 w5 w6 w7 w8", greedy=True, max_new_tokens=8
    )
    assert ours.token_ids == theirs
