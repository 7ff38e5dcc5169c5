"""A tokenizer from its file alone, without transformers, whose import takes longer than a small model's start."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import Tokenizer

from pagebinder.errors import CheckpointError

FILE_NAME = "tokenizer.json"


class SavedTokenizer:
    """What engines and encoders ask of a tokenizer. The file is read when the first text comes, not before.

    `truncation_side`: where texts that are too long for an encoder are cut, "right" or "left".
    """

    def __init__(self, path: Path, truncation_side: str = "right") -> None:
        self.path, self.truncation_side = path, truncation_side
        self._cutting: dict[int, Tokenizer] = {}

    @functools.cached_property
    def backend_tokenizer(self) -> Tokenizer:
        """Raises CheckpointError: the file cannot be read."""
        try:
            return Tokenizer.from_file(str(self.path))
        except Exception as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """text -> {"input_ids": token ids}."""
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def encode_batch(self, texts: list[str], max_length: int | None = None) -> list[list[int]]:
        """Token ids of each text with special tokens, which stay if a text is cut to `max_length`."""
        tokenizer = self.backend_tokenizer
        if max_length is not None:
            if max_length not in self._cutting:  # one of its own: others use the first as it is
                self._cutting[max_length] = Tokenizer.from_str(tokenizer.to_str())
                self._cutting[max_length].enable_truncation(max_length, direction=self.truncation_side)
            tokenizer = self._cutting[max_length]
        return [encoding.ids for encoding in tokenizer.encode_batch(texts)]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def save_tokenizer(tokenizer, path: Path) -> None:
    """Write the tokenizer as it works now: transformers may have changed what its own file says."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.save(str(path))
