"""Models with random weights in the shapes of released ones, with fewer layers so that training them fits 24 GB.

They have SmolLM2's tokenizer.
"""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import smollm2

SHAPES = {
    # Qwen3.5-0.8B: 4 of 24 layers, three recurrent and one of attention, and as large a share of the vocabulary
    "qwen3.5": {
        "model_type": "qwen3_5_text", "vocab_size": 41472, "hidden_size": 1024, "intermediate_size": 3584,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_value_heads": 16, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "tie_word_embeddings": True,
    },
    # OLMoE-1B-7B: 1 of 16 layers, with its 64 experts, and a sixth of its vocabulary
    "olmoe": {
        "model_type": "olmoe", "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 1024,
        "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "eos_token_id": 0,
    },
    # Gemma 3 1B: 6 of 26 layers, five with a window of 512 tokens, and as large a share of the vocabulary
    "gemma3": {
        "model_type": "gemma3_text", "vocab_size": 60416, "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "sliding_window": 512, "query_pre_attn_scalar": 256,
    },
    # Gemma 4 E2B: 10 of 35 layers, of which the last 5 read the keys of earlier ones, and as large a share of the vocabulary
    "gemma4": {
        "model_type": "gemma4_text", "vocab_size": 74880, "vocab_size_per_layer_input": 74880, "hidden_size": 1536,
        "intermediate_size": 6144, "num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
        "sliding_window": 512, "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2, "num_kv_shared_layers": 5,
        "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
    },
    # Llama 3 8B: 12 of 32 layers, and as large a share of the vocabulary
    "llama3": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
    },
}  # fmt: skip


@contextmanager
def random_model(shape: str) -> Iterator[str]:
    """Give the folder of SmolLM2, or of a model with random weights in bfloat16, which is removed at the end."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if shape == "smollm2":
        yield smollm2()
        return
    with TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape]), dtype=torch.bfloat16)
        model.save_pretrained(folder)
        for file in Path(smollm2()).glob("tokenizer*"):
            shutil.copy(file, folder)
        yield folder


def parameters(folder: str) -> tuple[int, int, int]:
    """Return how many parameters the model has, how many a token's products read without the head, and the head's."""
    from safetensors import safe_open

    config = json.loads((Path(folder) / "config.json").read_text())
    head = config["vocab_size"] * config["hidden_size"]
    used = config.get("num_experts_per_tok", 1) / config.get("num_experts", 1)
    count = active = 0
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                size = math.prod(tensors.get_slice(name).get_shape())
                count += size
                if "embed_tokens" not in name and "lm_head" not in name:
                    active += round(size * used) if ".experts." in name else size
    return count, active, head
