"""Read values of a GGUF file's metadata (ggml's docs/gguf.md), and convert its tokenizer to that of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nemo_rl_cpp.files.yaml_text import Plain


class UnsupportedGgufError(ValueError):
    """Raised if a GGUF file holds a model or a tokenizer that this module cannot convert."""


def value(reader: GGUFReader, key: str, default: Plain = None) -> Plain:
    """Return the value of the metadata key `key`, in which `{arch}` is replaced by the file's architecture; `default`
    if the file lacks the key."""
    if "{arch}" in key:
        key = key.replace("{arch}", str(value(reader, "general.architecture")))
    field = reader.fields.get(key)
    return default if field is None else field.contents()


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WITH_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_AFTER = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    (_ENDINGS + r"\p{N}{1,3}" + _REST,): "llama-bpe",
    (_ENDINGS + r"\p{N}" + _REST,): "qwen2",
    (_WITH_MARKS,): "qwen35",
    (_WORD + _AFTER + _CAPITALS + _AFTER + r"\p{N}{1,3}" + _SLASHES,): "gpt-4o",
    (_WORD + "|" + _CAPITALS + r"|\p{N}" + _SLASHES,): "tekken",
    (
        r"[\p{Han}]+|"
        + (_WORD + _AFTER + _CAPITALS + _AFTER).replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
        + r"\p{N}{1,3}"
        + _REST,
    ): "kimi-k2",
    (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ): "deepseek-v3",
}
"""Regular expressions by which a pre-tokenizer splits text into words, one after the other -> llama.cpp's name."""


_SAME_WORDS = {
    "refact": "smollm", "olmo": "gpt-2", "granite-docling": "gpt-2", "exaone4": "gpt-2", "lfm2": "llama-bpe", "pixtral": "llama-bpe", "dbrx": "llama-bpe", "glm4": "llama-bpe", "chatglm-bpe": "llama-bpe",
}  # fmt: skip
"""Name in llama.cpp of a rule by which text is split into words -> the name above of the same rule."""
_OF_LLAMA3 = "llama-bpe", "lfm2", "pixtral", "tekken"
"""Rules of tokenizers that take a word that is a token as it is, without merges, and begin a text with BOS by default."""


def _words(pre: str) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer that llama.cpp calls `pre`. Raise UnsupportedGgufError for an unknown name."""
    pre = _SAME_WORDS.get(pre, pre)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return words
    if pre == "smollm":
        # each digit is a separate token, so that the model does not learn "42" as one symbol
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    for patterns, name in SPLITS.items():
        if pre == name:
            splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
            return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join(("smollm", "gpt-2", *SPLITS.values(), *_SAME_WORDS))
    raise UnsupportedGgufError(f"the GGUF file's tokenizer splits by the rule {pre!r}, which is not read; {known} are")


def _byte_level(reader: GGUFReader, vocab: dict[str, int]) -> Tokenizer:
    pre = str(value(reader, "tokenizer.ggml.pre"))
    merges = [tuple(merge.split(" ", 1)) for merge in value(reader, "tokenizer.ggml.merges")]
    whole_words = {"ignore_merges": True} if pre in _OF_LLAMA3 else {}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False, **whole_words))
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = _words(pre), decoders.ByteLevel()
    return tokenizer


def _merges_by_score(reader: GGUFReader, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece tokenizer, in the order of their results' scores, highest first."""
    scores = value(reader, "tokenizer.ggml.scores")
    merges = []
    for token, i in vocab.items():
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        merges += [(scores[i], len(a), len(b), a, b) for a, b in halves if a in vocab and b in vocab]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [merge[3:] for merge in merges]


def _sentencepiece(reader: GGUFReader, vocab: dict[str, int]) -> Tokenizer:
    """Return a SentencePiece BPE tokenizer. The file of a Gemma 4 has its merges, and splits texts at newlines."""
    unknown = value(reader, "tokenizer.ggml.tokens")[int(value(reader, "tokenizer.ggml.unknown_token_id", 0))]
    if is_gemma4 := value(reader, "tokenizer.ggml.model") == "gemma4":
        pairs = [tuple(merge.split(" ", 1)) for merge in value(reader, "tokenizer.ggml.merges")]
    else:
        pairs = _merges_by_score(reader, vocab)
    bpe = models.BPE(vocab=vocab, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    marks = [normalizers.Replace(" ", "▁")]
    texts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_gemma4:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "isolated")
    if value(reader, "tokenizer.ggml.add_space_prefix", not is_gemma4):
        marks, texts = [normalizers.Prepend("▁"), *marks], [*texts, decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(marks), decoders.Sequence(texts)
    return tokenizer


def _tokenizer(reader: GGUFReader) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer and the texts of its control tokens."""
    kind = value(reader, "tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedGgufError(
            f"the GGUF file's tokenizer is a {kind!r}, which is not read; gpt2, llama and gemma4 are"
        )
    tokens = value(reader, "tokenizer.ggml.tokens")
    kinds = value(reader, "tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    vocab = {token: i for i, token in enumerate(tokens) if kinds[i] != TokenType.UNUSED}
    tokenizer = (_byte_level if kind == "gpt2" else _sentencepiece)(reader, vocab)
    control = [token for token, flag in zip(tokens, kinds) if flag == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    added = [token for token, flag in zip(tokens, kinds) if flag == TokenType.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    ends = [value(reader, f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")]
    begins = kind != "gpt2" or value(reader, "tokenizer.ggml.pre") in _OF_LLAMA3
    adds = [value(reader, f"tokenizer.ggml.add_{role}_token", begins and role == "bos") for role in ("bos", "eos")]
    first, last = ([tokens[i]] if add and i is not None else [] for add, i in zip(adds, ends))
    if first or last:
        known = [(text, vocab[text]) for text in first + last]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], pair=[*first, "$A", *last, *first, "$B:1", *last], special_tokens=known
        )
    return tokenizer, control


def write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json (with the chat template) and special_tokens_map.json."""
    backend, control = _tokenizer(reader)
    tokens = value(reader, "tokenizer.ggml.tokens")
    texts = {}
    for role, name in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        index = value(reader, f"tokenizer.ggml.{name}_token_id")
        texts[f"{role}_token"] = None if index is None else tokens[int(index)]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(value(reader, "{arch}.context_length")),
        **texts,
        "additional_special_tokens": control,
    }
    template, names = value(reader, "tokenizer.chat_template"), value(reader, "tokenizer.chat_templates", ())
    if names:
        texts_of = {"default": template} | {name: value(reader, f"tokenizer.chat_template.{name}") for name in names}
        template = [{"name": name, "template": text} for name, text in texts_of.items() if text is not None]
    settings |= {} if template is None else {"chat_template": template}
    backend.save(str(folder / "tokenizer.json"))
    special = {role: text for role, text in texts.items() if text is not None} | {"additional_special_tokens": control}
    for name, data in (("tokenizer_config.json", settings), ("special_tokens_map.json", special)):
        (folder / name).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
