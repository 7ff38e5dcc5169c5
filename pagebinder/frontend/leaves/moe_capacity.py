"""Refusal: experts with a capacity (Switch Transformers, NLLB-MoE).

An expert takes a fixed number of tokens of a call and drops the rest, in the order of the sequence. So what a token
gets depends on the tokens before it in the same call: a chunk of a prompt, or a batch, gives other results than the
whole prompt, and the source's own decoding with a cache other results than its forward without one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import Leaf


@dataclass(frozen=True, kw_only=True)
class Refused(Leaf):
    """Modules whose source can be traced and cannot be paged: named before anything else fails."""

    why: str

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        path, module = next(iter(self.modules(model).items()))
        raise CaptureError(f"{path} ({type(module).__name__}) {self.why}")
        yield  # a context manager is a generator


EXPERTS_WITH_CAPACITY = Refused(
    name="experts with a capacity",
    classes=("SwitchTransformersTop1Router", "NllbMoeTop2Router"),
    functions={},
    emits=(),
    seen_on=("5.23", "5.24"),
    why=(
        "drops the tokens beyond the capacity of an expert, counted along the sequence: what a token gets depends on "
        "the tokens before it, and paging, batching and chunked prefill would change it."
    ),
)
