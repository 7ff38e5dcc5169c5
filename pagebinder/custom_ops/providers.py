"""Providers: interchangeable implementations of the same op schema, and the choice between them.

A provider answers a need with reasons, never with a bare no. The choice is made once per op and layer, when
the model is compiled, and becomes the target of the graph's node:

    1. the user's explicit request, an error with reasons if it cannot be served
    2. the first provider in AUTO_ORDER of the device that serves the need
    3. the reference, said loudly, with the reasons against all others, unless a vendor's library makes it fast there
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field

import torch

from pagebinder.config_checks import short_repr
from pagebinder.custom_ops import library
from pagebinder.errors import CompilerNotFoundError, ProviderError

FEATURES = frozenset(
    {"window", "chunk", "soft_cap", "sinks", "alibi", "lse", "bidirectional", "split_kv", "cross_attention"}
    | {"fp8_v4", "fp8_v32", "fp8_index", "fp4_index"}  # layouts of latent rows
    | {"fp8_e4m3", "fp8_e5m2", "int8"}  # codes of K and V
    | {"indices", "groups"}  # lists of the latent rows that a query sees, and of groups of them
)
AUTO_ORDER = {"cpu": ("cpu",), "cuda": ("triton", "flash_attn", "flashinfer", "flex_attention", "flashmla")}
BUILTIN_MODULES = (
    "pagebinder.custom_ops.cpu.provider",
    "pagebinder.custom_ops.triton.provider",
    "pagebinder.custom_ops.optional.flashinfer",
    "pagebinder.custom_ops.optional.flash_attn",
    "pagebinder.custom_ops.optional.flex_attention",
    "pagebinder.custom_ops.optional.flashmla",
)


BUILTIN = ("reference", "cpu", "triton", "flash_attn", "flashinfer", "flex_attention", "flashmla")
CAPTURES = ("never", "uniform_decode", "always")


@dataclass(frozen=True, kw_only=True)
class OpNeed:
    """What a layer asks of an op. dtypes are names such as "bfloat16"; sizes that do not apply are None.

    Raises:
        ValueError: a feature is not in FEATURES.
    """

    op: str
    device: str = "cpu"
    dtype: str = "float32"
    kv_dtype: str | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    block_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    features: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = self.features - FEATURES
        if unknown:
            raise ValueError(f"unknown features {sorted(unknown)}; the known ones are {sorted(FEATURES)}")


def no_kernel_for(op: str) -> str:
    """The reason of a provider that lacks an op."""
    return f"it has no kernel for {op}"


class Provider:
    """Base class. A provider states what it serves and hands out overloads with the schema of the op.

    Cache layout of every provider so far: [N, G, B, D+Dv], see `attention.paged`; metadata are the op's own
    operands, so nothing else has to be built per step.
    """

    name: str
    devices: tuple[str, ...] | None = None  # None = any
    graph_capture: str = (
        "never"  # in a captured graph: "never", "uniform_decode" or "always", see `OpInfo.capture`
    )

    @property
    def namespace(self) -> str:
        """Where its overloads are registered."""
        return f"{library.NAMESPACE}_{self.name}"

    def capture_of(self, op: str) -> str:
        """Whether the launches of its overload follow from shapes alone, see `OpInfo.capture`."""
        return self.graph_capture

    def problem(self) -> ProviderError | None:
        """What keeps the provider from working on this machine at all; cheap to ask."""
        return None

    def reasons_against(self, need: OpNeed) -> list[str]:
        """Why the provider cannot serve `need`; empty if it can."""
        reasons = []
        if self.devices is not None and need.device not in self.devices:
            reasons.append(f"it runs on {', '.join(self.devices)}, not on {need.device}")
        problem = self.problem()
        if problem is not None:
            reasons.append(str(problem))
        return reasons

    def prepare(self, op: str | None = None) -> None:
        """Make an op's overload callable, or all of them (build, import); may take seconds. Raises ProviderError."""

    def prepare_for(self, need: OpNeed) -> None:
        """Make the overload callable for a need: a provider may leave out what others need. Raises ProviderError."""
        self.prepare(need.op)

    def overload(self, op: str) -> torch._ops.OpOverload:
        raise NotImplementedError

    def rehearse(self, op: str, device: torch.device, operands: tuple, options: dict):
        """Results of an op over tensors without memory as if on `device`, with all that serving it would allocate; or
        None: nobody knows, and the op is taken to allocate its results alone."""


class ReferenceProvider(Provider):
    """The plain PyTorch reference of every registered op, on any device."""

    name = "reference"
    namespace = library.NAMESPACE

    def capture_of(self, op: str) -> str:
        return library.op_info(op).capture

    def reasons_against(self, need: OpNeed) -> list[str]:
        if need.op not in library.all_ops():
            return [f"there is no op {need.op}; registered: {', '.join(sorted(library.all_ops()))}"]
        return []

    def overload(self, op: str) -> torch._ops.OpOverload:
        return library.op_info(op).overload


@dataclass(frozen=True)
class Selection:
    """The chosen provider, its overload, why it was chosen, and the reasons against those asked before it."""

    provider: str
    overload: torch._ops.OpOverload
    why: str
    rejected: dict[str, list[str]] = field(default_factory=dict)


_providers: dict[str, Provider] = {}


def register_provider(provider: Provider) -> None:
    """Add a provider under its name; a name can be taken only once.

    Raises ProviderError: it is none, says of itself what no provider is, or its name is taken or one of ours.
    """
    if not isinstance(provider, Provider):
        raise ProviderError(
            f"register_provider takes an instance of a subclass of Provider, not {short_repr(provider)}."
        )
    name = getattr(provider, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ProviderError(f"name={name!r} of a provider: use a name like a function's.")
    if name in BUILTIN and not type(provider).__module__.startswith("pagebinder."):
        raise ProviderError(f"a provider named {name!r} is one of Pagebinder's: choose another name.")
    if name in _providers:
        raise ProviderError(f"a provider named {name!r} is already registered")
    devices = provider.devices
    if devices is not None and not (
        isinstance(devices, (tuple, list)) and all(isinstance(d, str) for d in devices)
    ):
        raise ProviderError(
            f'devices={devices!r} of {name}: use a tuple such as ("cpu", "cuda"), or None for any.'
        )
    if provider.graph_capture not in CAPTURES:
        raise ProviderError(
            f"graph_capture={provider.graph_capture!r} of {name}: use one of {', '.join(CAPTURES)}."
        )
    _providers[name] = provider


register_provider(ReferenceProvider())


@functools.cache
def _import_builtin_providers() -> None:
    for module in BUILTIN_MODULES:
        importlib.import_module(module)


def registered_providers() -> dict[str, Provider]:
    """Name -> provider, the reference first."""
    _import_builtin_providers()
    return dict(_providers)


def select_provider(need: OpNeed, requested: str | None = None, *, prepare: bool = True) -> Selection:
    """Choose who serves `need`; the overload in the answer is ready to be called.

    Args:
        requested: a provider's name, or None / "auto" for the device's order.
        prepare: False leaves out building and loading: a plan on paper, whose overload may have no kernel yet.
    Raises:
        CompilerNotFoundError: the requested provider needs a C++ compiler and there is none.
        ProviderError: the requested provider is unknown or cannot serve the need, or nothing can.
    """
    providers = registered_providers()
    if requested is not None and requested != "auto":
        return _select_requested(need, requested, providers, prepare)
    rejected: dict[str, list[str]] = {}
    for name in AUTO_ORDER.get(need.device, ()):
        if name not in providers:
            rejected[name] = ["it is not installed"]
            continue
        reasons = providers[name].reasons_against(need)
        if not reasons:
            try:
                if prepare:
                    providers[name].prepare_for(need)
            except ProviderError as error:
                reasons = [str(error)]
            else:
                why = f"{name} is the first in the order for {need.device} that serves {need.op}"
                return Selection(name, providers[name].overload(need.op), why, rejected)
        rejected[name] = reasons
    reference = providers["reference"]
    reasons = reference.reasons_against(need)
    if reasons:
        raise ProviderError(_refusal(need, {**rejected, "reference": reasons}, providers))
    fast_by = library.op_info(need.op).fast_by.get(need.device)
    if fast_by is not None:
        why = f"the reference of {need.op} runs in {fast_by} on {need.device}, and no provider here replaces that"
    else:
        why = (
            f"FALLBACK to the slow reference for {need.op}: nothing else serves it. {_list_reasons(rejected)}"
        )
    return Selection("reference", reference.overload(need.op), why.rstrip(), rejected)


def _select_requested(
    need: OpNeed, requested: str, providers: dict[str, Provider], prepare: bool
) -> Selection:
    if requested not in providers:
        raise ProviderError(f"unknown provider {requested!r}; registered: {', '.join(sorted(providers))}")
    provider = providers[requested]
    reasons = _reasons(provider, need)
    if reasons:
        problem = provider.problem()
        kind = CompilerNotFoundError if isinstance(problem, CompilerNotFoundError) else ProviderError
        raise kind(_refusal(need, {requested: reasons}, providers))
    if prepare:
        provider.prepare_for(need)
    return Selection(requested, _overload(provider, need, has_kernel=prepare), f"{requested} was requested")


def _reasons(provider: Provider, need: OpNeed) -> list[str]:
    """Against it. Raises ProviderError: it does not answer so."""
    try:
        reasons = provider.reasons_against(need)
    except ProviderError:
        raise
    except Exception as error:
        raise ProviderError(
            f"{provider.name}.reasons_against({need.op}) raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(reasons, (list, tuple)) or not all(isinstance(reason, str) for reason in reasons):
        raise ProviderError(
            f"{provider.name}.reasons_against({need.op}) returned {short_repr(reasons)}: give a list of reasons as "
            "texts, an empty one where it can serve."
        )
    return list(reasons)


def _overload(provider: Provider, need: OpNeed, *, has_kernel: bool) -> torch._ops.OpOverload:
    """Raises ProviderError: there is none, or one of another schema, or (`has_kernel`) without a kernel."""
    of = f"{provider.name}, asked for its overload of {need.op},"
    how = (
        "define_schema(namespace, op_info(op)) and library(namespace).impl(op, function, device) register one"
    )
    try:
        found = provider.overload(need.op)
    except ProviderError:
        raise
    except Exception as error:
        raise ProviderError(f"{of} raised {type(error).__name__}: {error} ({how}).") from error
    if not isinstance(found, torch._ops.OpOverload):
        raise ProviderError(f"{of} returned {short_repr(found)} and no torch.ops overload ({how}).")
    wanted, given = (str(op._schema).partition("(")[2] for op in (library.op_info(need.op).overload, found))
    if wanted != given:
        raise ProviderError(
            f"{of} returned {found}, whose schema is not the op's: ({given} instead of ({wanted}."
        )
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(need.device)
    has_kernel = has_kernel and provider.name not in BUILTIN  # ours load theirs when they are prepared
    if has_kernel and key and not torch._C._dispatch_has_computed_kernel_for_dispatch_key(found.name(), key):
        raise ProviderError(f"{of} returned {found}, which has no kernel for {need.device} ({how}).")
    return found


def available_providers(device: str | None = None) -> list[tuple[str, bool, str]]:
    """(name, usable on this machine, reason) of every provider, for `pagebinder doctor`."""
    answer = []
    for name, provider in sorted(registered_providers().items()):
        problem = provider.problem()
        devices = ", ".join(provider.devices) if provider.devices else "any device"
        if device is not None and provider.devices is not None and device not in provider.devices:
            continue
        answer.append((name, problem is None, str(problem) if problem else f"serves {devices}"))
    return answer


def _list_reasons(rejected: dict[str, list[str]]) -> str:
    return " ".join(f"{name}: {'; '.join(reasons)}." for name, reasons in rejected.items())


def _refusal(need: OpNeed, rejected: dict[str, list[str]], providers: dict[str, Provider]) -> str:
    return (
        f"cannot serve {need.op} on {need.device}: {_list_reasons(rejected)} "
        f"Registered providers: {', '.join(sorted(providers))}"
    )
