"""Where ops are registered: one schema, one fake kernel and one reference each.

An op lives in the namespace `pagebinder` and runs its plain PyTorch reference. A *provider* is a faster
implementation of the same schema in a namespace of its own (`pagebinder_cpu::paged_attention`), so that the
compiler's choice is visible as a node's target in the graph and costs nothing at run time.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

NAMESPACE = "pagebinder"

_libraries: dict[str, torch.library.Library] = {}
_ops: dict[str, OpInfo] = {}


@dataclass(frozen=True)
class OpInfo:
    """One registered op: `signature` is the schema without the name, e.g. "(Tensor x) -> Tensor".

    A transparent op is visible to our passes and dissolves into its reference when a compiler traces it, so that
    inductor fuses it with its neighbours. The others stay opaque calls.
    `capture`: whether the reference can be captured in a graph of launches. "always": what it launches follows from
    shapes alone. "uniform_decode": if every request computes one token. "never": it reads values on the host.
    `fast_by`: type of a device -> the vendor's library that the reference calls there, where that is the fast way.
    """

    name: str
    signature: str
    reference: Callable
    fake: Callable
    transparent: bool = False
    capture: str = "never"
    fast_by: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def overload(self) -> torch._ops.OpOverload:
        return overload(NAMESPACE, self.name)


def overload(namespace: str, name: str) -> torch._ops.OpOverload:
    """The `OpOverload` of `namespace::name`; `name` may be "op" or "op.overload"."""
    packet, _, variant = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), variant or "default")


def library(namespace: str) -> torch.library.Library:
    """The (single, kept alive) library object of a namespace."""
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _libraries[namespace]


def define_op(
    name: str, signature: str, *, reference: Callable, fake: Callable, transparent: bool = False,
    capture: str | None = None, fast_by: Mapping[str, str] | None = None,
) -> OpInfo:  # fmt: skip
    """Define `pagebinder::name`; its reference serves every device, its fake kernel serves tracing.

    `capture`: see `OpInfo`; None: "always" for a transparent op, whose parts speak for themselves, else "never".
    `fast_by`: see `OpInfo`.
    """
    capture = capture or ("always" if transparent else "never")
    info = OpInfo(name, signature, reference, fake, transparent, capture, fast_by or {})
    if transparent:
        library(NAMESPACE).define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
        library(NAMESPACE).impl(name, reference, "CompositeImplicitAutograd")
    else:
        define_schema(NAMESPACE, info)
        library(NAMESPACE).impl(name, reference, "CompositeExplicitAutograd")
    _ops[name] = info
    return info


def define_schema(namespace: str, info: OpInfo) -> None:
    """Define `namespace::<op>` with the schema and fake kernel of `info`, without an implementation.

    A provider calls this for its own namespace before it registers kernels there.
    """
    library(namespace).define(info.name + info.signature, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{namespace}::{info.name}", info.fake, lib=library(namespace))


def op_info(name: str) -> OpInfo:
    """Raises ValueError: there is no op of ours with that name."""
    if name not in _ops:
        near = difflib.get_close_matches(str(name), _ops, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"there is no op {name!r}{hint} Ops: {', '.join(sorted(_ops))}.")
    return _ops[name]


def is_our_op(target: object) -> bool:
    """Is a call's target an op of ours, by whichever provider? Namespaces of others may begin like ours."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace.split("_")[0] == NAMESPACE
        and target._opname in _ops
    )


def all_ops() -> dict[str, OpInfo]:
    return dict(_ops)
