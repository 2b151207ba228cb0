"""A mock of the parts of vLLM that the worker extension uses: its modules, its weight transfer, and a Llama in plain
torch, which recomputes the whole sequence for each token."""

import sys
from types import ModuleType, SimpleNamespace


class Llama:
    """A Llama's forward pass in float32. The parameters have their checkpoint names."""

    def __init__(self, config, mode):
        import torch
        from nemo_rl_cpp.models.hf_config import native_config
        from nemo_rl_cpp.models.parameter_shapes import parameter_shapes

        self.config, self.mode = config, mode
        self.heads, self.kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.size = config.get("head_dim") or config["hidden_size"] // self.heads
        self.weights = {name: torch.zeros(shape) for name, shape in parameter_shapes(native_config(config)).items()}

    def named_parameters(self):
        return self.weights.items()

    def modules(self):
        return ()

    def load_weights(self, tensors):
        loaded = set()
        for name, tensor in tensors:
            if self.mode == "missing" and name == "model.norm.weight":
                continue
            self.weights[name].copy_(tensor)
            loaded.add(name)
        return loaded

    def logits(self, ids):
        import torch
        from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

        w, n, eps = self.weights, len(ids), self.config["rms_norm_eps"]
        theta = (self.config.get("rope_parameters") or self.config)["rope_theta"]
        angle = torch.arange(n)[:, None] / theta ** (torch.arange(0, self.size, 2) / self.size)
        cos, sin = (fn(torch.cat([angle, angle], -1)) for fn in (torch.cos, torch.sin))

        def turned(x):
            half = self.size // 2
            return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

        x = w["model.embed_tokens.weight"][torch.tensor(ids)]
        for i in range(self.config["num_hidden_layers"]):
            at = lambda name, i=i: w[f"model.layers.{i}.{name}.weight"]  # noqa: E731
            y = rms_norm(x, x.shape[-1:], at("input_layernorm"), eps)
            q, k, v = (
                linear(y, at(f"self_attn.{p}_proj")).view(n, heads, self.size).transpose(0, 1)
                for p, heads in (("q", self.heads), ("k", self.kv), ("v", self.kv))
            )
            k, v = (t.repeat_interleave(self.heads // self.kv, 0) for t in (turned(k), v))
            out = scaled_dot_product_attention(turned(q)[None], k[None], v[None], is_causal=True)[0]
            x = x + linear(out.transpose(0, 1).reshape(n, -1), at("self_attn.o_proj"))
            y = rms_norm(x, x.shape[-1:], at("post_attention_layernorm"), eps)
            x = x + linear(silu(linear(y, at("mlp.gate_proj"))) * linear(y, at("mlp.up_proj")), at("mlp.down_proj"))
        x = rms_norm(x[-1:], x.shape[-1:], w["model.norm.weight"], eps)
        return linear(x, w.get("lm_head.weight", w["model.embed_tokens.weight"]))[0]


def sample(llama, prompt, response, parameters):
    """Sample a token as vLLM does. Return (token, its log-probability)."""
    import torch

    logits = llama.logits([*prompt, *response]).double()
    greedy = parameters.temperature == 0
    chances = torch.log_softmax(logits if greedy else logits / parameters.temperature, -1)
    if greedy:
        token = int(chances.argmax())
    else:
        generator = torch.Generator().manual_seed(parameters.seed + len(response))
        token = int(torch.multinomial(chances.exp(), 1, generator=generator))
    return token, float(chances[token])


class Transfer:
    """A mock of vLLM's `WeightTransferEngine`."""

    def __init__(self, config, vllm_config, device, model):
        self.model, self.model_config = model, None

    def parse_update_info(self, values):
        return self.update_info_cls(**values)


def modules():
    """Create the vLLM modules that the worker extension imports."""

    def module(name, **values):
        made = sys.modules[name] = ModuleType(name)
        vars(made).update(values)

    module("vllm", __version__="0.32.0", __path__=[])
    for name in ("distributed", "distributed.weight_transfer", "model_executor", "model_executor.model_loader"):
        module(f"vllm.{name}", __path__=[])
    module("vllm.platforms", current_platform=SimpleNamespace(is_cpu=lambda: True))
    module(
        "vllm.distributed.weight_transfer.base", WeightTransferEngine=Transfer, WeightTransferInitInfo=object,
        WeightTransferUpdateInfo=object,
    )  # fmt: skip
    factory = SimpleNamespace(register_engine=lambda name, module, of: None)
    module("vllm.distributed.weight_transfer.factory", WeightTransferEngineFactory=factory)
    nothing = lambda *_: None  # noqa: E731
    module(
        "vllm.model_executor.model_loader.reload", initialize_layerwise_reload=nothing, finalize_layerwise_reload=nothing
    )  # fmt: skip
