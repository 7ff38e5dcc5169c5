"""Judges a compilation step by step: the same sequences through the graph before and after, and how far they differ.

    source model --capture--> captured --recognise_rms_norm--> ... --page_attention--> ... --select_providers--> fused
            difference 0            difference 1                    difference k

Every difference is that of one step alone, so the step that is wrong is named. The errors are in units of the spread
(standard deviation) of what is compared: logits, or an encoder's states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from pagebinder.errors import PagebinderError, UnrunnableGraphError, VerificationError
from pagebinder.passes.kernel_checks import is_foreign
from pagebinder.passes.trail import Step, same_graph
from pagebinder.report import VerifiedStep

# How far two graphs that mean the same may differ, in units of the spread of their outputs. A pass may change the
# order of sums and leave out or add roundings, each of one unit in the last place of the dtype (2^-24, 2^-11, 2^-8);
# a network with random weights makes them some hundred times larger by its last layer (measured on the families of
# the tests: at most 3e-5, 0.008 and 0.07). What a pass can get wrong is larger by far in float32, which is why
# models of a reduced dtype are also run in float32.
TOLERANCES = {torch.float32: 2e-4, torch.float64: 2e-4, torch.float16: 0.06, torch.bfloat16: 0.4}
# The source may compute the same in another way, a recurrence in chunks for example, with more rounding of its own
# (measured: at most 2e-4 in float32; in bfloat16 a gated delta net with random weights is off by its whole spread).
CAPTURE_FACTOR = 5
# Caches of 8 bits round what is computed: where a value lies between two codes, the order of sums decides, and the
# next code is up to 1/8 of the value away (measured on small DeepSeek-V4s: at most 0.004 in float32).
ROUNDED_TOLERANCE = 0.02
# Where activations are rounded to few bits, too, such a step sets off others, until two runs have no rounding in
# common: then they differ by sqrt(2) times what the rounding changes (measured: at most 0.6 of it).
ROUNDINGS_APART = 1.5

# Logits of ids that may not be chosen are set to -1e9 or the least number there is: beyond so many times what is
# typical (of a sample) a value says nothing of how large the others' errors may be.
MASKED, SAMPLED = 1e4, 1 << 16

MAX_PLACES_SHOWN, MAX_NODE_SHOWN = 4, 160

# label of a way to run the sequences ("alone", "packed", ...) -> one tensor per sequence, None if it was not run so
Outputs = dict[str, list[torch.Tensor | None]]
ALONE = "alone"


@dataclass(frozen=True)
class Difference:
    """How far two tensors are apart, at worst, and where: on which sequence, run in which way."""

    absolute: float = 0.0
    relative: float = 0.0
    where: str = ""
    way: str = ""
    index: int = 0


def difference(got: torch.Tensor, expected: torch.Tensor, where: str = "", *, spread=None) -> Difference:
    """Largest error of `got`, also relative to `spread` (that of `expected` if None). NaN only matches NaN."""
    if got.shape != expected.shape:
        return Difference(math.inf, math.inf, f"{where}: {list(got.shape)} instead of {list(expected.shape)}")
    errors = errors_of(got, expected)
    if not errors.numel() or not errors.max():
        return Difference(where=where)
    relative = in_units(errors, expected, spread or spread_of(expected))
    return Difference(float(errors.max()), float(relative.max()), where)


def errors_of(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How far each value is off, in float64; infinity if one of the two is NaN, or they are not both infinite."""
    got, expected = got.detach().double(), expected.detach().double()
    same = (got == expected) | (got.isnan() & expected.isnan())
    return (got - expected).abs().masked_fill(same, 0.0).nan_to_num(math.inf, math.inf)


def in_units(errors: torch.Tensor, expected: torch.Tensor, spread: float) -> torch.Tensor:
    """Errors in units of the spread; those of values that a mask has made, of their own size."""
    sizes = expected.detach().double().abs().nan_to_num(0.0, 0.0)
    return errors / torch.where(sizes > MASKED * spread, sizes, spread).clamp(min=1e-30)


def spread_of(values: torch.Tensor) -> float:
    """Standard deviation of the finite values, without those that a mask has made; of a constant, their magnitude."""
    values = values.detach().double()
    values = values[values.isfinite()]
    if not values.numel():
        return 0.0
    sizes = values.abs()
    typical = float(sizes[:: -(-len(sizes) // SAMPLED)].median())
    if typical > 0 and float(sizes.max()) > MASKED * typical:
        values = values[sizes <= MASKED * typical]
    deviation = float(values.std(correction=0))
    return deviation if deviation > 1e-12 else float(values.abs().mean())


@dataclass(frozen=True)
class Conditions:
    """What the sequences are run with; see `VerifiedStep`. `chooses`: the model picks experts or entries by scores:
    where values are rounded to few bits, another pick is no error."""

    weights: str
    dtype: torch.dtype
    tolerance: float
    judged: bool = True
    chooses: bool = False

    def __str__(self) -> str:
        kind = "the model's weights" if self.weights == "model" else "random weights"
        return f"{kind}, {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Measured:
    """A step, the one before it, and how far their outputs are apart. `expected`: what the one before returned."""

    before: Step | None
    step: Step
    line: VerifiedStep
    outputs: Outputs
    expected: list[torch.Tensor]
    worst: Difference


def measure_steps(
    steps: Sequence[Step],
    expected: list[torch.Tensor],
    run: Callable[[GraphModule], Outputs],
    conditions: Conditions,
    lengths: Sequence[int],
    own_tolerance: Callable[[], float],
) -> Iterator[Measured]:
    """Compare each step with the one before it, and the first with `expected`: what the source model returns.

    `lengths`: tokens of the sequences, of which only the last rows may be compared. `own_tolerance`: asked for
    where a step differs by more than is tolerated of most models (compiler/verify_noise.py).
    """

    def label(difference: Difference) -> str:
        return f"{lengths[difference.index]} tokens {difference.way}"

    before, outputs, rounded, mixed, changed = None, {ALONE: expected}, False, False, 0.0
    for step in steps:
        mixed = mixed or (step.result is not None and step.result.mixes_tokens)
        if before is not None and same_graph(before.graph, step.graph):
            worst = Difference()
        else:
            outputs = _run(run, step, conditions)
            outputs = {ALONE: outputs[ALONE]} if mixed else outputs
            worst = max(differences(outputs, expected), key=lambda d: d.relative)
            worst = dataclasses.replace(worst, where=label(worst) if worst.absolute else "")
        tolerance = conditions.tolerance * (CAPTURE_FACTOR if before is None else 1)
        rounded = rounded or (step.result is not None and step.result.rounds_values)
        tolerance = max(tolerance, ROUNDED_TOLERANCE, changed) if rounded else tolerance
        if step.result is not None and step.result.rounds_activations:
            changed = ROUNDINGS_APART * worst.relative
        line = _line(step, conditions, len(expected), worst, tolerance)
        if line.judged and worst.relative > tolerance:
            line = dataclasses.replace(line, tolerance=max(tolerance, own_tolerance()))
        if rounded and conditions.chooses:
            line = dataclasses.replace(line, judged=False)
        yield Measured(before, step, line, outputs, expected, worst)
        expected, before = outputs[ALONE], step


def _run(run: Callable[[GraphModule], Outputs], step: Step, conditions: Conditions) -> Outputs:
    """What a step's graph returns. A graph that cannot be run is as wrong as one that returns something else."""
    try:
        return run(step.graph)
    except VerificationError as error:  # of a kernel; fx adds lines of its own
        message = f"{step.name} (level {step.level}): {str(error).splitlines()[0]}"
        raise VerificationError(message, node=error.node, **_about(step)) from error
    except (PagebinderError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what an op or a provider of a user's own raises
        raise UnrunnableGraphError(
            f"{step.name} (level {step.level}) leaves a graph that cannot be run with {conditions}: "
            f"{what_failed(error)}",
            node=failing_node(error),
            **_about(step),
        ) from error


def _about(step: Step) -> dict:
    """The fields of a VerificationError about a step that cannot be compared."""
    places = tuple(places_of(step))
    return {"pass_name": step.name, "level": step.level, "error": math.inf, "places": places}


EXECUTING = "While executing %"  # fx, behind the message of an error


def failing_node(error: Exception) -> str:
    """The name of the node that an error of a run was in, or ""."""
    line = next((line for line in str(error).splitlines() if line.startswith(EXECUTING)), "")
    return line.removeprefix(EXECUTING).partition(" ")[0]


def what_failed(error: Exception) -> str:
    """An error of a run in a line, with the node that it was in."""
    lines = str(error).splitlines() or [""]
    node = next((line for line in lines if line.startswith(EXECUTING)), "")
    said = f"{type(error).__name__}: {lines[0]}" if lines[0] != node else type(error).__name__
    return f"{said} ({node.replace('While executing ', 'in ')[:MAX_NODE_SHOWN]})" if node else said


def verify_steps(
    steps, expected, run, conditions: Conditions, lengths, own_tolerance: Callable[[], float]
) -> list[VerifiedStep]:
    """`measure_steps`; the errors are also kept in the passes' results.

    Raises:
        VerificationError: a step differs by more than the tolerance, or leaves a graph that cannot be run.
    """
    lines = []
    for measured in measure_steps(steps, expected, run, conditions, lengths, own_tolerance):
        line, step = measured.line, measured.step
        lines.append(line)
        if line.judged and line.max_rel_error > line.tolerance:
            raise _error(measured.before, step, conditions, measured.worst, line.tolerance)
        if step.result is not None:
            step.result.max_abs_error = max(step.result.max_abs_error or 0.0, line.max_abs_error)
            step.result.max_rel_error = max(step.result.max_rel_error or 0.0, line.max_rel_error)
    return lines


def differences(outputs: Outputs, expected: list[torch.Tensor]) -> Iterator[Difference]:
    """One for each way and each sequence."""
    spread = spread_of(torch.cat(expected))
    for way, results in outputs.items():
        for index, (got, wanted) in enumerate(zip(results, expected, strict=True)):
            if got is not None:
                found = difference(got, wanted, spread=spread)
                yield dataclasses.replace(found, way=way, index=index)


def _line(
    step: Step, conditions: Conditions, num_sequences: int, worst: Difference, tolerance: float
) -> VerifiedStep:
    return VerifiedStep(
        chain=step.chain,
        level=step.level,
        name=step.name,
        weights=conditions.weights,
        dtype=str(conditions.dtype).removeprefix("torch."),
        num_sequences=num_sequences,
        max_abs_error=worst.absolute,
        max_rel_error=worst.relative,
        tolerance=tolerance,
        worst=worst.where,
        judged=conditions.judged and not (step.result is not None and step.result.changes_numbers),
    )


def _error(
    before: Step | None, step: Step, conditions: Conditions, worst: Difference, tolerance: float
) -> VerificationError:
    places = places_of(step)
    shown = ", ".join(places[:MAX_PLACES_SHOWN])
    more = f" and {len(places) - MAX_PLACES_SHOWN} more" if len(places) > MAX_PLACES_SHOWN else ""
    rewrote = f" It rewrote {shown}{more}." if places else ""
    if not places and (new := new_ops(before, step)):
        rewrote = f" It put in calls of {', '.join(new)}."
    return VerificationError(
        f"{step.name} (level {step.level}) changes what the model computes: on {worst.where} ({conditions}) the "
        f"error is {worst.absolute:.3g}, that is {worst.relative:.3g} of the spread of the outputs; "
        f"{tolerance:g} is tolerated.{rewrote} `pagebinder bisect` finds the layer and the node.",
        pass_name=step.name,
        level=step.level,
        sequence=worst.where,
        error=worst.relative,
        places=tuple(places),
    )


def new_ops(before: Step | None, step: Step) -> list[str]:
    """Ops that the graph of a step calls and the one before did not: those of providers, for example."""
    if before is None:
        return []
    was, now = ([n for n in one.graph.graph.nodes if n.op == "call_function"] for one in (before, step))
    known = {str(n.target) for n in was}
    new = [n for n in now if str(n.target) not in known]
    return sorted({str(n.target) for n in filter(is_foreign, new)} or {str(n.target) for n in new})


def places_of(step: Step) -> list[str]:
    """Where a pass matched: module path and node of each match."""
    matches = step.result.matches if step.result is not None else ()
    return [f"{m.pattern} at {m.module_path or '?'} (node {m.node})" for m in matches]
