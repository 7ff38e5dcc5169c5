"""Proves by numbers what an experts module computes, before it is traced as our op.

parts       the weights that its traits announce, and no others
gate        its own code between the projections, run beside the known gates (`expert_gates.py`)
whole       our route beside the loop over experts that its class defines, on a miniature with random weights
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.errors import CaptureError
from pagebinder.frontend.coded_experts import CODES, SCALE, QuantizedExperts
from pagebinder.frontend.expert_gates import find_gate

KEPT_AS = "_pagebinder_experts"  # where a module keeps its description while it is traced
MINI_EXPERTS, MINI_TOKENS, MINI_SLOTS, MINI_WIDTH, MINI_INNER = 4, 6, 2, 12, 8
TOLERANCE = (
    1e-4  # float32 results of magnitude 1 to 100; what a module does beyond our op is seldom that small
)


@dataclass(frozen=True)
class Experts:
    """How a module is traced: `gate` None means that its own code is, between two `expert_linear`."""

    gate: Gate | None


def up_name(module: torch.nn.Module) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def weights_of(module: torch.nn.Module) -> tuple[torch.Tensor | None, ...]:
    """up [E, J, C], down [E, C, I] (or both transposed), up_bias [E, J] or None, down_bias [E, C] or None."""
    up = up_name(module)
    biases = (getattr(module, f"{up}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    return getattr(module, up), module.down_proj, *biases


def matrices_of(module: torch.nn.Module) -> tuple[tuple[torch.Tensor | None, ...], bool]:
    """(The same as ops take them, are they transposed?) Those of codes never are."""
    weights = weights_of(module)
    if not isinstance(module, QuantizedExperts):
        return weights, module.is_transposed
    return (*map(module.expert_matrices, (up_name(module), "down_proj")), *weights[2:]), False


def dtype_of(module: torch.nn.Module) -> torch.dtype:
    """Of its weights, be they computed from codes."""
    return module.weights_dtype if isinstance(module, QuantizedExperts) else weights_of(module)[0].dtype


def code_between(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The module's own code between its projections: [S, J] -> [S, I]."""
    return module._apply_gate if module.has_gate else module.act_fn


def understand(path: str, module: torch.nn.Module, run: Callable, known: list[Gate]) -> Experts:
    """The description of one module, proven.

    Args:
        run: our route, called as transformers calls its experts functions.
        known: the gates seen so far in this model; grows.
    Raises:
        CaptureError: it computes something that is not understood; says what.
    """
    name = f"{path} ({type(module).__name__})"
    _require_known_parts(name, module)
    # A norm behind the down projection stands between the experts and their weights: two projections, then.
    gate = None if getattr(module, "has_post_expert_norm", False) else _find_gate(name, module, known)
    experts = Experts(gate)
    _prove(name, module, experts, run)
    return experts


def _require_known_parts(name: str, module: torch.nn.Module) -> None:
    up = up_name(module)
    expected = {up, "down_proj"} | ({f"{up}_bias", "down_proj_bias"} if module.has_bias else set())
    have = {n for n, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
    if isinstance(module, QuantizedExperts):
        have = have - {name + kind for name in module.formats for kind in (CODES, SCALE)} | {*module.formats}
    if have != expected:
        raise CaptureError(
            f"{name} holds the weights {sorted(have)} where {sorted(expected)} are understood; "
            "quantised experts and experts of more projections are not."
        )
    if getattr(module, "_is_expert_parallel", False):  # transformers 5.17 does not have it
        raise CaptureError(f"{name} is split over several devices (expert parallel), which is not supported.")


def _find_gate(name: str, module: torch.nn.Module, known: list[Gate]) -> Gate | None:
    numbers = [v for v in vars(module).values() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    options = {"gated": module.has_gate, "numbers": numbers, "dtype": dtype_of(module)}
    try:
        gate = find_gate(code_between(module), guesses=known, **options)
    except Exception as error:
        what = "what it computes between its projections cannot be run"
        raise CaptureError(f"{name}: {what}: {error}") from error
    if gate is not None and gate not in known:
        known.append(gate)
    return gate


def _prove(name: str, module: torch.nn.Module, experts: Experts, run: Callable) -> None:
    mini = _miniature(module)
    setattr(mini, KEPT_AS, experts)
    x = 2 * _random(MINI_TOKENS, mini.down_proj.shape[2 if module.is_transposed else 1], seed=1)
    ids = _random(MINI_TOKENS, MINI_EXPERTS, seed=2).argsort(dim=1)[:, :MINI_SLOTS]
    weights = _random(MINI_TOKENS, MINI_SLOTS, seed=3).abs()
    with torch.no_grad():
        try:
            expected = type(mini).forward.__wrapped__(mini, x, ids, weights)
        except Exception as error:
            raise CaptureError(f"{name}: its loop over experts cannot be run to compare: {error}") from error
        got = run(mini, x, ids, weights)
    if got.shape != expected.shape or not torch.allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE):
        raise CaptureError(
            f"{name} computes more than a mixture of experts as it is understood here; its result differs."
        )


def _miniature(module: torch.nn.Module) -> torch.nn.Module:
    """A copy with few small experts of random float32 weights; it shares everything that has no weights."""
    has_norm = getattr(module, "has_post_expert_norm", False)
    width = weights_of(module)[1].shape[2 if module.is_transposed else 1] if has_norm else MINI_WIDTH
    up, inner_up = up_name(module), (2 if module.has_gate else 1) * MINI_INNER
    shapes = {up: (inner_up, width), "down_proj": (width, MINI_INNER)}
    if module.is_transposed:
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    if module.has_bias:
        shapes |= {f"{up}_bias": (inner_up,), "down_proj_bias": (width,)}
    mini = copy.copy(module)
    mini.__dict__ = dict(module.__dict__)
    if isinstance(module, QuantizedExperts):
        mini.__class__ = module.plain_class
        mini._buffers = {}
    mini._parameters = {
        name: torch.nn.Parameter(_random(MINI_EXPERTS, *shape, seed=4 + i), requires_grad=False)
        for i, (name, shape) in enumerate(shapes.items())
    }
    mini._modules = {name: _on_cpu(child) for name, child in module._modules.items()}
    mini.num_experts = MINI_EXPERTS
    return mini


def _on_cpu(child: torch.nn.Module) -> torch.nn.Module:
    """A module without weights as it is; a norm with random float32 weights, as its own may be on any device."""
    if not list(child.parameters()):
        return child
    child = copy.deepcopy(child).to_empty(device="cpu").float()
    for parameter in child.parameters():
        parameter.data = _random(*parameter.shape, seed=9)
    return child


def _random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
