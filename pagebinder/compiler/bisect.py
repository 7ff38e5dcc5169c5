"""`bisect`: which step of a compilation first changes what the model computes, in which layer, at which node.

    source model ... captured ... pass 1 ... pass 2 ... fused          every step against the one before
                                        ^ the first that differs       then every value inside it, in order

It compiles as usual, but keeps every step; a step is suspect if one of its rewrites is wrong on its own (with random
inputs), or if the graph after it differs from the graph before it on whole sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagebinder import compile as compiler
from pagebinder.ambient import alone
from pagebinder.compiler.locate import Divergence, in_capture, in_packing, in_pass, of_cone
from pagebinder.compiler.repro import write_script
from pagebinder.compiler.verify import chains, check_can_verify, conditions_of, worlds
from pagebinder.compiler.verify_runs import Runs, Sequences, choose_sequences, lengths_to_test
from pagebinder.config import CompileConfig
from pagebinder.errors import ConfigError, VerificationError
from pagebinder.graph_tools import module_path
from pagebinder.passes.certificates import UnequalRewriteError, certify
from pagebinder.passes.trail import DECODER, ENCODER, Step, Trail
from pagebinder.passes.verifier import ALONE, Measured, differences, measure_steps, places_of
from pagebinder.paths import user_path
from pagebinder.report import CompileReport, VerifiedStep

DEFAULT_DIR = "bisect"


@dataclass(frozen=True, kw_only=True)
class BisectResult:
    """What `bisect` found.

    steps: every step that was measured, with its error. If nothing `diverged`, the other fields are empty.
    level, pass_name: the first step that differs. module_path, node, op: the first place in it, "" if the values
    inside could not be told apart. error, tolerance: in units of the spread. how: on which input. places: all that
    the pass rewrote. script: reproduces it. failure: what was raised, where a graph cannot be run or a kernel does
    what its schema does not say; there is no script then.
    """

    diverged: bool
    steps: list[VerifiedStep] = field(default_factory=list)
    level: str = ""
    pass_name: str = ""
    module_path: str = ""
    node: str = ""
    op: str = ""
    error: float = 0.0
    tolerance: float = 0.0
    how: str = ""
    places: tuple[str, ...] = ()
    script: Path | None = None
    notes: tuple[str, ...] = ()
    failure: str = ""

    def describe(self) -> str:
        """The result as text."""
        lines = [
            f"  {s.level:9} {s.name:22} {s.weights:9} {s.dtype:9} error {s.max_rel_error:.1e} of the spread"
            f" (tolerated {s.tolerance:g})"
            for s in self.steps
        ]
        lines += [f"note: {note}" for note in self.notes]
        if not self.diverged:
            return "\n".join(["nothing diverges: every step computes what the one before it does", *lines])
        what = f"{self.error:.3g} of the spread, tolerated {self.tolerance:g}, on {self.how}"
        head = [
            f"{'fails' if self.failure else 'diverges'} in {self.pass_name} (level {self.level})",
            f"  layer  {self.module_path or '(not known)'}",
            f"  node   {self.node or '(not known)'} {self.op}".rstrip(),
            f"  error  {self.failure or what}",
        ]
        if self.script is not None:
            head.append(f"  script {self.script}")
        return "\n".join([*head, "steps measured:", *lines])


@dataclass
class _Suspect:
    """The first step that differs: its place in the trail, and what shows it."""

    order: int
    step: Step
    before: Step | None
    error: float
    tolerance: float
    how: str
    measured: Measured | None = None
    runs: Runs | None = None
    unequal: UnequalRewriteError | None = None


@alone
def bisect(
    model: Any,
    config: CompileConfig | None = None,
    *,
    num_tokens: int | None = None,
    tolerance: float | None = None,
    out_dir: str | Path | None = None,
) -> BisectResult:
    """Find the first step, layer and node at which a compiled model differs from its source.

    Args:
        model: as for `compile_model`, with weights.
        num_tokens: length of the only sequence to run; None: lengths at the edges of blocks and windows.
        tolerance: error that counts, in units of the spread; None: that of `CompileConfig.verify`.
        out_dir: where the script goes; None: none is written.
    Raises:
        ConfigError: a model without weights, bad options. Errors of `compile_model`, but for VerificationError.
    """
    if num_tokens is not None and num_tokens < 1:
        raise ConfigError(f"num_tokens={num_tokens}: use at least 1, or None.")
    if tolerance is not None and not tolerance > 0:
        raise ConfigError(f"tolerance={tolerance}: use a number above 0, or None.")
    out_dir = None if out_dir is None else user_path(out_dir)
    config = config or CompileConfig()
    report, trail = CompileReport(), Trail("full")
    source = compiler.load_source(model, config)
    if source.encoder_only:
        raise ConfigError(
            'bisect is for decoders; for an encoder, verify="full" names the pass and its places.'
        )
    check_can_verify(source, dataclasses.replace(config, verify="full"))
    quick = dataclasses.replace(config, verify="off", executable="eager")
    compiled = compiler.compile_source(source, quick, report, compiler._StageTimer({}), trail)
    source = compiled.source
    plan, states = compiled.kv_spec, compiled.states
    lengths = lengths_to_test(plan, states, source, full=True)
    if num_tokens is not None:
        if num_tokens > compiled.max_model_len:
            raise ConfigError(f"num_tokens={num_tokens}: the model takes at most {compiled.max_model_len}.")
        lengths = [num_tokens]
    sequences = choose_sequences(source, plan, states, lengths)
    steps: list[VerifiedStep] = []
    try:
        suspect = _unequal_rewrite(trail, tolerance)
        for world in worlds(source, report.notes, full=True, num_tokens=max(lengths), trail=trail):
            found = _first_differing(
                trail, world, source, plan, states, sequences, tolerance, steps, report.notes
            )
            if found is not None and (suspect is None or found.order < suspect.order):
                suspect = found
            if suspect is not None:
                divergence = _locate(suspect, source)
                return _result(suspect, divergence, steps, report.notes, out_dir)
    except VerificationError as error:
        return _failed(error, trail, steps, report.notes)
    return BisectResult(diverged=False, steps=steps, notes=tuple(report.notes))


def _failed(error: VerificationError, trail: Trail, steps, notes) -> BisectResult:
    """A kernel raises, or does what its schema does not say: there is nothing to compare behind it."""
    step = next((s for s in trail.steps if (s.name, s.level) == (error.pass_name, error.level)), None)
    nodes = () if step is None else (n for n in step.graph.graph.nodes if n.name == error.node)
    node = next(iter(nodes), None)
    return BisectResult(
        diverged=True, steps=steps, level=error.level, pass_name=error.pass_name, node=error.node,
        module_path="" if node is None else module_path(node), op="" if node is None else str(node.target),
        error=error.error, places=error.places, notes=tuple(notes), failure=str(error),
    )  # fmt: skip


def _order(trail: Trail, step: Step) -> int:
    """Place of a step: the encoder's come before the decoder's."""
    return [*trail.of(ENCODER), *trail.of(DECODER)].index(step)


def _unequal_rewrite(trail: Trail, tolerance: float | None) -> _Suspect | None:
    for chain in (ENCODER, DECODER):
        for before, after in itertools.pairwise(trail.of(chain)):
            if after.result is None or not after.result.matches or after.result.changes_numbers:
                continue
            try:
                certify(before, after)
            except UnequalRewriteError as error:
                if tolerance is None or error.error > tolerance:
                    allowed = tolerance or error.counterexample.tolerance
                    how = f"the rewrite alone, {error.sequence}"
                    return _Suspect(
                        _order(trail, after), after, before, error.error, allowed, how, unequal=error
                    )
    return None


def _first_differing(
    trail: Trail,
    world,
    source,
    plan,
    states,
    sequences: Sequences,
    tolerance,
    lines: list[VerifiedStep],
    notes,
) -> _Suspect | None:
    """Measure steps until one differs."""
    conditions = conditions_of(world, trail)
    for steps, expected, runs, own in chains(trail, world, source, plan, states, sequences, notes):
        for measured in measure_steps(steps, expected, runs.outputs, conditions, runs.lengths, own):
            line = measured.line
            lines.append(line)
            allowed = tolerance or line.tolerance
            on_purpose = measured.step.result is not None and measured.step.result.changes_numbers
            if (line.judged or (tolerance and not on_purpose)) and line.max_rel_error > allowed:
                # The shortest sequence that shows it makes the smallest script.
                shown = next(
                    d for d in differences(measured.outputs, measured.expected) if d.relative > allowed
                )
                how = f"{runs.lengths[shown.index]} tokens {shown.way}, {conditions}"
                return _Suspect(
                    _order(trail, measured.step), measured.step, measured.before, shown.relative, allowed, how,
                    measured, runs,
                )  # fmt: skip
    return None


def _locate(suspect: _Suspect, source) -> Divergence | None:
    """The first value that differs inside the suspect step."""
    if suspect.unequal is not None:
        cone, shown = suspect.unequal.cone, suspect.unequal.counterexample
        return of_cone(cone, shown.inputs, cone.output[1], shown.widen)
    runs, step, tolerance = suspect.runs, suspect.step, suspect.tolerance
    shown = next(
        d for d in differences(suspect.measured.outputs, suspect.measured.expected) if d.relative > tolerance
    )
    if suspect.before is None:
        return in_capture(runs, source, step.chain, step.graph, shown.index, tolerance)
    if shown.way == ALONE:
        return in_pass(runs, suspect.before.graph, step.graph, shown.index, tolerance)
    return in_packing(runs, step.graph, shown.way, tolerance)


def _result(suspect: _Suspect, divergence: Divergence | None, steps, notes, out_dir) -> BisectResult:
    step, script = suspect.step, None
    node = divergence.node if divergence is not None else None
    where = divergence.module_path if divergence is not None else ""
    if suspect.unequal is not None:
        where = where or suspect.unequal.places[0]
    if divergence is not None and out_dir is not None:
        title = f"{step.name} (level {step.level}) at {where or 'an unknown layer'}, node {node.name}."
        script = write_script(divergence, out_dir, title, suspect.tolerance)
    return BisectResult(
        diverged=True,
        steps=steps,
        level=step.level,
        pass_name=step.name,
        module_path=where,
        node=node.name if node is not None else "",
        op=str(node.target) if node is not None else "",
        error=suspect.error,
        tolerance=suspect.tolerance,
        how=suspect.how,
        places=tuple(places_of(step)),
        script=script,
        notes=tuple(notes),
    )
