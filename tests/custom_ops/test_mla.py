"""Latent attention: the semantic op against plain attention, every provider of the paged op against the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import pagebinder.custom_ops.cpu.provider  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.attention.semantic import attention_reference
from pagebinder.custom_ops.cpu import build
from pagebinder.custom_ops.cpu.mla import is_expanded_cheaper
from pagebinder.custom_ops.cpu.parts import PARTS
from pagebinder.custom_ops.latent.layouts import row_layout, store_rows
from tests.tolerances import TOLERANCES, assert_close

PROVIDERS = ("pagebinder", "pagebinder_cpu")
SINKS = ("none", "finite", "some -inf")


@dataclass(frozen=True)
class Case:
    """A batch: (context, new tokens) of each request; sizes as in mla.py."""

    lengths: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float32
    heads: int = 4
    latent: int = 64
    rope: int = 16
    nope: int = 24
    value: int = 20
    block_size: int = 8
    padding: int = 0
    window: int | None = None
    topk: int | None = None
    ratio: int = 1
    strided: bool = False
    layout: str = "plain"
    sinks: str = "none"


@dataclass(frozen=True)
class Inputs:
    operands: tuple
    options: dict

    def run(self, provider: str):
        return getattr(torch.ops, provider).paged_mla_attention(*self.operands, **self.options)

    def wide(self) -> Inputs:
        """In float32, with the values that the operands have."""
        operands = (
            x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in self.operands
        )
        return Inputs(tuple(operands), self.options)


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random operands; blocks are shuffled, unused table entries are -1 and unused rows NaN."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(case.dtype)

    num_tokens = sum(new for _, new in case.lengths) + case.padding
    q = randn(num_tokens, case.heads, case.nope + case.rope + 3)[..., : case.nope + case.rope]
    weight = randn(case.heads, case.nope + case.value, case.latent, scale=case.latent**-0.5)
    w_k, w_v = weight.split((case.nope, case.value), dim=1)
    seq_lens = [context + new for context, new in case.lengths]
    blocks = [-(-n // case.block_size) for n in seq_lens]
    table = torch.full((len(seq_lens) + 1, max(blocks) + 1), -1, dtype=torch.int32)
    order = torch.randperm(sum(blocks) + 2, generator=generator).int()
    cache = _empty_cache(case, len(order))
    starts, first = [0], 0
    for r, (_, new) in enumerate(case.lengths):
        table[r, : blocks[r]] = order[first : first + blocks[r]]
        first += blocks[r]
        starts.append(starts[-1] + new)
        j = torch.arange(seq_lens[r])
        slots = table[r].long()[j // case.block_size] * case.block_size + j % case.block_size
        rope = 0 if case.layout == "plain" else case.rope
        store_rows(randn(seq_lens[r], case.latent + case.rope), cache, slots, case.layout, rope)
    lens, starts = (torch.tensor(x, dtype=torch.int32) for x in (seq_lens, starts))
    indices = _indices(case, num_tokens, generator) if case.topk else None
    optional = (indices, _sinks(case, generator))
    operands = (*q.split((case.nope, case.rope), dim=-1), w_k, w_v, cache, table, lens, starts, *optional)
    scale = (case.nope + case.rope) ** -0.5
    options = {"scale": scale, "window": case.window, "layout": case.layout, "ratio": case.ratio}
    return Inputs(operands, options)


def _empty_cache(case: Case, num_blocks: int) -> torch.Tensor:
    width = case.latent + case.rope
    if case.layout != "plain":
        size = row_layout(case.layout, width, case.rope).page_bytes(case.block_size)
        return torch.full((num_blocks, size), 255, dtype=torch.uint8)
    if not case.strided:
        return torch.full((num_blocks, case.block_size, width), float("nan"), dtype=case.dtype)
    arena = torch.full((num_blocks, case.block_size * width + 40), float("nan"), dtype=case.dtype)
    return arena[:, 8 : 8 + case.block_size * width].unflatten(1, (case.block_size, width))


def _indices(case: Case, num_tokens: int, generator) -> torch.Tensor:
    """Ascending positions that a query sees, then -1; every seventh query has none.

    With a ratio: groups in any order, and one that the query does not see among them.
    """
    indices = torch.full((num_tokens, case.topk), -1, dtype=torch.int32)
    token = 0
    for context, new in case.lengths:
        for p in range(context, context + new):
            number = p + 1 if case.ratio == 1 else (p + 1) // case.ratio + 1
            chosen = torch.randperm(number, generator=generator)[: case.topk]
            chosen = chosen.sort().values if case.ratio == 1 else chosen
            if token % 7 != 3:
                indices[token, : len(chosen)] = chosen.int()
            token += 1
    return indices


def _sinks(case: Case, generator) -> torch.Tensor | None:
    if case.sinks == "none":
        return None
    sinks = torch.randn(case.heads, generator=generator) * 2
    if case.sinks == "some -inf":
        sinks[::2] = float("-inf")
    return sinks


MIXED = ((30, 1), (0, 9), (17, 5), (3, 1), (8, 8), (40, 2))
LONG = ((10, 1), (0, 90), (33, 70), (20, 3))
CASES = {
    "decode": Case(((10, 1), (0, 1), (33, 1)), padding=2),
    "decode of one": Case(((100, 1),)),
    "prefill": Case(((0, 13), (0, 8), (0, 1))),
    "mixed": Case(MIXED, padding=3),
    "nothing new": Case(((5, 1), (9, 0), (2, 3))),
    "long": Case(LONG, padding=1),
    "split": Case(((2500, 1), (2300, 3))),
    "many tokens absorbed": Case(((60, 70), (4, 1)), latent=32, rope=8, nope=48, value=64),
    "window": Case(MIXED, window=6),
    "long window": Case(LONG, window=37),
    "strided": Case(MIXED + LONG, strided=True),
    "indices": Case(MIXED, topk=6, padding=1),
    "many indices": Case(LONG, topk=33),
    "indices in a window": Case(MIXED, topk=6, window=9),
    "groups": Case(MIXED, topk=3, ratio=4, padding=1),
    "all groups": Case((*LONG, (100, 2)), topk=23, ratio=4, padding=2),
    "groups in a window": Case(LONG, topk=5, ratio=3, window=20),
    "groups without RoPE": Case(LONG, topk=5, ratio=16, rope=0),
    "no multiples": Case(MIXED + LONG, latent=72, rope=6, nope=10, value=7, heads=3),
    "narrow latent": Case(MIXED, latent=20, rope=4, nope=8, value=8),
    "many heads": Case(MIXED, heads=40),
    "fp8": Case(MIXED + LONG, latent=128, layout="fp8_v32"),
    "fp8 with indices": Case(LONG, latent=128, topk=20, layout="fp8_v32"),
    "fp8 with groups": Case(LONG, latent=128, topk=6, ratio=5, layout="fp8_v32"),
    "fp8 with a window": Case(LONG, latent=128, window=20, layout="fp8_v32"),
}


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    for part in PARTS:
        build.load(part)


def assert_mla_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Below float32 the absorbed query and the sum of latents are rounded, too: values of about 1, by half an eps."""
    rtol, atol = TOLERANCES[actual.dtype]
    if actual.dtype != torch.float32:
        atol += torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_providers_agree_with_the_reference(provider, sinks, name, dtype):
    case = replace(CASES[name], dtype=dtype, sinks=sinks)
    inputs = make_inputs(case)
    expected = inputs.wide().run("pagebinder")
    actual = inputs.run(provider)
    assert actual.dtype == dtype and actual.is_contiguous()
    assert_mla_close(actual, expected)
    if case.padding:
        assert not actual[-case.padding :].any()


def test_both_forms_are_among_the_cases():
    sizes = (64, 16, 24, 20)
    chosen = {is_expanded_cheaper(new, context + new, None, *sizes) for context, new in LONG}
    assert chosen == {False, True}


def test_deepseek_prefers_the_expanded_form_from_a_few_hundred_tokens_on():
    sizes = (512, 64, 128, 128)
    assert not is_expanded_cheaper(1, 8192, None, *sizes)
    assert not is_expanded_cheaper(128, 8192, None, *sizes)
    assert is_expanded_cheaper(256, 8192, None, *sizes)
    assert is_expanded_cheaper(2048, 2048, None, *sizes)
    assert not is_expanded_cheaper(1, 8192, 512, *sizes)


@pytest.mark.parametrize("sinks", SINKS)
def test_the_semantic_op_is_expanded_attention(sinks):
    case = Case(((0, 30),), sinks=sinks)
    q_nope, q_rope, w_k, w_v, cache, table, *_, sinks = make_inputs(case).operands
    rows = cache[table[0, :4].long()].flatten(0, 1)[:30]
    latent, k_rope = rows.split((case.latent, case.rope), dim=1)
    k = torch.cat(
        [torch.einsum("tl,hnl->thn", latent, w_k), k_rope[:, None].expand(-1, case.heads, -1)], dim=-1
    )
    v = torch.einsum("tl,hvl->thv", latent, w_v)
    for window in (None, 7):
        expected = attention_reference(torch.cat([q_nope, q_rope], -1), k, v, sinks, scale=0.2, window=window)
        actual = torch.ops.pagebinder.mla_attention(
            q_nope, q_rope, latent, k_rope, w_k, w_v, None, sinks, scale=0.2, window=window
        )
        assert_close(actual, expected)


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize(("topk", "ratio"), [(None, 1), (5, 1), (3, 4)])
def test_the_semantic_op_equals_the_paged_reference(topk, ratio, sinks):
    case = Case(((0, 30),), topk=topk, ratio=ratio, sinks=sinks)
    inputs = make_inputs(case)
    q_nope, q_rope, w_k, w_v, cache, table, _, _, *optional = inputs.operands
    latent, k_rope = cache[table[0, :4].long()].flatten(0, 1)[:30].split((case.latent, case.rope), dim=1)
    actual = torch.ops.pagebinder.mla_attention(
        q_nope, q_rope, latent, k_rope, w_k, w_v, *optional, scale=inputs.options["scale"], ratio=ratio
    )
    assert_close(actual, inputs.run("pagebinder"))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_groups_are_the_tokens_that_they_stand_for(provider):
    """Query by query, spelt out: complete groups that are listed, and the tail."""
    case = Case(((13, 30), (0, 9)), topk=3, ratio=4)
    inputs = make_inputs(case)
    *operands, indices, sinks = inputs.operands
    listed = torch.full((len(indices), 48), -1, dtype=torch.int32)
    positions = [*range(13, 43), *range(9)]
    for row, p, groups in zip(listed, positions, indices.tolist()):
        seen = [j for j in range(p + 1) if j // 4 in groups or j // 4 == (p + 1) // 4]
        row[: len(seen)] = torch.tensor(seen)
    single = Inputs((*operands, listed, sinks), {**inputs.options, "ratio": 1})
    assert_mla_close(inputs.run(provider), single.run("pagebinder"))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_groups_without_indices_are_told(provider):
    inputs = make_inputs(CASES["mixed"])
    for ratio in (4, 0):
        with pytest.raises(ValueError, match="ratio is that of indices"):
            Inputs(inputs.operands, {**inputs.options, "ratio": ratio}).run(provider)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_groups_of_a_step_without_requests(provider):
    case = replace(CASES["groups"], lengths=((3, 0),), padding=2)
    inputs = make_inputs(case)
    *operands, lens, starts, indices, sinks = inputs.operands
    empty = Inputs((*operands, lens[:0], starts[:1], indices, sinks), inputs.options)
    assert not inputs.run(provider).any() and not empty.run(provider).any()


@pytest.mark.parametrize("sinks", ["none", "finite"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_query_that_sees_no_key_gets_zeros(provider, sinks):
    """Whatever its sink: a sink has no value."""
    case = replace(CASES["indices"], sinks=sinks)
    without = make_inputs(case).operands[8].amax(1) < 0
    assert without.sum() > 2
    assert not make_inputs(case).run(provider)[without].any()


@pytest.mark.parametrize("sinks", ["none", "finite"])
@pytest.mark.parametrize("name", ["mixed", "long", "indices", "all groups"])
def test_a_request_has_the_same_bits_alone_and_among_others(name, sinks):
    inputs = make_inputs(replace(CASES[name], sinks=sinks))
    together = inputs.run("pagebinder_cpu")
    q_nope, q_rope, w_k, w_v, cache, table, lens, starts, indices, sinks = inputs.operands
    for r in range(len(lens)):
        step = slice(int(starts[r]), int(starts[r + 1]))
        alone = torch.ops.pagebinder_cpu.paged_mla_attention(
            q_nope[step], q_rope[step], w_k, w_v, cache, table[r : r + 1], lens[r : r + 1],
            torch.tensor([0, step.stop - step.start], dtype=torch.int32),
            None if indices is None else indices[step], sinks, **inputs.options,
        )  # fmt: skip
        assert torch.equal(alone, together[step])


BAD = {
    "w_k must be": lambda o: (*o[:2], o[2][:, :-1], *o[3:]),
    "w_v must be": lambda o: (*o[:3], o[3][:-1], *o[4:]),
    "a cache row is": lambda o: (*o[:4], o[4][..., :-1].contiguous(), *o[5:]),
    "same dtype": lambda o: (*o[:4], o[4].bfloat16(), *o[5:]),
    "table must be int32": lambda o: (*o[:5], o[5].long(), *o[6:]),
    "exceeds its block table": lambda o: (*o[:6], o[6] + 1000, *o[7:]),
    "query_start_loc must rise": lambda o: (*o[:7], o[7].flip(0), *o[8:]),
    "indices must be int32": lambda o: (*o[:8], torch.zeros(3, 2)),
    "sinks must be float32": lambda o: (*o[:9], torch.zeros(len(o[2]), dtype=torch.float64)),
    r"sinks must be float32 \[H\]": lambda o: (*o[:9], torch.zeros(len(o[2]) + 1)),
}


@pytest.mark.parametrize("message", BAD)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_bad_operands_are_told(provider, message):
    inputs = make_inputs(CASES["mixed"])
    with pytest.raises(ValueError, match=message):
        Inputs(BAD[message](inputs.operands), inputs.options).run(provider)


@pytest.mark.parametrize("lengths", [((10, 1),), ((0, 90),)], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_bad_block_ids_are_told(provider, lengths):
    inputs = make_inputs(Case(lengths))
    inputs.operands[5][0, 0] = 1000
    with pytest.raises((ValueError, RuntimeError), match="a block id in .*table is not valid"):
        inputs.run(provider)
