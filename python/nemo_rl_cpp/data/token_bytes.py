"""The bytes of a token. Stop strings are matched on bytes, because one character may span several tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nemo_rl_cpp.data.interfaces import TokenizerType

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def is_byte_token(spelling: str | None) -> bool:
    """Whether a token of this spelling is one byte, by the convention of SentencePiece."""
    return spelling is not None and _BYTE_FALLBACK.fullmatch(spelling) is not None


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """The inverse of GPT-2's byte alphabet: printable Latin-1 characters stand for themselves, the other 68 bytes
    for the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + n): byte for n, byte in enumerate(others)})
    return table


def _leaves(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """A decoder of tokenizer.json, sequences flattened."""
    if not decoder:
        return []
    if decoder["type"] == "Sequence":
        return [leaf for child in decoder.get("decoders") or [] for leaf in _leaves(child)]
    return [decoder]


class TokenBytes:
    """Maps token ids to bytes for one `tokenizers.Tokenizer`.

    Understood are byte-level BPE (GPT-2, Llama 3, Qwen), byte fallback with a space mark (Llama 2), and plain tokens, which
    are joined by spaces where there is no decoder. They are the bytes that a token adds to a text: what a decoder does only
    at the start of a text (dropping one leading space) is not part of them.
    """

    def __init__(self, tokenizer: Backend):
        spec = json.loads(tokenizer.to_str())
        decoders = _leaves(spec.get("decoder"))
        kinds = {leaf["type"] for leaf in decoders}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._joint = "" if decoders else " "
        self._replacements: list[tuple[str, str]] = []
        for leaf in decoders:
            if leaf["type"] == "Metaspace":
                self._replacements.append((leaf.get("replacement", "\u2581"), " "))
            elif leaf["type"] == "Replace" and "String" in leaf["pattern"]:
                self._replacements.append((leaf["pattern"]["String"], leaf["content"]))
        self._added = {int(token["id"]): token["content"] for token in spec.get("added_tokens", ())}
        self._special = {int(token["id"]) for token in spec.get("added_tokens", ()) if token.get("special")}
        self._tokenizer = tokenizer

    def __call__(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """Bytes of one token; empty for an id that the tokenizer does not know (a model may have spare rows)."""
        if token_id in self._added:
            if skip_special_tokens and token_id in self._special:
                return b""
            return (self._joint + self._added[token_id]).encode("utf-8")
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            table = _byte_of_character()
            if all(character in table for character in token):
                return bytes(table[character] for character in token)
            return token.encode("utf-8")
        if self._byte_fallback:
            match = _BYTE_FALLBACK.fullmatch(token)
            if match:
                return bytes([int(match.group(1), 16)])
        for mark, content in self._replacements:
            token = token.replace(mark, content)
        return (self._joint + token).encode("utf-8")


def bytes_of_token(tokenizer: TokenizerType) -> Callable[[int], bytes]:
    """A function from an id to the bytes of its token, of our tokenizer or of a transformers tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return TokenBytes(backend)
    return lambda token_id: tokenizer.decode([token_id]).encode("utf-8")


def token_bytes_table(
    tokenizer: TokenizerType, size: int | None = None, skip_special_tokens: bool = False
) -> list[bytes]:
    """Bytes of the ids 0..size-1 (default: len(tokenizer)) of our tokenizer or of a transformers tokenizer.

    `size` is usually the model's vocabulary, which may be larger than the tokenizer's; the spare ids get b"".
    With `skip_special_tokens` special tokens get b"", as in text decoded without them.
    """
    count = len(tokenizer) if size is None else size
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        of = TokenBytes(backend)
        return [of(i, skip_special_tokens) for i in range(count)]
    known = min(count, len(tokenizer))
    special = set(tokenizer.all_special_ids) if skip_special_tokens else set()
    table = [b"" if i in special else tokenizer.decode([i]).encode("utf-8") for i in range(known)]
    return table + [b""] * (count - known)
