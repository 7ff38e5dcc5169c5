"""Greedy output of the engine equals transformers' `generate` run per sequence, under the hardest schedule.

Every case: at least 8 requests of different lengths added at different steps, prompts computed in chunks of at
most 16 tokens, prefix caching on, and a block pool so small that requests are preempted.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.runtime.executables import InductorExecutable
from pagebinder.runtime.single_sequence import single_sequence_inputs
from tests.helpers import by_day, tiny_llama, tiny_mistral, tiny_qwen3

pytestmark = pytest.mark.usefixtures("captured_once")

NEW_TOKENS = 40
PROMPT_LENGTHS = (3, 17, 40, 1, 33, 50, 16, 15, 64, 2)
WINDOW = 20

MODELS = {
    "llama": lambda: tiny_llama(),
    "qwen3": lambda: tiny_qwen3(),
    "mistral-window": lambda: tiny_mistral(WINDOW),
}
compiled_models: dict[tuple[str, str], tuple] = {}


def compiled_pair(name: str, executable: str):
    """(source model, compiled model), compiled once per test session."""
    key = (name, executable)
    if key not in compiled_models:
        model = MODELS[name]()
        compiled = pagebinder.compile_model(model, CompileConfig(executable=executable, block_size=16))
        compiled_models[key] = (model, compiled)
    return compiled_models[key]


def prompts_with_shared_prefix(vocab_size: int) -> list[list[int]]:
    """Ten prompts; every second one starts with the same 32 tokens (two blocks), where it is long enough."""
    generator = torch.Generator().manual_seed(7)
    shared = torch.randint(0, vocab_size, (32,), generator=generator).tolist()
    prompts = []
    for i, length in enumerate(PROMPT_LENGTHS):
        own = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        prompts.append((shared + own)[:length] if i % 2 == 0 and length > 32 else own)
    return prompts


def oracle(model, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def serve_staggered(engine, prompts, params) -> dict[str, list[int]]:
    """Add a request every third step; check the books after every step."""
    done: dict[str, list[int]] = {}
    waiting = [(f"r{i}", p) for i, p in enumerate(prompts)]
    step = 0
    while waiting or engine.has_unfinished:
        if waiting and step % 3 == 0:
            engine.add_request(*waiting.pop(0), params)
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output.token_ids
        engine.check_integrity()
        step += 1
    return done


@pytest.mark.parametrize(
    ("name", "executable"),
    by_day(
        itertools.product(MODELS, ["eager", "inductor"]),
        [("llama", "eager"), ("mistral-window", "eager"), ("qwen3", "inductor")],
    ),
)
def test_greedy_equals_generate_under_chunking_prefix_hits_and_preemption(name, executable):
    model, compiled = compiled_pair(name, executable)
    num_kv_blocks = 12 if name == "mistral-window" else 22
    engine = compiled.engine(
        EngineConfig(num_kv_blocks=num_kv_blocks, max_num_seqs=8, max_num_batched_tokens=16)
    )
    prompts = prompts_with_shared_prefix(compiled.source.vocab_size)
    done = serve_staggered(engine, prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
    for i, prompt in enumerate(prompts):
        assert done[f"r{i}"] == oracle(model, prompt), f"prompt of {len(prompt)} tokens"
    stats = engine.stats()
    assert stats.preemptions > 0, "the pool was meant to be too small"
    assert stats.prefix_hit_tokens > 0, "the shared prefix was meant to hit"
    assert stats.free_blocks == stats.num_blocks - 1


def executable_logits(compiled, ids: torch.Tensor) -> torch.Tensor:
    return compiled.executable.run(single_sequence_inputs(compiled.kv_spec, compiled.states, ids))


@pytest.mark.parametrize("name", by_day(MODELS, ["qwen3"]))
@pytest.mark.parametrize("length", [1, 2, 5, 77])
def test_the_compiled_executable_gives_the_logits_of_the_source_model(name, length):
    model, compiled = compiled_pair(name, "inductor")
    ids = torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    assert float((executable_logits(compiled, ids) - expected).abs().max()) < 1e-4


def test_the_compiled_executable_in_bf16_errs_at_most_twice_as_much_as_bf16_eager():
    exact, rounded = tiny_llama(), tiny_llama().bfloat16()
    with torch.no_grad():  # the same weights, so that only the arithmetic differs
        for wide, narrow in zip(exact.parameters(), rounded.parameters()):
            wide.copy_(narrow.float())
    compiled = pagebinder.compile_model(rounded, CompileConfig(executable="inductor"))
    ids = torch.randint(0, 128, (77,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        truth, eager = exact(ids[None]).logits[0], rounded(ids[None]).logits[0].float()
    ours = executable_logits(compiled, ids).float()
    assert float((ours - truth).abs().max()) <= 2 * float((eager - truth).abs().max())


def test_blocks_behind_a_window_are_freed():
    model, compiled = compiled_pair("mistral-window", "eager")
    window_blocks = -(-(WINDOW - 1 + 1) // 16) + 1
    engine = compiled.engine(EngineConfig(num_kv_blocks=16, max_num_seqs=1, max_num_batched_tokens=16))
    prompt = torch.randint(0, 128, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    engine.add_request("long", prompt, SamplingParams(max_tokens=60, temperature=0.0))
    held, tokens = [], []
    while engine.has_unfinished:
        outputs = engine.step()
        stats = engine.stats()
        held.append(stats.num_blocks - 1 - stats.free_blocks)
        tokens = outputs[0].token_ids if outputs else tokens
    assert len(prompt) + len(tokens) >= 4 * WINDOW
    # A step's chunk of 16 tokens adds at most one block to what the window itself needs.
    assert max(held) <= window_blocks + 1 < -(-150 // 16)
    assert tokens == oracle(model, prompt, 60)


def test_a_prompt_that_is_cached_whole_recomputes_only_its_end():
    model, compiled = compiled_pair("llama", "eager")
    engine = compiled.engine(EngineConfig(num_kv_blocks=64))
    prompt = list(range(80))
    params = SamplingParams(max_tokens=4, temperature=0.0)
    first, second = engine.generate([prompt], params)[0], engine.generate([prompt], params)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 64  # whole blocks of at most 79 tokens: the last token needs logits
    assert first.token_ids == second.token_ids == oracle(model, prompt, 4)


def test_a_cache_salt_keeps_prefixes_apart():
    _, compiled = compiled_pair("llama", "eager")
    engine = compiled.engine(EngineConfig(num_kv_blocks=64))
    params = SamplingParams(max_tokens=2, temperature=0.0)
    hits = []
    for i, salt in enumerate(("a", "b", "a")):
        engine.add_request(f"r{i}", list(range(50)), params, cache_salt=salt)
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        hits.append(outputs[-1].num_cached_tokens)
    assert hits == [0, 0, 48]


def test_the_inductor_executable_compiles_once():
    """After the first step nothing is compiled again, whatever the number of tokens, requests and blocks."""
    _, compiled = compiled_pair("llama", "inductor")
    engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_batched_tokens=64))
    params = SamplingParams(max_tokens=3, temperature=0.0)
    engine.generate([[1, 2, 3]], params)
    before = {k: dict(v) for k, v in counters.items()}
    for lengths in ((1,), (5, 7), (60,), (2,) * 20, (100, 1, 30)):
        engine.generate([list(range(n)) for n in lengths], params)
    assert {k: dict(v) for k, v in counters.items()} == before


def test_generated_code_passes_caches_through_untouched():
    """In inductor's output a cache is only ever an argument of our ops: never cloned, copied or returned."""
    _, compiled = compiled_pair("llama", "eager")
    with inductor_config.patch(force_disable_caches=True):
        _, code = run_and_get_code(InductorExecutable, compiled.graphs["fused"])
    body = re.search(r"def call\(self, args\):\n(.*?)\n        return \(", "\n".join(code), re.DOTALL).group(
        1
    )
    names = compiled.executable.input_names
    caches = [i for i, name in enumerate(names) if name.startswith("kv_cache_")]
    assert len(caches) == len(compiled.states)
    bookkeeping = re.compile(r"assert_size_stride|del |arg\d+_1_(size|stride) = |arg0_1, .* = args")
    for index in caches:
        uses = [line.strip() for line in body.splitlines() if re.search(rf"\barg{index}_1\b", line)]
        calls = [use for use in uses if not bookkeeping.match(use)]
        assert len(calls) == 2, calls
        assert ".qk_norm_rope_write.default(" in calls[0]
        assert ".paged_attention.default(" in calls[1]
