"""A stand-in for an interpreter with vLLM: the real worker script on a module `vllm` of forty lines, well-behaved or hostile.

`interpreter(folder, mode)` writes a program that may stand in `policy.generation.vllm_cfg.python`. It has the interfaces of vLLM
that the worker script uses, and a Llama in plain torch, which computes each text anew for each token.
"""

import importlib.metadata
import mmap
import os
import runpy
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

MODES = {
    "good": "does what it is asked",
    "old": "is another version of vLLM",
    "none": "has no vLLM",
    "dies_loading": "ends while it loads",
    "hangs_loading": "never says that it is ready",
    "dies": "ends in the middle of a generation",
    "hangs": "makes no second step",
    "fails": "raises in the middle of a generation",
    "flipped": "sees a bit of the first page that the trainer has not set",
    "missing": "leaves one tensor out",
    "garbage": "answers with bytes that are no frame",
    "forgets": "ends with a request without an answer",
}


def interpreter(folder: Path, mode: str = "good") -> str:
    """The path of the program."""
    assert mode in MODES
    path = folder / f"python_{mode}"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {mode} "$@"\n')
    path.chmod(0o755)
    return str(path)


BARE = ("dies", "hangs", "fails", "garbage", "forgets", "flipped")
"""These have no model, so that they need no torch."""


class Llama:
    """The forward pass in float32, over parameters by their names in checkpoints."""

    def __init__(self, config, mode):
        import torch

        self.config, self.mode = config, mode
        d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        self.heads, self.kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.size = config.get("head_dim") or d // self.heads
        shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
        if not config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (v, d)
        for i in range(config["num_hidden_layers"]):
            for name, shape in (
                ("self_attn.q_proj", (self.heads * self.size, d)), ("self_attn.k_proj", (self.kv * self.size, d)),
                ("self_attn.v_proj", (self.kv * self.size, d)), ("self_attn.o_proj", (d, self.heads * self.size)),
                ("mlp.gate_proj", (f, d)), ("mlp.up_proj", (f, d)), ("mlp.down_proj", (d, f)), ("input_layernorm", (d,)),
                ("post_attention_layernorm", (d,)),
            ):  # fmt: skip
                shapes[f"model.layers.{i}.{name}.weight"] = shape
        self.weights = {name: torch.zeros(shape) for name, shape in shapes.items()}

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


class Engine:
    """`vllm.LLM` and its `llm_engine` in one."""

    registered = {}

    def __init__(self, model, weight_transfer_config, mode, **arguments):
        import json

        if mode == "dies_loading":
            print("out of luck")
            sys.stdout.flush()
            os._exit(3)
        if mode == "hangs_loading":
            time.sleep(3600)
        self.mode, self.arguments, self.steps, self.updates = mode, arguments, 0, 0
        config = json.loads((Path(model) / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        self.running, self.llm_engine = {}, self
        if mode in BARE:
            return
        self.llama = Llama(config, mode)
        self.transfer = self.registered[weight_transfer_config["backend"]](None, None, "cpu", self.llama)

    def collective_rpc(self, method, args=()):
        if self.mode in BARE:
            return []
        if method == "init_weight_transfer_engine":
            return [self.transfer.init_transfer_engine(self.transfer.init_info_cls(**args[0]))]
        self.updates += method == "finish_weight_update"
        return [getattr(self.transfer, method)(*args)]

    def reset_prefix_cache(self):
        return not self.running

    def add_request(self, name, prompt, parameters):
        assert name not in self.running
        assert len(prompt["prompt_token_ids"]) + parameters.max_tokens <= self.arguments["max_model_len"]
        self.running[name] = (prompt["prompt_token_ids"], [], parameters)

    def abort_request(self, names):
        for name in names:
            del self.running[name]

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        self.steps += 1
        if self.steps > 1 and self.mode in BARE:
            self.misbehave()
        return [self.advance(name, *request) for name, request in list(self.running.items())]

    def misbehave(self):
        if self.mode == "dies":
            os.kill(os.getpid(), 9)
        if self.mode == "hangs":
            time.sleep(3600)
        if self.mode == "garbage":
            os.write(int(sys.argv[1]), b"\0" * 64)
            time.sleep(3600)
        if self.mode == "fails":
            raise RuntimeError("the kernel has a bug")
        self.running.clear()

    def advance(self, name, prompt, response, parameters):
        token, chance = (5, -1.0) if self.mode in BARE else self.sample(prompt, response, parameters)
        response.append(token)
        stop = token in parameters.stop_token_ids
        finished = stop or len(response) == parameters.max_tokens
        if finished:
            del self.running[name]
        reason = "stop" if stop else "length" if finished else None
        chances = {token: SimpleNamespace(logprob=chance)}
        sampled = SimpleNamespace(token_ids=[token], logprobs=[chances], finish_reason=reason)
        return SimpleNamespace(request_id=name, finished=finished, outputs=[sampled])

    def sample(self, prompt, response, parameters):
        import torch

        logits = self.llama.logits([*prompt, *response]).double()
        greedy = parameters.temperature == 0
        chances = torch.log_softmax(logits if greedy else logits / parameters.temperature, -1)
        if greedy:
            token = int(chances.argmax())
        else:
            generator = torch.Generator().manual_seed(parameters.seed + len(response))
            token = int(torch.multinomial(chances.exp(), 1, generator=generator))
        return token, float(chances[token])


class Transfer:
    """`WeightTransferEngine`."""

    def __init__(self, config, vllm_config, device, model):
        self.model, self.model_config = model, None

    def parse_update_info(self, values):
        return self.update_info_cls(**values)


class Private(mmap.mmap):
    """The shared memory but for its first page, which has a bit of its own."""

    def __new__(cls, descriptor, size):
        memory = super().__new__(cls, descriptor, size, flags=mmap.MAP_PRIVATE)
        memory[0] ^= 1
        return memory


def modules(mode):
    def module(name, **values):
        made = sys.modules[name] = ModuleType(name)
        vars(made).update(values)

    packages = ("distributed", "distributed.weight_transfer", "model_executor", "model_executor.model_loader")
    module(
        "vllm", __version__="0.32.0", LLM=lambda **arguments: Engine(mode=mode, **arguments), SamplingParams=SimpleNamespace, __path__=[]
    )  # fmt: skip
    for name in packages:
        module(f"vllm.{name}", __path__=[])
    module("vllm.sampling_params", RequestOutputKind=SimpleNamespace(DELTA=1))
    module("vllm.platforms", current_platform=SimpleNamespace(is_cpu=lambda: True))
    module(
        "vllm.distributed.weight_transfer.base", WeightTransferEngine=Transfer, WeightTransferInitInfo=object,
        WeightTransferUpdateInfo=object,
    )  # fmt: skip
    factory = SimpleNamespace(register_engine=lambda name, *of: Engine.registered.__setitem__(name, of[0]))
    module("vllm.distributed.weight_transfer.factory", WeightTransferEngineFactory=factory)
    nothing = lambda *_: None  # noqa: E731
    module(
        "vllm.model_executor.model_loader.reload", initialize_layerwise_reload=nothing, finalize_layerwise_reload=nothing
    )  # fmt: skip


def main():
    mode, _, script, *arguments = sys.argv[1:]
    version = {"old": "0.31.0", "none": None}.get(mode, "0.32.0")

    def version_of(name):
        if name == "vllm" and version is not None:
            return version
        raise importlib.metadata.PackageNotFoundError(name)

    importlib.metadata.version = version_of
    if mode == "flipped":
        mmap.mmap = Private
    modules(mode)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
