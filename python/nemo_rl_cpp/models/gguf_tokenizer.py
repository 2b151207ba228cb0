"""Writes a tokenizer into a GGUF file: tokens with their types, merges or scores, special tokens and the chat template.

llama.cpp supports two kinds of tokenizers. A byte-level BPE needs llama.cpp's name of its rule that splits text into
words. A SentencePiece BPE, stored as merges in tokenizer.json, gets the rank of a merge as the merged token's score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import ModelFolderError

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from nemo_rl_cpp.data.tokenizer import Tokenizer

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_ENDINGS + r"\p{N}{1,3}" + _REST: "llama-bpe", _ENDINGS + r"\p{N}" + _REST: "qwen2"}
"""Regular expression that splits text into words -> its name in llama.cpp."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
    """Write a tokenizer for a model of `vocab_size` tokens, whose responses end at the tokens `ends`.

    Raise ModelFolderError for a kind of tokenizer that llama.cpp does not support.
    """
    import gguf

    written = json.loads(tokenizer.backend_tokenizer.to_str())
    model = written["model"]
    if model["type"] != "BPE":
        raise ModelFolderError(f"the tokenizer is of type {model['type']}; as GGUF only BPE is written")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [int(gguf.TokenType.UNUSED)] * vocab_size
    for text, i in model["vocab"].items():
        tokens[i], kinds[i] = text, int(gguf.TokenType.NORMAL)
    for added in written["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], int(kind)
    if "ByteLevel" in json.dumps(written["pre_tokenizer"]):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split_name(written["pre_tokenizer"]))
        writer.add_token_merges(merges)
    elif model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(_scores(tokens, kinds, merges))
        writer.add_add_space_prefix(tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).tokens[0] != "a")
        for i, token in enumerate(tokens):
            if _BYTE.fullmatch(token):
                kinds[i] = int(gguf.TokenType.BYTE)
        if tokenizer.unk_token_id is not None:
            kinds[tokenizer.unk_token_id] = int(gguf.TokenType.UNKNOWN)
    else:
        raise ModelFolderError(
            "the tokenizer has neither byte-level tokens nor a fallback to bytes, which llama.cpp needs"
        )
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    _add_special_tokens(writer, tokenizer, ends)


def _split_name(pre_tokenizer: Mapping[str, Plain]) -> str:
    """Return llama.cpp's name of the rule that splits text into words."""
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [part["type"] for part in parts]
    patterns = [part["pattern"].get("Regex") for part in parts if part["type"] == "Split"]
    if kinds == ["Split", "ByteLevel"] and patterns[0] in SPLITS:
        return SPLITS[patterns[0]]
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1]["use_regex"]:
        return "smollm"
    if kinds == ["ByteLevel"] and parts[0]["use_regex"]:
        return "gpt-2"
    raise ModelFolderError(
        f"the tokenizer splits a text into words by {json.dumps(parts)[:200]}, of which llama.cpp's name is not known here; known are "
        "those of Llama 3, Qwen, SmolLM and GPT-2"
    )


def _scores(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str]) -> list[float]:
    """Return a score per token; llama.cpp merges to tokens with higher scores first."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [float(-ranks.get(token, len(merges) + i)) for i, token in enumerate(tokens)]


def _add_special_tokens(writer: GGUFWriter, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
    named = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unk": tokenizer.unk_token_id,
        "pad": tokenizer.pad_token_id,
    }
    for name, i in named.items():
        if i is not None:
            getattr(writer, f"add_{name}_token_id")(i)
    others = [i for i in ends if i != tokenizer.eos_token_id]
    if others:  # llama.cpp stores one second end token, and finds further end tokens by their texts
        writer.add_eot_token_id(others[0])
    encoded = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and encoded[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and encoded[-1] == tokenizer.eos_token_id)
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    if template is not None:
        writer.add_chat_template(template)
