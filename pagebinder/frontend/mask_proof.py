"""What an attention mask means, found by running the graph that makes it.

The subgraph behind a mask is evaluated at several lengths, the largest more than twice every number that occurs
in it or in the sizes it is made of, and compared with the masks of the known family:

    visible(p, j) = (j <= p if causal) and (p - window < j if window) and (j // chunk == p // chunk if chunk)

Lengths up to some thousand are compared entry by entry. At large ones (a window of 128k tokens) the entries are
those around every place where such a mask can change: rows, columns and distances near the subgraph's numbers, their
sums and differences, multiples of its divisors, and wherever one of its vectors has a step or a bend
(`mask_values.py`). What the graph makes of its numbers (a buffer times a literal, an exponential) is not known, so
all that some tokens of a far sequence see is looked at first, which tells windows and chunks, and is compared, too.

A mask that depends on anything but the number of tokens and the positions, or that differs in one entry, is not
proven, and the reason says which.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from pagebinder.custom_ops.attention.semantic import visible_keys
from pagebinder.frontend.audit import computes_with_sizes
from pagebinder.frontend.mask_reach import HIDDEN, is_straight, numbers_in, reach_of
from pagebinder.frontend.mask_values import (
    MaskNotProven,
    NotPointwise,
    Values,
    ancestors,
    constant_of,
    depends_on_tokens,
    evaluated,
    is_parameter,
    is_size,
    learned_as_zeros,
)

__all__ = [
    "FAR_SIZE",
    "MaskFacts",
    "MaskNotProven",
    "MaskTerm",
    "chosen_places",
    "max_tokens",
    "prove_mask",
    "prove_terms",
    "require_served",
]

SMALL_SIZES = (2, 3, 17, 64, 257)
LEAST_SIZE = 520  # of the largest length
WHOLE_SIZE = 2048  # masks up to this size are compared entry by entry
LARGEST_WHOLE_SIZE = (
    12_288  # the same, where a mask cannot be evaluated at chosen entries only, or has no rule
)
LARGEST_SIZE = 1 << 22
FAR_SIZE, FAR_WHOLE_SIZE = 1 << 17, 4096  # where the reach is not known: at chosen entries, entry by entry
FAR_ROWS_SIZE = 2 * FAR_SIZE + 3  # whole rows, which tell a window of FAR_SIZE from none
MAX_CHOSEN = 700  # rows and columns at a large size


@dataclass(frozen=True, kw_only=True)
class MaskFacts:
    """A proven mask: window and chunk in tokens, None = unlimited."""

    causal: bool
    window: int | None = None
    chunk: int | None = None

    def visible(self, p: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """Does the query at p see the key at j? (they broadcast)"""
        return visible_keys(p, j, window=self.window, chunk=self.chunk, causal=self.causal)

    def describe(self) -> str:
        parts = ["causal" if self.causal else "bidirectional"]
        parts += [f"window={self.window}"] if self.window is not None else []
        parts += [f"chunk={self.chunk}"] if self.chunk is not None else []
        return ", ".join(parts)


@dataclass(frozen=True)
class MaskTerm:
    """One of the masks of a layer.

    kind: "mask" (bool visible, or additive), "visible" or "hidden" (nonzero = so), "biased" (hidden by -1e9 or less,
    beside a bias), "factor" (multiplies scores before the others hide any: 1 where they leave visible, else 0 or 1).
    is_learned: it is made of parameters that hide nothing, and taken as if they were 0.
    """

    node: Node
    kind: str = "mask"
    is_learned: bool = False


def require_served(facts: MaskFacts) -> None:
    """Raises MaskNotProven: the mask is known, but no layer's state is kept for it."""
    if facts.window is not None and facts.chunk is not None:
        raise MaskNotProven(f"the mask is {facts.describe()}: a window inside chunks is not served")


def prove_mask(mask: Node) -> MaskFacts:
    """Classify the mask that `mask` computes ([.., T, T], bool or additive float).

    Raises:
        MaskNotProven: with the reason.
    """
    return prove_terms((MaskTerm(mask),))


def prove_terms(terms: Sequence[MaskTerm]) -> MaskFacts:
    """Classify what several masks leave visible together; see `prove_mask`."""
    nodes = ancestors(*(t.node for t in terms))
    learned = [t.node for t in terms if t.is_learned]
    weights = learned_as_zeros(ancestors(*learned)) if learned else {}
    if depends_on_tokens(nodes, *(t.node for t in terms)):
        raise MaskNotProven("the mask depends on the values of the tokens")
    limit = max_tokens(nodes[0].graph)
    of_places = [n for n in nodes if not (weights and is_parameter(n))]
    _, numbers, divisors = numbers_in(of_places)
    far = min(FAR_SIZE, limit or FAR_SIZE)
    found = [_rows_at(terms, nodes, min(FAR_ROWS_SIZE, limit or FAR_ROWS_SIZE), weights)]
    numbers |= {n for r in found if r is not None for n in (r.window, r.chunk) if n is not None}
    reach = reach_of(numbers, divisors)
    if sum(numbers) + sum(divisors) > LARGEST_SIZE // 2 and limit is None:
        raise MaskNotProven(
            f"the mask's numbers reach {reach} tokens, too many to evaluate at twice that size"
        )
    largest = min(max(2 * reach + 3, LEAST_SIZE), limit or LARGEST_SIZE)
    most = LARGEST_WHOLE_SIZE if any(map(_is_matrix, of_places)) else WHOLE_SIZE
    whole = {min(s, largest) for s in SMALL_SIZES} | ({largest} if largest <= most else set())
    seen = {size: _visible(terms, nodes, size, weights) for size in sorted(whole)}
    if largest > most:
        rows, columns, chosen = _visible_at_chosen(terms, nodes, largest, weights, numbers, divisors)
    else:
        rows = columns = torch.arange(largest, device="cpu")
        chosen = seen[largest]
    if largest > FAR_ROWS_SIZE and found[0] is not None:
        found.append(_rows_at(terms, nodes, largest, weights, (2,)))
    found = [far_rows for far_rows in found if far_rows is not None]
    for facts in _candidates(rows, columns, chosen, found):
        if torch.equal(_expected(facts, rows, columns), chosen) and all(
            torch.equal(_expected(facts, *[torch.arange(s, device="cpu")] * 2), seen[s]) for s in seen
        ):
            if counting := next((n for n in nodes if _counts_tokens(n)), None):
                raise MaskNotProven(f"the mask is computed with the number of tokens ({counting.name})")
            if miss := next((r.size for r in found if not r.agree(facts)), None):
                raise MaskNotProven(_ANOTHER_FAR.format(facts.describe(), miss))
            if largest < far and not (found and all(map(is_straight, nodes))):
                _require_far(terms, nodes, facts, far, weights, numbers, divisors)
            return facts
    raise MaskNotProven(_named(seen[min(64, largest)]) + f" (compared at sizes {sorted({*whole, largest})})")


def _counts_tokens(node: Node) -> bool:
    """Does it take the length as a number? What it makes of lengths that were not tried, nobody knows."""
    return node.op == "call_function" and not is_size(node) and computes_with_sizes(node)


def _is_matrix(node: Node) -> bool:
    """A buffer of the model with a row and a column for each token: its entries may follow no rule."""
    if node.op != "get_attr":
        return False
    shape = constant_of(node).shape
    return len(shape) >= 2 and min(shape[-2:]) > WHOLE_SIZE


@dataclass(frozen=True)
class _FarRows:
    """All that some tokens of a long sequence see: visible [rows, size]. The last one is the sequence's last, the one
    before is in front of all that it sees, if there is one."""

    rows: torch.Tensor
    visible: torch.Tensor

    @property
    def size(self) -> int:
        return self.visible.shape[1]

    @property
    def window(self) -> int | None:
        """How far the last token sees; None: to the first one, or not even itself."""
        seen = _seen_at_once(self.visible[-1])
        return seen if 0 < seen < self.size else None

    @property
    def chunk(self) -> int | None:
        """How far the one before sees, as the last one of another chunk."""
        if self.window is None or int(self.rows[-2]) != self.size - 1 - self.window:
            return None
        return _seen_at_once(self.visible[-2][: self.size - self.window]) or None

    def agree(self, facts: MaskFacts) -> bool:
        return torch.equal(_expected(facts, self.rows, torch.arange(self.size, device="cpu")), self.visible)


def _seen_at_once(row: torch.Tensor) -> int:
    """How many of its last entries are visible."""
    return int(row.flip(0).int().cumprod(0).sum())


def _rows_at(
    terms, nodes, size: int, weights: dict, parts: tuple[int, ...] = (2, 3, 7, 29)
) -> _FarRows | None:
    """The rows of a sequence's last token, of the one in front of all that it sees, and some in other places, `size`
    over these numbers. None: the mask cannot be evaluated at chosen entries."""
    values, columns = Values(nodes, size, weights=weights), torch.arange(size, device="cpu")

    def visible(rows: list[int]) -> torch.Tensor:
        at = torch.tensor(rows, device="cpu")
        return _together(terms, [values.at(t.node, at, columns) for t in terms], len(rows), size)

    try:
        with evaluated("the mask", size):
            last = visible([size - 1])
            before = size - 1 - _seen_at_once(last[0])
            others = [size // n for n in parts] + ([before] if before >= 0 else [])
            return _FarRows(
                torch.tensor([*others, size - 1], device="cpu"), torch.cat([visible(others), last])
            )
    except NotPointwise:
        return None


_ANOTHER_FAR = "the mask is {} at some hundred tokens, and another one at {}"


def _require_far(
    terms, nodes, facts: MaskFacts, size: int, weights: dict, numbers: set[int], divisors: set[int]
) -> None:
    """Raises unless a mask is the same at a length that few sequences have."""
    edges = numbers | {n for n in (facts.window, facts.chunk) if n is not None}
    most_whole = WHOLE_SIZE if all(map(is_straight, nodes)) else FAR_WHOLE_SIZE
    rows, columns, visible = _visible_at_chosen(terms, nodes, size, weights, edges, divisors, most_whole)
    if not torch.equal(_expected(facts, rows, columns), visible):
        raise MaskNotProven(_ANOTHER_FAR.format(facts.describe(), size))


def max_tokens(graph: torch.fx.Graph) -> int | None:
    """The longest sequence that the graph was captured for, where a buffer of the model limits it."""
    inputs = (n for n in graph.nodes if n.op == "placeholder" and n.target == "input_ids")
    return next((n.meta.get("max_tokens") for n in inputs), None)


def _visible(terms: Sequence[MaskTerm], nodes: list[Node], size: int, weights: dict) -> torch.Tensor:
    """What a sequence of `size` tokens sees: boolean [size, size]."""
    with evaluated("the mask", size):
        values = Values(nodes, size, weights=weights)
        return _together(terms, [values.whole(t.node) for t in terms], size, size)


def _visible_at_chosen(
    terms,
    nodes,
    size: int,
    weights: dict,
    numbers: set[int],
    divisors: set[int],
    most_whole: int | None = None,
):
    """(rows, columns, visible [rows, columns]) at entries that tell the masks of the family apart.

    `most_whole`: the size of which a mask that has no entries of its own is evaluated in full instead.
    """
    values = Values(nodes, size, weights=weights)
    try:
        with evaluated("the mask", size):
            chosen = chosen_places(size, numbers, divisors, values.vectors().values())
            parts = [values.at(t.node, chosen, chosen) for t in terms]
            return chosen, chosen, _together(terms, parts, len(chosen), len(chosen))
    except NotPointwise as miss:
        if most_whole is not None:
            size = min(size, most_whole)
        elif size > LARGEST_WHOLE_SIZE:
            raise MaskNotProven(
                f"the mask's numbers need {size} tokens, and it cannot be evaluated in parts: {miss}"
            ) from miss
    everything = torch.arange(size, device="cpu")
    return everything, everything, _visible(terms, nodes, size, weights)


def chosen_places(size: int, numbers: set[int], divisors: set[int], vectors) -> torch.Tensor:
    """Positions near which a mask made of these numbers can change, in order; and some others."""
    marks = {0, size - 1, size // 2}
    for a, b in itertools.product(sorted(numbers)[-12:], repeat=2):
        marks |= {a, a + b, abs(a - b), 2 * a}
    products = {math.prod(c) for n in range(1, 3) for c in itertools.combinations(sorted(divisors), n)}
    for d in sorted(products)[-8:]:
        marks |= {k * d for k in (1, 2, 3)} | {size // d * d} | {n * d for n in sorted(numbers)[-6:]}
    for vector in vectors:
        marks |= _bends(vector, size)
    near = {m + e for m in marks for e in (-2, -1, 0, 1, 2)}
    # Distances from a row count as well: a second round of sums with the numbers themselves.
    near |= {m + n + e for m in list(marks)[:40] for n in sorted(numbers)[-3:] for e in (-1, 0, 1)}
    generator = torch.Generator().manual_seed(0)
    others = torch.randint(size, (64,), generator=generator, device="cpu").tolist()
    known = sorted(n for n in near if 0 <= n < size)
    step = -(-len(known) // MAX_CHOSEN)
    return torch.tensor(sorted({*known[:: max(step, 1)], *others}), device="cpu")


def _bends(vector: torch.Tensor, size: int) -> set[int]:
    """Where the values of a vector of tokens do not go on in a straight line: a few of those places."""
    if vector.numel() != size or (vector.dtype is torch.bool and size < 3):
        return set()
    second = vector.reshape(-1).double().diff(n=2).nan_to_num(0.0)
    places = second.nonzero().reshape(-1)
    if len(places) > 24:
        places = torch.cat((places[:12], places[-12:]))
    return {int(p) + 1 for p in places}


def _together(terms: Sequence[MaskTerm], values: list[torch.Tensor], rows: int, columns: int) -> torch.Tensor:
    visible = torch.ones(rows, columns, dtype=torch.bool, device="cpu")
    for term, value in zip(terms, values):
        heads = value.reshape(-1, *value.shape[-2:]) if value.dim() > 1 else value.reshape(1, 1, -1)
        if term.kind == "factor":
            continue
        first = _as_visible(heads[:1], term.kind)[0].expand(rows, columns)
        if len(heads) > 1 and not bool((_as_visible(heads, term.kind) == first).all()):
            raise MaskNotProven("the mask differs between heads")
        visible = visible & first
    for term, value in zip(terms, values):
        if term.kind == "factor":
            _require_harmless(value, visible)
    return visible


def _require_harmless(factor: torch.Tensor, visible: torch.Tensor) -> None:
    """Scores times 0 are not hidden: the other masks must hide them."""
    if not bool(((factor == 0) | (factor == 1)).all()):
        raise MaskNotProven("the scores are multiplied by something else than a mask of ones and zeros")
    if bool(((factor == 0) & visible).any()):
        raise MaskNotProven("the scores are multiplied by zero where no mask hides them")


def _as_visible(mask: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "biased":
        return mask > -1e9
    if kind != "mask":
        return mask.bool() if kind == "visible" else ~mask.bool()
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= -HIDDEN
    if not bool(((mask == 0) | hidden).all()):
        raise MaskNotProven("the mask adds a bias that is neither 0 nor a large negative number")
    return ~hidden


def _expected(facts: MaskFacts, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return facts.visible(rows[:, None], columns[None, :])


def _candidates(rows: torch.Tensor, columns: torch.Tensor, visible: torch.Tensor, found: list[_FarRows]):
    """The masks of the family that the largest evaluation, and rows of far sequences, leave possible; each is then
    compared in full.

    A window is one more than the largest visible distance; a chunk begins where a token does not see the one before.
    """
    distance = rows[:, None] - columns[None, :]
    causal = not bool((visible & (distance < 0)).any())
    yield MaskFacts(causal=causal)
    reach = int(distance[visible].abs().max()) + 1 if bool(visible.any()) else 1
    window = reach if bool((~visible & (distance >= 0)).any()) else None
    if window is not None:
        yield MaskFacts(causal=causal, window=window)
    breaks = ((distance == 1) & ~visible).any(1).nonzero()
    if len(breaks):
        chunk = int(rows[breaks[0]])
        yield MaskFacts(causal=causal, chunk=chunk)
        yield MaskFacts(causal=causal, chunk=chunk, window=window)
    for far in found:
        yield MaskFacts(causal=causal, window=far.window)
        yield MaskFacts(causal=causal, chunk=far.chunk)


def _named(visible: torch.Tensor) -> str:
    """A refusal that names the mask, if it is one that is known but not served; `visible` is of a short sequence."""
    unknown = "the mask is none of causal, window, chunk, full"
    size = len(visible)
    j = torch.arange(size, device="cpu")[None]
    p = j.T
    prefix = int(visible[0].sum())
    if 1 < prefix < size and torch.equal(visible, (j <= p) | (j < prefix)):
        return f"a prefix-LM mask (the first {prefix} tokens see each other, the others are causal) is not served"
    lead = int(visible[-1].long().cumprod(0).sum())
    rest = visible[:, lead:] if 0 < lead < size else visible
    window = int(rest.sum(1).max())
    streaming = (j <= p) & ((p - j < window) | (j < lead))
    if 0 < lead < size and torch.equal(visible, streaming):
        return f"{unknown}: the first {lead} tokens stay visible beside a window of {window} tokens"
    if torch.equal(visible, j < p):
        return f"{unknown}: a token sees the earlier ones but not itself"
    return unknown
