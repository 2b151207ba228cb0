import re
import sys

import pytest
import torch
from models import Float64Torch, build, by_checkpoint_names, compute_in_float64, configurations, recur_in_float64
from nemo_rl_cpp._native import C
from nemo_rl_cpp.models.hf_config import native_config, read_config
from nemo_rl_cpp.models.weights import load_weights, named_views, save_weights
from row_batch import padded_rows

NAMES = sorted(configurations())


def load(folder, dtype=torch.float32, trainable=True):
    model = C.DecoderModel(native_config(read_config(folder), max_length=128), dtype, trainable)
    load_weights(model, folder)
    return model


def ragged_batch(vocab=97, lengths=(37, 5, 21, 1), seed=1):
    generator = torch.Generator().manual_seed(seed)
    S = max(lengths)
    ids = torch.randint(3, vocab, (len(lengths), S), generator=generator)
    mask = torch.zeros(len(lengths), S, dtype=torch.bool)
    for row, n in enumerate(lengths):
        ids[row, n:] = 0
        mask[row, n // 3 : n] = True
    mask[:, 0] = False
    batch = padded_rows(ids, torch.tensor(lengths), mask, torch.full((len(lengths),), -1))
    return batch, ids, torch.tensor(lengths), mask


def hf_logprobs(hf, ids, mask):
    """Return transformers' log-probabilities of the tokens in `mask`. Padding has no attention mask: no token attends
    to it, and a window of masked keys only would give NaN."""
    logits = hf(input_ids=ids).logits
    logprobs = torch.log_softmax(logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32)), -1)
    picked = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
    return torch.where(mask[:, 1:], picked, torch.zeros_like(picked))


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_architecture_match_transformers(name, tmp_path):
    hf = build(name, tmp_path)
    trainer = C.Trainer(load(tmp_path))
    ids = torch.randint(3, 97, (80,), generator=torch.Generator().manual_seed(3))
    expected = hf(input_ids=ids[None]).logits[0].detach()
    torch.testing.assert_close(trainer.logits(ids), expected, rtol=1e-4, atol=1e-4)


def test_logits_of_lfm2_match_transformers_if_the_scores_of_chosen_experts_are_near_0(tmp_path):
    """LFM2 adds 1e-6 to the sum of scores, other models with sigmoid routers 1e-20."""
    hf = build("lfm2_moe", tmp_path, num_experts_per_tok=1)
    with torch.no_grad():
        for layer in hf.model.layers[1:]:
            layer.feed_forward.gate.weight.mul_(12.0)
            layer.feed_forward.expert_bias[2] = 5.0  # every token chooses this expert
    hf.save_pretrained(tmp_path)
    ids = torch.randint(3, 97, (80,), generator=torch.Generator().manual_seed(3))
    expected = hf(input_ids=ids[None]).logits[0].detach()
    torch.testing.assert_close(C.Trainer(load(tmp_path)).logits(ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_every_architecture_match_transformers(name, tmp_path, monkeypatch):
    hf = build(name, tmp_path, torch.float64)
    if name.startswith(("qwen3_5", "qwen3_next", "nemotron_h", "granite_4", "gemma4")):
        compute_in_float64(hf, monkeypatch)
    # gradients of sinks, of keys' biases and of query norms cancel, so that the float32 of transformers' norms (and routers) would show
    if name.startswith(("gpt_oss", "glm4", "deepseek_v3", "gemma3", "lfm2")):
        monkeypatch.setattr(sys.modules[type(hf).__module__], "torch", Float64Torch())
    model = load(tmp_path, torch.float64)
    trainer = C.Trainer(model)
    batch, ids, lengths, mask = ragged_batch()
    weight = torch.randn(ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    (hf_logprobs(hf, ids, mask) * weight[:, 1:]).sum().backward()

    out = torch.zeros(ids.shape, dtype=torch.float64)
    trainer.forward(batch, list(range(len(lengths))), 1.0, False, True, False, out)
    trainer.backward(weight * mask)
    grads = named_views(model.specs, trainer.grads)
    gradients = {name: parameter.grad for name, parameter in hf.named_parameters()}
    for parameter_name, expected in by_checkpoint_names(gradients, hf.config.model_type).items():
        ours = grads[parameter_name]
        assert (ours - expected).norm() <= 1e-6 * expected.norm() + 1e-12, parameter_name


@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_groups", "nemotron_h_experts", "lfm2_moe"])
def test_token_counts_per_expert_match_transformers(name, tmp_path):
    hf, model = build(name, tmp_path), load(tmp_path)
    trainer, (batch, ids, lengths, _) = C.Trainer(model), ragged_batch()
    out = torch.zeros(ids.shape)
    trainer.forward(batch, list(range(len(lengths))), 1.0, False, True, False, out)
    trainer.backward(torch.zeros(ids.shape))
    chosen = []
    for router in [module for module in hf.modules() if type(module).__name__.lower().endswith("topkrouter")]:
        chosen.append([])
        router.register_forward_hook(lambda _, inputs, found, to=chosen[-1]: to.append(found[2].flatten()))
    for row, length in zip(ids, lengths):
        if length > 1:  # the last token of a row predicts none, and is not computed
            hf(input_ids=row[None, : length - 1])
    loads = [load for _, load in model.routers]
    assert [load.tolist() for load in loads] == [
        torch.cat(of).bincount(minlength=len(load)).tolist() for of, load in zip(chosen, loads)
    ]


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe_sparse_step"])
def test_gradient_of_the_moe_load_balancing_loss_matches_transformers(name, tmp_path):
    """The native loss is transformers' loss of each layer and sequence, divided by the number of experts per token."""
    hf = build(name, tmp_path, torch.float64)
    balance = sys.modules[type(hf).__module__].load_balancing_loss_func
    model = load(tmp_path, torch.float64)
    trainer, (batch, ids, lengths, _) = C.Trainer(model), ragged_batch()
    of_layers = []
    for row, length in zip(ids, lengths.tolist()):
        if length > 1:  # the last token of a row predicts none, and is not computed
            logits = hf(input_ids=row[None, : length - 1], output_router_logits=True).router_logits
            of_layers.append(
                [balance((layer,), hf.config.num_experts, hf.config.num_experts_per_tok) for layer in logits]
            )
    losses = torch.stack([torch.stack(layers) for layers in of_layers]) / hf.config.num_experts_per_tok
    assert losses.shape == (3, 1 if name == "qwen2_moe_sparse_step" else 3) and losses.min() > 1
    (0.7 * losses.sum(1).mean()).backward()

    out = torch.zeros(ids.shape, dtype=torch.float64)
    trainer.balance_experts(0.7 / len(losses))
    for rows in ([0, 1], [2, 3]):
        trainer.forward(batch, rows, 1.0, False, True, False, out)
        trainer.backward(torch.zeros(ids.shape, dtype=torch.float64))
    assert trainer.take_balance_loss() / 0.7 == pytest.approx(losses.mean().item(), rel=1e-6)
    assert trainer.take_balance_loss() == 0
    grads, gradients = named_views(model.specs, trainer.grads), {}
    for parameter_name, parameter in hf.named_parameters():
        gradients[parameter_name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for parameter_name, expected in by_checkpoint_names(gradients, hf.config.model_type).items():
        assert (grads[parameter_name] - expected).norm() <= 1e-5 * expected.norm() + 1e-12, parameter_name


@pytest.mark.parametrize(
    "name, freezes",
    [*((name, False) for name in ("llama_tied", "gemma3", "gemma4", "gemma4_experts", "deepseek_v3", "qwen3_5_moe", "gpt_oss", "nemotron_h", "granite_4", "lfm2_moe")),
     *((name, True) for name in ("qwen3_moe", "gpt_oss", "deepseek_v3", "gemma4_experts"))],
)  # fmt: skip
def test_weights_after_ten_adamw_steps_match_torch_adamw(name, freezes, tmp_path, monkeypatch):
    # a recurrence, and many layers, accumulate the rounding errors of float32, and torch's differ between processors
    accumulates = name.startswith(("qwen3_5", "qwen3_next", "nemotron_h", "granite_4", "gemma4"))
    dtype = torch.float64 if accumulates else torch.float32
    if accumulates and not name.startswith("gemma4"):
        recur_in_float64(monkeypatch)
    hf = build(name, tmp_path, dtype)
    if name.startswith("gemma4"):
        compute_in_float64(hf, monkeypatch)
    model = load(tmp_path, dtype)
    if freezes:
        model.freeze_routers()
        for parameter_name, parameter in hf.named_parameters():
            parameter.requires_grad_(
                not re.search(r"\.(gate|router|router\.proj)\.weight$|\.router\.\w*scale$", parameter_name)
            )
    trainer = C.Trainer(model)
    optimizer = torch.optim.AdamW(hf.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(10):
        batch, ids, lengths, mask = ragged_batch(seed=step)
        optimizer.zero_grad()
        expected = -hf_logprobs(hf, ids, mask).sum() / mask.sum()
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
        optimizer.step()

        out = torch.zeros(ids.shape, dtype=dtype)
        trainer.zero_grad()
        trainer.forward(batch, list(range(len(lengths))), 1.0, False, True, False, out)
        ours = -(out * mask).sum() / mask.sum()
        trainer.backward(-mask.to(dtype) / mask.sum())
        result = trainer.step(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-4, atol=1e-5)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-3)
    weights = named_views(model.specs, model.masters)
    for parameter_name, parameter in by_checkpoint_names(dict(hf.named_parameters()), hf.config.model_type).items():
        assert (weights[parameter_name] - parameter).norm() <= 1e-3 * parameter.norm(), parameter_name
        assert parameter.requires_grad or torch.equal(weights[parameter_name], parameter), parameter_name


@pytest.mark.parametrize(
    "name",
    [
        "llama_biases", "qwen2_tied", "qwen3", "olmo3", "smollm3", "granite", "phi3", "phi3_longrope", "gemma2",
        "gemma3", "gemma4", "gemma4_without_inputs", "gemma4_experts", "qwen3_moe", "qwen3_moe_dense_layer", "olmoe", "mixtral", "qwen2_moe", "glm4_moe", "glm4_moe_groups",
        "deepseek_v3", "deepseek_v3_queries_without_latent", "glm4_moe_lite", "glm4_moe_lite_layers", "qwen3_5",
        "qwen3_5_tied_other_layers", "qwen3_5_moe", "qwen3_5_moe_tied_other_layers", "qwen3_next",
        "qwen3_next_tied_other_layers", "gpt_oss", "nemotron_h", "nemotron_h_other_layers", "nemotron_h_experts",
        "nemotron_h_latent_experts", "nemotron_h_groups_of_experts", "granite_4", "granite_4_of_attention", "granite_4_other_layers", "granite_4_experts", "granite_experts", "ministral3",
        "exaone4", "exaone4_without_windows", "seed_oss", "ernie4_5", "glm4",
        "lfm2", "lfm2_other_layers", "lfm2_moe", "lfm2_moe_other_layers",
    ],
)  # fmt: skip
def test_saved_checkpoint_gives_the_same_logits_in_transformers(name, tmp_path):
    from transformers import AutoModelForCausalLM

    hf = build(name, tmp_path / "in")
    model = load(tmp_path / "in")
    save_weights(model, tmp_path / "out", read_config(tmp_path / "in"), max_shard_bytes=20_000)
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **eager).eval()
    expected, loaded = hf.state_dict(), again.state_dict()
    assert expected.keys() == loaded.keys()
    assert all(torch.equal(expected[name], weight) for name, weight in loaded.items())
    ids = torch.arange(3, 40)[None]  # on some processors torch's last bits depend on where a tensor lies in memory
    torch.testing.assert_close(hf(input_ids=ids).logits, again(input_ids=ids).logits, rtol=1e-6, atol=1e-6)
    assert load(tmp_path / "out").digest() == model.digest()


def test_saving_a_model_removes_weight_files_of_an_earlier_save(tmp_path):
    build("qwen3", tmp_path / "in")
    model, config = load(tmp_path / "in"), read_config(tmp_path / "in")
    files = []
    for shard_bytes in (10**9, 20_000, 10**9):
        save_weights(model, tmp_path / "out", config, max_shard_bytes=shard_bytes)
        files.append({file.name for file in (tmp_path / "out").iterdir()})
        assert load(tmp_path / "out").digest() == model.digest()
    assert files[0] == files[2] == {"config.json", "model.safetensors"} and "model.safetensors" not in files[1]
