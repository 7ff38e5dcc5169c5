"""Runs passes in order: times them, counts ops before and after, collects what they answered.

Options are bound when the pipeline is built (`functools.partial`), so that every pass has one signature.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from torch.fx import GraphModule

from pagebinder.graph_tools import num_ops
from pagebinder.report import PassResult

Pass = Callable[[GraphModule], PassResult]


def run_passes(
    gm: GraphModule,
    passes: Iterable[Pass],
    *,
    dump_dir: Path | None = None,
    after: Callable[[PassResult, GraphModule], None] | None = None,
) -> list[PassResult]:
    """Apply passes to `gm` in place.

    Args:
        dump_dir: write the graph before and after each pass there as text.
        after: called with each pass's result and the graph it left, for example `Trail.after(level)`.
    """
    results = []
    for run in passes:
        before, text = num_ops(gm), str(gm.graph) if dump_dir else ""
        start = time.perf_counter()
        result = run(gm)
        result.seconds = time.perf_counter() - start
        result.num_ops_before, result.num_ops_after = before, num_ops(gm)
        if dump_dir:
            dump_dir.mkdir(parents=True, exist_ok=True)
            (dump_dir / f"{len(results):02d}_{result.name}.before.txt").write_text(text)
            (dump_dir / f"{len(results):02d}_{result.name}.after.txt").write_text(str(gm.graph))
        results.append(result)
        if after is not None:
            after(result, gm)
    return results
