"""Runs every step of a compilation on the same sequences: binds the source model, the passes' trail and the runtime.

    conditions           weights                          computed in
    model                the model's                      its dtype, and float32 if that is wider
    rescaled             N(0, 1 / fan_in); vectors near   the same: small initial weights make attention uniform, and
                         their size, or one for zeros     then a wrong mask or scale hardly shows

Rescaled and widened weights are those of a copy of the model, one copy at a time; graphs are run with the copy's
tensors, so the model and its graphs are never touched.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch.fx import GraphModule

from pagebinder.compiler.verify_constants import as_captured
from pagebinder.compiler.verify_memory import room_for_copy
from pagebinder.compiler.verify_noise import converted_copy, own_tolerance
from pagebinder.compiler.verify_runs import (
    KEPT_ROWS,
    Runs,
    Sequences,
    World,
    call_source,
    choose_sequences,
    lengths_to_test,
    source_encoder_states,
    source_logits,
)
from pagebinder.config import CompileConfig
from pagebinder.custom_ops.linear.weight_numbers import remembering_weights
from pagebinder.errors import ConfigError, UnrunnableGraphError, VerificationError
from pagebinder.frontend.capture import name_in_graph
from pagebinder.frontend.module_copy import copied
from pagebinder.frontend.python_state import evaluation_mode
from pagebinder.frontend.source import ModelSource
from pagebinder.frontend.weight_values import decisions_of
from pagebinder.passes.certificates import certify_steps
from pagebinder.passes.graph_values import REDUCED
from pagebinder.passes.trail import DECODER, ENCODER, Step, Trail
from pagebinder.passes.verifier import TOLERANCES, Conditions, difference, verify_steps
from pagebinder.report import CompileReport
from pagebinder.runtime.kv import KVPlan


def check_can_verify(source: ModelSource, config: CompileConfig) -> None:
    """Raises ConfigError where there is nothing to run."""
    if config.verify != "off" and source.device.type == "meta":
        raise ConfigError(
            f'verify={config.verify!r} runs the model, and one on the meta device has no weights; use verify="off".'
        )


def verify(
    trail: Trail,
    source: ModelSource,
    plan: KVPlan,
    states: Sequence,
    config: CompileConfig,
    report: CompileReport,
    refused: str | None = None,
) -> None:
    """Verify all steps of a trail; errors and certificates go to the report. `refused`: what could not be explained.

    Raises:
        VerificationError: a step, or a rewrite on its own, changes what the model computes.
    """
    if refused is not None:
        report.notes.append(
            "verify: not run, as this model was compiled with strict=False and cannot be served"
        )
        return
    full = config.verify == "full"
    lengths = _runnable(source, lengths_to_test(plan, states, source, full=full), report)
    sequences = choose_sequences(source, plan, states, lengths)
    if full:  # first, as a certificate says more exactly what is wrong
        certify_steps(trail)
    for world in worlds(source, report.notes, full=full, num_tokens=max(lengths), trail=trail):
        with own_kernels_may_refuse(world, config, report), remembering_weights():
            verify_in_world(trail, world, source, plan, states, sequences, report)


@contextlib.contextmanager
def own_kernels_may_refuse(world: World, config: CompileConfig, report: CompileReport) -> Iterator[None]:
    """A kernel of the user's may be for bfloat16 alone: then graphs with it are judged in that, and not in float32,
    too."""
    try:
        yield
    except UnrunnableGraphError as error:
        if not world.widen or not (config.passes or config.providers):
            raise
        report.notes.append(f"verify: not compared in float32, from this step on: {error}")


def _runnable(source: ModelSource, lengths: list[int], report: CompileReport) -> list[int]:
    """Without those that a user's own code does not take: x[:, :-3] behind three zeros needs three tokens."""
    if source.is_transformers or source.encoder is not None:
        return lengths
    failures: dict[int, Exception] = {}
    with evaluation_mode(source.module):
        for n in lengths:
            try:
                ids = torch.zeros(n, dtype=torch.int64, device=source.device)
                if len(call_source(source.module, source, ids)) not in (1, n):
                    raise RuntimeError(f"it returns another number of rows than {n}")
            except (RuntimeError, IndexError) as error:
                failures[n] = error
    if len(failures) == len(lengths):
        raise VerificationError(f"The source model cannot be run on its own: {failures[lengths[-1]]}")
    if failures:
        few = ", ".join(map(str, sorted(failures)))
        report.notes.append(f"verify: the source model does not take sequences of {few} tokens; left out")
    return [n for n in lengths if n not in failures]


def verify_in_world(
    trail: Trail, world: World, source: ModelSource, plan, states, sequences: Sequences, report: CompileReport
) -> None:
    """All steps with one set of weights."""
    conditions = conditions_of(world, trail)
    for steps, expected, runs, own in chains(trail, world, source, plan, states, sequences, report.notes):
        if not all(x.isfinite().all() for x in expected):
            report.notes.append(f"verify: the model returns NaN or infinity with {conditions}; not compared")
            continue
        _require_deterministic(runs, steps[0].graph, conditions)
        report.verified += verify_steps(steps, expected, runs.outputs, conditions, runs.lengths, own)


def conditions_of(world: World, trail: Trail) -> Conditions:
    chooses = _chooses_experts(trail)
    judged = world.dtype not in REDUCED or not chooses
    return Conditions(world.name, world.dtype, TOLERANCES[world.dtype], judged, chooses)


def chains(
    trail: Trail, world: World, source: ModelSource, plan, states, sequences: Sequences, notes: list[str]
) -> Iterator[tuple[list[Step], list[torch.Tensor], Runs, Callable[[], float]]]:
    """The encoder's steps, if there is one, then the decoder's: with what the source model returns, how to run
    graphs, and what it asks to be tolerated (verify_noise.py). The decoder's get the states of its own encoder."""
    encoder_states = None

    def encode(module: torch.nn.Module) -> list[torch.Tensor]:
        with as_captured(world, trail.of(ENCODER)[0].graph):
            return [source_encoder_states(module, ids) for ids in sequences.encoder_ids]

    def last_states(module: torch.nn.Module) -> list[torch.Tensor]:
        return [x[-KEPT_ROWS:] for x in encode(module)]

    def logits(module: torch.nn.Module) -> list[torch.Tensor]:
        states = encoder_states
        if states is not None and module is not world.module:
            states = [x.to(next(module.parameters()).dtype) for x in states]
        with as_captured(world, trail.of(DECODER)[0].graph):
            return source_logits(module, source, sequences, states)

    with evaluation_mode(world.module):
        if sequences.encoder_ids is not None:
            encoder_states = encode(world.module)
            expected = [x[-KEPT_ROWS:] for x in encoder_states]
            runs = Runs(world, Sequences(sequences.encoder_ids), plan, states)
            yield trail.of(ENCODER), expected, runs, own_tolerance(world, expected, last_states, notes)
        expected = logits(world.module)
    kept_rows = max(map(len, expected))
    runs = Runs(world, sequences, plan, states, encoder_states, source.vocab_size, kept_rows)
    yield trail.of(DECODER), expected, runs, own_tolerance(world, expected, logits, notes)


def _require_deterministic(runs: Runs, captured: GraphModule, conditions: Conditions) -> None:
    first, second = (runs.alone(captured, len(runs.sequences.ids) - 1) for _ in range(2))
    apart = difference(first, second)
    if apart.relative > conditions.tolerance:
        raise VerificationError(
            f"The captured model returns different logits for the same tokens ({apart.relative:.3g} of their "
            "spread apart): it draws random numbers, or keeps state between calls. It cannot be verified.",
            pass_name="capture",
            level="captured",
            error=apart.relative,
        )


def _chooses_experts(trail: Trail) -> bool:
    """In reduced precision two experts' scores may tie, and rounding decides: a jump that is no error."""
    return any(
        "topk" in str(node.target) or "moe" in str(node.target) or "expert" in str(node.target)
        for step in trail.steps[:2]
        for node in step.graph.graph.nodes
        if node.op == "call_function"
    )


def worlds(
    source: ModelSource, notes: list[str], *, full: bool, num_tokens: int, trail: Trail | None = None
) -> Iterator[World]:
    """The sets of weights to verify with, one after the other; what there is no memory for is noted. `num_tokens`:
    of a sequence that the source takes. Weights by whose values the trail's graphs were made stay as they are."""
    yield World("model", source.module, source.dtype)
    if not full:
        return
    for dtype in (source.dtype, torch.float32) if source.dtype in REDUCED else (source.dtype,):
        if not room_for_copy(source.module, dtype):
            notes.append(f"verify: no memory for a copy of the weights in {dtype}; that part was left out")
            continue
        widen = dtype is not source.dtype
        module = converted_copy(source.module, dtype) if widen else copied(source.module)
        if widen and (why := _why_not_in(module, source, num_tokens)) is not None:
            notes.append(f"verify: not compared in {dtype}, which the model's own code does not take: {why}")
            continue
        if widen:
            yield World("model", module, dtype, tensors_of(module), widen)
        decisions = decisions_of(trail.steps[0].graph.graph) if trail is not None else ()
        rescale(module, kept={name for decision in decisions for name in decision.weights})
        yield World("rescaled", module, dtype, tensors_of(module), widen)
        del module


def _why_not_in(module: torch.nn.Module, source: ModelSource, num_tokens: int) -> str | None:
    """Why code of a user's, which may hold a dtype (`x.bfloat16()`), does not run with its weights in another one."""
    if source.is_transformers or source.encoder is not None:
        return None
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=source.device)
    with evaluation_mode(module):
        try:
            call_source(module, source, ids)
        except Exception as error:  # whatever their code raises
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under all their names, as graphs have them."""
    tensors = itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )
    return {name_in_graph(name): tensor for name, tensor in tensors}


def rescale(module: torch.nn.Module, seed: int = 0, kept: Collection[str] = ()) -> None:
    """Overwrite weights: matrices ~ N(0, 1 / fan_in), vectors near their mean size, or near one if they are zero.
    `kept`: names of parameters that stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    named = module.named_parameters(remove_duplicate=False)
    fixed = {id(parameter) for name, parameter in named if name in kept}
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and id(parameter) not in fixed:
                noise = torch.randn(parameter.shape, generator=generator, device="cpu")
                is_matrix = parameter.dim() >= 2
                size = parameter.shape[-1] ** -0.5 if is_matrix else float(parameter.abs().mean()) or 1.0
                parameter.copy_(size * (noise if is_matrix else 1.0 + 0.1 * noise))
