"""What rounding passes certify: random rows come back within what their format promises."""

from __future__ import annotations

import torch
from torch.fx import Node

from pagebinder.errors import VerificationError
from pagebinder.graph_tools import module_path
from pagebinder.report import Certificate, PassResult


class RoundingCheck:
    """Collects the errors of a pass' round trips; `max_rel_error` is that of rows, root mean square."""

    def __init__(self, result: PassResult) -> None:
        self.result = result
        self.largest = self.relative = 0.0

    def add(self, node: Node, what: str, x: torch.Tensor, back: torch.Tensor, bound: torch.Tensor) -> None:
        """Rows and how they came back. Raises VerificationError if a value is further off than its bound."""
        errors = (back - x).abs()
        if not (errors <= bound).all():
            raise VerificationError(
                f"{self.result.name}: {what} is off by {float(errors.max()):.3g} at {module_path(node)}, more "
                "than the format explains.",
                pass_name=self.result.name,
                level=self.result.level,
                error=float(errors.max()),
                places=(module_path(node),),
            )
        self.largest = max(self.largest, float(errors.max()))
        self.relative = max(self.relative, float(errors.norm() / x.norm()))

    def certificates(self) -> list[Certificate]:
        """One, for all matches of the pass."""
        first = self.result.matches[0]
        return [
            Certificate(
                pattern=first.pattern, node=first.node, module_path=first.module_path,
                count=len(self.result.matches), max_abs_error=self.largest, max_rel_error=self.relative,
            )
        ]  # fmt: skip
