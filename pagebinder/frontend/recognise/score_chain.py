"""What happens to attention scores between the product of queries and keys and the softmax, read backwards.

    scores = product -> * scale -> soft cap -> masks and biases, in any order -> (sink column) -> softmax

Everything on the way is a scaling, a factor of rows (row_factors.py), a soft cap, a mask, a bias, a number added to a
whole row, a cast or a change of shape around [.., T, T]; the first thing that is none of them ends the walk with its
name.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from fractions import Fraction

import torch
import torch.utils._pytree as pytree
from torch.fx import Node

from pagebinder.frontend.mask_proof import MaskTerm
from pagebinder.frontend.mask_reach import HIDDEN
from pagebinder.frontend.mask_values import MaskNotProven, Values, ancestors, is_size
from pagebinder.frontend.recognise.operands import (
    PRODUCTS,
    SCALINGS,
    NotAttention,
    Product,
    is_of_pairs,
    product_of,
    reduces_columns,
    scaling,
)
from pagebinder.frontend.recognise.row_factors import RowFactor, counts_tokens, is_of_rows
from pagebinder.frontend.recognise.sinks import VIEWS, Sinks, joined
from pagebinder.graph_tools import CASTS, IDENTITIES, arg, aten, attribute, is_call, val

_MASKED_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
_WHERES = (aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther)
LARGE = 1e6
MAX_INDEX = torch.iinfo(torch.int64).max  # how slices say "to the end"
FAR = 1e8  # a temperature times a score is not below its negative
_MAXIMA = (aten.maximum.default, aten.clamp.default, aten.clamp_min.default, aten.max.other)


@dataclass(frozen=True)
class Floor:
    """A number that hidden scores are filled with, or that scores are bounded by. `is_far`: it is below all that a
    score times a usual factor may be, or the lowest number of its dtype."""

    what: str
    is_far: bool


@dataclass
class Chain:
    """The chain from a softmax up to its product. `biases`: (node, factor) of what is added to the scores;
    `row_factors`: of the product itself; `shifts`: what rows are shifted by, which does not matter; `floors`: what no
    score is below any more; `learned`: positive factors that are parameters, `of_learned` their product as it
    is now, `before_learned`: what is added to the scores before one.
    """

    product: Product
    anchor: Node
    factor: Fraction = Fraction(1)
    soft_cap: Fraction | None = None
    masks: list[MaskTerm] = field(default_factory=list)
    biases: list[tuple[Node, Fraction]] = field(default_factory=list)
    row_factors: list[RowFactor] = field(default_factory=list)
    shifts: list[Node] = field(default_factory=list)
    sinks: Sinks | None = None
    floors: list[Floor] = field(default_factory=list)
    learned: list[RowFactor] = field(default_factory=list)
    of_learned: Fraction = Fraction(1)
    before_learned: set[Node] = field(default_factory=set)
    nodes: set[Node] = field(default_factory=set)

    @property
    def scale(self) -> float:
        return float(self.factor)

    @property
    def total(self) -> Fraction:
        """What the scores are multiplied with between here and the softmax."""
        return self.factor * self.of_learned


def read_chain(softmax: Node, tainted: set[Node]) -> Chain:
    """Walk up from a softmax. `tainted`: the nodes that depend on the tokens' values.

    Raises:
        NotAttention: with what was found in the way.
    """
    chain = Chain(product=None, anchor=softmax)
    node = softmax.args[0]
    while not is_call(node, *PRODUCTS):
        if not isinstance(node, Node) or node.op != "call_function" or node not in tainted:
            raise NotAttention(f"no product of queries and keys is behind the softmax, but {_name(node)}")
        chain.nodes.add(node)
        node = _step(chain, node, tainted)
    chain.nodes |= {node, *(n for shift in chain.shifts for n in _between(node, shift))}
    chain.product, chain.anchor = product_of(node), node
    if chain.product.bias is not None and chain.product.bias_factor:
        chain.biases.append((chain.product.bias, chain.total * chain.product.bias_factor))
        _require_before_cap(chain)
    chain.factor *= chain.product.factor
    return chain


def _step(chain: Chain, node: Node, tainted: set[Node]) -> Node:
    """Take one node of the chain into account and return the one before it."""
    if not val(node).is_floating_point():
        raise NotAttention(f"the scores are rounded to {val(node).dtype}")
    if is_call(node, *CASTS, *IDENTITIES):
        return node.args[0]
    if is_call(node, aten.nan_to_num.default) and arg(node, 3, "neginf") is None:
        chain.floors.append(Floor("what is not finite is replaced", False))
        return node.args[0]  # of finite scores: themselves; what is hidden stays so
    if is_call(node, *VIEWS):
        return _through_view(node)
    if is_call(node, *SCALINGS):
        return _scaled(chain, node, tainted)
    if is_call(node, aten.neg.default):
        return _times(chain, RowFactor(-1.0, False, node.args[0]))
    if is_call(node, aten.tanh.default):
        if chain.soft_cap is not None:
            raise NotAttention("the scores are soft-capped twice")
        if chain.row_factors:
            raise NotAttention("the scores are soft-capped before rows of them are multiplied")
        chain.soft_cap, chain.factor = chain.total, chain.total  # a cap is a number
        chain.learned, chain.of_learned = [], Fraction(1)
        return node.args[0]
    if is_call(node, aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor):
        return _added(chain, node, tainted)
    if is_call(node, *_MASKED_FILLS):
        mask = _before_expansion(chain, node.args[1], node.args[0])
        return _filled(chain, node.args[0], MaskTerm(mask, "hidden"), node.args[2], tainted)
    if is_call(node, *_WHERES):
        condition, yes, no = node.args
        if yes in tainted and no not in tainted:
            return _filled(chain, yes, MaskTerm(condition, "visible"), no, tainted)
        return _filled(chain, no, MaskTerm(condition, "hidden"), yes, tainted)
    if is_call(node, *_MAXIMA) and len(node.args) == 2:
        if (bound := number(node.args[1])) is None or bound * chain.total > -HIDDEN:
            raise NotAttention("the scores are clamped")
        _note_floor(chain, "they are clamped", bound, node)
        return node.args[0]
    if is_call(node, aten.cat.default):
        return _with_sinks(chain, node)
    raise NotAttention(f"{_name(node)} stands between the scores and the softmax")


def _scaled(chain: Chain, node: Node, tainted: set[Node]) -> Node:
    x, other = node.args[0], node.args[1]
    divides = is_call(node, aten.div.Tensor, aten.div.Scalar)
    if not divides and isinstance(other, Node) and _leads_to_scores(other, x, tainted):
        x, other = other, x
    while is_call(other, aten.expand.default, aten.expand_as.default):  # a product broadcasts by itself
        if is_call(other, aten.expand_as.default):
            chain.nodes.add(other)  # it may read the scores' sizes
        other = other.args[0]
    factor = scaling(node) if not isinstance(other, Node) else _factor_of(other, divides)
    # it could be a mask of ones and zeros, which the proof of masks then decides
    if factor is None and not divides and isinstance(x, Node) and other not in tainted and is_of_pairs(other):
        _require_before_cap(chain)
        chain.masks.append(MaskTerm(other, "factor"))
        return x
    if not isinstance(x, Node):
        raise NotAttention("the scores divide something")
    if factor is not None and factor > 0:
        if _is_learned(other):
            chain.learned.append(RowFactor(other, divides, x))
            chain.of_learned *= factor
        else:
            chain.factor *= factor
        return x
    if not is_of_rows(other, x, tainted):
        raise NotAttention(f"the scores are multiplied by {_no_factor(other)}")
    return _times(chain, RowFactor(other, divides, x))


def _is_learned(factor) -> bool:
    """Does it depend on a parameter, which is not the same in every run of the graph?"""
    if not isinstance(factor, Node):
        return False
    read = [n for n in ancestors(factor) if n.op == "get_attr"]
    return any(isinstance(attribute(n.graph.owning_module, n.target), torch.nn.Parameter) for n in read)


def _times(chain: Chain, factor: RowFactor) -> Node:
    if near := [floor.what for floor in chain.floors if not floor.is_far]:
        raise NotAttention(f"the scores have factors of rows or heads before {near[0]}")
    chain.row_factors.append(factor)
    return factor.scores


def _no_factor(other) -> str:
    """What scores are multiplied by, in words, where that is not understood."""
    if _is_tensor(other) and _has_columns(other):
        return "a number for each key"
    if isinstance(other, Node) and any(is_size(n) for n in ancestors(other)):
        return "what depends on the number of tokens"
    return "something else than a number"


def _factor_of(node: Node, divides: bool) -> Fraction | None:
    value = number(node)
    if value is None or not math.isfinite(value) or value == 0:
        return None
    return 1 / Fraction(value) if divides else Fraction(value)


def _added(chain: Chain, node: Node, tainted: set[Node]) -> Node:
    x, other = node.args[:2]
    is_minus = is_call(node, aten.sub.Tensor)
    if node.kwargs or len(node.args) > 2:
        raise NotAttention("a bias is added with a factor")
    if isinstance(x, Node) and not isinstance(other, Node) and other == 0:
        return x
    if not is_minus and (
        not isinstance(x, Node) or (isinstance(other, Node) and _leads_to_scores(other, x, tainted))
    ):
        x, other = other, x
    if isinstance(x, Node) and (not _is_tensor(other) or is_of_rows(other, x, tainted)):
        return _shifted(chain, x, other)
    if not isinstance(x, Node) or other in tainted:
        raise NotAttention("the scores get a bias that depends on the values of the tokens")
    _require_before_cap(chain)
    chain.biases.append((other, -chain.total if is_minus else chain.total))
    if chain.learned:
        chain.before_learned.add(other)
    return x


def _shifted(chain: Chain, x: Node, by) -> Node:
    """A softmax is the same without a number that is added to a whole row; not so what bounds scores before it."""
    if chain.soft_cap is not None or chain.sinks is not None:
        raise NotAttention("rows of the scores are shifted before a soft cap or a sink")
    bounds = [floor.what for floor in chain.floors]
    bounds += ["they are multiplied with a mask" for term in chain.masks if term.kind == "factor"]
    if bounds and not _is_row_maximum(by, x):
        raise NotAttention(f"rows of the scores are shifted before {bounds[0]}")
    if _maximum_of(by) is None and _has_large_numbers(by):  # what hides scores is no maximum of them
        raise NotAttention(
            "rows of the scores are shifted by numbers beside which scores may be rounded away"
        )
    if isinstance(by, Node):
        chain.shifts.append(by)
    return x


def _has_large_numbers(value) -> bool:
    """Is a number of LARGE or more among what it is made of? -1e9 for rows of padding, for example."""
    if not isinstance(value, Node):
        return not abs(value) < LARGE
    literals = [x for n in ancestors(value) for x in pytree.tree_leaves((n.args, n.kwargs))]
    return any(isinstance(x, (int, float)) and x != MAX_INDEX and not abs(x) < LARGE for x in literals)


def _is_row_maximum(value, x: Node) -> bool:
    """max(x, -1, keepdim) or amax: what is left is as far below 0 as scores are apart."""
    return (of := _maximum_of(value)) is not None and of is x


def _maximum_of(value) -> Node | None:
    """What a value is the maximum of, row by row."""
    while is_call(value, *CASTS, *IDENTITIES):
        value = value.args[0]
    if is_call(value, operator.getitem) and value.args[1] == 0 and is_call(value.args[0], aten.max.dim):
        value = value.args[0]
    is_maximum = is_call(value, aten.max.dim, aten.amax.default) and reduces_columns(value)
    return value.args[0] if is_maximum else None


def _note_floor(chain: Chain, what: str, value: float, node: Node) -> None:
    lowest = value <= torch.finfo(val(node).dtype).min
    chain.floors.append(Floor(what, lowest or value * chain.total <= -FAR))


def _leads_to_scores(node: Node, other, tainted: set[Node]) -> bool:
    """Of two operands, is this one the scores? They depend on the tokens and have a column for each."""
    if not isinstance(other, Node) or (node in tainted) != (other in tainted):
        return node in tainted
    return _has_columns(node) and not _has_columns(other)


def _is_tensor(value) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _has_columns(node: Node) -> bool:
    return val(node).dim() > 0 and isinstance(val(node).shape[-1], torch.SymInt)


def _between(x: Node, result: Node) -> set[Node]:
    """`result` and what lies on the way to it from x; nothing if it does not depend on x."""
    depends: dict[Node, bool] = {x: True}
    for node in ancestors(result):
        if node is not x:
            depends[node] = any(depends.get(n, False) for n in node.all_input_nodes)
    return {node for node, does in depends.items() if does and node is not x}


def _filled(chain: Chain, x: Node, term: MaskTerm, fill, tainted: set[Node]) -> Node:
    if term.node in tainted:
        raise NotAttention("the mask depends on the values of the tokens")
    value = number(fill)
    if not isinstance(x, Node) or value is None or not value * chain.total <= -HIDDEN:
        raise NotAttention("hidden scores are not filled with a large negative number")
    _require_before_cap(chain)
    if math.isfinite(value):
        _note_floor(chain, f"hidden ones are filled with {value:g}", value, x)
    chain.masks.append(term)
    return x


def _before_expansion(chain: Chain, mask: Node, scores: Node) -> Node:
    """mask.expand_as(scores) -> mask: filling broadcasts by itself, and the scores are not needed for the proof."""
    if is_call(mask, aten.expand_as.default) and mask.args[1] is scores:
        chain.nodes.add(mask)
        return mask.args[0]
    return mask


def _require_before_cap(chain: Chain) -> None:
    """Walking backwards, masks and biases come before the soft cap is met, and before a product with a mask."""
    if chain.soft_cap is not None:
        raise NotAttention("the scores are masked or biased before the soft cap")
    if any(term.kind == "factor" for term in chain.masks):
        raise NotAttention("the scores are masked or biased before they are multiplied with a mask")
    if chain.row_factors:
        raise NotAttention("the scores are masked or biased before rows of them are multiplied")


def _with_sinks(chain: Chain, node: Node) -> Node:
    scores, sinks = joined(node)
    if (
        chain.masks
        or chain.biases
        or chain.row_factors
        or chain.total != 1
        or chain.learned
        or chain.soft_cap is not None
        or chain.sinks is not None
    ):
        raise NotAttention("the column appended to the scores is masked, scaled or capped with them")
    chain.sinks = sinks
    chain.nodes |= sinks.nodes
    return scores


def _through_view(node: Node) -> Node:
    x = node.args[0]
    before, after = val(x).shape, val(node).shape
    dims = [
        [i - len(s) for i, size in enumerate(s) if isinstance(size, torch.SymInt)] for s in (before, after)
    ]
    if dims != [[-2, -1], [-2, -1]] or math.prod(before[:-2]) != math.prod(after[:-2]):
        raise NotAttention("the scores are reshaped in a way that mixes tokens and heads")
    return x


def number(value) -> float | None:
    """A literal, or the value of a tensor of one entry that depends on nothing, not on how many tokens there are
    either; else None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return None
    shape = val(value).shape
    if any(isinstance(s, torch.SymInt) for s in shape) or math.prod(shape) != 1:
        return None
    nodes = ancestors(value)
    if any(n.op == "placeholder" or counts_tokens(n) for n in nodes):
        return None
    try:
        return float(Values(nodes, 2).whole(value))
    except (MaskNotProven, RuntimeError):
        return None


def _name(node) -> str:
    return str(node.target).removesuffix(".default") if isinstance(node, Node) else repr(node)
