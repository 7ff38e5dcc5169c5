"""Does an op that is neither ours nor torch's do what its schema and its fake kernel say? Asked of each of its calls
while graphs are verified: of a user's ops, and of the overloads of a user's providers.

    its results      of the dtype and sizes that the fake kernel gives, by which executables reserve and compile
                     no memory of operands, unless the schema says so
    its operands     as they were, unless the schema says that they are written to
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from pagebinder.custom_ops.library import NAMESPACE
from pagebinder.custom_ops.providers import BUILTIN
from pagebinder.errors import VerificationError
from pagebinder.graph_tools import TORCHS

OURS = {NAMESPACE, *(f"{NAMESPACE}_{name}" for name in BUILTIN)}


def is_foreign(node: Node) -> bool:
    target = node.target
    return (
        node.op == "call_function"
        and isinstance(target, torch._ops.OpOverload)
        and target.namespace not in TORCHS
        and target.namespace not in OURS
    )


class WatchedCall:
    """A call of a foreign op: made before it with its operands, asked behind it.

    `widened`: it computes in float32 what was traced in another dtype, so dtypes say nothing.
    """

    def __init__(self, node: Node, args: Sequence, kwargs: dict, *, widened: bool) -> None:
        self._node, self._widened = node, widened
        schema = node.target._schema.arguments
        given = list(zip(schema, args)) + [(a, kwargs[a.name]) for a in schema if a.name in kwargs]
        self._operands = [
            (argument.name, value, value.clone(), argument.alias_info)
            for argument, value in given
            if isinstance(value, torch.Tensor)
        ]

    def check(self, value) -> None:
        """value: what it returned. Raises VerificationError."""
        for name, now, before, alias in self._operands:
            is_written = alias is not None and alias.is_write
            if not is_written and not torch.equal(now.nan_to_num(), before.nan_to_num()):
                self._raise(f"writes into its operand {name}, and its schema does not say so (mutates_args)")
        results, saids = (
            x if isinstance(x, (list, tuple)) else (x,) for x in (value, self._node.meta.get("val"))
        )
        returns = self._node.target._schema.returns
        for place, (got, said) in enumerate(zip(results, saids)):
            if not isinstance(said, torch.Tensor):
                continue
            if not isinstance(got, torch.Tensor):
                self._raise(f"gives {got!r} and no tensor")
            self._check_outline(got, said)
            if place < len(returns) and returns[place].alias_info is None:
                self._check_memory(got)

    def _check_outline(self, got: torch.Tensor, said: torch.Tensor) -> None:
        fixed = [(n, m) for n, m in zip(got.shape, said.shape) if not isinstance(m, torch.SymInt)]
        same_dtype = self._widened or got.dtype == said.dtype
        if not same_dtype or got.dim() != said.dim() or any(n != m for n, m in fixed):
            self._raise(
                f"gives {got.dtype} {list(got.shape)}, and its fake kernel says {said.dtype} {list(said.shape)}: "
                "executables go by that (torch.library.register_fake)"
            )

    def _check_memory(self, got: torch.Tensor) -> None:
        for name, operand, _, _ in self._operands:
            if got.numel() and got.untyped_storage().data_ptr() == operand.untyped_storage().data_ptr():
                self._raise(
                    f"returns memory of its operand {name}, and its schema does not say so: return a copy"
                )

    def _raise(self, what: str) -> None:
        message = f"{self._node.name}, a call of {self._node.target}, {what}."
        raise VerificationError(message, node=self._node.name)
