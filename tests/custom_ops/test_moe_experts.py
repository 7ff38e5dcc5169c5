"""`moe_experts` and `expert_linear` against a float64 oracle that takes one token and slot at a time."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.moe.gates import ACTIVATIONS, Gate
from tests.tolerances import assert_close

OPS = torch.ops.pagebinder
NUM_EXPERTS, WIDTH, INNER = 6, 16, 12
GATES = {
    "silu": Gate(),
    "gelu": Gate(activation="gelu"),
    "gpt-oss": Gate(activation="swish", alpha=1.702, limit=1.0, up_offset=1.0, interleaved=True),
    "limited silu": Gate(limit=0.5),
    "in float32": Gate(in_float32=True),
    "not gated": Gate(activation="relu2", gated=False),
}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(gate=GATES["silu"], *, transposed=False, bias=False, dtype=torch.float32):
    """up, down, up_bias, down_bias."""
    inner_up = (2 if gate.gated else 1) * INNER
    up = random(NUM_EXPERTS, inner_up, WIDTH, seed=1, dtype=dtype) * WIDTH**-0.5
    down = random(NUM_EXPERTS, WIDTH, INNER, seed=2, dtype=dtype) * INNER**-0.5
    biases = (
        random(NUM_EXPERTS, inner_up, seed=3, dtype=dtype),
        random(NUM_EXPERTS, WIDTH, seed=4, dtype=dtype),
    )
    if transposed:
        up, down = up.mT.contiguous(), down.mT.contiguous()
    return up, down, *(biases if bias else (None, None))


def routing(num_tokens, num_slots, seed=5):
    """Distinct experts for each token, of the first five: the last is never chosen."""
    ids = random(num_tokens, NUM_EXPERTS - 1, seed=seed).argsort(1)[:, :num_slots]
    return ids, random(num_tokens, num_slots, seed=seed + 1).softmax(1)


def run(x, ids, chosen, operands, gate=GATES["silu"], transposed=False):
    return OPS.moe_experts(x, ids, chosen, *operands, transposed=transposed, **gate.as_options())


def oracle(x, ids, chosen, operands, gate, transposed):
    up, down, up_bias, down_bias = (None if w is None else w.double() for w in operands)
    if transposed:
        up, down = up.mT, down.mT
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for expert, weight in zip(ids[t].tolist(), chosen[t].double()):
            h = up[expert] @ x[t].double() + (0 if up_bias is None else up_bias[expert])
            h = down[expert] @ formula(h, gate) + (0 if down_bias is None else down_bias[expert])
            out[t] += weight * h
    return out


def formula(h, gate):
    def activate(z):
        swish = gate.activation == "swish"
        return z * torch.sigmoid(gate.alpha * z) if swish else ACTIVATIONS[gate.activation](z)

    if not gate.gated:
        return activate(h)
    half = len(h) // 2
    g, u = (h[::2], h[1::2]) if gate.interleaved else (h[:half], h[half:])
    if gate.limit is not None:
        g, u = torch.clamp(g, max=gate.limit), torch.clamp(u, -gate.limit, gate.limit)
    return activate(g) * (u + gate.up_offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["[E, J, C]", "[E, C, J]"])
@pytest.mark.parametrize("name", GATES)
def test_equals_one_token_and_slot_at_a_time(name, transposed, bias, dtype):
    gate = GATES[name]
    operands = weights(gate, transposed=transposed, bias=bias, dtype=dtype)
    for num_tokens, num_slots in ((1, 1), (1, 3), (2, 5), (40, 2)):
        x = random(num_tokens, WIDTH, dtype=dtype)
        ids, chosen = routing(num_tokens, num_slots)
        expected = oracle(x, ids, chosen, operands, gate, transposed)
        got = run(x, ids, chosen, operands, gate, transposed)
        assert got.dtype is dtype and got.shape == x.shape
        assert expected.abs().mean() > 0.02
        if dtype is torch.float32:
            assert_close(got, expected)
        else:  # each of the two products and the gate between them is rounded to bfloat16
            torch.testing.assert_close(got.double(), expected, rtol=2**-6, atol=2**-5)


def test_a_token_gets_the_same_whoever_shares_the_batch():
    """Beside other tokens, in another order, and with other slots first: the sum follows the slots."""
    operands, x = weights(), random(32, WIDTH)
    ids, chosen = routing(32, 3)
    whole, order = run(x, ids, chosen, operands), random(32, seed=9).argsort()
    for part in (slice(0, 1), slice(5, 7), slice(0, 31)):
        assert_close(run(x[part], ids[part], chosen[part], operands), whole[part])
    assert_close(run(x[order], ids[order], chosen[order], operands), whole[order])


def test_other_tokens_never_enter_a_row():
    operands, x = weights(), random(8, WIDTH)
    ids, chosen = routing(8, 2)
    expected = run(x, ids, chosen, operands)[3]
    x[torch.arange(8) != 3] = float("nan")
    torch.testing.assert_close(run(x, ids, chosen, operands)[3], expected)


def test_an_id_outside_the_experts_adds_nothing():
    operands, x = weights(bias=True), random(4, WIDTH)
    ids, chosen = routing(4, 2)
    only_first = run(x, ids[:, :1], chosen[:, :1], operands)
    for outside in (NUM_EXPERTS, NUM_EXPERTS + 7, -1):
        ids[:, 1] = outside
        assert_close(run(x, ids, chosen, operands), only_first)
    assert not OPS.expert_linear(x, ids, operands[0], operands[2], transposed=False)[:, 1].any()


def test_one_expert_chosen_twice_is_added_twice():
    operands, x = weights(), random(2, WIDTH)
    ids, ones = torch.tensor([[4, 4], [0, 0]]), torch.ones(2, 2)
    assert_close(run(x, ids, ones, operands), 2 * run(x, ids[:, :1], ones[:, :1], operands))


def test_no_tokens():
    operands = weights()
    out = run(random(0, WIDTH), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2), operands)
    assert out.shape == (0, WIDTH)


@pytest.mark.parametrize("transposed", [False, True])
def test_two_expert_linear_and_a_gate_are_the_mixture(transposed):
    gate, operands = GATES["gpt-oss"], weights(GATES["gpt-oss"], transposed=transposed, bias=True)
    up, down, up_bias, down_bias = operands
    x, (ids, chosen) = random(9, WIDTH), routing(9, 3)
    h = gate(OPS.expert_linear(x, ids, up, up_bias, transposed=transposed))
    assert h.shape == (9, 3, INNER)
    out = OPS.expert_linear(h, ids, down, down_bias, transposed=transposed)
    assert_close((out * chosen[..., None]).sum(1), run(x, ids, chosen, operands, gate, transposed))


def test_meta_tensors_have_the_shapes_of_real_ones():
    operands = [None if w is None else w.to("meta") for w in weights(bias=True)]
    ids, chosen = (r.to("meta") for r in routing(7, 2))
    assert run(random(7, WIDTH).to("meta"), ids, chosen, operands).shape == (7, WIDTH)
    shape = OPS.expert_linear(random(7, WIDTH).to("meta"), ids, operands[0], None, transposed=False).shape
    assert shape == (7, 2, 2 * INNER)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, ids, chosen: (x, ids[:3], chosen), "expert ids and weights"),
        (lambda x, ids, chosen: (x[None], ids, chosen), "expert ids and weights"),
        (lambda x, ids, chosen: (x.double(), ids, chosen), "cast x first"),
    ],
)
def test_operands_that_do_not_fit_are_errors(change, reason):
    with pytest.raises(ValueError, match=reason):
        run(*change(random(4, WIDTH), *routing(4, 2)), weights())


def test_gates_that_make_no_sense_are_errors():
    with pytest.raises(ValueError, match="use one of"):
        Gate(activation="tanhshrink")
    with pytest.raises(ValueError, match="alpha"):
        Gate(activation="swish")
    with pytest.raises(ValueError, match="alpha"):
        Gate(activation="silu", alpha=2.0)
