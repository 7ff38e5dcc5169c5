"""The kernels compile for Hopper without a GPU: none spills registers, and each fits its shared memory."""

import json
import os
import subprocess
import sys

import pytest

HOPPER = {"capability": "90", "shared_bytes": 227 * 1024}
KERNELS = {
    "split_kernel",
    "merge_kernel",
    "tile_kernel",
    "shared_kernel",
    "merge_states_kernel",
    "encode_kernel",
    "qk_norm_rope_write_kernel",
    "rms_norm_kernel",
}


def test_kernels_for_hopper(provider):
    """In a process of its own, where triton compiles instead of interpreting."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.custom_ops.triton.compiled_for", HOPPER["capability"]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "No such file" in done.stderr and "cuobjdump" in done.stderr:
        pytest.skip("this triton comes without cuobjdump")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["kernel"] for line in lines} == KERNELS
    for line in lines:
        assert line["local_bytes"] == 0, line
        assert line["shared_bytes"] <= HOPPER["shared_bytes"], line
