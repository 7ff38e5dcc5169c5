"""When the triton provider serves, what it refuses and why, and models served by its kernels."""

import threading

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.custom_ops.providers import OpNeed, registered_providers, select_provider
from pagebinder.custom_ops.triton import gpu
from pagebinder.errors import ProviderError
from pagebinder.runtime.graphs.cpu_backend import Recorder
from tests.custom_ops.triton.on_device import DEVICE
from tests.helpers import VOCAB_SIZE, tiny_gpt_oss, tiny_qwen3

pytestmark = pytest.mark.usefixtures("captured_once")

ATTENTION = ("paged_attention", "kv_cache_write")
ALL = (*ATTENTION, "qk_norm_rope_write", "rms_norm", "add_rms_norm", "rope", "gated_activation")
NEW_TOKENS = 3
PROMPTS = [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(4 + 13 * i)] for i in range(2)]


@pytest.mark.usefixtures("provider")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float64"}, "dtype float64"),
        ({"kv_dtype": "float8_e4m3fn"}, "q's dtype bfloat16, not float8_e4m3fn"),
        ({"head_dim": 640}, "heads of 640 channels: at most 576"),
        ({"op": "quantized_gated_linear"}, "no kernel for quantized_gated_linear"),
        ({"op": "linear", "dtype": "float32"}, "products in float32 are the library's"),
        ({"op": "sparse_mla_attention", "features": frozenset({"fp4_index"})}, "no kernel for fp4_index"),
        ({"op": "indexer_score_topk", "features": frozenset({"fp8_v4"})}, "no kernel for fp8_v4"),
    ],
)
def test_refusals_name_their_reason(change, reason):
    need = OpNeed(**{"op": "paged_attention", "device": DEVICE, "dtype": "bfloat16", **change})
    with pytest.raises(ProviderError, match=reason):
        select_provider(need, "triton")


def test_without_a_gpu_or_the_interpreter_nothing_is_served(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert registered_providers()["triton"].devices == ("cuda",)
    selection = select_provider(OpNeed(op="paged_attention", device="cuda"), prepare=False)
    assert selection.provider == "reference" and "no CUDA GPU" in selection.why
    with pytest.raises(ProviderError, match="runs on cuda, not on cpu"):
        select_provider(OpNeed(op="paged_attention"), "triton")


def compiled_with(model, ops, **options):
    providers = dict.fromkeys(ops, "triton")
    config = CompileConfig(executable="eager", device=DEVICE, providers=providers, block_size=16, **options)
    return pagebinder.compile_model(model.to(DEVICE), config)


def used(compiled) -> set[str]:
    """Ops of the fused graph that triton serves."""
    targets = {str(n.target) for n in compiled.graphs["fused"].graph.nodes}
    return {t.split(".")[1] for t in targets if t.startswith("pagebinder_triton")}


def serve(compiled) -> list[list[int]]:
    engine = compiled.engine(EngineConfig(num_kv_blocks=40, max_num_batched_tokens=12))
    outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
    return [o.token_ids for o in outputs]


def one_layer():
    return tiny_qwen3(num_hidden_layers=1)


def two_layers_with_sinks():
    """One of them with a window, shorter than the second prompt."""
    return tiny_gpt_oss(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])


@pytest.mark.usefixtures("provider")
@pytest.mark.parametrize(
    ("model", "ops", "options", "served"),
    [
        (one_layer, ALL, {}, {"paged_attention", "qk_norm_rope_write", "rms_norm", "add_rms_norm"}),
        (two_layers_with_sinks, ATTENTION, {"fusions": False}, {"paged_attention", "kv_cache_write"}),
    ],
)
def test_an_engine_gives_the_tokens_of_the_source(model, ops, options, served):
    compiled = compiled_with(model(), ops, **options)
    assert served <= used(compiled)
    expected = []
    source = model().to(DEVICE)
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                logits = source(torch.tensor([ids], device=DEVICE)).logits
            ids.append(int(logits[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    assert serve(compiled) == expected


@pytest.mark.usefixtures("provider")
def test_ops_over_codes_are_served():
    ops = ("quantized_paged_attention", "quantized_kv_cache_write")
    compiled = compiled_with(one_layer(), ops, kv_dtype="int8", fusions=False)
    assert used(compiled) >= set(ops)


def test_kernels_are_launched_on_the_gpu_of_their_operands(monkeypatch):
    """Two GPUs that are not there: the second holds the tensors, the first is current."""
    seen, current = [], [0]

    class Current:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            self.before, current[0] = current[0], self.index

        def __exit__(self, *error):
            current[0] = self.before

    class OnSecond(torch.Tensor):
        device = torch.device("cuda:1")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Current)
    launch = gpu.on_its_device(lambda x, *, scale: seen.append((current[0], scale)))
    launch(torch.ones(1).as_subclass(OnSecond), scale=2.0)
    launch([torch.ones(1).as_subclass(OnSecond)], scale=4.0)
    launch(torch.ones(1), scale=3.0)
    assert seen == [(1, 2.0), (1, 4.0), (0, 3.0)] and current == [0]


def test_a_rehearsal_shows_what_an_op_allocates(provider):
    """Both products of a gated layer of many rows are there at once; a context in parts has sums of each part."""
    triton, cuda = registered_providers()["triton"], torch.device("cuda", 0)
    bf16 = {"dtype": torch.bfloat16, "device": "meta"}

    def rehearsed(op, *operands, **options):
        with Recorder() as recorder:
            results = triton.rehearse(op, cuda, operands, options)
        (lives,) = recorder.lives().values()
        return results, sorted(num_bytes for num_bytes, *_ in lives if num_bytes)

    x, weight = torch.empty(64, 256, **bf16), torch.empty(1024, 256, **bf16)
    out, taken = rehearsed("gated_linear", x, weight, weight, activation="silu")
    assert out.device.type == "meta" and out.shape == (64, 1024) and taken == [2 * 64 * 1024] * 2

    q, cache = torch.empty(2, 8, 128, **bf16), torch.empty(9, 2, 64, 256, **bf16)
    step = [torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((2, 16), (2,), (3,))]
    out, taken = rehearsed("paged_attention", q, cache, *step, head_dim_v=128, scale=0.1)
    assert out.shape == q.shape and len(taken) == 3 and taken[-1] == 128 * min(taken)


def test_a_rehearsal_is_of_one_thread(provider):
    triton, seen = registered_providers()["triton"], []
    x = torch.ones(3, 64, dtype=torch.bfloat16)

    def norm_elsewhere():
        seen.append(provider.overload("rms_norm")(x, None, eps=1e-6, tail="none"))

    with gpu.rehearsal(torch.device("cuda")):
        thread = threading.Thread(target=norm_elsewhere)
        thread.start()
        thread.join()
        assert gpu.capability(torch.device("meta")) >= (8, 0)
    assert torch.equal(seen[0], x) and gpu.capability(torch.device("cpu")) == gpu.CAPABILITY_OF_NO_GPU
    assert (
        triton.rehearse("rms_norm", torch.device("cuda"), (x,), {"eps": 0.0, "tail": "none so far"}) is None
    )
    norm_elsewhere()
    assert torch.equal(seen[1], x)
