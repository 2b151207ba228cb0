"""A model with a few thousand parameters behind the HTTP server, in this process."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.models.weights import save_weights
from nemo_rl_cpp.serving.app import make_app
from nemo_rl_cpp.serving.http_server import HttpServer, listen
from nemo_rl_cpp.serving.model import EngineSizes, Limits, load_model
from tokenizer_folders import byte_level

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nCall as <tool_call>...</tool_call>: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "initializer_range": 0.3,
}  # fmt: skip


RECURRENT = {
    "model_type": "qwen3_5_text", "full_attention_interval": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip


def make_folder(folder: Path, seed: int = 3, **more: object) -> Path:
    """Write a model with a byte-level tokenizer and a chat template that supports tools. Return its folder. `more`: other
    keys of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = byte_level(SPECIAL)
    tokenizer = Tokenizer(backend, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE})
    config = PolicyConfig(
        model_name="tiny-random", precision="float32", max_total_sequence_length=512,
        hf_config_overrides=SIZES | more | {"vocab_size": len(tokenizer)}, generation={"max_new_tokens": 16},
    )  # fmt: skip
    config.fill_defaults()
    policy = Policy(None, config, tokenizer, seed=seed, init_reference_model=False)
    save_weights(policy.model, folder, policy.saved_config() | {"eos_token_id": tokenizer.eos_token_id})
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    return folder


@contextmanager
def serving(
    folder: Path, api_key: str | None = None, sizes: EngineSizes | None = None, **limits: float
) -> Iterator[HttpServer]:
    """Serve the folder's model at a free port; `server.model` is the model."""
    sizes = sizes or EngineSizes(kv_cache_gb=0.05, max_batch_size=16)
    model = load_model(str(folder), served_name="tiny", precision="float32", sizes=sizes, limits=Limits(**limits))
    server = HttpServer(make_app(model, api_key), listen("127.0.0.1", 0))
    server.model = model
    server.start()
    try:
        yield server
    finally:
        server.stop()
        model.engine.shut_down()
