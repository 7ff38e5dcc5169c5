"""The paged recurrences of the `cpu` provider: against the oracles in any batch, and bit by bit among themselves."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.custom_ops.providers import OpNeed, select_provider
from tests.custom_ops import defined_recurrence_cases as defined
from tests.custom_ops import recurrent_cases
from tests.custom_ops.recurrent_cases import int32
from tests.custom_ops.test_paged_recurrent import RECURRENCES, Batch
from tests.helpers import tiny_mamba2, tiny_qwen3_next
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("captured_once")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Whole vectors and rests of them, more than one patch or range, options that the small ones leave out.
WIDE = {
    "short_conv of 300": functools.partial(recurrent_cases.short_conv, channels=300, bias=False),
    "short_conv of 2 taps": functools.partial(recurrent_cases.short_conv, channels=70, taps=2),
    "short_conv of 6 taps": functools.partial(
        recurrent_cases.short_conv, channels=17, taps=6, activation=None
    ),
    "gated_delta_rule of 64": functools.partial(
        recurrent_cases.gated_delta_rule, width=32, width_v=64, group=3, norm=False
    ),
    "gated_delta_rule of 100": functools.partial(recurrent_cases.gated_delta_rule, width=20, width_v=100),
    "ssd of 32": functools.partial(recurrent_cases.ssd, width=32, state=48, limits=(0.2, 0.5)),
    "bare ssd": functools.partial(recurrent_cases.ssd, bare=True, width=20, state=20, groups=1, group=4),
    "selective_scan of 16": functools.partial(defined.selective_scan, width=150, state=16),
    "bare selective_scan": functools.partial(defined.selective_scan, bare=True),
    "linear_recurrence of 300": functools.partial(defined.linear_recurrence, width=300),
    "mlstm of 48": functools.partial(defined.mlstm, width=24, width_v=47),
    "gated_delta_rule of 48 rows": functools.partial(defined.row_decay_rule, width=48, width_v=16),
}
CASES = RECURRENCES | WIDE
MARCHES = {"x86-64": "fpu", "x86-64-v3": "avx2"}


def on_cpu(name: str, dtype: torch.dtype = torch.float32):
    """A recurrence whose paged op is the kernel."""
    recurrence = CASES[name](dtype=dtype)
    kernel = select_provider(OpNeed(op=recurrence.paged.__name__), "cpu").overload
    return replace(recurrence, paged=kernel)


def check(recurrence) -> None:
    """Prompts cut inside, at and behind blocks, decodes beside them, requests without new tokens, padding."""
    batch = Batch(
        recurrence, [70, 33, 50, 20, 1], block_size=16, unwanted=lambda r, i: (r, i) in ((0, 2), (2, 0))
    )
    batch.step([64, 31, 20, 7, 0], padding=3)
    batch.check_states()
    batch.step([1, 1, 29, 0, 1])
    batch.step([5, 1, 1, 13, 0], padding=1)
    batch.check_states()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_oracles(name, dtype):
    check(on_cpu(name, DTYPES[dtype]))


@pytest.mark.parametrize("name", CASES)
def test_neither_cuts_nor_neighbours_nor_threads_change_a_bit(name):
    """One prompt at once; in pieces, among others and by two threads."""
    recurrence, threads = on_cpu(name, torch.bfloat16), torch.get_num_threads()
    whole = Batch(recurrence, [77, 60], block_size=16)
    expected = whole.step([77, 0])
    parts = Batch(recurrence, [77, 60], block_size=16)
    torch.set_num_threads(2)
    try:
        steps = [(1, 0), (30, 9), (1, 1), (2, 50), (43, 0)]
        got = torch.cat([parts.step([n, other])[:n] for n, other in steps])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(got, expected)
    for i in whole.table[0, :5]:
        assert torch.equal(parts.cache[i], whole.cache[i])


@pytest.mark.parametrize("name", CASES)
def test_any_strides(name):
    """A cache whose dimensions lie in reverse order, and operands that are not contiguous."""
    recurrence = on_cpu(name)
    batch = Batch(recurrence, [40, 20], block_size=16)
    axes = tuple(reversed(range(1, batch.cache.dim())))
    batch.cache = batch.cache.permute(0, *axes).contiguous().permute(0, *axes)
    batch.tokens = [tuple(x.mT.contiguous().mT for x in tokens) for tokens in batch.tokens]
    kernel = recurrence.paged

    def strided(*operands, **options):
        return kernel(*(spread(x) for x in operands[:-4]), *operands[-4:], **options)

    batch.recurrence = replace(recurrence, paged=strided)
    batch.step([33, 1])
    batch.step([7, 19])
    batch.check_states()


def spread(x: torch.Tensor | None) -> torch.Tensor | None:
    """The same values, two apart."""
    return x if x is None else torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]


def test_operands_of_other_float_types():
    recurrence = on_cpu("ssd")
    batch = Batch(recurrence, [40], block_size=16)
    batch.recurrence = replace(recurrence, weights=tuple(w.double() for w in recurrence.weights))
    batch.step([40])


def test_a_fading_state_becomes_zero_and_costs_nothing():
    """Subnormal numbers are flushed inside the kernels, and only there."""
    kernel = on_cpu("linear_recurrence").paged
    cache, ints = torch.zeros(2, 16), functools.partial(torch.tensor, dtype=torch.int32)
    x = torch.zeros(200, 16)
    x[0] = 1.0
    out = kernel(x, torch.full_like(x, 0.5), cache, ints([[1]]), ints([200]), ints([0, 200]), block_size=256)
    assert_close(out[:100, 0], 0.5 ** torch.arange(100.0))
    assert not out[-1].any() and not cache[1].any()
    assert torch.tensor(2.0**-126) / 2 > 0


@pytest.mark.parametrize("name", RECURRENCES)
def test_bad_metadata(name):
    recurrence = on_cpu(name)
    tokens = recurrence.tokens(4, torch.Generator().manual_seed(0))
    cache, table = recurrent_cases.strided_cache(recurrence, 3), int32(1, 2)[None]
    good = {"cache": cache, "table": table, "lens": int32(4), "starts": int32(0, 4), "block_size": 8}
    recurrence.run_paged(tokens, **good)
    before = cache.clone()
    for message, options in recurrent_cases.bad_operands(cache).items():
        with pytest.raises((ValueError, RuntimeError), match=message):
            recurrence.run_paged(tokens, **{**good, **options})
    assert torch.equal(cache, before) or (cache.isnan() == before.isnan()).all()


def test_another_dtype_is_refused_with_a_reason():
    selection = select_provider(OpNeed(op="paged_ssd", dtype="float64"))
    assert selection.provider == "reference" and "float64" in selection.why


@pytest.mark.parametrize(
    ("build", "ops"),
    [
        (tiny_qwen3_next, ("paged_short_conv", "paged_gated_delta_rule")),
        (tiny_mamba2, ("paged_short_conv", "paged_ssd")),
    ],
    ids=["qwen3-next", "mamba2"],
)
def test_served_by_the_kernels_as_by_the_references(build, ops):
    prompts, tokens = [list(range(2, 40)), [5, 6, 7]], []
    for providers in ({}, dict.fromkeys(ops, "reference")):
        config = CompileConfig(executable="eager", max_model_len=128, providers=providers)
        compiled = pagebinder.compile_model(build(), config)
        chosen = {choice.op: choice.provider for choice in compiled.report.providers}
        assert all(chosen[op] == providers.get(op, "cpu") for op in ops)
        engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_seqs=2, max_num_batched_tokens=16))
        outputs = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0))
        tokens.append([list(output.token_ids) for output in outputs])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("march", MARCHES)
def test_narrower_instruction_sets(march):
    if os.uname().machine != "x86_64":
        pytest.skip("x86 only")
    if MARCHES[march] not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"no {MARCHES[march]} here")
    code = """
import torch
from tests.custom_ops import test_recurrent_cpu as t
for name in t.CASES:
    for dtype in t.DTYPES.values():
        t.check(t.on_cpu(name, dtype))
print("passed")
"""
    environment = {**os.environ, "PAGEBINDER_CPU_MARCH": march, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "passed" in result.stdout, result.stderr
