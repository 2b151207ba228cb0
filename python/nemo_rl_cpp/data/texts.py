"""Makes text from token ids: the one place for rewards, environments, `generate`, evaluations and the server.

The text of a prompt and of what continues it are together transformers' text of all their ids, without clean-up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.data.token_bytes import is_byte_token

_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes of UTF-8, so tokens at most


def text_of(
    tokenizer: TokenizerType, token_ids: Sequence[int], before: Sequence[int] = (), skip_special: bool = True
) -> str:
    """Makes the text that `token_ids` add to a text of the tokens `before`; equals the joined pieces of a `TextStream`."""
    decode = _decoder(tokenizer, skip_special)
    context, unfinished = _context(decode, _spelling(tokenizer), before)
    return decode([*context, *unfinished, *token_ids])[len(decode(context)) :] if token_ids else ""


class TextStream:
    """Makes the text of one answer, token by token.

    A token's text is given when no later token can change it: its characters are complete, and it cannot be the beginning
    of a stop string any more. The text ends before the first stop string, or behind it with `keep_stop`.

    Args:
        before: the prompt's token ids.
        skip_special: whether special tokens add no text, except those whose text is in `kept`.
    """

    def __init__(
        self, tokenizer: TokenizerType, before: Sequence[int] = (), *, stops: tuple[str, ...] = (), keep_stop: bool = False,
        skip_special: bool = True, kept: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._decode, self._without_special = _decoder(tokenizer, False), _decoder(tokenizer, True)
        self._spelling = _spelling(tokenizer)
        self._skip_special, self._kept = skip_special, kept
        self._stops, self._keep_stop = stops, keep_stop
        context, unfinished = _context(self._without_special if skip_special else self._decode, self._spelling, before)
        # ids that are decoded together: first those whose text is known (a text begins with its first token's space only
        # behind another token), then those that wait for the end of a character
        self._window = [token for token in (*context, *unfinished) if not self._is_skipped(token)]
        self._settled = sum(not self._is_skipped(token) for token in context)
        self._known = self._decode(self._window[: self._settled])
        self._waiting: list[int] = []  # of each token without text yet: where it ends in the window
        self._held: list[str] = []  # texts of tokens that may be part of a stop string
        self._stopped = False

    def push(self, token_ids: Sequence[int], last: bool = False) -> list[str]:
        """Takes the next tokens, gives the texts of the tokens that are now certain, oldest first; with `last` of all."""
        for token in token_ids:
            if not self._is_skipped(token):
                self._window.append(token)
            self._waiting.append(len(self._window))
            text = self._decode(self._window)
            if not (
                text.endswith(_UNFINISHED) or is_byte_token(self._spelling(self._window[-1]) if self._window else "")
            ):
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
        """Gives the waiting tokens their texts, where `text` is the window's."""
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
        if at is None:
            end = len(text) - (0 if last else self._may_begin_a_stop(text))
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

    def _may_begin_a_stop(self, text: str) -> int:
        """Counts the characters at the end of `text` with which a stop string may begin."""
        sizes = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return max(sizes, default=0)


def _decoder(tokenizer: TokenizerType, skip_special: bool) -> Callable[[Sequence[int]], str]:
    """Gives the function from ids to text; the library's own where there is one, since it never cleans up."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return lambda ids: backend.decode(list(ids), skip_special_tokens=skip_special)


def _spelling(tokenizer: TokenizerType) -> Callable[[int], str | None]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return (lambda token: None) if backend is None else backend.id_to_token


def _context(
    decode: Callable[[Sequence[int]], str], spelling: Callable[[int], str | None], before: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Finds what of the ids `before` decides how the next ids are decoded.

    Returns ids with a complete text, one where a token has a text by itself, and those of an unfinished character at the end.
    """
    before = list(before)
    start = next((i for i in reversed(range(len(before))) if _is_text(decode([before[i]]), spelling(before[i]))), None)
    tail = before[start or 0 :]
    ends = range(len(tail), max(len(tail) - _LONGEST_CHARACTER, 0), -1)
    end = next((end for end in ends if not decode(tail[:end]).endswith(_UNFINISHED)), len(tail))
    return tail[: end if start is None else 1], tail[end:]


def _is_text(text: str, spelling: str | None) -> bool:
    return bool(text) and _UNFINISHED not in text and not is_byte_token(spelling)
