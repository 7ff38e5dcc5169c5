"""Cross attention -> encoder K and V in blocks: structure, and packed requests of different encoders and progress."""

from __future__ import annotations

import functools

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig
from pagebinder.graph_tools import calls
from pagebinder.passes.layer_states import Paging
from pagebinder.passes.page_cross_attention import page_cross_attention
from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.executables import EagerExecutable, InductorExecutable
from tests.encoder_decoders import eager_logits, tiny, tokens
from tests.graphs import assert_metadata_kept, captured, count

PAGED = torch.ops.pagebinder.paged_attention.default
WRITE = torch.ops.pagebinder.kv_cache_write.default
BLOCK = 16
ENCODER_LENS = (21, 1, 48)
TOLERANCE = 1e-4


@functools.cache
def compiled_pair(family: str):
    model = tiny(family)
    config = CompileConfig(executable="eager", block_size=BLOCK)
    return model, pagebinder.compile_model(model, config)


def test_the_structure():
    _, compiled = compiled_pair("bart")
    gm = compiled.graphs["paged"]
    assert count(gm, torch.ops.pagebinder.cross_attention.default) == 0
    assert_metadata_kept(gm, PAGED)
    cross = [n for n in calls(gm.graph, PAGED) if n.kwargs.get("causal") is False]
    group = next(i for i, g in enumerate(compiled.kv_spec.groups) if g.spec.kind == "cross_attention")
    assert len(cross) == 3
    assert {n.args[2].target for n in cross} == {f"block_table_{group}"}
    assert {n.args[3].target for n in cross} == {"encoder_lens"}
    assert len({n.args[1].target for n in cross}) == 3
    order = list(gm.graph.nodes)
    for node in cross:
        write = next(n for n in calls(gm.graph, WRITE) if n.args[2] is node.args[1])
        assert write.args[3].target == f"slot_mapping_{group}"
        assert order.index(write) < order.index(node)
    inputs = {n.target: n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"}
    sizes = [
        inputs[name].shape[0].node.expr for name in ("encoder_states", f"slot_mapping_{group}", "input_ids")
    ]
    assert sizes[0] == sizes[1] != sizes[2]


def test_a_decoder_alone_is_left_as_it_is():
    gm = captured(lambda x, p: x.exp())
    result = page_cross_attention(
        gm, paging=Paging(states=[], group_of=[], block_sizes=[], bytes_per_block=0)
    )
    assert not result.matches and not result.changed


class Step:
    """Inputs of one step of packed requests, by hand. Request r owns blocks 10 r + 1, ... of every group."""

    def __init__(self, compiled, arena, requests):
        """requests: (request, first position, ids [n], encoder states [E, C] to write now, or None) per row."""
        self.plan = compiled.kv_spec
        width = compiled.graphs["encoder"](tokens(2), torch.arange(2)).shape[1]
        states = [s for *_, s in requests if s is not None]
        lengths = [len(ids) for _, _, ids, _ in requests]
        self.inputs = {
            "input_ids": torch.cat([ids for _, _, ids, _ in requests]),
            "positions": torch.cat([torch.arange(p, p + len(ids)) for _, p, ids, _ in requests]),
            "logits_rows": torch.arange(sum(lengths)),
            "query_start_loc": torch.tensor([0, *lengths]).cumsum(0).int(),
            "seq_lens": torch.tensor([p + len(ids) for _, p, ids, _ in requests]).int(),
            "encoder_lens": torch.tensor([ENCODER_LENS[r] for r, *_ in requests]).int(),
            "encoder_states": torch.cat(states) if states else torch.full((1, width), torch.nan),
            **arena.caches,
        }
        for g, group in enumerate(self.plan.groups):
            self._fill_group(g, group.spec.kind == "cross_attention", requests)

    def _fill_group(self, g, is_cross, requests):
        slots = []
        for r, start, ids, states in requests:
            written = (
                range(start, start + len(ids))
                if not is_cross
                else range(len(states) if states is not None else 0)
            )
            slots += [self._table(r, g)[p // BLOCK] * BLOCK + p % BLOCK for p in written]
        self.inputs[f"slot_mapping_{g}"] = torch.tensor(slots or [-1]).int()
        spare = [[0] * 5]  # block tables may have more rows than the step has requests
        self.inputs[f"block_table_{g}"] = torch.tensor(
            [self._table(r, g) for r, *_ in requests] + spare
        ).int()

    def _table(self, r, g):
        first = 1 + 10 * r + 5 * g
        return [first, first + 3, first + 1, first + 2, first + 4]


def packed_steps(family, executable):
    """Three requests in three steps: r0 starts alone; r1 and r2 join; then all decode, r0 idle in the last row."""
    model, compiled = compiled_pair(family)
    ids = [tokens(n, seed=1) for n in (20, 9, 31)]
    encoder_ids = [tokens(n, seed=2) for n in ENCODER_LENS]
    states = [compiled.encode(e) for e in encoder_ids]
    arena = KVArena(compiled.kv_spec, compiled.states, 40, torch.device("cpu"))
    got = [[], [], []]
    plan = [
        [(0, 0, 12, True)],
        [(0, 12, 19, False), (1, 0, 1, True), (2, 0, 30, True)],
        [(2, 30, 31, False), (1, 1, 9, False), (0, 19, 20, False)],
    ]
    for requests in plan:
        step = Step(
            compiled, arena, [(r, a, ids[r][a:b], states[r] if new else None) for r, a, b, new in requests]
        )
        out = executable.run(step.inputs)
        for (r, *_), rows in zip(requests, out.split(step.inputs["query_start_loc"].diff().tolist())):
            got[r].append(rows)
    for r in range(3):
        yield torch.cat(got[r]), eager_logits(model, encoder_ids[r], ids[r])


@pytest.mark.parametrize("level", ["paged", "fused"])
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_packed_requests_equal_separate_runs_of_the_source(family, level):
    executable = EagerExecutable(compiled_pair(family)[1].graphs[level])
    for got, expected in packed_steps(family, executable):
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_encoder_compiles_as_well():
    _, compiled = compiled_pair("bart")
    executable = InductorExecutable(compiled.graphs["encoder"])
    for encoder_len in (1, 2, 48):
        ids = tokens(encoder_len)
        got = executable.run({"input_ids": ids, "positions": torch.arange(encoder_len)})
        torch.testing.assert_close(got, compiled.encode(ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_the_compiled_executable_does_the_same(family):
    """Also a step that has nothing to write: one row of NaN with slot -1."""
    executable = InductorExecutable(compiled_pair(family)[1].graphs["fused"])
    for got, expected in packed_steps(family, executable):
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
