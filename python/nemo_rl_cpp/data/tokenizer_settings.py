"""Read and write the files next to tokenizer.json (special tokens, tokenizer class) as transformers 5 does."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import PreTokenizer

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} without the file. Raise ValueError for any other content."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def token_text(token: str | Mapping[str, Any] | None) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token


def read_settings(folder: Path, own_ids: Collection[int]) -> dict[str, Any]:
    """Return the settings of tokenizer_config.json. If they lack `added_tokens_decoder`, as in older folders,
    special_tokens_map.json takes precedence over them, and `added_tokens_decoder` is made from the tokens of
    added_tokens.json whose ids are not in `own_ids`. If there are template files, which transformers 5 writes, their
    texts are the setting `chat_template`."""
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        _take_special_tokens_map(settings, read_json(folder / "special_tokens_map.json"))
        special = {token_text(settings.get(name)) for name in NAMED_TOKENS} | set(extra_special_tokens(settings))
        added = {
            str(index): {"content": text, "normalized": text not in special, "special": text in special}
            for text, index in read_json(folder / "added_tokens.json").items()
            if index not in own_ids
        }
        if added:
            settings["added_tokens_decoder"] = added
    found = {file: file.read_text(encoding="utf-8") for file in _template_files(folder)}
    if named := [{"name": file.stem, "template": text} for file, text in found.items() if file.parent != folder]:
        named += [{"name": "default", "template": text} for file, text in found.items() if file.parent == folder]
        settings["chat_template"] = named
    elif found:
        settings["chat_template"] = next(iter(found.values()))
    return settings


def _template_files(folder: Path) -> list[Path]:
    """Return the files of the default chat template and of further templates, which have the names of their files."""
    further = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return [file for file in (folder / "chat_template.jinja", *further) if file.is_file()]


def write_settings(
    folder: Path, settings: Mapping[str, object], named: Mapping[str, str], additional: list[str]
) -> None:
    """Write tokenizer_config.json with `settings`, and special_tokens_map.json with the special tokens that have a role
    (`named`, such as {"eos_token": ...}) and those without one (`additional`)."""
    special: dict[str, str | list[str]] = dict(named)
    if additional:
        special["additional_special_tokens"] = additional
    for name, data in (("tokenizer_config.json", settings), ("special_tokens_map.json", special)):
        (folder / name).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for file in _template_files(folder):  # of an earlier save, which would take precedence over the new template
        file.unlink()


def _take_special_tokens_map(settings: dict[str, Any], special: Mapping[str, Any]) -> None:
    key = "extra_special_tokens"
    if isinstance(special.get(key), list) and isinstance(settings.get(key), list):
        special = {**special, key: [*settings[key], *(t for t in special[key] if t not in settings[key])]}
    settings.update(special)


def extra_special_tokens(settings: Mapping[str, Any]) -> list[str]:
    """Return the special tokens without a role, which is a key of `NAMED_TOKENS` such as `eos_token`: those under
    separate keys (such as `image_token`), and those under `additional_special_tokens` or `extra_special_tokens`."""
    own = [token_text(token) for key, token in settings.items() if key.endswith("_token") and key not in NAMED_TOKENS]
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    common = [token_text(token) for token in (extra.values() if isinstance(extra, Mapping) else extra)]
    return list(dict.fromkeys(text for text in [*own, *common] if isinstance(text, str)))


_OF_MODELS = {
    "GPT2Tokenizer": ("gpt2", "gpt_neo", "gptj", "codegen", "opt", "phi", "starcoder2"),
    "GPTNeoXTokenizer": ("gpt_neox", "olmo", "olmoe", "mamba", "mamba2", "mpt", "falcon_mamba"),
    "CohereTokenizer": ("cohere", "cohere2"),
    "Qwen2Tokenizer": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"),
    "Qwen3_5Tokenizer": ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
}
_BYTE_LEVEL = (*_OF_MODELS, "CodeGenTokenizer")
_OVERRULES = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")  # their folders often name a wrong class


def class_name(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return the name of the tokenizer class that transformers 5 uses for a folder: `tokenizer_class` of
    tokenizer_config.json (`settings`) or else of config.json (`config`). If neither names a class, or the model type is
    in `_OVERRULES`, the `model_type` in config.json determines the class."""
    kind = config.get("model_type")
    of_model = next((name for name, kinds in _OF_MODELS.items() if kind in kinds), None)
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    return of_model if of_model and (not named or kind in _OVERRULES) else named


def obey_settings(backend: Backend, settings: Mapping[str, Any]) -> None:
    """Change `backend` to follow the settings of tokenizer_config.json: `split_special_tokens`, and if the class
    `tokenizer_class` uses them, `add_prefix_space` and `legacy`. For other classes the pipeline of tokenizer.json stays
    unchanged."""
    backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
    name = str(settings.get("tokenizer_class")).removesuffix("Fast")
    prefix = settings.get("add_prefix_space")
    byte_level = [part for part in _parts(backend.pre_tokenizer) if isinstance(part, pre_tokenizers.ByteLevel)]
    if name in _BYTE_LEVEL:
        for part in byte_level:
            part.add_prefix_space = bool(prefix)
    if name == "LlamaTokenizer" and isinstance(backend.model, models.BPE) and not byte_level:
        prefix = prefix is None or bool(prefix)
        scheme = "never" if not prefix else "always" if settings.get("legacy") else "first"
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=False)
        strip = [decoders.Strip(" ", 1, 0)] if prefix else []
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        backend.decoder = decoders.Sequence(steps)


def _parts(pre_tokenizer: PreTokenizer | None) -> Iterator[PreTokenizer]:
    """Yield the steps of a pre-tokenizer; the steps of nested sequences are included."""
    if isinstance(pre_tokenizer, pre_tokenizers.Sequence):
        for part in pre_tokenizer:
            yield from _parts(part)
    elif pre_tokenizer is not None:
        yield pre_tokenizer


_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def _added_token(token: str | Mapping[str, object] | None, **flags: bool) -> AddedToken:
    """Return a token, a string or a dictionary, as `tokenizers.AddedToken`; `flags` take precedence."""
    if isinstance(token, Mapping):
        flags = {name: bool(token[name]) for name in _FLAGS if name in token} | flags
    return AddedToken(token_text(token), **flags)


class SpecialTokens:
    """The base class of the tokenizer. It registers the special tokens of tokenizer_config.json, so that each is a
    single token, and decoding can skip them."""

    def __init__(self, backend: Backend, config: Mapping[str, Any], eos_token_ids: Iterable[int]):
        self.backend_tokenizer = backend
        self._named = {name: token_text(config.get(name)) for name in NAMED_TOKENS}
        self._additional = extra_special_tokens(config)
        self._model_ends = [int(i) for i in eos_token_ids]
        listed = config.get("added_tokens_decoder") or {}
        self._listed = {token_text(token): token for token in listed.values()}
        self._add_listed_tokens(listed)
        self._declare_special_tokens([config.get(name) for name in NAMED_TOKENS])

    def _add_listed_tokens(self, listed: Mapping[str, Mapping[str, object]]) -> None:
        """Add the tokens of `added_tokens_decoder` that tokenizer.json lacks. Warn if a token gets another id than the
        one listed there."""
        tokens = {int(index): _added_token(token) for index, token in listed.items()}
        present = {repr(token) for token in self.backend_tokenizer.get_added_tokens_decoder().values()}
        self.backend_tokenizer.add_tokens([token for _, token in sorted(tokens.items()) if repr(token) not in present])
        for index, token in tokens.items():
            if (got := self.backend_tokenizer.token_to_id(token.content)) != index:
                text = f"the token {token.content!r} has the id {got} in tokenizer.json and {index} in"
                text += f" tokenizer_config.json or added_tokens.json: {got} is used, as in transformers"
                warnings.warn(f"{text}; make the files agree", stacklevel=4)

    def _declare_special_tokens(self, named: Iterable[object] = ()) -> None:
        """Register all tokens that the settings name as special. Their flags (such as `lstrip`) are those in
        `added_tokens_decoder`; `named` holds the flags of tokens that are neither there nor in tokenizer.json."""
        added = {token.content: token.special for token in self.backend_tokenizer.get_added_tokens_decoder().values()}
        wanted = [t for t in [*self._named.values(), *self._additional] if t is not None and not added.get(t)]
        flagged = {token_text(token): token for token in named if isinstance(token, Mapping)}
        flags = {text: token for text, token in flagged.items() if text not in added} | self._listed
        tokens = [
            _added_token(flags[text], special=True) if text in flags else _added_token(text, special=True, normalized=False)
            for text in dict.fromkeys(wanted)
        ]  # fmt: skip
        if tokens:
            self.backend_tokenizer.add_special_tokens(tokens)

    def _set_named(self, name: str, text: str | None) -> None:
        self._named[name] = text
        self._declare_special_tokens()

    def _id(self, text: str | None) -> int | None:
        return None if text is None else self.backend_tokenizer.token_to_id(text)

    def _padding(self) -> str | None:
        """Return the padding token, or the end token if the folder has no padding token."""
        end = self.eos_token or (self.backend_tokenizer.id_to_token(self._model_ends[0]) if self._model_ends else None)
        return self._named["pad_token"] or end

    unk_token = property(lambda self: self._named["unk_token"])
    bos_token = property(lambda self: self._named["bos_token"], lambda self, text: self._set_named("bos_token", text))
    eos_token = property(lambda self: self._named["eos_token"], lambda self, text: self._set_named("eos_token", text))
    pad_token = property(_padding, lambda self, text: self._set_named("pad_token", text))
    bos_token_id = property(lambda self: self._id(self.bos_token))
    eos_token_id = property(lambda self: self._id(self.eos_token))
    unk_token_id = property(lambda self: self._id(self.unk_token))
    pad_token_id = property(lambda self: self._id(self.pad_token))

    @property
    def eos_token_ids(self) -> list[int]:
        """The end tokens that the model in the folder lists (see `data.boundaries`), otherwise the tokenizer's own."""
        return list(self._model_ends) or ([] if self.eos_token_id is None else [self.eos_token_id])

    @property
    def special_tokens_map(self) -> dict[str, str | list[str]]:
        named: dict[str, str | list[str]] = {k: v for k, v in self._named.items() if v is not None}
        if self.pad_token is not None:
            named["pad_token"] = self.pad_token
        if self._additional:
            named["additional_special_tokens"] = list(self._additional)
        return named

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys(text for text in [*self._named.values(), *self._additional] if text is not None))

    @property
    def all_special_ids(self) -> list[int]:
        return [self.backend_tokenizer.token_to_id(text) for text in self.all_special_tokens]
