"""Decoding of token ids, all at once or as a stream, and the bytes of single tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nemo_rl_cpp.data.interfaces import TokenizerType

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def is_byte_token(spelling: str | None) -> bool:
    """Return whether a token's spelling means a single byte, as SentencePiece's `<0x0A>` does."""
    return spelling is not None and _BYTE_FALLBACK.fullmatch(spelling) is not None


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Return {character: byte} of GPT-2's byte alphabet: U+0100 and following are bytes that Latin-1 does not print."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + n): byte for n, byte in enumerate(others)})
    return table


def _leaves(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of the decoder in a tokenizer.json, including those of nested sequences."""
    if decoder and decoder["type"] == "Sequence":
        return [leaf for child in decoder.get("decoders") or [] for leaf in _leaves(child)]
    return [decoder] if decoder else []


class TokenBytes:
    """A callable that returns the bytes that a token id adds to a text.

    It supports byte-level BPE (GPT-2, Llama 3, Qwen), byte fallback with a space mark (Llama 2), and plain tokens,
    which are joined by spaces if there is no decoder. A decoder may drop one leading space of a whole text; the bytes
    of a token include this space."""

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
        self._tokenizer = tokenizer

    def __call__(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token's text, or b"" for an id that only the model has, not the tokenizer."""
        if token_id in self._added:
            return (self._joint + self._added[token_id]).encode("utf-8")
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            table = _byte_of_character()
            known = all(character in table for character in token)
            return bytes(table[character] for character in token) if known else token.encode("utf-8")
        if self._byte_fallback and (match := _BYTE_FALLBACK.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for mark, content in self._replacements:
            token = token.replace(mark, content)
        return (self._joint + token).encode("utf-8")


def bytes_of_token(tokenizer: TokenizerType) -> Callable[[int], bytes]:
    """Return a function from token ids to bytes, for a tokenizer of this package or of transformers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return TokenBytes(backend) if backend is not None else lambda token: tokenizer.decode([token]).encode("utf-8")


def token_bytes_table(tokenizer: TokenizerType, size: int | None = None) -> list[bytes]:
    """Return the bytes of the ids 0..size-1 (default: len(tokenizer)); b"" for ids that the tokenizer lacks."""
    of, count = bytes_of_token(tokenizer), len(tokenizer) if size is None else size
    known = count if hasattr(tokenizer, "backend_tokenizer") else len(tokenizer)
    return [of(i) if i < known else b"" for i in range(count)]


_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes of UTF-8; a character has at most as many tokens


def text_of(
    tokenizer: TokenizerType, token_ids: Sequence[int], before: Sequence[int] = (), skip_special: bool = True
) -> str:
    """Return the text that the tokens `token_ids` add when they follow the tokens `before`. With `skip_special`,
    special tokens add no text."""
    decode = _decoder(tokenizer, skip_special)
    context, unfinished = _context(decode, _spelling(tokenizer), before)
    return decode([*context, *unfinished, *token_ids])[len(decode(context)) :] if token_ids else ""


class TextStream:
    """A stream that decodes one response token by token.

    The text of a token is returned as soon as no later token can change it: its characters are complete, and it cannot
    be the start of a stop string. The text ends before the first stop string, or after it with `keep_stop`. `before`
    are the prompt's ids. With `skip_special`, special tokens add no text, except those whose spelling is in `kept`."""

    def __init__(
        self, tokenizer: TokenizerType, before: Sequence[int] = (), *, stops: tuple[str, ...] = (), keep_stop: bool = False,
        skip_special: bool = True, kept: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._decode, self._without_special = _decoder(tokenizer, False), _decoder(tokenizer, True)
        self._spelling = _spelling(tokenizer)
        self._skip_special, self._kept = skip_special, kept
        self._stops, self._keep_stop = stops, keep_stop
        context, unfinished = _context(self._without_special if skip_special else self._decode, self._spelling, before)
        # ids that are decoded together: first those whose text is known (a token's leading space is decoded only
        # after another token), then those of a character that is not complete
        self._window = [token for token in (*context, *unfinished) if not self._is_skipped(token)]
        self._settled = sum(not self._is_skipped(token) for token in context)
        self._known = self._decode(self._window[: self._settled])
        self._waiting: list[int] = []  # for each token whose text is not known: its end in the window
        self._held: list[str] = []  # texts of tokens that may be part of a stop string
        self._stopped = False

    def push(self, token_ids: Sequence[int], last: bool = False) -> list[str]:
        """Add the response's next tokens. Return the texts of the tokens, from these or earlier calls, that have become
        final; with `last` (the response has ended), of all remaining tokens."""
        for token in token_ids:
            if not self._is_skipped(token):
                self._window.append(token)
            self._waiting.append(len(self._window))
            text = self._decode(self._window)
            in_bytes = bool(self._window) and is_byte_token(self._spelling(self._window[-1]))
            if not in_bytes and not text.endswith(_UNFINISHED):
                self._settle(text)
        if last and self._waiting:
            self._settle(self._decode(self._window))
        return self._release(last)

    def _is_skipped(self, token: int) -> bool:
        if not self._skip_special:
            return False
        text = self._decode([token])
        return text not in self._kept and text != self._without_special([token])

    def _settle(self, text: str) -> None:
        """Append to `_held` the text that each token in `_waiting` adds. `text` is the decoded text of all tokens in
        `_window`."""
        known = len(self._known)
        for end in self._waiting:
            until = text if end == len(self._window) else self._decode(self._window[:end])
            fits = text.startswith(until) and len(until) > known
            self._held.append(until[known:] if fits else "")
            known = max(known, len(until)) if fits else known
        self._held[-1] += text[known:]
        if len(text) > len(self._known):
            self._window = self._window[self._settled :]
            self._known = self._decode(self._window)
        self._settled = len(self._window)
        self._waiting.clear()

    def _release(self, last: bool) -> list[str]:
        if self._stopped:
            given, self._held = [""] * len(self._held), []
            return given
        text = "".join(self._held)
        at = min(((found, stop) for stop in self._stops if (found := text.find(stop)) >= 0), default=None)
        if at is None:  # the end of the text may be the start of a stop string
            sizes = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
            end = len(text) - (0 if last else max(sizes, default=0))
        else:
            self._stopped = True
            end = at[0] + (len(at[1]) if self._keep_stop else 0)
        given = []
        for piece in self._held:
            if not (self._stopped or last or len(piece) <= end):
                break
            given.append(piece[: max(end, 0)])
            end -= len(piece)
        self._held = self._held[len(given) :]
        return given


def _decoder(tokenizer: TokenizerType, skip_special: bool) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text. The tokenizers library, if available, never cleans up spaces."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return lambda ids: backend.decode(list(ids), skip_special_tokens=skip_special)


def _spelling(tokenizer: TokenizerType) -> Callable[[int], str | None]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return (lambda token: None) if backend is None else backend.id_to_token


def _context(
    decode: Callable[[Sequence[int]], str], spelling: Callable[[int], str | None], before: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return (context, unfinished), the last ids of the prompt `before` that must be decoded together with the ids that
    follow. `unfinished` are the ids at its end whose bytes form no whole character yet. `context` is the last id before
    them that decodes to text by itself, or all ids before them if none does."""
    before = list(before)

    def is_text(token: int) -> bool:
        text = decode([token])
        return bool(text) and _UNFINISHED not in text and not is_byte_token(spelling(token))

    start = next((i for i in reversed(range(len(before))) if is_text(before[i])), None)
    tail = before[start or 0 :]
    ends = range(len(tail), max(len(tail) - _LONGEST_CHARACTER, 0), -1)
    end = next((end for end in ends if not decode(tail[:end]).endswith(_UNFINISHED)), len(tail))
    return tail[: end if start is None else 1], tail[end:]
