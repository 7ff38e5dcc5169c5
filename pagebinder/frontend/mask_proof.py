"""What an attention mask means, found by running the graph that makes it.

The subgraph behind a mask is evaluated at several lengths, the largest more than twice every number that occurs
in it, and compared element by element with the masks of the known family:

    visible(p, j) = (j <= p if causal) and (p - window < j if window) and (j // chunk == p // chunk if chunk)

A mask that depends on anything but the number of tokens and the positions, or that differs in one element, is
not proven, and the reason says which.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch.fx import Node

from pagebinder.custom_ops.attention.semantic import visible_keys

SMALL_SIZES = (2, 3, 17, 64)
LARGEST_SIZE = 12_288


class MaskNotProven(Exception):
    """The reason why an attention layer was refused."""


@dataclass(frozen=True, kw_only=True)
class MaskFacts:
    """A proven mask: window and chunk in tokens, None = unlimited."""

    causal: bool
    window: int | None = None
    chunk: int | None = None

    def describe(self) -> str:
        parts = ["causal" if self.causal else "bidirectional"]
        parts += [f"window={self.window}"] if self.window is not None else []
        parts += [f"chunk={self.chunk}"] if self.chunk is not None else []
        return ", ".join(parts)


def prove_mask(mask: Node) -> MaskFacts:
    """Classify the mask that `mask` computes ([.., T, T], bool or additive float).

    Raises:
        MaskNotProven: with the reason.
    """
    subgraph = _ancestors(mask)
    numbers = _numbers(subgraph)
    largest = 2 * max(numbers, default=8) + 3
    if largest > LARGEST_SIZE:
        raise MaskNotProven(f"the mask holds the number {max(numbers)}, too large to evaluate at twice its size")
    sizes = sorted({*SMALL_SIZES, largest})
    seen = {size: _evaluate(subgraph, mask, size) for size in sizes}
    for facts in _candidates(seen[largest]):
        if all(torch.equal(_expected(facts, size), seen[size]) for size in sizes):
            return facts
    raise MaskNotProven(f"the mask is none of causal, window, chunk, full at sizes {sizes}")


def _ancestors(mask: Node) -> list[Node]:
    """The nodes behind a mask, in execution order."""
    needed, queue = set(), [mask]
    while queue:
        node = queue.pop()
        if node not in needed:
            needed.add(node)
            queue.extend(node.all_input_nodes)
    return [n for n in mask.graph.nodes if n in needed]


def _numbers(nodes: list[Node]) -> list[int]:
    """Whole numbers of magnitude 2 to 2^30 that occur as literals: windows, chunk sizes."""
    found = []
    for node in nodes:
        for value in itertools.chain(node.args, node.kwargs.values()):
            if isinstance(value, (int, float)) and not isinstance(value, bool) and 2 <= abs(value) < 1 << 30:
                found.append(int(abs(value)))
    return found


def _evaluate(nodes: list[Node], mask: Node, size: int) -> torch.Tensor:
    """Run the subgraph for a sequence of `size` tokens; returns a boolean [size, size], True = visible."""
    env: dict[Node, object] = {}
    for node in nodes:
        if node.op == "placeholder":
            if node.target == "positions":
                env[node] = torch.arange(size)
            elif node.target == "input_ids":
                env[node] = torch.zeros(size, dtype=torch.int64)
            else:
                raise MaskNotProven(f"the mask depends on the input {node.target}")
        elif node.op == "get_attr":
            env[node] = _constant(node)
        elif node.target is torch.ops.aten.embedding.default:
            raise MaskNotProven("the mask depends on the values of the tokens")
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **_on_cpu(kwargs))
    out = env[mask]
    out = out.reshape(-1, *out.shape[-2:])
    if out.shape[0] != 1 and not all(torch.equal(out[0], other) for other in out[1:]):
        raise MaskNotProven("the mask differs between heads")
    return _as_visible(out[0].expand(size, size))


def _constant(node: Node) -> torch.Tensor:
    """A weight or buffer by name; masks may use small constants, not parameters of unknown value."""
    tensor = node.graph.owning_module
    for part in node.target.split("."):
        tensor = getattr(tensor, part)
    if tensor.device.type == "meta":
        raise MaskNotProven(f"the mask depends on the values of {node.target}, which has none on the meta device")
    return tensor.detach().cpu()


def _on_cpu(kwargs: dict) -> dict:
    return {k: (torch.device("cpu") if k == "device" else v) for k, v in kwargs.items()}


def _as_visible(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= -1e4
    if not bool(((mask == 0) | hidden).all()):
        raise MaskNotProven("the mask adds a bias that is neither 0 nor a large negative number")
    return ~hidden


def _expected(facts: MaskFacts, size: int) -> torch.Tensor:
    p = torch.arange(size)
    return visible_keys(p[:, None], p[None, :], window=facts.window, chunk=facts.chunk, causal=facts.causal)


def _candidates(visible: torch.Tensor):
    """The masks of the family that fit the last row and the first column of the largest evaluation."""
    size = visible.shape[0]
    causal = not bool(visible[0, 1:].any()) or not bool(visible.triu(1).any())
    yield MaskFacts(causal=causal)
    reach = int(visible[-1].sum()) if causal else int(visible[0].sum())
    if reach < size:
        yield MaskFacts(causal=causal, window=reach)
    first_hidden = (~visible[:, 0]).nonzero()
    if len(first_hidden):
        yield MaskFacts(causal=causal, chunk=int(first_hidden[0]))
