"""A token on its own, as log-probabilities name it: its text, and its bytes where it is a part of a character.

Byte-level vocabularies write a byte as one printable character: those that Latin-1 prints are themselves, the others
follow from U+0100 on, in the order of bytes (Radford et al., 2019). Others write it as <0xNN>. Where a token's text
depends on whether it is the first of a text (a blank before a word, "##" of its continuation), it is not the first.
"""

from __future__ import annotations

import functools
import re
from typing import Any

_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTED]
BYTES = {chr(byte): byte for byte in _PRINTED} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Of a tokenizer's tokens; without one, tokens are called by their ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """A part of a character as "bytes:\\xe2\\x82", as in OpenAI's API."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        text = self._behind_another(token_id)
        if REPLACEMENT not in text or (found := self._bytes(token_id)) is None:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def bytes(self, token_id: int) -> list[int] | None:
        """UTF-8; of tokens in a row they add up to the text's. None: not known."""
        if self._tokenizer is None:
            return None
        text = self._behind_another(token_id)
        return list(text.encode()) if REPLACEMENT not in text else self._bytes(token_id)

    def _behind_another(self, token_id: int) -> str:
        if self._other is None:
            return self._tokenizer.decode([token_id])
        other, text = self._other
        both = self._tokenizer.decode([other, token_id])
        return both.removeprefix(text) if both.startswith(text) else self._tokenizer.decode([token_id])

    @functools.cached_property
    def _other(self) -> tuple[int, str] | None:
        """A token with its text, behind which others are written; None: the tokenizer has no such thing."""
        ids = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        text = self._tokenizer.decode(ids[-1:])
        return (ids[-1], text) if text and REPLACEMENT not in text else None

    def _bytes(self, token_id: int) -> list[int] | None:
        piece = self._tokenizer.backend_tokenizer.id_to_token(token_id) or ""
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            return [int(byte[1], 16)]
        return [BYTES[c] for c in piece] if piece and all(c in BYTES for c in piece) else None
