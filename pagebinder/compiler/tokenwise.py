"""`CompileConfig.tokenwise_ops`: ops of others that are said to compute every token from itself alone.

    y = op(x)      x, y [T, ...]      op(x[:k]) must be y[:k], and op(x[k:]) y[k:], in a sequence of random tokens

A sum over the tokens, a shift, a number that hangs on how many tokens there are: none of them passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pagebinder.errors import CaptureError, ConfigError
from pagebinder.frontend.source import ModelSource
from pagebinder.frontend.token_dims import symbolic_dims, token_dims
from pagebinder.graph_tools import TORCHS, module_path, tensors
from pagebinder.passes.verifier import TOLERANCES, difference, what_failed
from pagebinder.report import CompileReport

NUM_TOKENS = 24  # at most
SPLIT = 7


def tokenwise_ops(
    names: Iterable[str], graphs: Sequence[GraphModule], report: CompileReport, *, of_passes: bool = False
) -> frozenset[OpOverload]:
    """The ops of these names that the graphs call; the report says that they are taken at their word.

    of_passes: they may be those of a pass that found nothing in this model, which is noted.
    Raises:
        ConfigError: no graph calls an op of such a name, or it is one of torch's, which are judged by what they do.
    """
    called = {n.target for gm in graphs for n in gm.graph.nodes if n.op == "call_function"}
    others = {
        op for op in called if isinstance(op, OpOverload) and op.namespace not in (*TORCHS, "pagebinder")
    }
    found = set()
    for name in names:
        ops = {op for op in others if name in (op._schema.name, f"{op._schema.name}.{op._overloadname}")}
        if not ops:
            known = ", ".join(sorted({op._schema.name for op in others})) or "none"
            message = (
                f"tokenwise_ops: the model calls no {name!r} of a library of its own; it calls: {known}."
            )
            if not of_passes or name.split("::")[0] in TORCHS:
                raise ConfigError(message)
            report.notes.append(message)
            continue
        count = sum(n.target in ops for gm in graphs for n in gm.graph.nodes if n.op == "call_function")
        report.notes.append(
            f"{name} is taken to compute every token from itself alone, as tokenwise_ops says "
            f"({count} call{'' if count == 1 else 's'})."
        )
        found |= ops
    return frozenset(found)


def check_tokenwise(
    ops: frozenset[OpOverload], graphs: Sequence[GraphModule], source: ModelSource, max_model_len: int
) -> None:
    """Run each call of these ops on a sequence and on its two parts; nothing is run without weights.

    Raises:
        CaptureError: a part of the sequence alone has other results.
    """
    if not ops or source.device.type == "meta":
        return
    num_tokens = min(NUM_TOKENS, max_model_len)
    for gm in graphs:
        runner = _Splitter(gm, ops, num_tokens)
        try:
            with torch.inference_mode():
                runner.run(*_inputs(gm, source, num_tokens))
        except CaptureError:
            raise
        except Exception as error:
            names = ", ".join(sorted(op._schema.name for op in ops))
            raise CaptureError(
                f"With {names} (tokenwise_ops) the model cannot be run on {num_tokens} tokens: {what_failed(error)}"
            ) from error


class _Splitter(torch.fx.Interpreter):
    """Runs a graph, and its calls of `ops` once more on the parts of their operands."""

    def __init__(self, gm: GraphModule, ops: frozenset[OpOverload], num_tokens: int) -> None:
        super().__init__(gm)
        self.ops = ops
        self.num_tokens, split = num_tokens, min(SPLIT, num_tokens // 2)
        self.parts = slice(0, split), slice(split, num_tokens)
        self.extra_traceback = False  # errors here are ours

    def run_node(self, n: Node):
        if n.op != "call_function" or n.target not in self.ops:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        whole = self._called(n, args, kwargs)
        for part in self.parts:
            self._compare(n, whole, part)
        return whole

    @staticmethod
    def _called(node: Node, args, kwargs):
        try:
            return node.target(*args, **kwargs)
        except Exception as error:
            raise CaptureError(
                f"{node.target._schema.name} in {module_path(node) or node.name} cannot be called with what the "
                f"model gives it: {type(error).__name__}: {error}"
            ) from error

    def _compare(self, node: Node, whole, part: slice) -> None:
        args, kwargs = map_arg((node.args, node.kwargs), lambda a: _cut(a, self.env[a], part))
        got = self._called(node, args, kwargs)
        results = (whole, got) if isinstance(whole, (tuple, list)) else ((whole,), (got,))
        for fake, expected, alone in zip(tensors(node), *results, strict=True):
            dims = symbolic_dims(fake)
            rows = expected.narrow(dims[0], part.start, part.stop - part.start) if dims else expected
            error = difference(alone, rows)
            if error.relative > TOLERANCES.get(expected.dtype, 0.0):
                raise CaptureError(
                    f"{node.target._schema.name} in {module_path(node) or node.name} is said to compute every token "
                    f"from itself alone (tokenwise_ops), and does not: on tokens {part.start} to {part.stop - 1} of "
                    f"{self.num_tokens} alone its result is off by {error.relative:.2g} of its spread."
                )


def _cut(node: Node, value, part: slice):
    """An operand's rows of these tokens; anything else as it is."""
    dims = token_dims(node)
    if not dims or not isinstance(value, torch.Tensor):
        return value
    return value.narrow(dims[0], part.start, part.stop - part.start)


def _inputs(gm: GraphModule, source: ModelSource, num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for node in (n for n in gm.graph.nodes if n.op == "placeholder"):
        fake = node.meta["val"]
        sizes = [num_tokens if isinstance(size, torch.SymInt) else size for size in fake.shape]
        if node.target == "positions":
            value = torch.arange(num_tokens, device="cpu")
        elif fake.dtype.is_floating_point:
            value = torch.randn(sizes, generator=generator, device="cpu").to(fake.dtype)
        else:
            value = torch.randint(source.vocab_size, sizes, generator=generator, device="cpu")
        inputs.append(value.to(source.device))
    return inputs
