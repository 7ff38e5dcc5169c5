"""`argmax_tokens`, `sample_tokens`: the generator's published words, kernels against references, bad operands."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from pagebinder.custom_ops.cpu.provider import CpuProvider
from pagebinder.custom_ops.sampling.noise import log2_noise, philox4x32
from tests.custom_ops.test_cpu_build import NEEDED_FLAG, run_python

reference = torch.ops.pagebinder
# Of the authors' Random123 1.14, tests/kat_vectors.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
OPTIONS = {
    "temperature": {},
    "top_k": {"top_k": (1, 2, 7, 60, 10**6)},
    "top_p": {"top_p": (1e-6, 0.3, 0.9, 0.999)},
    "min_p": {"min_y": (0.0, -2.5, -9.0)},
    "penalty": {"penalty": (0.6, 1.7)},
    "all": {"top_k": (1, 40, 300), "top_p": (0.5, 0.95), "min_y": (-4.0, -math.inf), "penalty": (1.0, 1.3)},
}
COLUMNS = {"scale": (0.3, 1.4427, 2.06, 40.0), "top_k": (math.inf,), "top_p": (1.0,), "min_y": (-math.inf,),
           "penalty": (1.0,)}  # fmt: skip


def operands(vocab: int, dtype: torch.dtype, options: str, seed: int = 0, draws: int = 24) -> tuple:
    """Draws from five rows of logits: spread wide, narrow, with ties, with -inf, and all of them equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, vocab, generator=generator) * torch.tensor([4.0, 0.01, 1.0, 1.0, 0.0])[:, None]
    logits[2] = logits[2].round()
    logits[3, : vocab - 1 : 3] = -math.inf
    columns = [(COLUMNS | OPTIONS[options])[name] for name in COLUMNS]
    table = torch.tensor([[c[i % len(c)] for c in columns] for i in range(draws)], dtype=torch.float64)
    rows = torch.randint(0, 5, (draws,), generator=generator)
    streams = torch.randint(-(2**63), 2**63 - 1, (draws, 2), generator=generator) >> torch.tensor([0, 40])
    lengths = torch.randint(0, 9, (draws,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    seen = torch.randint(0, vocab, (int(starts[-1]),), generator=generator)
    return logits.to(dtype), rows, streams, table, seen, starts


def check_equal(vocab: int, dtype: torch.dtype, options: str) -> None:
    for op in ("argmax_tokens", "sample_tokens"):
        CpuProvider().prepare(op)
    case = operands(vocab, dtype, options)
    assert torch.equal(torch.ops.pagebinder_cpu.sample_tokens(*case), reference.sample_tokens(*case))
    assert torch.equal(torch.ops.pagebinder_cpu.argmax_tokens(case[0]), reference.argmax_tokens(case[0]))


@pytest.mark.parametrize("counter, key, words", KNOWN_ANSWERS)
def test_the_generator_is_philox4x32_10(counter, key, words):
    found = philox4x32([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert " ".join(f"{int(word):08x}" for word in found) == words


def test_noise_is_exponential_in_its_tails_too():
    e = torch.exp2(log2_noise(torch.tensor([[5, 6]]), 1 << 20).double()) * math.log(2)
    assert float(e.mean()) == pytest.approx(1, abs=5e-3) and float(e.var()) == pytest.approx(1, abs=1.5e-2)
    for tail in (1e-4, 1e-3, 0.1):
        for share in ((e < -math.log1p(-tail)), (e > -math.log(tail))):
            assert float(share.double().mean()) == pytest.approx(tail, abs=5 * (tail / e.numel()) ** 0.5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_choose_the_references_tokens(dtype, options):
    for vocab in (1, 15, 64, 130, 1000):
        check_equal(vocab, dtype, options)


def test_large_vocabularies_and_many_candidates_in_one_bin():
    for options in OPTIONS:
        check_equal(40_003, torch.bfloat16, options)


@pytest.mark.parametrize("march", [m for m in NEEDED_FLAG if m != "cooperlake"])
def test_narrower_instruction_sets_choose_the_same_tokens(march):
    if os.uname().machine != "x86_64":
        pytest.skip("x86 only")
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if NEEDED_FLAG[march] not in flags:
        pytest.skip(f"no {NEEDED_FLAG[march]} here")
    code = """
from tests.custom_ops.test_sample_tokens import OPTIONS, check_equal, torch
for options in OPTIONS:
    for vocab in (15, 130, 1000):
        check_equal(vocab, torch.bfloat16, options)
print("passed")
"""
    assert "passed" in run_python(code, PAGEBINDER_CPU_MARCH=march)


@pytest.mark.parametrize("op", [reference, torch.ops.pagebinder_cpu], ids=["reference", "cpu"])
def test_nan_is_minus_one_and_infinity_is_largest(op):
    for name in ("argmax_tokens", "sample_tokens"):
        CpuProvider().prepare(name)
    logits = torch.zeros(4, 100)
    logits[0, 99] = math.nan
    logits[1, 50], logits[1, 7] = math.inf, -math.inf
    logits[2] = -math.inf
    logits[3, 5] = 60.0
    assert op.argmax_tokens(logits).tolist() == [-1, 50, 0, 5]
    draws = torch.zeros(4, dtype=torch.int64)
    options = torch.tensor([[1.4, math.inf, 0.9, -math.inf, 1.0]] * 4, dtype=torch.float64)
    starts, none = torch.zeros(5, dtype=torch.int64), draws[:0]
    streams = torch.stack([draws, draws], dim=-1)
    assert op.sample_tokens(logits, torch.arange(4), streams, options, none, starts).tolist() == [
        -1,
        50,
        0,
        5,
    ]


BAD = {
    "a row beyond logits": (1, lambda rows: rows + 5),
    "streams of another length": (2, lambda streams: streams[1:]),
    "options of another dtype": (3, lambda options: options.float()),
    "options without a column": (3, lambda options: options[:, 1:].contiguous()),
    "a token beyond the vocabulary": (4, lambda seen: seen + 64),
    "ends that fall": (5, lambda starts: starts.flip(0)),
    "ends of another dtype": (5, lambda starts: starts.int()),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("op", [reference, torch.ops.pagebinder_cpu], ids=["reference", "cpu"])
def test_bad_operands_are_refused(op, case):
    CpuProvider().prepare("sample_tokens")
    bad = list(operands(64, torch.float32, "all"))
    index, spoil = BAD[case]
    bad[index] = spoil(bad[index])
    with pytest.raises((ValueError, RuntimeError)):
        op.sample_tokens(*bad)
