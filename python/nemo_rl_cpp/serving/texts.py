"""From tokens as they come to text as clients read it: whole characters, and nothing from a stop string on."""

from tokenizers.decoders import DecodeStream

from nemo_rl_cpp.data.interfaces import TokenizerType


class TextStream:
    """The text of one answer, piece by piece.

    A piece is given when its characters are complete and when it cannot be the beginning of a stop string any more. The text
    ends before the first stop string, or behind it with `keep_stop`.
    """

    def __init__(
        self, tokenizer: TokenizerType, stops: tuple[str, ...] = (), keep_stop: bool = False, skip_special: bool = True
    ) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._ids: list[int] = []  # that the stream was given, and the text that it gave
        self._given = ""
        self._stops, self._keep_stop = stops, keep_stop
        self._held = ""
        self._stopped = False

    def push(self, token_ids: tuple[int, ...] | list[int], last: bool = False) -> str:
        """The text that is complete with these tokens; with `last` what was held back comes too."""
        if self._stopped:
            return ""
        self._held += "".join(self._piece(token) for token in token_ids)
        if last:
            self._held += self._rest()
        at = min(((found, text) for text in self._stops if (found := self._held.find(text)) >= 0), default=None)
        if at is not None:
            self._stopped = True
            end = at[0] + (len(at[1]) if self._keep_stop else 0)
            return self._take(end)
        return self._take(len(self._held) - (0 if last else self._may_begin_a_stop()))

    def _take(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _may_begin_a_stop(self) -> int:
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _piece(self, token: int) -> str:
        rest = ""
        try:
            text = self._stream.step(self._backend, token) or ""
        except Exception:  # noqa: BLE001 - its kind for bytes that form no character
            rest = self._rest()
            self._stream, self._ids, self._given = DecodeStream(skip_special_tokens=self._skip_special), [], ""
            text = self._stream.step(self._backend, token) or ""
        self._ids.append(token)
        self._given += text
        return rest + text

    def _rest(self) -> str:
        """What the stream holds back: the beginning of a character, whose end has not come."""
        whole = self._backend.decode(self._ids, skip_special_tokens=self._skip_special)
        rest = whole.removeprefix(self._given) if whole.startswith(self._given) else ""
        self._given += rest
        return rest


def text_of(tokenizer: TokenizerType, token_ids: list[int], **options: object) -> str:
    """The text of a whole answer, as `TextStream` gives it."""
    return TextStream(tokenizer, **options).push(token_ids, last=True)
