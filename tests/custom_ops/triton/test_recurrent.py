"""The paged recurrences in Triton: against the oracles in any batch, and bit by bit among themselves."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import softplus

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.custom_ops.providers import OpNeed, registered_providers
from tests.custom_ops import recurrent_cases
from tests.custom_ops.recurrent_cases import bad_operands, int32, strided_cache
from tests.custom_ops.test_paged_recurrent import RECURRENCES, Batch
from tests.custom_ops.test_recurrent_cpu import CASES, check, spread
from tests.custom_ops.triton.on_device import DEVICE, OF_A_KERNEL, moved_to_device
from tests.helpers import by_day, nightly, tiny_mamba2, tiny_qwen3_next

# What only the device knows is not checked, see recurrent_steps.py.
ON_DEVICE = ("rise from 0", "smaller than its", "exceeds its", "start state is null", "not valid")


@pytest.fixture(scope="module")
def on_triton(provider):
    """name, dtype -> a recurrence whose paged op is the kernel."""

    def make(name: str, dtype: torch.dtype = torch.float32):
        recurrence = CASES[name](dtype=dtype)
        return replace(recurrence, paged=provider.overload(recurrence.paged.__name__))

    return make


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_batch_of_requests(on_triton, name):
    """Prompts cut inside, at and behind blocks; a null block; decodes alone and beside a prompt; padding."""
    batch = Batch(on_triton(name), [9, 6, 1], block_size=4, unwanted=lambda r, i: (r, i) == (0, 0))
    batch.step([5, 4, 0], padding=2)
    batch.check_states()
    batch.step([1, 1, 1])
    batch.step([3, 0, 0], padding=1)
    batch.step([0, 0, 0], padding=2)
    batch.check_states()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", by_day(RECURRENCES, ("short_conv", "gated_delta_rule")))
def test_other_types(on_triton, name, dtype):
    batch = Batch(on_triton(name, dtype), [7], block_size=4)
    batch.step([6])
    batch.step([1])
    batch.check_states()


@pytest.mark.parametrize("taps", by_day((2, 4, 6), (4,)))
def test_short_conv_of_several_tiles(provider, taps):
    """The first checkpoint goes into the block of the start state, out of a tile that does not read it."""
    whole = None
    for cuts in ([110], [10, 100], [1, 39, 1, 69]):
        recurrence = recurrent_cases.short_conv(taps=taps, channels=20, dtype=torch.bfloat16)
        batch = Batch(replace(recurrence, paged=provider.overload("paged_short_conv")), [110], block_size=64)
        out = torch.cat([batch.step([n], padding=40)[:n] for n in cuts])
        batch.check_states()
        whole = out if whole is None else whole
        assert torch.equal(out, whole)


@pytest.fixture
def last_program_first(monkeypatch):
    """The interpreter runs programs in their order; on a GPU any may be first."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    place = builder.set_grid_idx
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda *index: place(*(n - 1 - i for n, i in zip(builder.grid_dim, index)))
    )


@pytest.mark.skipif(DEVICE == "cuda", reason="the order is the GPU's")
@pytest.mark.parametrize("name", by_day((*RECURRENCES, "mlstm of 48"), ("short_conv",)))
def test_programs_in_another_order(on_triton, last_program_first, name):
    """No program writes what another one still has to read: the step begins and ends in one block, or leaves it."""
    tokens = (110, 45) if name == "short_conv" else (13, 7)
    batch = Batch(on_triton(name), tokens, block_size=64 if name == "short_conv" else 8)
    batch.step([2, 3])
    batch.step([n - d for n, d in zip(tokens, batch.done)], padding=1)
    batch.check_states()


def test_small_time_steps_keep_their_digits(provider):
    dt = torch.tensor([[-17.0, -9.0, -1.0, 0.0, 3.0, 30.0]])
    ones, cache = torch.ones(1, 6, 1), torch.zeros(2, 6, 1, 1)
    rate, step = torch.zeros(6), (int32(1)[None], int32(1), int32(0, 1))
    operands = (ones, dt, rate, ones[:, :1], ones[:, :1], None, None, cache, *step)
    y = provider.overload("paged_ssd")(*operands, block_size=4, dt_softplus=True)
    torch.testing.assert_close(y[0, :, 0].double(), softplus(dt[0].double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", RECURRENCES)
def test_bad_operands_raise(on_triton, name):
    recurrence = on_triton(name)
    tokens = recurrence.tokens(4, torch.Generator().manual_seed(0))
    cache, table = strided_cache(recurrence, 3), int32(1, 2)[None]
    good = {"cache": cache, "table": table, "lens": int32(4), "starts": int32(0, 4), "block_size": 8}
    for message, options in bad_operands(cache).items():
        if not message.startswith(ON_DEVICE):
            with pytest.raises(ValueError, match=message):
                recurrence.run_paged(tokens, **{**good, **options})
    with pytest.raises(ValueError):
        recurrence.run_paged([tokens[0][:, :1], *tokens[1:]], **good)
    assert cache.isnan().all()


def test_weights_of_another_width_are_refused(provider):
    x, cache, step = torch.zeros(4, 6), torch.zeros(2, 6, 3), (int32(1)[None], int32(4), int32(0, 4))
    with pytest.raises(ValueError, match=r"bias is \[C\]"):
        options = {"block_size": 4, "activation": None}
        provider.overload("paged_short_conv")(x, torch.zeros(6, 4), x[0, :5], cache, *step, **options)
    x, cache, rate = torch.zeros(4, 2, 1), torch.zeros(2, 2, 1, 1), torch.zeros(2)
    for weights in ((rate[:1], None), (None, rate[:1])):
        with pytest.raises(ValueError, match=r"D and dt_bias are \[H\]"):
            operands = (x, x[..., 0], rate, x[:, :1], x[:, :1], *weights, cache, *step)
            provider.overload("paged_ssd")(*operands, block_size=4, dt_softplus=True)


@pytest.mark.parametrize("name", by_day(RECURRENCES, ("short_conv",)))
def test_opcheck(on_triton, name):
    recurrence = on_triton(name)
    op = RECURRENCES[name]().paged.__name__
    tokens = recurrence.tokens(3, torch.Generator().manual_seed(0))
    cache = torch.zeros(3, *recurrence.state_shape, dtype=recurrence.state_dtype)
    given = (*recurrence.operands(tokens), cache, int32(1, 2)[None], int32(3), int32(0, 3))
    kernel = getattr(torch.ops.pagebinder_triton, op).default
    options = {"block_size": 8, **recurrence.options}
    torch.library.opcheck(kernel, tuple(moved_to_device(list(given))), options, test_utils=OF_A_KERNEL)


def test_each_op_is_served():
    """On a GPU nothing is requested: `triton` comes first there."""
    for name in RECURRENCES:
        op = RECURRENCES[name]().paged.__name__
        need = OpNeed(op=op, device=DEVICE, dtype="bfloat16")
        assert registered_providers()["triton"].reasons_against(need) == []


@nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_oracles(on_triton, name, dtype):
    check(on_triton(name, dtype))


@nightly
@pytest.mark.parametrize("name", CASES)
def test_neither_cuts_nor_neighbours_change_a_bit(on_triton, name):
    recurrence = on_triton(name, torch.bfloat16)
    whole = Batch(recurrence, [37, 20], block_size=16)
    expected = whole.step([37, 0])
    parts = Batch(recurrence, [37, 20], block_size=16)
    steps = [(1, 0), (10, 9), (1, 1), (2, 10), (23, 0)]
    got = torch.cat([parts.step([n, other])[:n] for n, other in steps])
    assert torch.equal(got, expected)
    for i in whole.table[0, :3]:
        assert torch.equal(parts.cache[i], whole.cache[i])


@nightly
@pytest.mark.parametrize("name", CASES)
def test_any_strides(on_triton, name):
    """A cache whose dimensions lie in reverse order, and operands that are not contiguous."""
    recurrence = on_triton(name)
    batch = Batch(recurrence, [20, 10], block_size=8)
    axes = tuple(reversed(range(1, batch.cache.dim())))
    batch.cache = batch.cache.permute(0, *axes).contiguous().permute(0, *axes)
    batch.tokens = [tuple(x.mT.contiguous().mT for x in tokens) for tokens in batch.tokens]
    kernel = recurrence.paged

    def strided(*operands, **options):
        return kernel(*(spread(x) for x in operands[:-4]), *operands[-4:], **options)

    batch.recurrence = replace(recurrence, paged=strided)
    batch.step([17, 1])
    batch.step([3, 9])
    batch.check_states()


@nightly
@pytest.mark.usefixtures("provider")
@pytest.mark.parametrize(
    ("build", "ops"),
    [
        (tiny_qwen3_next, ("paged_short_conv", "paged_gated_delta_rule")),
        (tiny_mamba2, ("paged_short_conv", "paged_ssd")),
    ],
    ids=["qwen3-next", "mamba2"],
)
def test_an_engine_gives_the_tokens_of_the_source(build, ops):
    prompts, new_tokens = [list(range(2, 24)), [5, 6, 7]], 4
    config = CompileConfig(
        executable="eager", device=DEVICE, max_model_len=64, providers=dict.fromkeys(ops, "triton")
    )
    compiled = pagebinder.compile_model(build().to(DEVICE), config)
    chosen = {choice.op: choice.provider for choice in compiled.report.providers}
    assert {op: chosen[op] for op in ops} == dict.fromkeys(ops, "triton")
    engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_seqs=2, max_num_batched_tokens=16))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=new_tokens, temperature=0.0))
    source = build().to(DEVICE)
    for prompt, output in zip(prompts, outputs):
        ids = list(prompt)
        for _ in range(new_tokens):
            with torch.no_grad():
                logits = source(torch.tensor([ids], device=DEVICE), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        assert list(output.token_ids) == ids[len(prompt) :]
