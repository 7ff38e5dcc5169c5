"""Engines that read shared prefixes once: the tokens of those that do not, when they do, and why not."""

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.errors import ConfigError
from pagebinder.runtime.cascade_costs import CascadeCosts, CascadeRates
from pagebinder.runtime.packed_sequences import PackedSequences
from tests.helpers import tiny_gpt_oss, tiny_llama, tiny_qwen3
from tests.test_engine_exact import serve_staggered

pytestmark = pytest.mark.usefixtures("captured_once")

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
PREFIX = [(5 * i + i * i) % 128 for i in range(50)]
PROMPTS = [PREFIX + [i, 2 * i, 3][: 1 + i % 3] for i in range(7)] + [[9, 8, 7], PREFIX[:33]]
WINDOW = 60


def compiled_with(model, **options):
    return pagebinder.compile_model(model, CompileConfig(cascade=True, block_size=16, **options))


@pytest.fixture(scope="module")
def qwen3():
    return compiled_with(tiny_qwen3(num_hidden_layers=1), executable="inductor")


@pytest.fixture(scope="module")
def gpt_oss():
    """Sinks; windows that requests outgrow between full attention."""
    return compiled_with(tiny_gpt_oss(WINDOW), executable="eager")


def serve(compiled, cascade: str, **options):
    """(tokens by request, stats) of staggered requests, prompts in chunks, behind one that fills the prefix cache."""
    config = {"num_kv_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 24, **options}
    engine = compiled.engine(EngineConfig(cascade=cascade, **config))
    first = engine.generate([PREFIX], GREEDY)[0].token_ids
    done = serve_staggered(engine, PROMPTS, GREEDY)
    return {"first": first, **done}, engine.stats()


def test_tokens_are_those_without_cascade(qwen3):
    expected, off = serve(qwen3, "off")
    assert off.cascaded_steps == 0 and off.cascade_refusals == {}
    tokens, on = serve(qwen3, "on")
    assert tokens == expected
    assert on.cascaded_steps > 20 and on.cascade_saved_tokens > 48 * on.cascaded_steps


def test_tokens_with_preemption(qwen3):
    """Blocks come and go: rows move, prefixes are lost and hit again."""
    expected, _ = serve(qwen3, "off", num_kv_blocks=9)
    tokens, on = serve(qwen3, "on", num_kv_blocks=9)
    assert tokens == expected
    assert on.preemptions > 0 and on.cascaded_steps > 0


def test_samples_of_one_prompt_share_it(qwen3):
    params = SamplingParams(max_tokens=9, n=3, seed=4)
    results = []
    for cascade in ("off", "on"):
        engine = qwen3.engine(EngineConfig(num_kv_blocks=60, cascade=cascade, check_integrity=True))
        results.append([o.token_ids for o in engine.generate([PREFIX], params)])
    assert results[0] == results[1]
    assert engine.stats().cascaded_steps > 5


def test_sinks_and_windows(gpt_oss):
    expected, _ = serve(gpt_oss, "off")
    tokens, on = serve(gpt_oss, "on")
    assert tokens == expected
    assert on.cascaded_steps > 0 and on.cascade_refusals["window"] > 0


def test_the_cost_model_decides(qwen3):
    """By its rates; those that were measured are put aside, as they are another's on each machine."""
    engine = qwen3.engine(EngineConfig(num_kv_blocks=60))
    ((group, costs),) = engine.loop.cascade.costs.items()
    for read, used, refused in ((1e-9, False, True), (1e-3, True, False)):
        before = engine.stats()
        rates = CascadeRates(read_near=read, read_far=read, tile=0.0, row=0.0)
        engine.loop.cascade.costs[group] = CascadeCosts(costs.shape, rates)
        engine.generate([PREFIX], GREEDY)
        engine.generate(PROMPTS[:3], GREEDY)
        stats = engine.stats()
        assert (stats.cascaded_steps > before.cascaded_steps) == used
        assert (stats.cascade_refusals != before.cascade_refusals) == refused


def test_nothing_shared_costs_nothing(qwen3):
    engine = qwen3.engine(EngineConfig(num_kv_blocks=60, cascade="on"))
    engine.generate([[1, 2, 3] * 9, [4, 5] * 12], GREEDY)
    stats = engine.stats()
    assert stats.cascaded_steps == 0 and stats.cascade_refusals == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(dtype):
    """Of two sequences that share two blocks, against the same step apart; in bf16 both err alike."""
    exact = tiny_llama(num_hidden_layers=1)
    model = tiny_llama(num_hidden_layers=1).to(dtype)
    with torch.no_grad():
        for wide, narrow in zip(exact.parameters(), model.parameters()):
            wide.copy_(narrow.float())
    compiled = compiled_with(model, executable="eager")
    ids = [torch.tensor(PREFIX[:40] + tail) for tail in ([3, 4], [100])]
    packed = PackedSequences(compiled.kv_spec, compiled.states, ids)
    packed.tables[0][1, :2] = packed.tables[0][0, :2]
    compiled.executable.run(packed.inputs([(0, 40), (0, 40)]))
    inputs = packed.inputs([(40, 42), (40, 41)])
    apart = compiled.executable.run(inputs).float()
    inputs["shared_lens_0"] = torch.tensor([32, 32], dtype=torch.int32)
    inputs["shared_tokens_0"] = torch.tensor([0, 1, 2], dtype=torch.int32)
    together = compiled.executable.run(inputs).float()
    assert not torch.equal(together, apart) or dtype == torch.bfloat16
    with torch.no_grad():
        truth = torch.cat([exact(x[None]).logits[0, 40:] for x in ids])
    error, usual = float((together - truth).abs().max()), float((apart - truth).abs().max())
    assert error <= (1e-4 if dtype == torch.float32 else 2 * usual)


def test_refusals_are_told():
    compiled = compiled_with(tiny_llama(num_hidden_layers=1), executable="eager", kv_dtype="int8")
    (result,) = (p for p in compiled.report.passes if p.name == "cascade_attention")
    assert not result.matches and "codes" in result.refusals[0].reason
    assert "cascade_attention" in compiled.explain()
    with pytest.raises(ConfigError, match="no layer of this model"):
        compiled.engine(EngineConfig(cascade="on"))
    assert compiled.engine(EngineConfig(num_kv_blocks=9)).generate([PREFIX], GREEDY)[0].finished


def test_bad_options():
    with pytest.raises(ConfigError, match="cascade='maybe'"):
        EngineConfig(cascade="maybe")
    with pytest.raises(ConfigError, match="cascade='on': use True or False"):
        CompileConfig(cascade="on")


def test_a_saved_model_cascades(gpt_oss, tmp_path):
    gpt_oss.save(tmp_path / "saved")
    loaded = pagebinder.load(tmp_path / "saved")
    results = []
    for compiled in (gpt_oss, loaded):
        engine = compiled.engine(EngineConfig(num_kv_blocks=60, cascade="on"))
        engine.generate([PREFIX], GREEDY)
        results.append([o.token_ids for o in engine.generate(PROMPTS[:2], GREEDY)])
        assert engine.stats().cascaded_steps > 0
    assert results[0] == results[1]
