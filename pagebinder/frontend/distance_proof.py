"""A bias by distance found and proven by running the graph that makes it: T5's buckets, a learned table, a formula.

    bias[h, p, j] = table[h, c],    c = j - p + num_behind, kept in 0 .. num_behind

    distance p - j    num_behind and more | ... | 2 | 1 | 0        of keys that a causal query sees

A table that ends with the longest sequence or with a window has an entry for each distance; any other must stay the
same from some distance on, as T5's last bucket does. The bias is run for the longest sequence there is, or one of
FAR_SIZE tokens, whose last row has all distances, and compared with that row at rows all over that sequence.

A learned bias is run with other weights, 1, 2, 3, ...: what comes out says which entry of the parameter (or of what
is made of parameters alone) is where, and so the table is made of it in the graph, whatever its values will be.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from pagebinder.frontend.alibi_proof import Bias, heads_of, prove_alibi
from pagebinder.frontend.mask_proof import (
    FAR_SIZE,
    MaskFacts,
    MaskNotProven,
    chosen_places,
    max_tokens,
)
from pagebinder.frontend.mask_reach import is_straight, numbers_in
from pagebinder.frontend.mask_values import NotPointwise, Values, ancestors, evaluated, learned_in, made_of
from pagebinder.graph_tools import CASTS, IDENTITIES, arg, aten, is_call, val

SMALL_SIZES = (2, 3, 17, 97)
WHOLE_SIZE = 2048  # up to this length a bias whose entries cannot be computed one by one is run in full
EDGE = 48  # tokens at the beginning, in the middle and at the end that are compared
# Ops that take entries of a table, whose indices tell distances apart, or move dimensions.
LOOK_UPS = (
    aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.movedim.int,
)  # fmt: skip
LARGEST_BESIDE_NEAR_FILL = 1e3  # hidden scores filled with -1e4 are below all that have such a bias


@dataclass(frozen=True)
class Learned:
    """Entries of `parameter` times `factor`, as `dtype`, times `outer` in float32: `entries` count through it,
    flattened; how many it has stand for 0. It is one of the graph's, or made of some."""

    parameter: Node
    entries: torch.Tensor
    factor: float
    dtype: torch.dtype
    outer: float

    @property
    def has_zeros(self) -> bool:
        return bool((self.entries == math.prod(val(self.parameter).shape)).any())


@dataclass(frozen=True)
class Slopes:
    """ALiBi's, [H]: float32, or learned."""

    values: torch.Tensor | Learned


@dataclass(frozen=True)
class DistanceBias:
    """[H, N], the last column is distance 0: float32, or learned."""

    values: torch.Tensor | Learned

    @property
    def num_behind(self) -> int:
        table = self.values.entries if isinstance(self.values, Learned) else self.values
        return table.shape[1] - 1


def prove_bias(
    bias: Bias, facts: MaskFacts, num_heads: int, *, shifts: bool = True, near_fill: bool = False
) -> Slopes | DistanceBias:
    """ALiBi (`shifts`: see `prove_alibi`), or a bias by distance (`near_fill`: hidden scores are filled with a number
    that is not far below the others). ALiBi that is a parameter as a whole is taken as it is now.

    Raises:
        MaskNotProven: it is neither.
    """
    by_distance = functools.partial(prove_distance_bias, bias, facts, num_heads, near_fill=near_fill)
    if bias.slopes is None:
        return by_distance()

    def alibi() -> Slopes:
        return Slopes(prove_alibi(bias, facts, num_heads, shifts=shifts))

    first, second = (by_distance, alibi) if bias.is_learned else (alibi, by_distance)
    try:
        return first()
    except MaskNotProven as miss:
        try:
            return second()
        except MaskNotProven:
            raise miss from None


def prove_distance_bias(
    bias: Bias, facts: MaskFacts, num_heads: int, *, near_fill: bool
) -> Slopes | DistanceBias:
    """The table of a bias that depends on the head and the distance alone; slopes, if they are learned.

    Raises:
        MaskNotProven: it is another bias.
    """
    if not facts.causal or facts.chunk is not None:
        raise MaskNotProven(f"a bias by distance is not served where the mask is {facts.describe()}")
    nodes, limit = ancestors(bias.node), max_tokens(bias.node.graph)
    learned = learned_in(nodes)
    if learned and not bias.is_learned:
        raise MaskNotProven("a parameter hides entries, and others have a bias by distance")
    of_weights = set(ancestors(*learned)) if learned else set()
    with_tokens = [n for n in nodes if n not in of_weights]
    reach, numbers, divisors = numbers_in(with_tokens)
    numbers |= {entries for n in learned for entries in val(n).shape}
    run = _Runs(bias, nodes, learned[0] if learned else None)
    size = limit or FAR_SIZE
    is_near = learned and 2 * reach < WHOLE_SIZE < size and all(map(_is_straight, with_tokens))
    if is_near and not run.is_in_parts(size):
        size = WHOLE_SIZE  # nothing that is known tells longer distances apart
    if size != limit and facts.window is None and reach > size // 2:
        raise MaskNotProven(f"the numbers of the bias reach {reach} tokens, too far to be compared")
    if len(learned) > 1:
        raise MaskNotProven("the bias added to the scores is made of several parameters in several places")
    made = made_of(learned, nodes)
    if miss := next((n for n in made - set(learned) if not _is_linear_op(n, made)), None):
        raise MaskNotProven(f"{_MORE_THAN_ENTRIES} ({miss.target})")
    if learned and near_fill:
        raise MaskNotProven("hidden scores are filled with a number that a learned bias may come close to")
    values = run.last_row(size)  # [H, size], by distance
    for small in sorted({min(s, size) for s in SMALL_SIZES}):
        run.compare(values, facts, small, None)
    places = run.places(size, numbers, divisors)
    run.compare(values, facts, size, places)
    if learned:
        drawn = run.last_row(size, run.drawn)
        run.compare(drawn, facts, size, places, run.drawn)
    if learned and _is_linear(values) and _is_linear(drawn):
        entries, factor = run.entries(size, 2)  # of the distances 0, where it is 0, and 1
        of_heads = entries[:, 1].expand(num_heads if len(entries) == 1 else -1).contiguous()
        if len(of_heads) == num_heads:
            return Slopes(Learned(learned[0], of_heads, -factor, run.dtype, bias.factor))
    values = values[:, : _num_distances(values, facts, size == limit)]
    if near_fill and float(values.abs().amax()) > LARGEST_BESIDE_NEAR_FILL:
        raise MaskNotProven(
            "hidden scores are filled with a number that is not far below those with the bias"
        )
    if len(values) not in (1, num_heads):
        raise MaskNotProven(f"a bias of {len(values)} heads is added to the scores of {num_heads}")
    if not learned:
        return DistanceBias((values * bias.factor).float().flip(1).expand(num_heads, -1).contiguous())
    entries, factor = run.entries(size, values.shape[1])
    entries = entries.flip(1).expand(num_heads, -1).contiguous()
    return DistanceBias(Learned(learned[0], entries, factor, run.dtype, bias.factor))


def _is_linear(values: torch.Tensor) -> bool:
    """Of a row by distance [H, size]: are its values slope * distance?"""
    distances = torch.arange(values.shape[1], dtype=values.dtype, device="cpu")
    expected = values[:, 1:2] * distances
    return values.shape[1] > 2 and bool(values[:, 1].any()) and torch.allclose(values, expected, 1e-12, 0.0)


def _is_straight(node: Node) -> bool:
    return is_straight(node) or is_call(node, *LOOK_UPS)


def _is_linear_op(node: Node, made: set[Node]) -> bool:
    """Is a value made of weights linear in them? Then what it does to some weights tells what it does to all."""
    if is_call(node, *_LINEAR, *LOOK_UPS, *CASTS, *IDENTITIES):
        return val(node).is_floating_point()
    if is_call(node, aten.dropout.default):
        return not arg(node, 2, "train")
    if is_call(node, aten.div.Tensor, aten.div.Scalar) and node.args[0] not in made:
        return False
    return is_call(node, *_LINEAR_BESIDE) and sum(n in made for n in node.all_input_nodes) == 1


def _num_distances(values: torch.Tensor, facts: MaskFacts, is_all: bool) -> int:
    """How many distances have an entry of their own, the last one stands for all beyond it. `is_all`: there are no
    longer ones."""
    size = values.shape[1]
    seen = size if facts.window is None else min(facts.window, size)
    if not bool(values[:, :seen].isfinite().all()):
        raise MaskNotProven("the bias of a key that is visible is not finite")
    differs = (values[:, :seen] != values[:, seen - 1 : seen]).any(0).nonzero()
    needed = int(differs[-1]) + 2 if len(differs) else 1
    if not is_all and seen == size and needed > size // 2:
        raise MaskNotProven(
            "the bias added to the scores is neither linear in the distance, as ALiBi is, nor the same from some "
            "distance on, as T5's is"
        )
    return needed


class _Runs:
    """Runs a bias, in float64 if it is learned: with weights 1, 2, 3, ... if it is not said otherwise. `drawn`:
    others, of both signs."""

    def __init__(self, bias: Bias, nodes: list[Node], parameter: Node | None) -> None:
        self.bias, self.nodes, self.parameter = bias, nodes, parameter
        self._shape = () if parameter is None else val(parameter).shape
        self.dtype = None if parameter is None else _narrowest(nodes, parameter)
        self._numbers = torch.arange(1, 1 + math.prod(self._shape), dtype=torch.float64, device="cpu")
        generator = torch.Generator().manual_seed(0)
        self.drawn = torch.randn(len(self._numbers), generator=generator, dtype=torch.float64, device="cpu")

    def is_in_parts(self, size: int) -> bool:
        """Can entries be computed that are asked for, and no others?"""
        last = torch.tensor([size - 1], device="cpu")
        try:
            with evaluated("the bias", size):
                self._values(size, None).at(self.bias.node, last, last)
        except NotPointwise:
            return False
        return True

    def last_row(self, size: int, weights: torch.Tensor | None = None) -> torch.Tensor:
        """[H, size]: the bias of the last token for the keys at distances 0, 1, ..."""
        last, everything = torch.tensor([size - 1], device="cpu"), torch.arange(size, device="cpu")
        return self._at(size, last, everything, weights)[:, -1].flip(1).contiguous()

    def places(self, size: int, numbers: set[int], divisors: set[int]) -> torch.Tensor:
        """Rows, and columns as well, all over a sequence: its ends, its middle, and where the bias may change."""
        found = {*range(EDGE), *range(size - EDGE, size), *range(size // 2, size // 2 + EDGE)}
        with evaluated("the bias", size):
            vectors = self._values(size, None).vectors().values()
        found |= set(chosen_places(size, numbers, divisors, vectors).tolist())
        return torch.tensor(sorted(n for n in found if 0 <= n < size), device="cpu")

    def compare(
        self,
        values: torch.Tensor,
        facts: MaskFacts,
        size: int,
        places: torch.Tensor | None,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Is the bias of `size` tokens the one that `values` say, wherever a key is visible? At some rows and
        columns, or at all."""
        found = self._whole(size, weights) if places is None else self._at(size, places, places, weights)
        places = torch.arange(size, device="cpu") if places is None else places
        visible = facts.visible(places[:, None], places[None])
        distance = (places[:, None] - places[None]).clamp(min=0)
        expected = values[:, distance]
        error = (found - expected).masked_fill(~visible, 0.0).abs()
        rounding = 0.0
        if self.parameter is None:  # of a formula, which may be computed in other blocks
            rounding = (
                4 * torch.finfo(torch.float32).eps * (found.abs() + expected.abs()).nan_to_num(0.0, 0.0)
            )
        if not bool((error <= rounding).all()):
            raise MaskNotProven(
                "the bias added to the scores depends on more than the head and the distance: it is neither ALiBi "
                "nor a bias by distance"
            )

    def entries(self, size: int, num_distances: int) -> tuple[torch.Tensor, float]:
        """Which entries of the parameter the last row is, [H, num_distances] by distance (see `Learned`), and what
        they are multiplied with.

        Raises:
            MaskNotProven: the bias is more than that.
        """
        drawn = self.drawn
        told = (torch.zeros_like(drawn), torch.ones_like(drawn), drawn, self._numbers)
        zeros, ones, values, numbers = (self.last_row(size, w)[:, :num_distances] for w in told)
        factor = next((float(x) for x in ones.flatten() if x != 0), 1.0)
        if not bool((zeros == 0).all() & ((ones == factor) | (ones == 0)).all()):
            raise MaskNotProven(_MORE_THAN_ENTRIES)
        entries = (numbers / factor).round().long() - 1
        if bool((entries < -1).any() | (entries >= len(drawn)).any()):
            raise MaskNotProven(_MORE_THAN_ENTRIES)
        entries = torch.where(entries < 0, len(drawn), entries)
        expected = factor * torch.cat([drawn, drawn.new_zeros(1)])[entries]
        if not bool(((values - expected).abs() <= 1e-9 * abs(factor)).all()):
            raise MaskNotProven(_MORE_THAN_ENTRIES)
        return entries, factor

    def _at(self, size: int, rows: torch.Tensor, columns: torch.Tensor, weights=None) -> torch.Tensor:
        """[H, rows or 1, columns]"""
        try:
            with evaluated("the bias", size):
                found = heads_of(self._values(size, weights).at(self.bias.node, rows, columns))
        except NotPointwise as miss:
            if size > WHOLE_SIZE:
                raise MaskNotProven(
                    f"the bias needs {size} tokens, and it cannot be run in parts: {miss}"
                ) from miss
            found = self._whole(size, weights)
            found = found[:, rows if found.shape[1] > 1 else slice(None)][..., columns]
        return found.double()

    def _whole(self, size: int, weights=None) -> torch.Tensor:
        with evaluated("the bias", size):
            return heads_of(self._values(size, weights).whole(self.bias.node)).double()

    def _values(self, size: int, weights: torch.Tensor | None) -> Values:
        if self.parameter is None:
            return Values(self.nodes, size)
        weights = (self._numbers if weights is None else weights).view(self._shape)
        return Values(self.nodes, size, weights={self.parameter: weights})


def _narrowest(nodes: list[Node], parameter: Node) -> torch.dtype:
    """The coarsest dtype on the way from a parameter to the bias."""
    dtypes = [val(n).dtype for n in made_of([parameter], nodes)]
    return max((d for d in dtypes if d.is_floating_point), key=lambda d: torch.finfo(d).eps)


# Ops that move values of weights, and those that are linear beside something else.
_LINEAR = (
    aten.permute.default, aten.transpose.int, aten.mT.default, aten.t.default, aten.numpy_T.default,
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.default,
    aten.select.int, aten.slice.Tensor, aten.expand.default, aten.expand_as.default, aten.clone.default,
    aten.contiguous.default, aten.neg.default, aten.flip.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.constant_pad_nd.default,
)  # fmt: skip
_LINEAR_BESIDE = (
    aten.div.Tensor, aten.div.Scalar, aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.sub.Tensor,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf,
)  # fmt: skip
_MORE_THAN_ENTRIES = (
    "the bias added to the scores is by distance, but more than entries of one parameter, or of what is made of "
    "parameters alone, times a number"
)
