"""Tokens -> text, one token at a time, and the search for stop strings.

A token may end in the middle of a character, so text appears only when it is complete; what is left at the end
is decoded as it is.

Where tokens that stand for bytes are read as one run (byte fallback), a later byte can make an earlier one invalid
that has been shown as a character. Then the text goes on with what the tokens behind that one are by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The text of one request. `text` is everything decoded; `visible_text` what may be shown already."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._hold_back = max((len(s) for s in self._stop), default=1) - 1
        self._pending: list[int] = []

    def append(self, token_id: int) -> bool:
        """Add one token; True if a stop string is complete (the text is cut before it)."""
        self._pending.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises this very type: the text does not begin as it did before
            piece = self._tokenizer.decode(self._pending, skip_special_tokens=self._skips)
            self._stream = DecodeStream(skip_special_tokens=self._skips)
            self._stream.step(self._tokenizer, token_id)
        if piece:
            self._pending.clear()
            self._extend(piece)
        return self.stopped

    def finish(self) -> None:
        """Decode what was held back as an incomplete character."""
        if self._pending and not self.stopped:
            self._extend(self._tokenizer.decode(self._pending, skip_special_tokens=self._skips))
        self._pending.clear()
        self._hold_back = 0

    @property
    def visible_text(self) -> str:
        if self.stopped or not self._hold_back:
            return self.text
        return self.text[: max(0, len(self.text) - self._hold_back)]

    def _extend(self, piece: str) -> None:
        searched = max(0, len(self.text) - self._hold_back)
        self.text += piece
        found = [i for i in (self.text.find(s, searched) for s in self._stop) if i >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
