"""One definition per recurrence: from its scan follow the op over one sequence and its form over a paged cache.

    <name>(tokens..., weights..., *, options) -> out [T, ...]
    paged_<name>(tokens..., weights..., cache, block_table, seq_lens, query_start_loc, *, block_size, options)

What passes and the audit need to know of such an op is kept with it, in `RECURRENCES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.recurrent.checkpoints import scan_requests, scan_sequence

RECURRENCES: dict[torch._ops.OpOverload, Recurrence] = {}

_PAGED = "Tensor(a!) cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc"


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """A recurrence from a zero state, in float32.

    tokens, weights: its tensor operands in order, as schema arguments ("Tensor x"); those of tokens are [T, ...].
    options: its other arguments, as a schema ("float eps").
    scan: scan(state [R, *state shape] float32, *token operands [R, L, ...], *weights, **options) -> (out [R, L, ...],
        new state); it may overwrite the state it is given.
    check: raises ValueError for operands that do not fit, given all of them.
    state_shape: shape of one request's state, given all operands. A state of zeros must mean "no tokens yet".
    like: an empty tensor like the result, given all operands.
    """

    name: str
    tokens: tuple[str, ...]
    weights: tuple[str, ...] = ()
    options: str = ""
    scan: Callable
    check: Callable
    state_shape: Callable[..., tuple[int, ...]]
    like: Callable[..., torch.Tensor]

    @property
    def num_operands(self) -> int:
        return len(self.tokens) + len(self.weights)

    @property
    def semantic(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.pagebinder, self.name).default

    @property
    def paged(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.pagebinder, f"paged_{self.name}").default

    def run(self, *operands, **options) -> torch.Tensor:
        """The recurrence over one sequence."""
        self.check(*operands)
        scan, tokens = self._bound(operands, options)
        state = tokens[0].new_zeros((1, *self.state_shape(*operands)), dtype=torch.float32)
        out, _ = scan_sequence(scan, state, [x[None] for x in tokens])
        return out[0].to(self.like(*operands).dtype).contiguous()

    def run_paged(self, *args, block_size, **options) -> torch.Tensor:
        """The recurrence of a mixed batch over cache [N, *state shape] float32; zeros for padding.

        The arguments behind the operands are those of `checkpoints.scan_requests`.
        """
        operands, (cache, *metadata) = args[: self.num_operands], args[self.num_operands :]
        self.check_paged(operands, cache)
        scan, tokens = self._bound(operands, options)
        out = torch.zeros_like(self.like(*operands))
        return scan_requests(scan, tokens, out, cache, *metadata, block_size)

    def check_paged(self, operands, cache: torch.Tensor) -> None:
        """Raise ValueError for operands that do not fit, or a cache that does not fit them."""
        self.check(*operands)
        shape = tuple(self.state_shape(*operands))
        if tuple(cache.shape[1:]) != shape or cache.dtype != torch.float32:
            raise ValueError(f"the cache of a {self.name} is [N, {', '.join(map(str, shape))}] float32")

    def _bound(self, operands, options) -> tuple[Callable, list[torch.Tensor]]:
        tokens, weights = operands[: len(self.tokens)], operands[len(self.tokens) :]

        def scan(state, *parts):
            return self.scan(state, *parts, *weights, **options)

        return scan, list(tokens)


def define_recurrence(recurrence: Recurrence) -> None:
    """Register `pagebinder::<name>` and `pagebinder::paged_<name>`."""
    operands = ", ".join((*recurrence.tokens, *recurrence.weights))
    semantic, paged = [recurrence.options], ["int block_size", recurrence.options]
    fake = functools.partial(_fake, recurrence)
    for name, arguments, options, reference in (
        (recurrence.name, operands, semantic, recurrence.run),
        (f"paged_{recurrence.name}", f"{operands}, {_PAGED}", paged, recurrence.run_paged),
    ):
        keywords = ", ".join(filter(None, options))
        signature = f"({arguments}{', *, ' + keywords if keywords else ''}) -> Tensor"
        define_op(name, signature, reference=reference, fake=fake)
    RECURRENCES[recurrence.semantic] = recurrence


def _fake(recurrence: Recurrence, *args, **options) -> torch.Tensor:
    return recurrence.like(*args[: recurrence.num_operands])


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
