"""Generation: the contract, and what a configuration needs of the tokenizer before an engine starts."""

from typing import Any

from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.data.boundaries import end_token_ids_of_tokenizer


def configure_generation_config(
    config: GenerationConfig,
    tokenizer: Any,
    is_eval: bool = False,
    has_refit_draft_weights: bool = False,
    trains_mtp: bool = False,
) -> GenerationConfig:
    """Completes the configuration, in place, with what the tokenizer knows, and returns it.

    `_pad_token_id` becomes the tokenizer's pad token; `stop_token_ids` its end-of-text tokens where it is null. For vLLM,
    `load_format` is "dummy" (weights come by refit) or "auto" in evaluation, and `skip_tokenizer_init` follows from
    whether stop strings are in use, unless it is set.

    Raises ValueError when the tokenizer lacks a token that is needed, or for draft weights and multi-token prediction,
    which this package does not train.
    """
    if has_refit_draft_weights or trains_mtp:
        raise ValueError("draft models and multi-token prediction are not supported: leave both off")
    pad, ends = tokenizer.pad_token_id, end_token_ids_of_tokenizer(tokenizer)
    if pad is None:
        raise ValueError("the tokenizer has no pad token: set tokenizer.pad_token = tokenizer.eos_token")
    config["_pad_token_id"] = pad
    if config.get("stop_token_ids") is None:
        if not ends:
            raise ValueError("the tokenizer has no end-of-text token: set policy.generation.stop_token_ids")
        config["stop_token_ids"] = ends
    if config.get("backend") == "vllm":
        engine: Any = config["vllm_cfg"]  # a dictionary, or the section of a loaded configuration
        engine["load_format"] = "auto" if is_eval else "dummy"
        if engine.get("skip_tokenizer_init") is None:
            engine["skip_tokenizer_init"] = not is_eval and config.get("stop_strings") is None
    return config
