"""Freed memory stays with the process: what a step frees, the next step has without new pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEP_PAGES = 1024 * (4096 + 3072 + 1024 + 6144 + 3072) * 2 // 4096
# Tensors of a prompt's sizes, all freed at the end of a step. The first steps make pages.
STEPS = """
import resource
import torch
from pagebinder.custom_ops.cpu.freed_memory import keep_freed_memory

kept = keep_freed_memory()

def step():
    tensors = [torch.ones(1024, columns, dtype=torch.bfloat16) for columns in (4096, 3072, 1024, 6144, 3072)]

for _ in range(8):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_of_five_steps(**environment: str) -> tuple[str, int]:
    ran = subprocess.run(
        [sys.executable, "-c", STEPS],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, pages = ran.stdout.split()
    return kept, int(pages)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's setting")
def test_a_step_finds_the_memory_of_the_one_before():
    kept, pages = pages_of_five_steps()
    if kept == "False":
        pytest.skip("this C library has no mallopt, or malloc's variables are set")
    assert pages < STEP_PAGES, "more than those of one step: the heap's end is given back"


def test_malloc_variables_of_the_user_win():
    kept, _ = pages_of_five_steps(MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False"
