"""The rules for where a prompt begins (BOS token) and where a response ends (end tokens). Training, validation,
evaluation, `generate` and saved checkpoints follow these rules, which are those of transformers.

Beginnings: plain text gets the special tokens that the tokenizer adds to a text (a BOS token, if it has one). Text that
a chat template rendered gets none, because the template writes them. A template that only joins the contents writes
none, so its output is treated as plain text.

Ends: the `eos_token_id` of generation_config.json, a number or a list; otherwise that of config.json; otherwise the
tokenizer's end token."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.data.tokenizer_settings import read_json

GENERATION_CONFIG = "generation_config.json"
_FROM_CONFIG = (
    "bos_token_id", "pad_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_length",
    "max_new_tokens",
)  # fmt: skip


def prompt_ids(
    tokenizer: TokenizerType, text: str, messages: Sequence[Mapping[str, object]] | None = None
) -> list[int]:
    """Return the token ids of a prompt: plain text, or `text` as a chat template rendered it from `messages`. If plain
    text already starts with the BOS token, no second one is added."""
    plain = messages is None or text == "".join(str(message.get("content")) for message in messages)
    ids = tokenizer(text, add_special_tokens=plain)["input_ids"]
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    # some tokenizers return a batch of one row
    ids = [int(i) for i in (ids[0] if ids and isinstance(ids[0], list) else ids)]
    bos, eos, end = (getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "eos_token"))
    if plain and ids and ids[-1] == eos and end and not text.endswith(end):
        text = f"the tokenizer puts its end token {end!r} behind every text, so the model continues an ended prompt"
        warnings.warn(f"{text}: take it out of the post_processor in tokenizer.json", stacklevel=3)
    return ids[1:] if plain and bos is not None and ids[:2] == [bos, bos] else ids


def end_token_ids(folder: Path | None, config: Mapping[str, object], tokenizer: TokenizerType | None) -> list[int]:
    """Return the ids of the tokens at which responses end: those of generation_config.json in `folder`, otherwise of
    `config` (config.json), otherwise the end tokens of `tokenizer`. Warn if the model's files list end tokens and the
    tokenizer's is not among them."""
    ends, own = named_ends(folder, config), getattr(tokenizer, "eos_token_id", None)
    if not ends:
        return end_token_ids_of_tokenizer(tokenizer)
    if own is not None and own not in ends:
        text = f"the model's end tokens are {ends} ({folder or 'config.json'}), and the tokenizer's end token"
        text += f" {tokenizer.eos_token!r} ({own}) is not among them: responses go on after it, as in transformers"
        remedy = f"list it in generation_config.json or set policy.generation.stop_token_ids={[*ends, own]}"
        warnings.warn(f"{text}; to end them there as well, {remedy}", stacklevel=3)
    return ends


def end_token_ids_of_tokenizer(tokenizer: TokenizerType | None) -> list[int]:
    """Return the ids of a tokenizer's end tokens: those that the model files in its folder list, or if there are none,
    the tokenizer's own `eos_token_id`. Return [] if `tokenizer` is None."""
    own = getattr(tokenizer, "eos_token_id", None)
    return list(getattr(tokenizer, "eos_token_ids", None) or ([] if own is None else [own]))


def named_ends(folder: Path | None, config: Mapping[str, object]) -> list[int]:
    """Return the end token ids of generation_config.json in `folder`, otherwise of `config` (config.json), or []."""
    generation = {} if folder is None else read_json(folder / GENERATION_CONFIG)
    for source, name in ((generation, GENERATION_CONFIG), (config, "config.json")):
        if ends := _ids(source.get("eos_token_id"), f"{name} of {folder}"):
            return ends
    return []


def _ids(value: object, where: str) -> list[int]:
    given = [] if value is None else value if isinstance(value, list) else [value]
    for i in given:
        if isinstance(i, bool) or not isinstance(i, int):
            raise ValueError(f"{where}: eos_token_id is {value!r}, expected a token id or a list of them")
    return list(dict.fromkeys(i for i in given if i >= 0))  # some folders write -1 if there is none


def save_generation_config(
    folder: Path | None, config: Mapping[str, object], tokenizer: TokenizerType | None, target: Path
) -> None:
    """Write a trained model's generation_config.json into the folder `target`: a copy of the file in `folder`,
    otherwise keys of `config` (config.json). If end tokens are missing, add those of `config` or the tokenizer."""
    content = {} if folder is None else read_json(folder / GENERATION_CONFIG)
    if not content:
        content = {key: config[key] for key in _FROM_CONFIG if config.get(key) is not None}
    ends = named_ends(folder, config) or end_token_ids_of_tokenizer(tokenizer)
    if ends and not _ids(content.get("eos_token_id"), GENERATION_CONFIG):
        content["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if content:
        (target / GENERATION_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def passes_text_through(tokenizer: TokenizerType) -> bool:
    """Return whether the chat template returns a user's message unchanged, without marking its role."""
    try:
        messages = [{"role": "user", "content": "x"}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "x"
    except ValueError:  # there is no template, or it rejects this conversation
        return False
