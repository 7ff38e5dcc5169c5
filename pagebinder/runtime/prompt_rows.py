"""Embeddings that stand in prompts for tokens: parts of an image or a sound, or a prompt that was learned.

    prompt      [5, 9, embeds [2, C], 7]     ->     token ids  5  9  2^30+4  2^30+5  7
    tables      rows 4, 5 = embeds                  media      (digest of embeds, 2, 4)

A row is written once and read by the graph wherever its id stands, so chunked prefill, preemption, forks and the
prefix cache see tokens; what a prefix is told by besides ids is the digest. Equal embeddings are kept once. Rows that
no request holds any more stay until others need the place, so that an image that comes again finds its prefix.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import torch

from pagebinder.custom_ops.prompt_rows import FIRST_ROW_ID, MOST_POSITION, Embeds, PromptTables
from pagebinder.errors import CacheCapacityError, RequestError


class PromptRowsTakenError(CacheCapacityError):
    """Other requests hold the rows that embeddings need: when these end there is room."""


class HeldRows:
    """Rows that stay as they are until `release`, or as long as this object lives. `token_ids`: theirs. `digest`: of
    what they hold."""

    __slots__ = ("_holders", "digest", "token_ids")

    def __init__(self, digest: str, rows: Sequence[int], holders: set[int]) -> None:
        self.digest = digest
        self.token_ids = tuple(FIRST_ROW_ID + row for row in rows)
        self._holders = holders
        holders.add(id(self))

    def release(self) -> None:
        """May be called again, and by the collector at any time, so no lock is taken."""
        self._holders.discard(id(self))

    __del__ = release


class _Entry:
    __slots__ = ("holders", "rows")

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.holders: set[int] = set()


def _digest(next_position: int | None, contents: Sequence[torch.Tensor]) -> str:
    hashed = hashlib.sha256(repr(next_position).encode())
    for tensor in contents:
        hashed.update(tensor.contiguous().cpu().view(torch.uint8).numpy())
    return hashed.hexdigest()


class PromptRows:
    """The tables that a compiled model's graph reads, and who holds what of them. Threads may share it.

    Engines of one compiled model share them, too, as they share its weights.
    """

    def __init__(self, tables: PromptTables) -> None:
        self.tables = tables
        self.table, self.positions, self.features = tables.rows, tables.positions, tables.features
        self._free = list(range(len(self.table)))[::-1]
        self._entries: dict[str, _Entry] = {}  # by digest, those asked for last at the end
        self._lock = threading.Lock()

    @property
    def width(self) -> int:
        return self.table.shape[1]

    @property
    def num_held(self) -> int:
        """Rows that requests hold at present."""
        with self._lock:
            return sum(len(entry.rows) for entry in self._entries.values() if entry.holders)

    @property
    def axes(self) -> int:
        """Of positions; 0: they are one number, and rows have none of their own."""
        return 0 if self.positions is None else self.positions.shape[1]

    def hold(self, embeds: torch.Tensor | Embeds) -> HeldRows:
        """Rows with these embeddings [n, C], n >= 1, in the table's dtype, and with what `Embeds` says beside them:
        positions [n, A] where there are axes, features where layers add some, lookahead where attention has it.
        `next_position` is part of the digest, as it is of what the tokens behind them are.

        Raises:
            RequestError: other sizes, not floating, not finite, or more than the table has rows.
            PromptRowsTakenError: requests hold too many of them at present.
        """
        embeds = embeds if isinstance(embeds, Embeds) else Embeds(embeds)
        values = self._checked(embeds.values)
        written = [(self.table, values)]
        for table, contents in (
            (self.positions, self._checked_positions(embeds.positions, len(values))),
            (self.tables.lookahead, self._checked_lookahead(embeds.lookahead, len(values))),
            (self.tables.token_ids, self._checked_ids(embeds.token_ids, len(values))),
        ):
            written += [] if table is None else [(table, contents)]
        written += zip(self.features, self._checked_features(embeds.features, values))
        digest = _digest(embeds.next_position, [contents for _, contents in written])
        with self._lock:
            entry = self._entries.pop(digest, None)
            if entry is None:
                entry = _Entry(self._take(len(values)))
                rows = torch.tensor(entry.rows, device=self.table.device)
                with torch.no_grad():
                    for table, values in written:
                        table[rows] = values
            self._entries[digest] = entry
            return HeldRows(digest, entry.rows, entry.holders)

    def _checked(self, embeds: torch.Tensor) -> torch.Tensor:
        ok = isinstance(embeds, torch.Tensor) and embeds.is_floating_point() and embeds.dim() == 2
        if not ok or embeds.layout != torch.strided or embeds.is_meta:
            raise RequestError("Embeddings of a prompt are a dense floating tensor [tokens, width].")
        if embeds.shape[1] != self.width or not len(embeds):
            raise RequestError(
                f"Embeddings [{len(embeds)}, {embeds.shape[1]}]: the model's are {self.width} wide, and there must "
                "be at least one."
            )
        if len(embeds) > len(self.table):
            raise RequestError(
                f"{len(embeds)} embeddings are more than the {len(self.table)} that the model was compiled for; "
                f"compile it with CompileConfig(prompt_embeds={len(embeds)}) or more."
            )
        values = embeds.detach().resolve_neg().to(device=self.table.device, dtype=self.table.dtype)
        if not bool(values.isfinite().all()):
            raise RequestError(f"An embedding is not finite in the model's {self.table.dtype}.")
        return values

    def _checked_positions(self, positions: torch.Tensor | None, count: int) -> torch.Tensor | None:
        if self.positions is None:
            if positions is not None:
                raise RequestError(
                    "This model counts positions token by token: embeddings have none of their own."
                )
            return None
        ok = isinstance(positions, torch.Tensor) and positions.dtype == torch.int64
        ok = ok and positions.shape == (count, self.axes)
        if not ok or bool(((positions < 0) | (positions > MOST_POSITION)).any()):
            raise RequestError(
                f"Positions of {count} embeddings are int64 [{count}, {self.axes}], from 0 on to {MOST_POSITION:,}."
            )
        return positions.to(self.positions.device)

    def _checked_lookahead(self, lookahead: torch.Tensor | None, count: int) -> torch.Tensor | None:
        table = self.tables.lookahead
        if lookahead is None:
            return None if table is None else torch.zeros(count, dtype=table.dtype, device=table.device)
        if table is None:
            raise RequestError("This model's tokens see none behind them: embeddings have no lookahead.")
        ok = isinstance(lookahead, torch.Tensor) and lookahead.shape == (count,)
        ok = ok and lookahead.dtype in (torch.int32, torch.int64)
        farthest = torch.arange(count - 1, -1, -1, device=lookahead.device) if ok else None
        if not ok or bool(((lookahead < 0) | (lookahead > farthest)).any()):
            raise RequestError(
                f"lookahead of {count} embeddings is int64 [{count}], from 0 to as many as are behind each."
            )
        return lookahead.to(table)

    def _checked_ids(self, token_ids: torch.Tensor | None, count: int) -> torch.Tensor | None:
        table = self.tables.token_ids
        if table is not None and token_ids is None:
            raise RequestError(
                "This model reads token ids beside embeddings (it has embeddings of each layer): give Embeds(..., "
                "token_ids=...) of what stood in their place, as media_prompt() does."
            )
        if token_ids is None:
            return None
        fits = isinstance(token_ids, torch.Tensor) and token_ids.dtype == torch.int64
        if not fits or token_ids.shape != (count,):
            raise RequestError(f"token_ids of {count} embeddings are int64 [{count}].")
        return None if table is None else token_ids.to(table)

    def _checked_features(self, features: Sequence[torch.Tensor], values: torch.Tensor) -> list[torch.Tensor]:
        if features is None or not len(features):
            return [torch.zeros_like(values) for _ in self.features]
        if len(features) != len(self.features):
            raise RequestError(
                f"Embeddings with features for {len(features)} layers: this model adds them behind "
                f"{len(self.features)}."
            )
        checked = [self._checked(one) for one in features]
        if any(one.shape != values.shape for one in checked):
            raise RequestError(f"Features of {len(values)} embeddings are as many rows.")
        return checked

    def _take(self, count: int) -> list[int]:
        """Free rows; those that nobody holds go first who were asked for longest ago. Raises PromptRowsTakenError."""
        idle = [digest for digest, entry in self._entries.items() if not entry.holders]
        if len(self._free) + sum(len(self._entries[digest].rows) for digest in idle) < count:
            raise PromptRowsTakenError(
                f"{count} embeddings do not fit beside those of other requests ({len(self.table)} in all): wait for "
                "these to end, or compile with a larger CompileConfig(prompt_embeds=...)."
            )
        for digest in idle:
            if len(self._free) >= count:
                break
            self._free += self._entries.pop(digest).rows[::-1]
        return [self._free.pop() for _ in range(count)]
