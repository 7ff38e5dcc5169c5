"""Runs the subgraph behind a mask or a bias, whole or at chosen rows and columns.

A mask over T tokens has T * T entries, but it is made of vectors of T. So vectors are computed whole, and what has
two token dimensions only where it is asked for, from the entries of its operands that it needs:

    mask[rows, columns]  <-  le(p[rows, :1], j[:1, columns])  <-  p, j whole

That takes milliseconds for a million tokens, as long as every op with two token dimensions works entry by entry or
only moves dimensions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch.fx import Node

from pagebinder.graph_tools import CASTS, IDENTITIES, arg, aten, attribute, is_call

# Entry by entry, some without torch's tag that says so.
_POINTWISE = {
    aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther, aten.masked_fill.Scalar,
    aten.masked_fill.Tensor, aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor, aten.__rshift__.Scalar,
    aten.floor_divide.default, aten.floor_divide.Scalar, aten.subtract.Tensor, aten.multiply.Tensor,
    aten.less_equal.Tensor, aten.greater_equal.Tensor, aten.greater.Tensor, aten.less.Tensor, aten.not_equal.Tensor,
    *CASTS, *IDENTITIES,
}  # fmt: skip
_MOVES = {
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.default,
    aten.transpose.int,
    aten.permute.default,
}
_SWAPS = {aten.mT.default, aten.t.default, aten.numpy_T.default}  # of the two dimensions of a matrix
_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_CONSTANTS = {
    aten.ones.default: 1, aten.zeros.default: 0, aten.ones_like.default: 1, aten.zeros_like.default: 0,
    aten.new_ones.default: 1, aten.new_zeros.default: 0,
}  # fmt: skip
_FILLS = {aten.full.default, aten.full_like.default, aten.new_full.default}

# A dimension that is so many times as long as the sequence is one of pairs of tokens, unless it is short.
MOST_TIMES, MOST_ROWS = 4, 1 << 20


class MaskNotProven(Exception):
    """The reason why an attention layer was refused."""


class NotPointwise(Exception):
    """An op with two token dimensions that cannot be computed at chosen entries only."""


@contextlib.contextmanager
def evaluated(what: str, num_tokens: int) -> Iterator[None]:
    """What fails inside is the evaluation of a mask or bias: raises MaskNotProven."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        raise MaskNotProven(f"{what} cannot be evaluated for {num_tokens} tokens: {error}") from error


def ancestors(*results: Node) -> list[Node]:
    """The nodes behind some values, in execution order; not those behind a size, which is a function of T alone."""
    needed, queue = set(), list(results)
    while queue:
        node = queue.pop()
        if node not in needed:
            needed.add(node)
            queue.extend(_sizes_behind(node) if fill_of(node) is not None else _behind(node))
    if len(needed) > 1:
        order = {n: i for i, n in enumerate(results[0].graph.nodes)}
        return sorted(needed, key=order.__getitem__)
    return list(needed)


def _behind(node: Node) -> list[Node]:
    return [] if is_size(node) else node.all_input_nodes


def _sizes_behind(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if is_size(n)]


def fill_of(node: Node) -> float | None:
    """The number that a value consists of, whatever the values of its operands; None: it is something else."""
    if is_call(node, *_CONSTANTS):
        return _CONSTANTS[node.target]
    if not is_call(node, *_FILLS) or is_size(node):
        return None
    value = node.args[{aten.new_full.default: 2}.get(node.target, 1)]
    return value if isinstance(value, (int, float)) else None


def is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def is_pointwise(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or target in _POINTWISE
    )


def by_shape_only(node: Node) -> bool:
    """Does it depend on its operands by their sizes alone?"""
    return is_size(node) or is_call(node, *_CONSTANTS, *_FILLS, aten.empty_like.default)


def token_dims(node: Node) -> list[int]:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return []
    return [d for d, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]


def made_of(sources: Iterable[Node], nodes: list[Node]) -> set[Node]:
    """These nodes and all of `nodes`, which are in execution order, whose values depend on theirs."""
    made = set(sources)
    for node in nodes if made else ():
        if any(n in made for n in node.all_input_nodes) and not by_shape_only(node):
            made.add(node)
    return made


def learned_in(nodes: list[Node]) -> list[Node]:
    """What is made of parameters and has no token dimension, and what with tokens is made of: parameters mostly, or
    for example their exponentials. Their values may change."""
    made = made_of(filter(is_parameter, nodes), nodes)
    found = [n for n in nodes if n in made and not token_dims(n)]
    return [n for n in found if any(user in made and token_dims(user) for user in n.users)]


def is_parameter(node: Node) -> bool:
    is_read = node.op == "get_attr"
    return is_read and isinstance(attribute(node.graph.owning_module, node.target), torch.nn.Parameter)


def learned_as_zeros(nodes: list[Node]) -> dict[Node, torch.Tensor]:
    """`weights` of `Values` with which nothing learned is seen."""
    values = {n: n.meta["val"] for n in learned_in(nodes)}
    return {n: torch.zeros(v.shape, dtype=v.dtype, device="cpu") for n, v in values.items()}


def constant_of(node: Node) -> torch.Tensor:
    """The value of a weight or buffer of the graph, on the CPU."""
    tensor = node.graph.owning_module
    for part in node.target.split("."):
        tensor = getattr(tensor, part)
    if tensor.device.type == "meta":
        raise MaskNotProven(
            f"the mask depends on the values of {node.target}, which has none on the meta device"
        )
    return tensor.detach().cpu()


class Values:
    """The values of a subgraph for one sequence of `size` tokens at `positions` (0, 1, ... by default).

    `weights`: other values of some of its weights, and what is made of them keeps their dtype.
    """

    def __init__(
        self,
        nodes: list[Node],
        size: int,
        positions: torch.Tensor | None = None,
        weights: dict[Node, torch.Tensor] | None = None,
    ):
        self.nodes, self.size, self.weights = nodes, size, weights or {}
        self.positions = torch.arange(size, device="cpu") if positions is None else positions
        self._kept = _casts_of(nodes, self.weights)
        self._whole: dict[Node, object] = {}
        self._parts: dict[tuple, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def whole(self, result: Node) -> torch.Tensor:
        """The value of `result` in full."""
        for node in self.nodes:
            if node not in self._whole:
                self._run(node)
            if node is result:
                break
        return self._whole[result]

    def vectors(self) -> dict[Node, torch.Tensor]:
        """The values of all nodes with at most one token dimension that no larger node is needed for."""
        for node in self.nodes:
            ready = is_size(node) or fill_of(node) is not None
            ready = ready or all(n in self._whole for n in node.all_input_nodes)
            is_vector = len(token_dims(node)) < 2 and not self._is_of_pairs(node)
            if node not in self._whole and ready and is_vector:
                self._run(node)
        return {n: v for n, v in self._whole.items() if isinstance(v, torch.Tensor)}

    def at(self, result: Node, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """result[.., rows, columns]; a `result` without a token dimension there has one entry.

        Raises:
            NotPointwise: an op on the way needs other entries than these.
        """
        self.vectors()
        return self._part(result, rows, columns)

    def _run(self, node: Node) -> None:
        if node in self.weights:
            self._whole[node] = self.weights[node]
        elif is_size(node):
            self._whole[node] = self._size_of(node.meta["val"])
        elif node.op == "placeholder":
            self._whole[node] = self._input(node)
        elif node.op == "get_attr":
            self._whole[node] = constant_of(node)
        elif (fill := fill_of(node)) is not None:
            shape = [self._size_of(s) for s in node.meta["val"].shape]
            self._whole[node] = torch.full(shape, fill, dtype=node.meta["val"].dtype, device="cpu")
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._whole.__getitem__)
            self._whole[node] = self._computed(node, args, kwargs)

    def _input(self, node: Node) -> torch.Tensor:
        if node.target == "positions":
            return self.positions
        if node.target == "input_ids":
            return torch.zeros(self.size, dtype=torch.int64, device="cpu")
        raise MaskNotProven(f"the mask depends on the input {node.target}")

    def _size_of(self, size) -> int:
        """A symbolic size when the sequence has `self.size` tokens."""
        if not isinstance(size, torch.SymInt):
            return size
        tokens = {
            n.meta["val"].shape[0].node.expr
            for n in self.nodes[0].graph.nodes
            if n.op == "placeholder" and n.target in ("input_ids", "positions")
        }
        expr = size.node.expr
        if not expr.free_symbols <= tokens:
            raise MaskNotProven(
                f"the mask depends on the size {expr}, which is not a function of the number of tokens"
            )
        return int(expr.subs(dict.fromkeys(tokens, self.size)))

    def _part(self, node: Node, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """A node with two token dimensions at rows of the first and columns of the second."""
        key = (node, id(rows), id(columns))
        if key not in self._parts:  # with the indices, whose ids others would get
            self._parts[key] = self._compute_part(node, rows, columns), rows, columns
        return self._parts[key][0]

    def _compute_part(self, node: Node, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        dims = token_dims(node)
        if len(dims) != 2:
            return self._sampled(node, _last_two(node, rows, columns))
        wanted = dict(zip(dims, (rows, columns)))
        target = node.target
        if target in (aten.tril.default, aten.triu.default):
            distance, diagonal = columns[None, :] - rows[:, None], arg(node, 1, "diagonal", 0)
            kept = distance <= diagonal if target is aten.tril.default else distance >= diagonal
            return torch.where(kept, self._sampled(node.args[0], wanted), 0).to(node.meta["val"].dtype)
        shape = [len(wanted[d]) if d in wanted else s for d, s in enumerate(node.meta["val"].shape)]
        if target in _CONSTANTS or target in _FILLS:
            last = {aten.full_like.default: 1, aten.full.default: 1, aten.new_full.default: 2}
            value = _CONSTANTS[target] if target in _CONSTANTS else node.args[last[target]]
            return torch.full(
                shape, self._whole.get(value, value), dtype=node.meta["val"].dtype, device="cpu"
            )
        if target in (aten.expand.default, aten.expand_as.default):
            return self._sampled(node.args[0], self._aligned(node, node.args[0], wanted)).expand(shape)
        if is_pointwise(node):
            return self._entry_by_entry(node, wanted)
        if target is aten.embedding.default and node.args[0] in self._whole:
            index = self._sampled(node.args[1], wanted)
            return target(self._whole[node.args[0]], index, *node.args[2:], **node.kwargs)
        if target is aten.index.Tensor and node.args[0] in self._whole:
            return self._looked_up(node, rows, columns)
        return self._moved(node, wanted, shape)

    def _entry_by_entry(self, node: Node, wanted: dict) -> torch.Tensor:
        def part(n: Node):
            return self._whole[n] if is_size(n) else self._sampled(n, self._aligned(node, n, wanted))

        return self._computed(node, *torch.fx.node.map_arg((node.args, node.kwargs), part))

    def _computed(self, node: Node, args, kwargs):
        return args[0] if node in self._kept else node.target(*_on_cpu(args), **_on_cpu(kwargs))

    def _looked_up(self, node: Node, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """table[.., index, ..] of one index over pairs of tokens."""
        indices = [n for n in node.args[1] if n is not None]
        if len(indices) != 1 or len(token_dims(indices[0])) != 2:
            raise NotPointwise(f"{node.target} of several indices")
        index = self._sampled(indices[0], dict(zip(token_dims(indices[0]), (rows, columns))))
        return node.target(self._whole[node.args[0]], [None if n is None else index for n in node.args[1]])

    def _is_of_pairs(self, node: Node) -> bool:
        """Has it a dimension of all pairs of tokens, too long to be computed?"""
        sizes = [self._size_of(s) for s in getattr(node.meta.get("val"), "shape", ())]
        return any(size > MOST_TIMES * self.size for size in sizes if size > MOST_ROWS)

    def _moved(self, node: Node, wanted: dict, shape: list[int]) -> torch.Tensor:
        """Ops that move, add or drop dimensions, and slices."""
        x, target = node.args[0], node.target
        if not isinstance(x, Node):  # a list: stack, cat
            raise NotPointwise(f"{target} joins values of all pairs of tokens")
        of_x = token_dims(x)
        if target is aten.slice.Tensor and len(of_x) < 2 and x in self._whole:
            self._run(node)  # a view
            return self._sampled(node, wanted)
        if len(of_x) != 2:
            raise NotPointwise(str(target))
        rank, (first, second) = x.meta["val"].dim(), wanted.values()
        sizes = [x.meta["val"].shape[d].node.expr for d in of_x]
        if sizes != [node.meta["val"].shape[d].node.expr for d in wanted]:
            raise NotPointwise(f"{target} changes the number of tokens")
        if target in _SWAPS and of_x == [rank - 2, rank - 1] and (rank == 2 or target is aten.mT.default):
            return self._part(x, second, first).mT
        if target is aten.permute.default:
            order = [d % rank for d in node.args[1]]
            swapped = order.index(of_x[0]) > order.index(of_x[1])
        else:
            swapped = target is aten.transpose.int and {d % rank for d in node.args[1:3]} == set(of_x)
            if (
                target is aten.transpose.int
                and not swapped
                and {d % rank for d in node.args[1:3]} & set(of_x)
            ):
                raise NotPointwise("a transpose that moves one token dimension")
        part = self._part(x, *((second, first) if swapped else (first, second)))
        if target in _RESHAPES and _between(x) == _between(node):
            return part.reshape(shape)
        if target is aten.slice.Tensor and arg(node, 1, "dim", 0) % rank in of_x:
            return part  # of the whole length, as the sizes are equal
        if target in _MOVES or target in (aten.select.int, aten.slice.Tensor):
            return target(part, *node.args[1:], **node.kwargs)
        raise NotPointwise(str(target))

    def _aligned(self, node: Node, operand: Node, wanted: dict) -> dict:
        """The wanted entries of an operand that is broadcast to `node`: dimensions count from the right."""
        shift = node.meta["val"].dim() - operand.meta["val"].dim()
        dims = token_dims(operand)
        if not set(dims) <= {d - shift for d in wanted}:
            raise NotPointwise(f"{node.target} lines up different dimensions")
        return {d - shift: index for d, index in wanted.items() if d - shift in dims}

    def _sampled(self, node: Node, wanted: dict) -> torch.Tensor:
        if len(token_dims(node)) == 2 and node not in self._whole:
            return self._part(node, *wanted.values())
        if node not in self._whole:
            raise NotPointwise(f"{node.target} after an op over two token dimensions")
        value = self._whole[node]
        for dim, index in wanted.items():
            value = value.index_select(dim, index)
        return value


def _casts_of(nodes: list[Node], weights: dict[Node, torch.Tensor]) -> set[Node]:
    """Casts of what is made of these weights."""
    casts = {node for node in made_of(weights, nodes) - weights.keys() if is_call(node, *CASTS)}
    return {node for node in casts if node.meta["val"].is_floating_point()}


def _last_two(node: Node, rows: torch.Tensor, columns: torch.Tensor) -> dict:
    """Which of its last two dimensions are tokens, of a mask that is broadcast over the other."""
    rank = node.meta["val"].dim()
    index = {rank - 2: rows, rank - 1: columns}
    if not set(token_dims(node)) <= set(index):
        raise NotPointwise("tokens are not in the last two dimensions")
    return {d: index[d] for d in token_dims(node)}


def _between(node: Node) -> list[int]:
    """How many entries stand before, between and after the two token dimensions."""
    counts = [1]
    for size in node.meta["val"].shape:
        if isinstance(size, torch.SymInt):
            counts.append(1)
        else:
            counts[-1] *= size
    return counts


def _on_cpu(arguments):
    """Arguments with every device replaced by the CPU."""
    return torch.utils._pytree.tree_map(
        lambda a: torch.device("cpu") if isinstance(a, torch.device) else a, arguments
    )


def depends_on_tokens(nodes: list[Node], *results: Node) -> bool:
    """Do the values of input_ids (not their number) reach one of `results`?"""
    tainted: set[Node] = set()
    for node in nodes:
        is_source = node.op == "placeholder" and node.target == "input_ids"
        if is_source or (not by_shape_only(node) and any(n in tainted for n in node.all_input_nodes)):
            tainted.add(node)
    return any(r in tainted for r in results)
