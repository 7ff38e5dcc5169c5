"""ALiBi found and proven by running the graph that makes a bias (Press et al., 2022).

    bias[h, p, j] = slope[h] * (j - p) + anything that depends on h and p alone

since a softmax does not change when a number is added to a whole row. A bias may hide entries as well, with -1e9 or
less; then it is a mask, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch.fx import Node

from pagebinder.frontend.mask_proof import (
    MaskFacts,
    MaskNotProven,
    MaskTerm,
    chosen_places,
    max_tokens,
)
from pagebinder.frontend.mask_reach import HIDDEN, numbers_in
from pagebinder.frontend.mask_values import (
    NotPointwise,
    Values,
    ancestors,
    constant_of,
    depends_on_tokens,
    evaluated,
    is_parameter,
    learned_as_zeros,
    learned_in,
)
from pagebinder.graph_tools import val

SIZE = 97
LARGE_SIZE, LARGEST_SIZE = 8192, 1 << 20
BFLOAT16_ROUNDING = torch.finfo(torch.bfloat16).eps  # of two roundings to the nearest
HIDDEN_BESIDE_BIAS = 1e9  # a bias itself may be as low as -1e4 at long distances


@dataclass(frozen=True)
class Bias:
    """What is added to the scores: `mask` hides entries (None = none does), `node` holds a bias (None = none).
    `slopes` [H]: those that it has now if it is ALiBi, None: it is something else."""

    mask: MaskTerm | None
    node: Node | None
    slopes: torch.Tensor | None = None
    factor: float = 1.0
    is_learned: bool = False


def classify_bias(node: Node, factor: Fraction) -> Bias:
    """A mask, a bias, or both. Raises MaskNotProven."""
    nodes = ancestors(node)
    if depends_on_tokens(nodes, node):
        raise MaskNotProven("the bias depends on the values of the tokens")
    learned, size = is_learned(node), min(SIZE, max_tokens(node.graph) or SIZE)
    # As they are now, learned ones may be 0 everywhere.
    value = heads_of(_run(nodes, node, size, learned_as_zeros(nodes) if learned else None))
    if value.dtype is torch.bool:
        raise MaskNotProven("a boolean mask is added to the scores as numbers")
    value = value * float(factor)
    if not learned and bool(((value == 0) | (value <= -HIDDEN)).all()):
        return Bias(MaskTerm(node), None)
    hidden = value <= -HIDDEN_BESIDE_BIAS
    mask = MaskTerm(node, "biased", learned) if bool(hidden.any()) else None
    if learned and not any(val(n).device.type == "meta" for n in learned_in(nodes)):
        value = heads_of(_run(nodes, node, size)) * float(factor)
    return Bias(mask, node, _slopes(value), float(factor), learned)


def is_learned(bias: Node) -> bool:
    """Is it made of parameters? Not, if they hide entries or could: a mask that was made one is taken as it is."""
    nodes = ancestors(bias)
    if not learned_in(nodes) or depends_on_tokens(nodes, bias):
        return False
    if any(val(n).device.type == "meta" for n in nodes if n.op == "get_attr"):
        return True
    if any(bool((constant_of(n) <= -HIDDEN).any()) for n in nodes if is_parameter(n)):
        return False
    size = min(SIZE, max_tokens(bias.graph) or SIZE)
    now, without = (_run(nodes, bias, size, weights) for weights in (None, learned_as_zeros(nodes)))
    return torch.equal(now <= -HIDDEN, without <= -HIDDEN)


def prove_alibi(bias: Bias, facts: MaskFacts, num_heads: int, *, shifts: bool = True) -> torch.Tensor:
    """The slopes [H] in float32, after the bias was compared with them wherever a key is visible. `shifts`: it may
    add a number to a whole row besides, which a softmax does not see.

    Raises:
        MaskNotProven: it is another bias.
    """
    if bias.slopes is None:
        raise MaskNotProven("the mask adds a bias that is neither 0, nor a large negative number, nor ALiBi")
    nodes, limit = ancestors(bias.node), max_tokens(bias.node.graph)
    for size in sorted({min(s, limit or s) for s in (2, 3, 17, SIZE)}):
        _compare(bias, facts, shifts, _run(nodes, bias.node, size), torch.arange(size, device="cpu"))
    if limit is None:
        reach, numbers, divisors = numbers_in([n for n in nodes if not (bias.is_learned and is_parameter(n))])
        size = max(LARGE_SIZE, 2 * reach + 3)
        if size > LARGEST_SIZE:
            raise MaskNotProven(f"the numbers of the bias reach {reach} tokens, too far to be compared")
        values = Values(nodes, size)
        parts = ((0, 40), (4000, 4040), (size - 40, size))
        places = torch.cat([torch.arange(start, end, device="cpu") for start, end in parts])
        try:
            with evaluated("the bias", size):
                vectors = values.vectors().values()
                places = torch.cat([places, chosen_places(size, numbers, divisors, vectors)]).unique()
                _compare(bias, facts, shifts, values.at(bias.node, places, places), places)
        except NotPointwise:
            if size > LARGE_SIZE:
                raise MaskNotProven(f"the bias needs {size} tokens, and it cannot be run in parts") from None
            _compare(bias, facts, shifts, _run(nodes, bias.node, 2048), torch.arange(2048, device="cpu"))
    else:
        _compare(bias, facts, shifts, _run(nodes, bias.node, limit), torch.arange(limit, device="cpu"))
    slopes = bias.slopes
    if len(slopes) not in (1, num_heads):
        raise MaskNotProven(f"ALiBi of {len(slopes)} heads is added to the scores of {num_heads}")
    return slopes.float().expand(num_heads).contiguous()


def _run(nodes: list[Node], node: Node, size: int, weights=None) -> torch.Tensor:
    with evaluated("the bias", size):
        return Values(nodes, size, weights=weights).whole(node)


def heads_of(value: torch.Tensor) -> torch.Tensor:
    """[H or 1, T or 1, T]"""
    return value.reshape(-1, *value.shape[-2:]) if value.dim() > 1 else value.reshape(1, 1, -1)


def _slopes(value: torch.Tensor) -> torch.Tensor | None:
    """The steps from key 0 to key 1 as the second query sees them: exact for slope * (j - p) and slope * j."""
    row = value[:, min(1, value.shape[1] - 1)].double()
    if row.shape[1] < 2 or not bool(row[:, :2].isfinite().all()) or bool((row[:, :2] <= -HIDDEN).any()):
        return None
    slopes = row[:, 1] - row[:, 0]
    return slopes if bool(slopes.any()) else None


def _compare(bias: Bias, facts: MaskFacts, shifts: bool, raw: torch.Tensor, places: torch.Tensor) -> None:
    """Is the bias slope * (j - p) but for a number per row, up to its own dtype's rounding?"""
    rounding = torch.finfo(raw.dtype).eps if raw.is_floating_point() else 0.0
    value = (heads_of(raw) * bias.factor).double()
    visible = facts.visible(places[:, None], places[None])
    diagonal = value.expand(-1, len(places), -1).diagonal(dim1=1, dim2=2)[..., None]
    expected = bias.slopes[:, None, None] * (places[None, :] - places[:, None])
    if not shifts and bool((diagonal.abs() > 4 * rounding * expected.abs().amax()).any()):
        raise MaskNotProven(
            "the bias of a row is not 0 for its own token: beside a sink, or where scores are filled with a number "
            "that is not far below them or bounded, rows may not be shifted"
        )
    error = (value - diagonal - expected).masked_fill(~visible, 0.0).abs()
    scale = value.masked_fill(~visible, 0.0).abs().amax() + diagonal.abs().amax() + expected.abs().amax()
    if bool((error <= 4 * rounding * scale).all()):
        return
    is_coarse = torch.equal(raw.bfloat16().to(raw.dtype), raw)
    if is_coarse and bool(
        (error <= BFLOAT16_ROUNDING * (value.abs() + diagonal.abs() + expected.abs())).all()
    ):
        raise MaskNotProven(
            "the bias added to the scores is ALiBi that was rounded to bfloat16, so that far keys share a bias; only "
            "one that is linear in the distance is served"
        )
    raise MaskNotProven("the bias added to the scores is not linear in the distance, as ALiBi is")
