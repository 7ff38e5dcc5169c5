"""`moe_experts` and `expert_linear`: every provider against a float64 oracle, one token and slot at a time."""

from __future__ import annotations

import pytest
import torch

from pagebinder import CompileConfig, EngineConfig, SamplingParams, compile_model
from pagebinder.custom_ops.cpu import pack as coder
from pagebinder.custom_ops.linear.packed_weights import is_coded, pack, plain, plain_shape
from pagebinder.custom_ops.moe.gates import ACTIVATIONS, Gate
from pagebinder.custom_ops.providers import OpNeed, registered_providers
from pagebinder.errors import CompilerNotFoundError
from tests import moe_models
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("captured_once")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_EXPERTS, WIDTH, INNER = 6, 16, 12
GATES = {
    "silu": Gate(),
    "gelu": Gate(activation="gelu"),
    "gpt-oss": Gate(activation="swish", alpha=1.702, limit=1.0, up_offset=1.0, interleaved=True),
    "limited silu": Gate(limit=0.5),
    "in float32": Gate(in_float32=True),
    "not gated": Gate(activation="relu2", gated=False),
}


def ops_of(name: str):
    chosen = registered_providers()[name]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    assert not chosen.reasons_against(OpNeed(op="moe_experts", dtype="bfloat16"))
    chosen.prepare("moe_experts")
    return torch.ops.pagebinder if name == "reference" else torch.ops.pagebinder_cpu


@pytest.fixture(params=["reference", "cpu"])
def ops(request):
    return ops_of(request.param)


@pytest.fixture
def cpu():
    return ops_of("cpu")


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(
    gate=GATES["silu"], *, transposed=False, bias=False, dtype=torch.float32, width=WIDTH, inner=INNER
):
    """up, down, up_bias, down_bias."""
    inner_up = (2 if gate.gated else 1) * inner
    up = random(NUM_EXPERTS, inner_up, width, seed=1, dtype=dtype) * width**-0.5
    down = random(NUM_EXPERTS, width, inner, seed=2, dtype=dtype) * inner**-0.5
    biases = (
        random(NUM_EXPERTS, inner_up, seed=3, dtype=dtype),
        random(NUM_EXPERTS, width, seed=4, dtype=dtype),
    )
    if transposed:
        up, down = up.mT.contiguous(), down.mT.contiguous()
    return up, down, *(biases if bias else (None, None))


def routing(num_tokens, num_slots, seed=5):
    """Distinct experts for each token, of the first five: the last is never chosen."""
    ids = random(num_tokens, NUM_EXPERTS - 1, seed=seed).argsort(1)[:, :num_slots]
    return ids, random(num_tokens, num_slots, seed=seed + 1).softmax(1)


def run(ops, x, ids, chosen, operands, gate=GATES["silu"], transposed=False):
    return ops.moe_experts(x, ids, chosen, *operands, transposed=transposed, **gate.as_options())


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["[E, J, C]", "[E, C, J]"])
@pytest.mark.parametrize("name", GATES)
def test_equals_one_token_and_slot_at_a_time(ops, name, transposed, bias, dtype):
    gate = GATES[name]
    operands = weights(gate, transposed=transposed, bias=bias, dtype=dtype)
    for num_tokens, num_slots in ((1, 1), (1, 3), (2, 5), (40, 2)):
        x = random(num_tokens, WIDTH, dtype=dtype)
        ids, chosen = routing(num_tokens, num_slots)
        expected = oracle(x, ids, chosen, operands, gate, transposed)
        got = run(ops, x, ids, chosen, operands, gate, transposed)
        assert got.dtype is dtype and got.shape == x.shape
        assert expected.abs().mean() > 0.02
        if dtype is torch.float32:
            assert_close(got, expected)
        else:  # each of the two products and the gate between them is rounded to bfloat16
            torch.testing.assert_close(got.double(), expected, rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("num_tokens", [1, 5, 33])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", ["silu", "limited silu", "not gated"])
def test_packed_weights(ops, name, bias, num_tokens):
    """As plain ones, be it for a strip of rows or several; a token has the same bits alone."""
    gate = GATES[name]
    up, down, *biases = weights(gate, bias=bias, dtype=torch.bfloat16, width=96, inner=32)
    x = random(num_tokens, 96, dtype=torch.bfloat16)
    ids, chosen = routing(num_tokens, 2)
    ids[0, 1] = -1  # no expert
    packed = run(ops, x, ids, chosen, (pack(up), pack(down), *biases), gate)
    expected = run(
        ops, x.float(), ids, chosen, [None if w is None else w.float() for w in (up, down, *biases)], gate
    )
    torch.testing.assert_close(packed.float(), expected, rtol=2e-2, atol=2e-2)
    for t in (0, num_tokens - 1):
        alone = run(
            ops, x[t : t + 1], ids[t : t + 1], chosen[t : t + 1], (pack(up), pack(down), *biases), gate
        )
        if ops is torch.ops.pagebinder_cpu:
            assert torch.equal(alone[0], packed[t])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["as stored", "packed"])
def test_a_token_gets_the_same_of_experts_with_many_rows(cpu, packed, dtype):
    """From some rows on, all experts' rows of some columns are one job."""
    if packed and dtype is torch.float32:
        pytest.skip("experts in bf16 are packed")
    up, down, *biases = weights(bias=True, dtype=dtype, width=96, inner=64)
    operands = (pack(up), pack(down), *biases) if packed else (up, down, *biases)
    x, (ids, chosen) = random(120, 96, dtype=dtype), routing(120, 2)
    together = run(cpu, x, ids, chosen, operands)
    coding()
    for some in (slice(0, 1), slice(3, 9), slice(80, 110)):
        few = run(cpu, x[some], ids[some], chosen[some], operands)
        if torch.ops.pagebinder_cpu.has_matrix_tiles() and dtype is torch.bfloat16 and not packed:
            torch.testing.assert_close(few.float(), together[some].float(), rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(few, together[some])


@pytest.mark.parametrize("num_tokens", [1, 7, 30, 120])
@pytest.mark.parametrize("name", ["silu", "not gated"])
def test_coded_weights_give_the_bits_of_packed_ones(cpu, name, num_tokens):
    """Also those with rare exponents, jobs of several panels, few rows of an expert and many."""
    gate, code = GATES[name], coding()
    up, down, *biases = weights(gate, bias=True, dtype=torch.bfloat16, width=256, inner=512)
    for stack in (up, down):
        stack[1, 40, :64] *= torch.logspace(-12, 1, 64)
        stack[2, 3] = 0
    x, (ids, chosen) = random(num_tokens, 256, dtype=torch.bfloat16), routing(num_tokens, 2)
    ids[0, 1] = -1
    coded = (code(up), code(down), *biases)
    assert is_coded(coded[0]) and plain_shape(coded[0]) == up.shape and torch.equal(plain(coded[1]), down)
    got = run(cpu, x, ids, chosen, coded, gate)
    assert torch.equal(got, run(cpu, x, ids, chosen, (pack(up), pack(down), *biases), gate))
    reference = [
        run(torch.ops.pagebinder, x, ids, chosen, (*two, *biases), gate) for two in (coded[:2], (up, down))
    ]
    assert torch.equal(*reference)
    fake = run(torch.ops.pagebinder, *(on_meta(t) for t in (x, ids, chosen)), map(on_meta, coded), gate)
    assert fake.shape == got.shape and fake.dtype is torch.bfloat16


def coding():
    """The function that codes; its part of the kernels is loaded."""
    registered_providers()["cpu"].prepare("linear")
    return coder.code


def on_meta(tensor):
    return None if tensor is None else tensor.to("meta")


def test_codes_of_one_matrix_for_another_are_refused(cpu):
    x, (ids, chosen), code = random(2, 256, dtype=torch.bfloat16), routing(2, 2), coding()
    up, down, *biases = weights(dtype=torch.bfloat16, width=256, inner=256)
    with pytest.raises(RuntimeError, match="both coded"):
        run(cpu, x, ids, chosen, (code(up), down, *biases))
    with pytest.raises(RuntimeError, match="both coded"):
        run(cpu, x, ids, chosen, (pack(up), code(down), *biases))
    with pytest.raises(RuntimeError, match="differ in dtype"):
        run(cpu, x.float(), ids, chosen, (code(up), code(down), *biases))


def test_packed_weights_that_cannot_be(cpu):
    x, (ids, chosen) = random(2, 64, dtype=torch.bfloat16), routing(2, 2)
    up, down, *biases = weights(dtype=torch.bfloat16, width=64, inner=32)
    for operands, gate, transposed in (
        ((pack(up), down), GATES["silu"], False),
        ((pack(up), pack(down)), GATES["silu"], True),
        ((pack(up), pack(down)), GATES["gpt-oss"], False),
        ((pack(up)[..., :1], pack(down)[..., :1]), GATES["silu"], False),
    ):
        with pytest.raises(RuntimeError, match="packed"):
            run(cpu, x, ids, chosen, (*operands, *biases), gate, transposed)
    with pytest.raises(RuntimeError, match="differ in dtype"):
        run(cpu, x.float(), ids, chosen, (pack(up), pack(down), *biases))


def test_a_token_gets_the_same_whoever_shares_the_batch(ops):
    """Beside other tokens, in another order, and with other slots first: the sum follows the slots."""
    operands, x = weights(), random(32, WIDTH)
    ids, chosen = routing(32, 3)
    whole, order = run(ops, x, ids, chosen, operands), random(32, seed=9).argsort()
    for part in (slice(0, 1), slice(5, 7), slice(0, 31)):
        assert_close(run(ops, x[part], ids[part], chosen[part], operands), whole[part])
    assert_close(run(ops, x[order], ids[order], chosen[order], operands), whole[order])


def test_other_tokens_never_enter_a_row(ops):
    operands, x = weights(), random(8, WIDTH)
    ids, chosen = routing(8, 2)
    expected = run(ops, x, ids, chosen, operands)[3]
    x[torch.arange(8) != 3] = float("nan")
    torch.testing.assert_close(run(ops, x, ids, chosen, operands)[3], expected)


def test_an_id_outside_the_experts_adds_nothing(ops):
    operands, x = weights(bias=True), random(4, WIDTH)
    ids, chosen = routing(4, 2)
    only_first = run(ops, x, ids[:, :1], chosen[:, :1], operands)
    for outside in (NUM_EXPERTS, NUM_EXPERTS + 7, -1):
        ids[:, 1] = outside
        assert_close(run(ops, x, ids, chosen, operands), only_first)
    assert not ops.expert_linear(x, ids, operands[0], operands[2], transposed=False)[:, 1].any()
    assert not run(ops, x, torch.full_like(ids, -1), chosen, operands).any()


def test_one_expert_chosen_twice_is_added_twice(ops):
    operands, x = weights(), random(2, WIDTH)
    ids, ones = torch.tensor([[4, 4], [0, 0]]), torch.ones(2, 2)
    assert_close(run(ops, x, ids, ones, operands), 2 * run(ops, x, ids[:, :1], ones[:, :1], operands))


def test_no_tokens(ops):
    operands = weights()
    out = run(ops, random(0, WIDTH), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2), operands)
    assert out.shape == (0, WIDTH)


@pytest.mark.parametrize("transposed", [False, True])
def test_two_expert_linear_and_a_gate_are_the_mixture(ops, transposed):
    gate, operands = GATES["gpt-oss"], weights(GATES["gpt-oss"], transposed=transposed, bias=True)
    up, down, up_bias, down_bias = operands
    x, (ids, chosen) = random(9, WIDTH), routing(9, 3)
    h = gate(ops.expert_linear(x, ids, up, up_bias, transposed=transposed))
    assert h.shape == (9, 3, INNER)
    out = ops.expert_linear(h, ids, down, down_bias, transposed=transposed)
    assert_close((out * chosen[..., None]).sum(1), run(ops, x, ids, chosen, operands, gate, transposed))


def test_meta_tensors_have_the_shapes_of_real_ones(ops):
    operands = [None if w is None else w.to("meta") for w in weights(bias=True)]
    ids, chosen = (r.to("meta") for r in routing(7, 2))
    assert run(ops, random(7, WIDTH).to("meta"), ids, chosen, operands).shape == (7, WIDTH)
    shape = ops.expert_linear(random(7, WIDTH).to("meta"), ids, operands[0], None, transposed=False).shape
    assert shape == (7, 2, 2 * INNER)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, ids, chosen: (x, ids[:3], chosen), "expert ids and weights"),
        (lambda x, ids, chosen: (x[None], ids, chosen), "expert ids and weights"),
        (lambda x, ids, chosen: (x.double(), ids, chosen), "cast x first"),
    ],
)
def test_operands_that_do_not_fit_are_errors(ops, change, reason):
    error = ValueError if ops is torch.ops.pagebinder else RuntimeError
    with pytest.raises(error, match=reason):
        run(ops, *change(random(4, WIDTH), *routing(4, 2)), weights())


def test_gates_that_make_no_sense_are_errors():
    with pytest.raises(ValueError, match="use one of"):
        Gate(activation="tanhshrink")
    with pytest.raises(ValueError, match="alpha"):
        Gate(activation="swish")
    with pytest.raises(ValueError, match="alpha"):
        Gate(activation="silu", alpha=2.0)


# ---- the C++ kernels, on both sides of the limits of tiles, panels and row blocks ------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "inner"), [(64, 32), (96, 160), (37, 45), (544, 96)])
@pytest.mark.parametrize("transposed", [False, True], ids=["[E, J, C]", "[E, C, J]"])
@pytest.mark.parametrize("name", ["silu", "gpt-oss", "not gated"])
def test_sizes_of_the_kernels(cpu, name, transposed, width, inner, dtype):
    """The kernel in its dtype against the reference in float32 on the same values."""
    gate, reference = GATES[name], ops_of("reference")
    operands = weights(gate, transposed=transposed, bias=True, dtype=dtype, width=width, inner=inner)
    wide = [w.float() for w in operands]
    for num_tokens, num_slots in ((1, 3), (3, 2), (40, 2), (330, 2)):
        x = random(num_tokens, width, dtype=dtype)
        ids, chosen = routing(num_tokens, num_slots)
        ids[num_tokens // 2, 0] = NUM_EXPERTS
        expected = run(reference, x.float(), ids, chosen, wide, gate, transposed)
        got = run(cpu, x, ids, chosen, operands, gate, transposed)
        unit = torch.finfo(dtype).eps  # what the gate makes is rounded once, the result again
        torch.testing.assert_close(got.float(), expected, rtol=unit, atol=max(8 * unit, 2e-5))
        expected = reference.expert_linear(x.float(), ids, wide[0], wide[2], transposed=transposed)
        for rows in (x, x[:, None].expand(-1, num_slots, -1)):
            got = cpu.expert_linear(rows, ids, operands[0], operands[2], transposed=transposed)
            torch.testing.assert_close(got.float(), expected, rtol=unit, atol=2e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_depend_on_neither_threads_nor_other_tokens(cpu, dtype, transposed):
    """In bfloat16 on tiles an expert's rows, up to 4, are summed in another order than more of them."""
    operands = weights(transposed=transposed, dtype=dtype, width=320, inner=96)
    x, (ids, chosen) = random(96, 320, dtype=dtype), routing(96, 3)
    whole, threads = run(cpu, x, ids, chosen, operands, transposed=transposed), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(run(cpu, x, ids, chosen, operands, transposed=transposed), whole)
    finally:
        torch.set_num_threads(threads)
    for part in (slice(0, 1), slice(5, 7), slice(0, 60)) if dtype is torch.float32 else (slice(0, 60),):
        assert torch.equal(
            run(cpu, x[part], ids[part], chosen[part], operands, transposed=transposed), whole[part]
        )


def test_more_slots_than_one_pass_takes(cpu):
    operands, (ids, chosen) = weights(), routing(3000, 4)
    x = random(3000, WIDTH)
    assert torch.equal(
        run(cpu, x, ids, chosen, operands)[-7:], run(cpu, x[-7:], ids[-7:], chosen[-7:], operands)
    )


def test_layouts_of_weights(cpu):
    """Views are read where they lie: transposed ones, slices, experts that are apart."""
    up, down, *_ = weights(width=64, inner=32)
    x, (ids, chosen) = random(7, 64), routing(7, 2)
    expected = run(cpu, x, ids, chosen, (up, down, None, None))
    views = [(up.mT.contiguous().mT, down.mT.contiguous().mT)]
    views.append((torch.cat([up, up], 2)[..., :64], torch.cat([down, down], 1)[:, :64]))
    views.append((up[..., None].repeat(1, 1, 1, 2)[..., 0], down))
    for view in views:
        assert_close(run(cpu, x, ids, chosen, (*view, None, None)), expected)
    wide = random(7, 80)
    wide[:, :64] = x
    assert torch.equal(run(cpu, wide[:, :64], ids, chosen, (up, down, None, None)), expected)


@pytest.mark.parametrize("op", ["moe_experts", "expert_linear"])
def test_opcheck(cpu, op):
    up, down, *biases = weights(bias=True)
    x, (ids, chosen) = random(4, WIDTH), routing(4, 2)
    if op == "moe_experts":
        operands, options = (x, ids, chosen, up, down, *biases), GATES["gpt-oss"].as_options()
    else:
        operands, options = (x, ids, up, biases[0]), {}
    torch.library.opcheck(getattr(cpu, op).default, operands, {"transposed": False, **options})


def test_an_engine_runs_on_the_kernel_and_says_so(cpu):
    model, outputs = moe_models.tiny_qwen3_moe(), {}
    for provider in ("reference", "cpu"):
        config = CompileConfig(executable="eager", providers={"moe_experts": provider})
        compiled = compile_model(model, config)
        choices = [c for c in compiled.report.providers if c.op == "moe_experts"]
        assert [c.provider for c in choices] == [provider]
        engine = compiled.engine(EngineConfig(num_kv_blocks=40, max_num_seqs=2, max_num_batched_tokens=24))
        prompts = [list(range(1, n)) for n in (4, 30)]
        outputs[provider] = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0))
    assert [o.token_ids for o in outputs["cpu"]] == [o.token_ids for o in outputs["reference"]]
