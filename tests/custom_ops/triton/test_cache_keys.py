"""A kernel has the same key in Triton's cache on disk in every process: nothing is compiled again after a restart."""

import os
import subprocess
import sys

import pytest

KERNELS = (
    "rms_norm.rms_norm_kernel",
    "attention_kernels.split_kernel",
    "fp8_quant.quantise_kernel",
    "linear.linears_kernel",
)
KEYS = """
import importlib, sys
from pagebinder.custom_ops.triton.gpu import settle_key
for name in sys.argv[1:]:
    module, kernel = name.split(".")
    kernel = getattr(importlib.import_module("pagebinder.custom_ops.triton." + module), kernel)
    settle_key(kernel)
    print(name, kernel.cache_key)
"""


def keys(names) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", KEYS, *names]
    return sorted(
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split(
            "\n"
        )
    )


def test_keys_do_not_depend_on_what_was_asked_for_before():
    pytest.importorskip("triton")
    found = keys(KERNELS)
    assert found == keys(KERNELS[::-1])
    assert len({line.split()[1] for line in found if line}) == len(KERNELS)  # and they are keys
