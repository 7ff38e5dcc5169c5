"""Packed weights in compiled models: who gets them, what they compute, and what an artefact keeps of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import pagebinder
from pagebinder import CompileConfig, ConfigError, EngineConfig, SamplingParams
from pagebinder.artefacts.files import TENSORS
from pagebinder.custom_ops.cpu import huge_pages
from pagebinder.custom_ops.cpu.provider import reads_packed_weights
from pagebinder.custom_ops.linear.packed_weights import is_coded, is_packed, pack, plain_shape, unpack
from pagebinder.graph_tools import attributes
from pagebinder.passes.op_costs import scenario
from pagebinder.passes.op_costs_ours import cost_model
from pagebinder.runtime.single_sequence import single_sequence_inputs
from tests import moe_models
from tests.helpers import VOCAB_SIZE, tiny_llama

pytestmark = pytest.mark.usefixtures("captured_once")

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SMALL = EngineConfig(kv_cache_bytes=1 << 20, max_num_seqs=4)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], list(range(40)), [7]]


def eager(**options) -> CompileConfig:
    return CompileConfig(executable="eager", **options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_llama(tie_word_embeddings=True).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def packed(checkpoint):
    compiled = pagebinder.compile_model(checkpoint, eager())
    if not reads_packed_weights():
        pytest.skip("this machine has neither matrix tiles nor BF16 dots: nothing is packed")
    return compiled


def test_the_table_of_an_embedding_stays_mapped(checkpoint, tmp_path, monkeypatch):
    moved = []

    def note(weights, *memory):
        moved.append({(tuple(w.shape), w.dtype) for w in weights})

    monkeypatch.setattr("pagebinder.compiler.weights.move_to_huge_pages", note)
    monkeypatch.setattr("pagebinder.artefacts.load.move_to_huge_pages", note)
    compiled = pagebinder.compile_model(checkpoint, eager())
    compiled.save(tmp_path / "artefact")
    loaded = pagebinder.load(tmp_path / "artefact")
    table = ((VOCAB_SIZE, compiled.source.config.hidden_size), torch.bfloat16)
    norm = ((compiled.source.config.hidden_size,), torch.bfloat16)
    has_own_head = reads_packed_weights()  # a copy of the tied table in another order
    assert (
        all(norm in weights and (table in weights) != has_own_head for weights in moved) and len(moved) == 2
    )
    assert tokens_of(loaded) == tokens_of(compiled)


def weights_of(compiled, packed: bool) -> list[str]:
    found = attributes(compiled.graphs["fused"])
    return [name for name, tensor in found.items() if is_packed(tensor) == packed and tensor.dim() > 1]


def tokens_of(compiled) -> list[list[int]]:
    return [output.token_ids for output in compiled.engine(SMALL).generate(PROMPTS, GREEDY)]


def logits_of(compiled, ids=range(20)) -> torch.Tensor:
    inputs = single_sequence_inputs(compiled.kv_spec, compiled.states, torch.tensor(list(ids)))
    return compiled.executable.run(inputs)


def test_linear_layers_of_a_checkpoint_are_packed(packed):
    assert packed.report.weight_layout == ["9 linear layers read packed weights"]
    assert len(weights_of(packed, True)) == 2 * 7 + 1
    assert not any("proj" in name for name in weights_of(packed, False))


def test_the_table_that_is_the_head_too_has_both_forms(packed):
    names = [name for name in weights_of(packed, True) if "layers" not in name]
    assert len(names) == 1 and names[0].removesuffix("_packed") in weights_of(packed, False)


def test_they_compute_what_plain_weights_do(packed, checkpoint):
    plain = pagebinder.compile_model(checkpoint, eager(pack_weights=False))
    assert not weights_of(plain, True) and not plain.report.weight_layout
    a, b = (logits_of(compiled).float() for compiled in (packed, plain))
    assert (a - b).abs().max() < 0.03 * b.abs().max()


def test_a_module_keeps_its_weights_unless_asked(packed):
    module = tiny_llama().bfloat16()
    kept = pagebinder.compile_model(module, eager())
    assert not weights_of(kept, True)
    (line,) = kept.report.weight_layout
    assert line.startswith("9 linear layers") and "hold it twice" in line and line in kept.explain()
    asked = pagebinder.compile_model(module, eager(pack_weights=True))
    assert len(weights_of(asked, True)) == 2 * 7 + 1
    assert all(p.dim() < 6 for p in module.parameters())


def test_other_types_and_mapped_weights_stay(packed, checkpoint):
    assert not weights_of(pagebinder.compile_model(checkpoint, eager(dtype="float32")), True)
    assert not weights_of(pagebinder.compile_model(checkpoint, eager(map_weights=True)), True)


def test_one_by_one_and_together_are_the_same_bits(packed):
    """What few rows and many compute is the same sum: a long prompt in chunks has the bits of one in a piece."""
    linear = torch.ops.pagebinder_cpu.linear
    name = next(n for n in weights_of(packed, True) if "o_proj" in n)
    weight = attributes(packed.graphs["fused"])[name]
    x = torch.randn(300, weight.shape[1] * 32).bfloat16()
    together = linear(x, weight)
    assert all(torch.equal(linear(x[i : i + 1], weight), together[i : i + 1]) for i in range(0, 300, 37))


def test_an_artefact_refers_to_the_checkpoint_and_packs_again(packed, tmp_path):
    packed.save(tmp_path / "artefact")
    with safe_open(tmp_path / "artefact" / TENSORS, framework="pt") as own:
        stored = [own.get_tensor(name).numel() for name in list(own.keys())]
    assert sum(stored) < 2048
    loaded = pagebinder.load(tmp_path / "artefact")
    assert weights_of(loaded, True) == weights_of(packed, True)
    assert tokens_of(loaded) == tokens_of(packed)


def test_an_artefact_of_a_module_holds_its_weights(packed, tmp_path):
    compiled = pagebinder.compile_model(tiny_llama().bfloat16(), eager(pack_weights=True))
    compiled.save(tmp_path / "artefact")
    loaded = pagebinder.load(tmp_path / "artefact")
    assert len(weights_of(loaded, True)) == 2 * 7 + 1 and tokens_of(loaded) == tokens_of(compiled)


def test_packed_weights_run_without_the_machine_for_them(packed):
    """The reference takes them, too: a graph that was saved on another machine is slow and right."""
    weight = attributes(packed.graphs["fused"])[weights_of(packed, True)[0]]
    x = torch.randn(3, weight.shape[1] * 32).bfloat16()
    ours, reference = torch.ops.pagebinder_cpu.linear(x, weight), torch.ops.pagebinder.linear(x, weight)
    torch.testing.assert_close(ours, reference, rtol=2e-2, atol=2e-2)


def test_coded_weights_give_the_same_bits(packed, tmp_path):
    """Where rows are multiples of 256; the others stay packed. Artefacts hold plain weights and code them again."""
    folder = tmp_path / "checkpoint"
    tiny_llama(hidden_size=256, intermediate_size=512, num_attention_heads=8).bfloat16().save_pretrained(
        folder
    )
    plainly = pagebinder.compile_model(folder, eager())
    coded = pagebinder.compile_model(folder, eager(pack_weights="coded"))
    (line,) = coded.report.weight_layout
    assert line.endswith("9 of them in about 12 of 16 bits, without loss") and line in coded.explain()
    weights = [w for w in attributes(coded.graphs["fused"]).values() if is_coded(w)]
    packed_bytes = sum(2 * torch.Size(plain_shape(w)).numel() for w in weights)
    assert len(weights) == 2 * 7 + 1 and sum(w.numel() for w in weights) < 0.8 * packed_bytes
    assert torch.equal(logits_of(coded), logits_of(plainly)) and tokens_of(coded) == tokens_of(plainly)
    coded.save(tmp_path / "artefact")
    loaded = pagebinder.load(tmp_path / "artefact")
    assert sum(is_coded(w) for w in attributes(loaded.graphs["fused"]).values()) == len(weights)
    assert tokens_of(loaded) == tokens_of(coded)


def test_sizes_that_blocks_do_not_fill_stay_packed(packed, checkpoint):
    compiled = pagebinder.compile_model(checkpoint, eager(pack_weights="coded"))
    assert compiled.report.weight_layout == [
        "9 linear layers read packed weights",
        "9 linear layers read packed weights, not coded ones: rows are no multiples of 256",
    ]
    assert weights_of(compiled, True) == weights_of(packed, True)


@pytest.mark.parametrize(
    "options", [{"pack_weights": 1}, {"pack_weights": "12"}, {"pack_weights": True, "map_weights": True}]
)
def test_bad_options(options):
    with pytest.raises(ConfigError, match="pack_weights"):
        CompileConfig(**options)


def test_weights_stay_plain_where_memory_is_short(packed, checkpoint, monkeypatch):
    monkeypatch.setattr(huge_pages, "_available_bytes", lambda: 1 << 10)
    compiled = pagebinder.compile_model(checkpoint, eager())
    assert not weights_of(compiled, True)
    (line,) = compiled.report.weight_layout
    assert line.startswith("9 linear layers read theirs as they are") and "free memory" in line


def test_stacks_are_packed_weight_by_weight():
    stack = torch.randn(3, 96, 64).bfloat16()
    packed = pack(stack)
    assert plain_shape(packed) == stack.shape and torch.equal(unpack(packed), stack)
    assert all(torch.equal(one, pack(weight)) for one, weight in zip(packed, stack))


def test_experts(packed, tmp_path):
    """Of a checkpoint they are packed where dots read them, and an artefact packs them again."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "mlp_only_layers": []}
    moe_models.tiny_qwen3_moe(**sizes).bfloat16().save_pretrained(tmp_path / "model")
    compiled, plain = (
        pagebinder.compile_model(tmp_path / "model", eager(pack_weights=p)) for p in (None, False)
    )
    experts = [name for name in weights_of(compiled, True) if "experts" in name]
    layers = compiled.source.module.config.num_hidden_layers
    if torch.ops.pagebinder_cpu.has_matrix_tiles():
        assert not experts
        assert any("mixtures of experts read theirs" in line for line in compiled.report.weight_layout)
    else:
        assert len(experts) == 2 * layers
        assert f"{layers} mixtures of experts read packed weights" in compiled.report.weight_layout
    a, b = (logits_of(c).float() for c in (compiled, plain))
    assert (a - b).abs().max() < 0.03 * b.abs().max()
    compiled.save(tmp_path / "artefact")
    loaded = pagebinder.load(tmp_path / "artefact")
    assert weights_of(loaded, True) == weights_of(compiled, True)
    assert tokens_of(loaded) == tokens_of(compiled)


def calls_of(gm) -> list[torch.fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def test_coded_experts(packed, tmp_path):
    """The same bits as packed ones, in a quarter less; an artefact codes them again."""
    if torch.ops.pagebinder_cpu.has_matrix_tiles():
        pytest.skip("matrix tiles read experts as they lie")
    moe_models.tiny_qwen3_moe(hidden_size=256, moe_intermediate_size=256).bfloat16().save_pretrained(
        tmp_path / "model"
    )
    plainly, coded = (
        pagebinder.compile_model(tmp_path / "model", eager(pack_weights=p)) for p in (True, "coded")
    )
    (line,) = (line for line in coded.report.weight_layout if "mixtures" in line)
    assert line.endswith("1 of them in about 12 of 16 bits, without loss")
    stacks = [w for w in attributes(coded.graphs["fused"]).values() if is_coded(w) and w.dim() == 4]
    assert len(stacks) == 2
    assert all(w.numel() < 0.8 * 2 * torch.Size(plain_shape(w)).numel() for w in stacks)
    flops = [
        sum(c.flops for c in map(cost_model(gm).cost, calls_of(gm)))
        for gm in (coded.graphs["fused"], plainly.graphs["fused"])
    ]
    assert flops[0] == flops[1]
    assert torch.equal(logits_of(coded), logits_of(plainly)) and tokens_of(coded) == tokens_of(plainly)
    coded.save(tmp_path / "artefact")
    loaded = pagebinder.load(tmp_path / "artefact")
    of_loaded = [w for w in attributes(loaded.graphs["fused"]).values() if is_coded(w) and w.dim() == 4]
    assert len(of_loaded) == 2 and tokens_of(loaded) == tokens_of(coded)


def test_what_is_not_coded_is_told(packed, tmp_path):
    """One expert of rare exponents keeps the stack of all as it is."""
    if torch.ops.pagebinder_cpu.has_matrix_tiles():
        pytest.skip("matrix tiles read experts as they lie")
    model = moe_models.tiny_qwen3_moe(hidden_size=256, moe_intermediate_size=256).bfloat16()
    experts = next(p for name, p in model.named_parameters() if name.endswith("experts.down_proj"))
    with torch.no_grad():
        experts[1] *= 10 ** (-15 * torch.rand(experts[1].shape))
    model.save_pretrained(tmp_path)
    compiled = pagebinder.compile_model(tmp_path, eager(pack_weights="coded"))
    told = [line for line in compiled.report.weight_layout if "mixtures" in line]
    assert told[0] == "1 mixtures of experts read packed weights" and "exponents are rare" in told[1]


def test_codes_do_not_choose_another_executable(packed, tmp_path):
    """Else the tokens would be other ones: what torch's ops move is held against what weights stand for."""
    tiny_llama(hidden_size=256, intermediate_size=512, num_attention_heads=8).bfloat16().save_pretrained(
        tmp_path
    )
    plainly, coded = (pagebinder.compile_model(tmp_path, eager(pack_weights=p)) for p in (True, "coded"))
    step = scenario(tokens=1, context=1)

    def weight_bytes(compiled, decoded):
        gm = compiled.graphs["fused"]
        model = cost_model(gm, decoded=decoded)
        return sum(float(model.cost(n).weight_bytes.subs(step)) for n in calls_of(gm))

    assert weight_bytes(coded, True) == weight_bytes(plainly, True) == weight_bytes(plainly, False)
    assert weight_bytes(coded, False) < 0.8 * weight_bytes(plainly, False)


def test_experts_stay_where_they_would_be_too_much_twice(packed, tmp_path, monkeypatch):
    """The rest is packed all the same."""
    if torch.ops.pagebinder_cpu.has_matrix_tiles():
        pytest.skip("matrix tiles read experts as they lie")
    moe_models.tiny_qwen3_moe(hidden_size=64, moe_intermediate_size=32).bfloat16().save_pretrained(tmp_path)
    stacks = 8 * 3 * 64 * 32 * 2  # bytes of the one mixture
    monkeypatch.setattr(huge_pages, "_available_bytes", lambda: 3 * stacks)
    compiled = pagebinder.compile_model(tmp_path, eager())
    assert not any("experts" in name for name in weights_of(compiled, True))
    told = compiled.report.weight_layout
    assert "linear layers read packed weights" in told[0] and "0.25 of the free memory" in told[-1]
    asked = pagebinder.compile_model(tmp_path, eager(pack_weights=True))
    assert any("experts" in name for name in weights_of(asked, True))


def test_experts_in_another_order_stay(packed, tmp_path):
    moe_models.tiny_gpt_oss_moe(hidden_size=64, intermediate_size=32).bfloat16().save_pretrained(tmp_path)
    compiled = pagebinder.compile_model(tmp_path, eager())
    assert not any("experts" in name for name in weights_of(compiled, True))
    (line,) = (line for line in compiled.report.weight_layout if "mixtures" in line)
    assert "transposed" in line or "matrix tiles" in line
