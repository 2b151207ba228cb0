"""The special tokens of a tokenizer: by name, by text and by id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _content(token: Any) -> str | None:
    """A special token is written as a text or as a dictionary with its flags."""
    return token.get("content") if isinstance(token, Mapping) else token


class SpecialTokens:
    """Base of the tokenizer: takes the special tokens of tokenizer_config.json's keys and declares them to the
    `tokenizers.Tokenizer`, so that decoding can skip them."""

    def __init__(self, backend: Any, config: Mapping[str, Any], eos_token_ids: Iterable[int]):
        self.backend_tokenizer = backend
        self._named = {name: _content(config.get(name)) for name in _NAMED}
        more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
        self._additional = [_content(token) for token in (more.values() if isinstance(more, Mapping) else more)]
        self._extra_eos = [int(i) for i in eos_token_ids]
        self._declare_special_tokens()

    def _declare_special_tokens(self) -> None:
        from tokenizers import AddedToken

        known = {token.content for token in self.backend_tokenizer.get_added_tokens_decoder().values() if token.special}
        wanted = [t for t in [*self._named.values(), *self._additional] if t is not None and t not in known]
        if wanted:
            self.backend_tokenizer.add_special_tokens(
                [AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(wanted)]
            )

    def _set_named(self, name: str, text: str | None) -> None:
        self._named[name] = text
        self._declare_special_tokens()

    def _id(self, text: str | None) -> int | None:
        return None if text is None else self.backend_tokenizer.token_to_id(text)

    @property
    def bos_token(self) -> str | None:
        return self._named["bos_token"]

    @bos_token.setter
    def bos_token(self, text: str | None) -> None:
        self._set_named("bos_token", text)

    @property
    def eos_token(self) -> str | None:
        return self._named["eos_token"]

    @eos_token.setter
    def eos_token(self, text: str | None) -> None:
        self._set_named("eos_token", text)

    @property
    def unk_token(self) -> str | None:
        return self._named["unk_token"]

    @property
    def pad_token(self) -> str | None:
        """The padding token; the eos token where the folder names none."""
        return self._named["pad_token"] or self.eos_token

    @pad_token.setter
    def pad_token(self, text: str | None) -> None:
        self._set_named("pad_token", text)

    @property
    def bos_token_id(self) -> int | None:
        return self._id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self._id(self.eos_token)

    @property
    def unk_token_id(self) -> int | None:
        return self._id(self.unk_token)

    @property
    def pad_token_id(self) -> int | None:
        return self._id(self.pad_token)

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokenizer's own eos first, then those that only generation_config.json lists."""
        own = [] if self.eos_token_id is None else [self.eos_token_id]
        return list(dict.fromkeys([*own, *self._extra_eos]))

    @property
    def special_tokens_map(self) -> dict[str, Any]:
        named: dict[str, Any] = {k: v for k, v in self._named.items() if v is not None}
        if self.pad_token is not None:
            named["pad_token"] = self.pad_token
        if self._additional:
            named["additional_special_tokens"] = list(self._additional)
        return named

    @property
    def all_special_tokens(self) -> list[str]:
        named = [text for text in self._named.values() if text is not None]
        return list(dict.fromkeys([*named, *self._additional]))

    @property
    def all_special_ids(self) -> list[int]:
        return [self.backend_tokenizer.token_to_id(text) for text in self.all_special_tokens]
