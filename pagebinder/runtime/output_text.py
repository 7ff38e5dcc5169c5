"""The text of a request's output, decoded when somebody reads it.

tokens   t0   t1    t2   t3  | t4 t5 ...        ends[i]: characters that may be shown once there are i tokens
text     |abc|d    |efg |    |
ends   0     3 4       7    7                   text only grows, so what an earlier output shows stays readable
starts 0     3 4       7    9                   the same with what is held back, as a stop string may begin there

A finished output of which nobody has read a part is decoded at once, as `tokenizer.decode` does.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from pagebinder.runtime.detokenizer import Detokenizer
from pagebinder.runtime.request import Request


class OutputText:
    """Reads the generated tokens of `request`. With stop strings every token must be decoded as it comes."""

    def __init__(self, tokenizer: Tokenizer, request: Request, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._detokenizer = Detokenizer(tokenizer, stop)
        self._request = request
        self._ends, self._starts = [0], [0]
        self._whole: str | None = None
        # Tokens that the text shows: a token that ends the request is none of them. None: all.
        self.limit: int | None = None

    def anew(self) -> OutputText:
        """A reader of the same tokens that has read nothing: what it finishes may go on here."""
        return OutputText(self._tokenizer, self._request, self._stop)

    def append(self, token_id: int) -> bool:
        """Decode the request's next token; True if a stop string is complete."""
        stopped = self._detokenizer.append(token_id)
        self._ends.append(len(self._detokenizer.visible_text))
        self._starts.append(len(self._detokenizer.text))
        return stopped

    def catch_up(self, num_tokens: int) -> None:
        """Decode the first `num_tokens` generated tokens."""
        for token in self._generated(len(self._ends) - 1, num_tokens):
            self.append(token)

    def offsets(self, num_tokens: int) -> list[int]:
        """Where in the text each of the first `num_tokens` tokens begins, in characters."""
        shown = num_tokens if self.limit is None else min(num_tokens, self.limit)
        self.catch_up(shown)
        most = len(self._detokenizer.text if self._whole is None else self._whole)
        return [min(self._starts[min(i, shown)], most) for i in range(num_tokens)]

    def after(self, num_tokens: int, finished: bool) -> str:
        """The text that `num_tokens` tokens show; with `finished`, what was held back too."""
        num_tokens = num_tokens if self.limit is None else min(num_tokens, self.limit)
        if finished and self._whole is None:
            self._whole = self._finish(num_tokens)
        if finished:
            return self._whole
        self.catch_up(num_tokens)
        return self._detokenizer.text[: self._ends[num_tokens]]

    def _finish(self, num_tokens: int) -> str:
        if len(self._ends) == 1:
            return self._tokenizer.decode(self._generated(0, num_tokens), skip_special_tokens=True)
        self.catch_up(num_tokens)
        self._detokenizer.finish()
        return self._detokenizer.visible_text

    def _generated(self, first: int, end: int) -> Sequence[int]:
        prompt = self._request.num_prompt_tokens
        return self._request.all_token_ids[prompt + first : prompt + end]
