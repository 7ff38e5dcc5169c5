"""The kernels compile for Hopper without a GPU: none spills registers but one, outside of its loop, and each fits its
shared memory."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import nightly

HOPPER = {"capability": "90", "shared_bytes": 227 * 1024}
# Prefills by a descriptor: two programs share a multiprocessor, which is worth what they spill outside of their loop
# over whole tiles (on an H200 504 TFLOP/s, and 369 where they spill nothing and one fits).
DESCRIBED_LOCAL_BYTES = 64
KERNELS = {
    "split_kernel",
    "merge_kernel",
    "tile_kernel",
    "shared_kernel",
    "merge_states_kernel",
    "encode_kernel",
    "qk_norm_rope_write_kernel",
    "rms_norm_kernel",
    "norm_quantise_kernel",
    "gate_quantise_kernel",
    "quantise_kernel",
    "linears_kernel",
    "gated_linear_kernel",
    "row_linears_kernel",
    "row_gated_kernel",
    "packed_linear_kernel",
    "sum_parts_kernel",
    "penalise_kernel",
    "largest_kernel",
    "bins_kernel",
    "cut_kernel",
    "draw_kernel",
    "choose_kernel",
    "expert_kernel",
    "packed_expert_kernel",
    "combine_kernel",
    "list_rows_kernel",
    "sparse_kernel",
    "requantise_kernel",
    "score_kernel",
    "select_kernel",
    "start_states_kernel",
    "compress_kernel",
    "norm_rope_kernel",
    "rope_store_kernel",
    "turn_back_kernel",
    "logits_kernel",
    "collapse_kernel",
    "mix_kernel",
    "short_conv_kernel",
    "delta_rule_kernel",
    "ssd_kernel",
}
RECURRENT = {
    "short_conv_kernel",
    "delta_rule_kernel",
    "ssd_kernel",
    "selective_scan_kernel",
    "linear_recurrence_kernel",
    "wkv_kernel",
    "start_kernel",
    "mlstm_kernel",
}


@pytest.mark.parametrize(
    ("options", "kernels"), [((), KERNELS), pytest.param(("--recurrent",), RECURRENT, marks=nightly)]
)
def test_kernels_for_hopper(provider, options, kernels):
    """In a process of its own, where triton compiles instead of interpreting."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.custom_ops.triton.compiled_for", HOPPER["capability"], *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "No such file" in done.stderr and "cuobjdump" in done.stderr:
        pytest.skip("this triton comes without cuobjdump")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["kernel"] for line in lines} == kernels
    for line in lines:
        assert line["local_bytes"] <= (DESCRIBED_LOCAL_BYTES if line["described"] else 0), line
        assert line["shared_bytes"] <= HOPPER["shared_bytes"], line
