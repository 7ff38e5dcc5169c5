"""Kernels read memory in the order that the processor likes (cpu/memory_streams.h): the bits are the same."""

import json
import os
import subprocess
import sys

import pytest

from pagebinder.custom_ops.providers import registered_providers

# Prints a digest of what each op makes, by name. Sizes: several panels, more than a block of codes.
PROGRAM = """
import hashlib, json, torch
from pagebinder.custom_ops.cpu import pack
from pagebinder.custom_ops.cpu.provider import reads_packed_weights
from pagebinder.custom_ops.linear.weight_numbers import quantize
from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.custom_ops.providers import registered_providers

cpu, digests = registered_providers()["cpu"], {}
generator = torch.Generator().manual_seed(0)

def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=generator).to(dtype)

def op(name):
    cpu.prepare(name)
    return cpu.overload(name)

def note(name, out):
    digests[name] = hashlib.sha256(out.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

weight, gate, up = random(160, 512), random(96, 512), random(96, 512)
forms = {"plain": lambda w: w}
if op("linear") and reads_packed_weights():
    forms["packed"] = lambda w: pack.pack_all([w])[0]
for rows in (1, 2, 3, 4, 5, 8):
    x = random(rows, 512)
    for form, of in forms.items():
        note(f"linear {form} {rows}", op("linear")(x, of(weight), None))
        note(f"gated {form} {rows}", op("gated_linear")(x, of(gate), of(up), None, None, activation="silu"))
    note(f"linear float32 {rows}", op("linear")(x.float(), weight.float(), None))
    for name in ("fp8", "int8", "int4_g64"):
        note(f"{name} {rows}", op("quantized_linear")(x, *quantize(weight, name), None, format=name))
# Few tokens for each expert, and widths that neither columns nor steps divide.
gate_up, down = random(6, 2 * 45, 200), random(6, 200, 45)
for tokens in (1, 4, 9):
    x, weights = random(tokens, 200), torch.rand(tokens, 2, generator=generator)
    ids = torch.rand(tokens, 6, generator=generator).argsort(1)[:, :2]
    for dtype in (torch.bfloat16, torch.float32):
        operands = (x.to(dtype), ids, weights, gate_up.to(dtype), down.to(dtype), None, None)
        note(f"experts {dtype} {tokens}", op("moe_experts")(*operands, transposed=False, **Gate().as_options()))
print(json.dumps(digests))
"""


def digests(tmp_path, rising: str) -> dict[str, str]:
    environment = {**os.environ, "PAGEBINDER_RISING_READS": rising}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_either_order_makes_the_same_bits(tmp_path):
    cpu = registered_providers()["cpu"]
    if cpu.problem() is not None:
        pytest.skip(str(cpu.problem()))
    rising, any_order = (digests(tmp_path, value) for value in ("1", "0"))
    assert rising == any_order
    assert len(rising) > 6 * 5
