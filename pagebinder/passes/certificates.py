"""Certificates: every kind of rewrite, cut out of the graph before and after the pass, tested with random inputs.

    before   fn(x [T, 64], w [64]): cast, pow, mean, + eps, rsqrt, mul, cast, mul
    after    fn(x [T, 64], w [64]): rms_norm(eps, tail)
    x, w     random, of the real shapes and dtypes, of magnitude 1 and 0.001, for several T

A whole network hides an eps or a scale that is slightly wrong behind the layers that follow; here it stands alone.
Equal rewrites of repeated layers are tested once, and counted.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pagebinder.errors import VerificationError
from pagebinder.graph_tools import aten, is_call, module_path, recipe_of, written_by
from pagebinder.passes.graph_values import REDUCED, GraphRunner
from pagebinder.passes.quantize_activations import certify_activations
from pagebinder.passes.quantize_kv import certify_kv
from pagebinder.passes.quantize_weights import certify_weights
from pagebinder.passes.rewrite_cones import Cone, Diff, cones
from pagebinder.passes.trail import DECODER, ENCODER, Step, Trail
from pagebinder.passes.verifier import Difference, difference, spread_of, what_failed
from pagebinder.report import Certificate, Match

# How far a rewrite alone may differ, in units of the spread of its outputs, or of what these are a sum of: it has a
# few operations only, so this is a few units in the last place of the largest outputs, which are some 5 deviations
# out. In float32 a sum over a layer's width may differ by more, as the order of its terms is free.
TOLERANCES = {torch.float32: 2e-5, torch.float64: 2e-5, torch.float16: 2**-7, torch.bfloat16: 2**-4}
NUM_TOKENS = (1, 3, 17)
MAGNITUDES = (1.0, 1e-3)
# Passes that change numbers on purpose: the two sides differ, and what the format promises is tested instead. (Page
# passes to rows of fewer bits change numbers, too: their rewrites cannot be cut out anyway.)
CHANGES = {
    "quantize_weights": certify_weights,
    "quantize_activations": certify_activations,
    "quantize_kv": certify_kv,
}
# Passes whose rewrites read what another place computes: cut out, that is a random input. Whole graphs tell.
ELSEWHERE = {"share_values": "an equal call stands for it, which is at another place"}
CAPTURED_INPUTS = ("input_ids", "positions", "encoder_states")


class NotExtractable(Exception):
    """Why a rewrite cannot be run on its own."""


@dataclass(frozen=True)
class Counterexample:
    """Inputs on which the two sides of a cone differ by more than `tolerance`; `widen`: when computed in float32."""

    inputs: list
    tolerance: float
    widen: bool


class RewriteFailedError(Exception):
    """What a rewrite put in raises on inputs that what it replaced takes."""


class UnequalRewriteError(VerificationError):
    """With the cone whose sides are not equal, and inputs that show it."""

    cone: Cone
    counterexample: Counterexample


@dataclass
class _Kind:
    """One kind of rewrite: the first of its cones, and how many matches are of it."""

    cone: Cone
    match: Match
    count: int = 0
    worst: Difference | None = None
    counterexample: Counterexample | None = None
    reason: str = ""


def certify_steps(trail: Trail) -> None:
    """Certify every pass of a trail that matched something; certificates go to the passes' results.

    Raises:
        VerificationError: a rewrite is not equal to what it replaced.
    """
    for chain in (ENCODER, DECODER):
        for before, after in itertools.pairwise(trail.of(chain)):
            if after.result is None or not after.result.matches:
                continue
            certify_change = CHANGES.get(after.result.name)
            if certify_change is None:
                after.result.certificates = certify(before, after)
            else:
                after.result.certificates = certify_change(before.graph, after.graph, after.result)


def certify(before: Step, after: Step) -> list[Certificate]:
    """One certificate for each kind of rewrite of the pass `after`; of one that changes numbers on purpose, whose
    promise is not known here, it says by how much."""
    kinds: dict[str, _Kind] = {}
    by_node: dict[str, list[Cone]] = {}
    for cone in cones(Diff(before.graph.graph, after.graph.graph)):
        for node in (*cone.before, *cone.after):
            by_node.setdefault(node.name, []).append(cone)
    for match in after.result.matches:
        found = by_node.get(match.node, ()) if after.name not in ELSEWHERE else ()
        if not found:
            why_none = ELSEWHERE.get(after.name) or _no_cone(before, after)
            kind = kinds.setdefault(f"none {match.pattern}", _Kind(None, match, reason=why_none))
            kind.count += 1
            continue
        try:
            own = [_kind_of(kinds, cone, match, before.graph) for cone in _smallest(found)]
        except RewriteFailedError as why:
            raise VerificationError(
                f"{after.name} (level {after.level}): the rewrite {match.pattern} at {match.module_path or '?'} "
                f"(node {match.node}) cannot be run on inputs that what it replaced takes: {why}",
                pass_name=after.name, level=after.level, error=math.inf, places=(match.module_path,),
                node=match.node,
            ) from why  # fmt: skip
        worst = max(own, key=lambda k: math.inf if k.reason else k.worst.relative)
        worst.count += 1
        if worst.counterexample is not None and not after.result.changes_numbers:
            raise _error(worst, match, after)
    return [_certificate(kind) for kind in kinds.values() if kind.count]


def _smallest(found: Sequence[Cone]) -> list[Cone]:
    """Cones that end in this match, not those that merely pass through it."""
    size = min(len(c.before) + len(c.after) for c in found)
    return [c for c in found if len(c.before) + len(c.after) <= 2 * size]


def _no_cone(before: Step, after: Step) -> str:
    new = {str(n.target) for n in after.graph.graph.nodes if n.op == "placeholder"}
    new -= {str(n.target) for n in before.graph.graph.nodes if n.op == "placeholder"}
    if new:
        return (
            f"the pass adds inputs ({', '.join(sorted(new)[:3])}, ...), so the two sides take different ones"
        )
    return "no value of the graph before could be paired with it"


def _kind_of(kinds: dict[str, _Kind], cone: Cone, match: Match, owner: GraphModule) -> _Kind:
    """The kind of a cone, tested if it is the first of it."""
    try:
        _require_same_interface(cone)
        graphs = cone.graphs()
        key = _structure(cone, graphs)
    except NotExtractable as why:
        return kinds.setdefault(f"{why} {match.pattern}", _Kind(cone, match, reason=str(why)))
    if key not in kinds:
        kinds[key] = kind = _Kind(cone, match)
        try:
            kind.worst, kind.counterexample = compare_sides(cone, graphs, owner)
        except NotExtractable as why:
            kind.reason = str(why)
    return kinds[key]


def _require_same_interface(cone: Cone) -> None:
    """Caches and step metadata are inputs that only whole-graph runs can provide."""
    for b, a in cone.inputs:
        node = b if b is not None else a
        if node.op == "placeholder" and str(node.target) not in CAPTURED_INPUTS:
            raise NotExtractable("paging changes the interface: one side reads caches and step metadata")
    if any(written_by(n) for n in (*cone.before, *cone.after)):
        raise NotExtractable("it writes to a cache")


def _structure(cone: Cone, graphs: tuple[GraphModule, GraphModule]) -> str:
    """Equal for cones that compute the same from inputs of the same kind."""
    digest = hashlib.sha256()
    for pair in cone.inputs:
        digest.update(repr(_input_kind(pair[0] or pair[1])).encode())
    for gm in graphs:
        index = {n: i for i, n in enumerate(gm.graph.nodes)}
        for node in gm.graph.nodes:
            args = map_arg((node.args, node.kwargs), lambda n: f"%{index[n]}")  # noqa: B023
            digest.update(repr((node.op, str(node.target), str(args))).encode())
    return digest.hexdigest()


def _input_kind(node: Node) -> tuple:
    value = node.meta.get("val")
    shape = tuple(map(str, getattr(value, "shape", ())))
    constant = None
    if node.op == "get_attr" and not isinstance(tensor := _attribute(node), torch.nn.Parameter):
        recipe = recipe_of(tensor)
        constant = (
            (tensor.data_ptr(), tensor.stride()) if recipe is None else id(recipe.function)
        )  # values matter
    return node.op, shape, str(getattr(value, "dtype", type(value))), constant


def _attribute(node: Node) -> torch.Tensor:
    value = node.graph.owning_module  # of its own side: a pass may add constants, ALiBi slopes for example
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def compare_sides(
    cone: Cone, graphs: tuple[GraphModule, GraphModule], owner: GraphModule
) -> tuple[Difference, Counterexample | None]:
    """Run both sides on random inputs of several sizes and magnitudes, and in float32 if the graph's dtype is
    smaller; the largest error, and a counterexample if it is beyond the tolerance. Sizes that the side before cannot
    be run with are left out: a shift by three tokens as the source writes it takes at least as many.

    Raises NotExtractable: that is all of them.
    """
    worst, tried, failure = Difference(), 0, None
    reduced = any(_dtype_of(node) in REDUCED for node in (*cone.before, *cone.after, cone.output[0]))
    for num_tokens in NUM_TOKENS:
        for magnitude in MAGNITUDES:
            inputs = _random_inputs(cone, owner, num_tokens, magnitude)
            for widen in (False, True) if reduced else (False,):
                given = [x.float() if widen and _is_reduced(x) else x for x in inputs]
                with torch.inference_mode():
                    try:
                        expected = GraphRunner(graphs[0], widen=widen).run(*given)
                    except Exception as error:
                        failure = f"what was replaced cannot be run on its own: {error}"
                        continue
                    if not _has_its_shape(expected, cone.output[0], num_tokens):
                        failure = "what it replaced has another shape on its own than it was traced with"
                        continue
                    try:
                        got, spread = _run_with_terms(graphs[1], widen, given)
                    except Exception as error:
                        if not widen:
                            raise RewriteFailedError(what_failed(error)) from error
                        failure = f"it cannot be computed in float32: {what_failed(error)}"  # a kernel for bf16 only
                        continue
                tried += 1
                tolerance = TOLERANCES.get(expected.dtype, 0.0)
                label = f"{num_tokens} tokens, inputs of magnitude {magnitude:g}, {expected.dtype}"
                here = difference(got, expected, label, spread=max(spread, spread_of(expected)))
                if here.relative > tolerance and not _is_nearer(graphs[0], given, expected, got):
                    return here, Counterexample(given, tolerance, widen)
                worst = max(worst, here, key=lambda d: d.relative)
    if not tried:
        raise NotExtractable(str(failure))
    return worst, None


def _is_nearer(before: GraphModule, inputs: list, expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Is a result in float32 at least as near to the one in float64 as what it replaces? Torch's product adds up on
    top of a bias, and where products are small beside it, drops their last bits one by one."""
    if expected.dtype is not torch.float32 or got.shape != expected.shape or got.dtype is not expected.dtype:
        return False
    wide = [x.double() if isinstance(x, torch.Tensor) and x.dtype is torch.float32 else x for x in inputs]
    with torch.inference_mode():
        try:
            exact = GraphRunner(before).run(*wide)
        except Exception:  # an op, or a constant, that is for float32 alone
            return False
    if not isinstance(exact, torch.Tensor) or exact.dtype is not torch.float64 or not exact.isfinite().all():
        return False
    return bool((got.double() - exact).abs().max() <= (expected.double() - exact).abs().max())


def _run_with_terms(gm: GraphModule, widen: bool, inputs: list) -> tuple[torch.Tensor, float]:
    """What a side returns and, if that is a sum or difference, the largest spread of its terms: where they cancel,
    their rounding is large beside the result. (A term that is wrong is off by its own size.)"""
    (output,) = (n.args[0] for n in gm.graph.nodes if n.op == "output")
    terms = set(output.args) if is_call(output, aten.add.Tensor, aten.sub.Tensor) else set()
    spreads = [0.0]

    def observe(node: Node, value) -> None:
        if node in terms and isinstance(value, torch.Tensor) and value.is_floating_point():
            spreads.append(spread_of(value))

    return GraphRunner(gm, widen=widen, observe=observe).run(*inputs), max(spreads)


def _dtype_of(node: Node):
    return getattr(node.meta.get("val"), "dtype", None)


def _is_reduced(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in REDUCED


def _random_inputs(cone: Cone, owner: GraphModule, num_tokens: int, magnitude: float) -> list:
    generator = torch.Generator().manual_seed(num_tokens)
    device = next((p.device for p in owner.parameters()), torch.device("cpu"))
    inputs, weights = [], {}
    for pair in cone.inputs:
        node = pair[0] or pair[1]
        if node.op == "get_attr":
            value = _random_weight(node.target, _attribute(node), weights, generator)
        else:
            value = _random_input(node, num_tokens, magnitude, generator)
        inputs.append(value.to(device) if isinstance(value, torch.Tensor) else value)
    return inputs


def _random_weight(
    name: str, tensor: torch.Tensor, known: dict[str, torch.Tensor], generator
) -> torch.Tensor:
    """Of a parameter random values, of what is made of parameters what these give; other constants are themselves.
    `known`: parameters by name, one set for both sides."""
    if (recipe := recipe_of(tensor)) is not None:
        return recipe.made({n: _random_weight(n, t, known, generator) for n, t in recipe.weights.items()})
    if not (isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()):
        return tensor
    if name not in known:
        noise = torch.randn(tensor.shape, generator=generator, device="cpu")
        noise = noise * tensor.shape[-1] ** -0.5 if tensor.dim() >= 2 else 1 + 0.1 * noise
        known[name] = noise.to(tensor.dtype)
    return known[name]


def _random_input(node: Node, num_tokens: int, magnitude: float, generator):
    if node.target == "positions":
        return torch.arange(num_tokens, device="cpu")
    if node.target == "input_ids":
        # Only its size can matter to a rewrite.
        return torch.zeros(num_tokens, dtype=torch.int64, device="cpu")
    value = node.meta["val"]
    shape = [_size(n, num_tokens) for n in value.shape]
    return (magnitude * torch.randn(shape, generator=generator, device="cpu")).to(value.dtype)


def _has_its_shape(value, node: Node, num_tokens: int) -> bool:
    traced = node.meta.get("val")
    if not (isinstance(traced, torch.Tensor) and isinstance(value, torch.Tensor)):
        return True
    return list(value.shape) == [_size(n, num_tokens) for n in traced.shape]


def _size(size, num_tokens: int) -> int:
    """A dimension with every symbol, which is a number of tokens, set to `num_tokens`."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, num_tokens)))


def _error(kind: _Kind, match: Match, after: Step) -> UnequalRewriteError:
    worst, where = kind.worst, match.module_path or module_path(kind.cone.output[1])
    replaced = ", ".join(node.name for node in kind.cone.before[:8])
    error = UnequalRewriteError(
        f"{after.name} (level {after.level}): the rewrite {match.pattern} at {where} (node {match.node}) is not "
        f"equal to what it replaced. Alone, on {worst.where}, its error is {worst.absolute:.3g}, that is "
        f"{worst.relative:.3g} of the spread of its outputs; {kind.counterexample.tolerance:g} is tolerated. "
        f"{f'It replaced {replaced}.' if replaced else 'It replaced nothing.'} `pagebinder bisect` writes a script "
        "that shows it.",
        pass_name=after.name,
        level=after.level,
        sequence=worst.where,
        error=worst.relative,
        places=(where,),
    )
    error.cone, error.counterexample = kind.cone, kind.counterexample
    return error


def _certificate(kind: _Kind) -> Certificate:
    worst = kind.worst
    return Certificate(
        pattern=kind.match.pattern,
        node=kind.match.node,
        module_path=kind.match.module_path,
        count=kind.count,
        max_abs_error=None if worst is None else worst.absolute,
        max_rel_error=None if worst is None else worst.relative,
        reason=kind.reason,
    )
