"""Verification of an encoder alone: captured -> semantic -> packed, as `compiler/verify.py` does it for decoders.

There is no cache: a packed graph runs each sequence in a call of its own, and then all of them in one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from pagebinder.compiler.verify import conditions_of, own_kernels_may_refuse, worlds
from pagebinder.compiler.verify_constants import as_captured
from pagebinder.compiler.verify_noise import own_tolerance
from pagebinder.compiler.verify_runs import (
    KEPT_ROWS,
    PACKED,
    Runs,
    Sequences,
    random_tokens,
)
from pagebinder.config import CompileConfig
from pagebinder.frontend.encoder_only import rows_of
from pagebinder.frontend.numbering import numbering
from pagebinder.frontend.python_state import evaluation_mode
from pagebinder.frontend.source import ModelSource
from pagebinder.passes.certificates import certify_steps
from pagebinder.passes.trail import ENCODER, Trail
from pagebinder.passes.verifier import Outputs, verify_steps
from pagebinder.report import CompileReport
from pagebinder.runtime.encoder_batches import batches

LENGTHS = (1, 2, 5, 17, 40)


def verify_encoder(
    trail: Trail, source: ModelSource, max_tokens: int, config: CompileConfig, report: CompileReport
) -> None:
    """Verify all steps of an encoder's trail; errors and certificates go to the report.

    Raises:
        VerificationError: a step, or a rewrite on its own, changes what the model computes.
    """
    full = config.verify == "full"
    sequences = Sequences(_sequences(trail, source, max_tokens))
    if full:
        certify_steps(trail)
    num_tokens = max(map(len, sequences.ids))
    for world in worlds(source, report.notes, full=full, num_tokens=num_tokens):
        runs = EncoderRuns(world, sequences, None, ())
        steps = trail.of(ENCODER)

        def rows(module: torch.nn.Module, world=world, captured=steps[0].graph) -> list[torch.Tensor]:
            with as_captured(world, captured), torch.inference_mode():
                return [rows_of(module(input_ids=ids[None]))[-KEPT_ROWS:] for ids in sequences.ids]

        with evaluation_mode(world.module):
            expected = rows(world.module)
        conditions = conditions_of(world, trail)
        if not all(x.isfinite().all() for x in expected):
            report.notes.append(f"verify: the model returns NaN or infinity with {conditions}; not compared")
            continue
        with own_kernels_may_refuse(world, config, report):
            own = own_tolerance(world, expected, rows, report.notes)
            report.verified += verify_steps(steps, expected, runs.outputs, conditions, runs.lengths, own)


def _sequences(trail: Trail, source: ModelSource, max_tokens: int) -> list[torch.Tensor]:
    """Random ids of lengths at the edges of windows, without the padding token, which is numbered otherwise."""
    nodes = trail.of(ENCODER)[-1].graph.graph.nodes
    windows = {n.kwargs["window"] for n in nodes if n.kwargs.get("window") is not None}
    lengths = {
        n for n in (*LENGTHS, *(w + d for w in windows for d in (-1, 0, 1, 9))) if 1 <= n <= max_tokens
    }
    counted = numbering(source.module).counted
    return [counted(random_tokens(n, source.vocab_size, source.device)) for n in sorted(lengths)]


class EncoderRuns(Runs):
    """Runs graphs of an encoder's levels."""

    def outputs(self, gm: GraphModule) -> Outputs:
        outputs = super().outputs(gm)
        if _is_packed(gm):
            outputs[PACKED] = self._kept(self._in_one_call(gm, self.packed_ids))
        return outputs

    def alone(self, gm: GraphModule, index: int, observe=None) -> torch.Tensor:
        if not _is_packed(gm):
            return super().alone(gm, index, observe)
        return self._in_one_call(gm, [self.sequences.ids[index]])[0]

    def _in_one_call(self, gm: GraphModule, ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (batch,) = batches([x.tolist() for x in ids], 1 << 40, ids[0].device)
        rows = self.world.run(gm, batch.inputs)
        return [rows[start : start + len(x)] for x, start in zip(ids, batch.starts.tolist())]


def _is_packed(gm: GraphModule) -> bool:
    return any(n.op == "placeholder" and n.target == "query_start_loc" for n in gm.graph.nodes)
