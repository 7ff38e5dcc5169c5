"""Compressors, indexers, compressed attention and MLA -> their paged forms: structure, values, near misses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.custom_ops.layer_state import CacheFormats
from pagebinder.errors import ProviderError, UnsupportedLayerError
from pagebinder.passes.latent_states import COMPRESS, COMPRESSED_ATTENTION, INDEX_TOPK
from pagebinder.passes.layer_states import Paging, layer_states
from pagebinder.passes.page_compressed import page_compressed
from pagebinder.passes.page_mla import page_mla
from pagebinder.passes.select_providers import select_providers
from pagebinder.runtime.kv import plan_kv_cache
from tests.graphs import VOCAB_SIZE, assert_metadata_kept, captured, clone, count, run_in_steps

OPS = torch.ops.pagebinder
WIDTH, HEADS, ROPE, WINDOW, RATIO, TOPK, MAX_MODEL_LEN = 80, 2, 16, 6, 4, 3, 256
PAGED_OPS = (
    OPS.compress_norm_rope_store.default,
    OPS.indexer_score_topk.default,
    OPS.sparse_mla_attention.default,
    OPS.paged_mla_attention.default,
)


class Compressor(nn.Module):
    def __init__(self, overlap: bool):
        super().__init__()
        self.overlap, columns = overlap, WIDTH * (2 if overlap else 1)
        self.kv, self.gate = nn.Linear(WIDTH, columns), nn.Linear(WIDTH, columns)
        self.bias = nn.Parameter(torch.randn(RATIO, columns))
        self.norm = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("inv_freq", 0.1 ** torch.arange(ROPE // 2).float())

    def forward(self, x):
        return OPS.compress(
            self.kv(x), self.gate(x), self.bias, self.norm, self.inv_freq, ratio=RATIO, overlap=self.overlap,
            eps=1e-6,
        )  # fmt: skip


class Attention(nn.Module):
    """Compressed attention of a kind: "window", "all" entries, or "chosen" ones."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.q = nn.Linear(WIDTH, HEADS * WIDTH)
        self.compressor = Compressor(overlap=kind == "chosen") if kind != "window" else None
        self.keys = Compressor(overlap=True) if kind == "chosen" else None
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x):
        x = x[0]
        q, entries, indices = self.q(x).view(-1, HEADS, WIDTH), None, None
        if self.compressor is not None:
            entries = self.compressor(x)
        if self.keys is not None:
            indices = OPS.index_topk(q, self.keys(x), q[..., 0], topk=TOPK, ratio=RATIO, scale=0.1)
        out = OPS.compressed_attention(
            q,
            x,
            entries,
            indices,
            self.sinks,
            scale=0.1,
            window=WINDOW,
            ratio=RATIO if entries is not None else 1,
        )
        return (x + out.mean(1))[None]


class Latent(nn.Module):
    """MLA; with keys of an indexer, over the tokens that it chooses; with sinks."""

    def __init__(self, indexed: bool, sinks: bool = False):
        super().__init__()
        self.indexed = indexed
        self.sinks = nn.Parameter(torch.randn(HEADS) * 2) if sinks else None
        self.q, self.key = nn.Linear(WIDTH, HEADS * 24), nn.Linear(WIDTH, 32)
        self.w_k, self.w_v = (nn.Parameter(torch.randn(HEADS, n, WIDTH) / 9) for n in (8, 40))

    def forward(self, x):
        x = x[0]
        q, k, indices = self.q(x).view(-1, HEADS, 24), self.key(x), None
        if self.indexed:
            heads = q.repeat_interleave(2, dim=1)[..., :16]
            indices = OPS.index_topk(heads, k[:, 16:], heads[..., 0], topk=TOPK, ratio=1, scale=0.2)
        operands = (q[..., :8], q[..., 8:], x, k[:, :16], self.w_k, self.w_v, indices, self.sinks)
        out = OPS.mla_attention(*operands, scale=0.2)
        return (x + out.flatten(1))[None]


class PooledLatent(nn.Module):
    """MLA to the groups of tokens that an indexer of pooled keys chooses: no norm, no RoPE. `shared`: twice."""

    def __init__(self, shared: bool = False):
        super().__init__()
        self.shared, self.pool, self.q = shared, nn.Linear(WIDTH, 2 * 16), nn.Linear(WIDTH, HEADS * 24)
        self.bias = nn.Parameter(torch.randn(RATIO, 16))
        self.register_buffer("inv_freq", torch.empty(0))
        self.w_k, self.w_v = (nn.Parameter(torch.randn(HEADS, n, WIDTH) / 9) for n in (24, 40))

    def forward(self, x):
        x, options = x[0], {"ratio": RATIO, "overlap": False, "eps": 0.0}
        kv, gate = self.pool(x).split(16, dim=-1)
        keys = OPS.compress(kv, gate, self.bias, None, self.inv_freq, **options)
        q = self.q(x).view(-1, HEADS, 24)
        heads = q.unflatten(1, (-1, 2))[:, :, 0].repeat_interleave(16, dim=1)[..., :16]
        heads = heads + torch.arange(16)[None, :, None] / 16 - 0.5
        groups = OPS.index_topk(heads, keys, heads[..., 0].abs(), topk=TOPK, ratio=RATIO, scale=0.2)
        for _ in range(1 + self.shared):
            operands = (q, q[..., :0], x, x[:, :0], self.w_k, self.w_v, groups)
            x = x + OPS.mla_attention(*operands, scale=0.2, ratio=RATIO).flatten(1)
        return x[None]


class Layers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, positions):
        for layer in self.layers:
            x = layer(x)
        return x


def paged(body, **formats):
    """(graph before, graph after, what the passes said, states, plan)"""
    before = captured(body, width=WIDTH)
    states = layer_states(before, max_model_len=MAX_MODEL_LEN, formats=CacheFormats(**formats))
    plan = plan_kv_cache(tuple(states), max_model_len=MAX_MODEL_LEN)
    after = clone(before)
    paging = Paging.by_plan(states, plan)
    results = [page_compressed(after, paging=paging), page_mla(after, paging=paging)]
    return before, after, [m.pattern for r in results for m in r.matches], states, plan


WINDOW_STATE, SUMS, ENTRIES, ROWS = "sliding_window_mla", "recurrent", "compressed_latent", "mla_latent"
MODELS = {
    "window": ((Attention, "window"), ["sparse_mla_attention"], [WINDOW_STATE]),
    "all": (
        (Attention, "all"), ["compress_norm_rope_store", "sparse_mla_attention"], [SUMS, ENTRIES, WINDOW_STATE],
    ),
    "chosen": (
        (Attention, "chosen"),
        ["compress_norm_rope_store"] * 2 + ["indexer_score_topk", "sparse_mla_attention"],
        [SUMS, ENTRIES, SUMS, ENTRIES, WINDOW_STATE],
    ),
    "mla": ((Latent, False), ["paged_mla_attention"], [ROWS]),
    "indexed mla": ((Latent, True), ["indexer_score_topk", "paged_mla_attention"], [ROWS, ROWS]),
    "mla with sinks": ((Latent, False, True), ["paged_mla_attention"], [ROWS]),
    "pooled mla": (
        (PooledLatent,), ["compress_norm_rope_store", "indexer_score_topk", "paged_mla_attention"],
        [SUMS, ENTRIES, ROWS],
    ),
    "pooled mla shared": (
        (PooledLatent, True),
        ["compress_norm_rope_store", "indexer_score_topk", *["paged_mla_attention"] * 2],
        [SUMS, ENTRIES, ROWS, ROWS],
    ),
    "indexed mla with sinks": (
        (Latent, True, True), ["indexer_score_topk", "paged_mla_attention"], [ROWS, ROWS],
    ),
}  # fmt: skip


@pytest.mark.parametrize("number", [1, 2], ids=["one site", "a chain"])
@pytest.mark.parametrize("name", MODELS)
def test_structure_and_values(name, number):
    (kind, *arguments), patterns, kinds = MODELS[name]
    before, after, matched, states, plan = paged(Layers(*(kind(*arguments) for _ in range(number))))
    assert sorted(matched) == sorted(patterns * number)
    assert [state.kind for state in states] == kinds * number
    assert count(after, COMPRESS, INDEX_TOPK, COMPRESSED_ATTENTION, OPS.mla_attention.default) == 0
    assert count(after, *PAGED_OPS) == len(matched)
    assert_metadata_kept(after, *PAGED_OPS[1:])  # a store has no value
    ids = torch.randint(VOCAB_SIZE, (45,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = before(ids, torch.arange(45))
    got = run_in_steps(after, plan, states, ids, (3, 4, 5, 23, 45), num_blocks=40)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_a_provider_without_sinks_is_refused():
    _, after, *_ = paged(Layers(Latent(True, True)))
    requested = {"paged_mla_attention": "flashmla"}
    with pytest.raises(ProviderError, match="cannot do indices.*cannot do sinks"):
        select_providers(after, device=torch.device("cpu"), requested=requested, prepare=False)


def test_a_provider_without_groups_is_refused():
    _, after, *_ = paged(Layers(PooledLatent()))
    assert [n.kwargs["ratio"] for n in after.graph.nodes if n.target is OPS.paged_mla_attention.default] == [
        RATIO
    ]
    requested = {"paged_mla_attention": "flashmla"}
    with pytest.raises(ProviderError, match="cannot do groups"):
        select_providers(after, device=torch.device("cpu"), requested=requested, prepare=False)


def test_layouts_go_by_reader():
    _, after, _, states, _ = paged(
        Layers(Attention("chosen"), Attention("window")), latent="fp8_ds_mla", index="fp8_index"
    )
    assert [getattr(state, "layout", None) for state in states] == [
        None, "fp8_v4", None, "fp8_index", "fp8_v4", "fp8_v4",
    ]  # fmt: skip
    assert [state.rope_dim for state in states if state.kind == WINDOW_STATE] == [ROPE, ROPE]
    stored = {n.kwargs["layout"] for n in after.graph.nodes if n.target in PAGED_OPS}
    assert stored == {"fp8_v4", "fp8_index"}


def test_entries_with_two_readers_of_one_kind():
    class Twice(Attention):
        def forward(self, x):
            q, entries = self.q(x[0]).view(-1, HEADS, WIDTH), self.compressor(x[0])
            options = {"scale": 0.1, "window": WINDOW, "ratio": RATIO}
            first = OPS.compressed_attention(q, x[0], entries, None, None, **options)
            second = OPS.compressed_attention(first, x[0], entries, None, None, **options)
            return second.mean(1)[None]

    _, after, _, states, _ = paged(Layers(Twice("all")))
    assert count(after, OPS.compress_norm_rope_store.default) == 1 and len(states) == 2 + 2
    first, second = (n for n in after.graph.nodes if n.target is OPS.sparse_mla_attention.default)
    assert first.args[3] is second.args[3], "one cache of entries"


@pytest.mark.parametrize("reader", ["a sum", "both", "nobody"])
def test_entries_that_cannot_be_paged(reader):
    class Odd(Attention):
        def forward(self, x):
            q, entries = self.q(x[0]).view(-1, HEADS, WIDTH), self.compressor(x[0])
            if reader == "a sum":
                return (x[0] + entries)[None]
            if reader == "nobody":
                return torch.cat([x, (entries * 0)[None]], dim=-1)[..., :WIDTH]
            indices = OPS.index_topk(q, entries, q[..., 0], topk=TOPK, ratio=RATIO, scale=0.1)
            options = {"scale": 0.1, "window": WINDOW, "ratio": RATIO}
            return OPS.compressed_attention(q, x[0], entries, indices, None, **options).mean(1)[None]

    with pytest.raises(UnsupportedLayerError, match="entries"):
        paged(Layers(Odd("all")), index="fp8_index")
