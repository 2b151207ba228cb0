"""The special tokens of a tokenizer: by name, by text and by id."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nemo_rl_cpp.data.tokenizer_files import NAMED_TOKENS, extra_special_tokens, token_text

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def _added_token(token: str | Mapping[str, object] | None, **flags: bool) -> AddedToken:
    """A `tokenizers.AddedToken` of a text, or of a dictionary with its flags."""
    from tokenizers import AddedToken

    if isinstance(token, Mapping):
        flags = {name: bool(token[name]) for name in _FLAGS if name in token} | flags
    return AddedToken(token_text(token), **flags)


class SpecialTokens:
    """Base of the tokenizer: takes the tokens that tokenizer_config.json's keys name and declares them to the
    `tokenizers.Tokenizer`, so that each is one token and decoding can skip the special ones."""

    def __init__(self, backend: Backend, config: Mapping[str, Any], eos_token_ids: Iterable[int]):
        self.backend_tokenizer = backend
        self._named = {name: token_text(config.get(name)) for name in NAMED_TOKENS}
        self._additional = extra_special_tokens(config)
        self._model_ends = [int(i) for i in eos_token_ids]
        self._add_listed_tokens(config.get("added_tokens_decoder") or {})
        self._declare_special_tokens([config.get(name) for name in NAMED_TOKENS])

    def _add_listed_tokens(self, listed: Mapping[str, Mapping[str, object]]) -> None:
        """Adds the tokens of `added_tokens_decoder` (id -> token) that tokenizer.json lacks or has with other flags."""
        tokens = {int(index): _added_token(token) for index, token in listed.items()}
        present = {repr(token) for token in self.backend_tokenizer.get_added_tokens_decoder().values()}
        self.backend_tokenizer.add_tokens([token for _, token in sorted(tokens.items()) if repr(token) not in present])
        for index, token in tokens.items():
            if (got := self.backend_tokenizer.token_to_id(token.content)) != index:
                warnings.warn(
                    f"the token {token.content!r} has the id {got} in tokenizer.json and {index} in tokenizer_config.json or "
                    f"added_tokens.json: {got} is used, as in transformers; make the files agree",
                    stacklevel=4,
                )

    def _declare_special_tokens(self, named: Iterable[object] = ()) -> None:
        """Makes the named and the additional special tokens special; `named` may give them with flags."""
        flagged = {token_text(token): token for token in named if isinstance(token, Mapping)}
        added = {token.content: token.special for token in self.backend_tokenizer.get_added_tokens_decoder().values()}
        wanted = [t for t in [*self._named.values(), *self._additional] if t is not None and not added.get(t)]
        tokens = [
            _added_token(flagged[text], special=True) if text in flagged and text not in added else _added_token(text, special=True, normalized=False)
            for text in dict.fromkeys(wanted)
        ]  # fmt: skip
        if tokens:
            self.backend_tokenizer.add_special_tokens(tokens)

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
        """The padding token; the end token where the folder names none."""
        end = self.eos_token or (self.backend_tokenizer.id_to_token(self._model_ends[0]) if self._model_ends else None)
        return self._named["pad_token"] or end

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
        """The ends of the folder's model (`data.boundaries`); the tokenizer's own eos where it names none."""
        own = [] if self.eos_token_id is None else [self.eos_token_id]
        return list(self._model_ends) or own

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
        named = [text for text in self._named.values() if text is not None]
        return list(dict.fromkeys([*named, *self._additional]))

    @property
    def all_special_ids(self) -> list[int]:
        return [self.backend_tokenizer.token_to_id(text) for text in self.all_special_tokens]
