"""Bad input gets an error that says what was wrong and what to do, loses nothing, and the engine serves on."""

from __future__ import annotations

import copy
import os
import pickle
import signal

import numpy as np
import pytest
import torch

import pagebinder
from pagebinder import (
    CacheCapacityError,
    CaptureError,
    CheckpointError,
    CompileConfig,
    ConfigError,
    EngineConfig,
    ProviderError,
    RequestError,
    SamplingParams,
)
from tests.helpers import VOCAB_SIZE, tiny_llama, tiny_mistral

pytestmark = pytest.mark.usefixtures("captured_once")

GREEDY = SamplingParams(max_tokens=5, temperature=0.0)


@pytest.fixture(scope="module")
def compiled():
    return pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager", block_size=16))


@pytest.fixture(scope="module")
def expected(compiled):
    return compiled.engine(EngineConfig(num_kv_blocks=40)).generate([[1, 2, 3]], GREEDY)[0].token_ids


@pytest.fixture
def engine(compiled):
    return compiled.engine(EngineConfig(num_kv_blocks=40, max_num_batched_tokens=32, check_integrity=True))


@pytest.mark.parametrize("write", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("what", ["compiled", "engine"])
def test_what_lives_in_one_process_says_how_another_gets_it(request, write, what):
    with pytest.raises(TypeError, match=r"neither pickled nor copied.*compiled.save\(directory\)"):
        write(request.getfixturevalue(what))


BAD_PROMPTS = {
    "empty": ([], RequestError, "empty"),
    "out of range": ([1, VOCAB_SIZE], RequestError, f"out of range.*0 to {VOCAB_SIZE - 1}"),
    "negative": ([-1], RequestError, "out of range"),
    "not a number": ([1, "a"], RequestError, "whole numbers"),
    "a float": ([1.0], RequestError, "whole numbers"),
    "not a list": (7, RequestError, "text or a list"),
    "text without a tokenizer": ("hello", RequestError, "no tokenizer"),
    "far out of range": ([10**30], RequestError, rf"out of range: .* 0 to {VOCAB_SIZE - 1}\.$"),
    "a row of embeddings of other models": ([1 << 30], RequestError, rf"0 to {VOCAB_SIZE - 1}\.$"),
    "of many digits": ([10**5000], RequestError, "Token id int of too many digits is out of range"),
    "longer than the model": ([1] * 512, RequestError, "512.*shorten"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_the_next_request_is_served(engine, expected, case):
    prompt, error, message = BAD_PROMPTS[case]
    with pytest.raises(error, match=message):
        engine.add_request("bad", prompt, GREEDY)
    assert not engine.has_unfinished
    assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids == expected


@pytest.mark.parametrize("prompt", [b"abc", bytearray(b"abc"), memoryview(b"abc"), np.bytes_(b"abc")])
def test_bytes_are_no_token_ids(engine, prompt):
    for use in (
        lambda: engine.add_request("bad", prompt, GREEDY),
        lambda: engine.generate(prompt, GREEDY),
        lambda: engine.generate([prompt], GREEDY),
        lambda: engine.stream([[1], prompt], GREEDY),
        lambda: engine.beam_search(prompt, beam_width=2, max_tokens=2),
    ):
        with pytest.raises(RequestError, match=r"The prompt is (bytes|bytearray|memoryview): give text"):
            use()
    assert not engine.has_unfinished


def test_a_request_that_the_cache_can_never_hold_is_refused(compiled, expected):
    engine = compiled.engine(EngineConfig(num_kv_blocks=6, max_num_batched_tokens=16))
    with pytest.raises(CacheCapacityError, match="raise kv_cache_bytes"):
        engine.add_request("big", [1] * 200, GREEDY)
    assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids == expected


BAD_PARAMS = {
    "unknown option": (dict(max_token=3), "did you mean 'max_tokens'"),
    "max_tokens": (dict(max_tokens=0), "max_tokens=0"),
    "temperature": (dict(temperature=-1.0), "temperature=-1.0"),
    "temperature nan": (dict(temperature=float("nan")), "temperature=nan"),
    "top_k": (dict(top_k=-1), "top_k"),
    "top_p": (dict(top_p=0.0), "top_p"),
    "min_p": (dict(min_p=2.0), "min_p"),
    "repetition_penalty": (dict(repetition_penalty=0.0), "repetition_penalty"),
    "tiny repetition_penalty": (dict(repetition_penalty=1e-40), "0.01 to 100"),
    "stop_token_ids, one number": (dict(stop_token_ids=5), "use a list"),
    "stop": (dict(stop=""), "stop"),
    "stop_token_ids": (dict(stop_token_ids=(-4,)), "stop_token_ids"),
    "n": (dict(n=0), "n=0"),
    "too many samples": (dict(n=1_000_000), "n=1000000: use 1 to 16384"),
    "logprobs": (dict(logprobs=-1), "logprobs"),
    "seed": (dict(seed="x"), "seed"),
    "a temperature that no float can hold": (dict(temperature=10**400), "temperature=10+: use 0.0"),
    "a seed of many digits": (dict(seed=10**5000), "seed is a number of 16,610 bits"),
    "max_tokens of many digits": (dict(max_tokens=10**5000), "max_tokens is a number of 16,610 bits"),
    "temperature of numpy": (dict(temperature=np.float32(-1)), "temperature=-1.0"),
    "a truth value of numpy": (dict(seed=np.bool_(True)), "seed=np.True_"),
}


@pytest.mark.parametrize("case", BAD_PARAMS)
def test_a_bad_sampling_parameter_is_refused(case):
    options, message = BAD_PARAMS[case]
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


def test_parameters_that_contradict_the_model_are_refused_and_the_engine_serves_on(engine, expected):
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.add_request("a", [1], SamplingParams(stop_token_ids=(VOCAB_SIZE,)))
    for options in (dict(stop_token_ids=[10**5000]), dict(logit_bias={10**5000: 1.0})):
        with pytest.raises(RequestError, match="of too many digits are outside the vocabulary"):
            engine.add_request("a", [1], SamplingParams(**options))
    with pytest.raises(RequestError, match="need a tokenizer"):
        engine.add_request("a", [1], SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="SamplingParams"):
        engine.add_request("a", [1], {"max_tokens": 3})
    with pytest.raises(RequestError, match="2 prompts but 1"):
        engine.generate([[1], [2]], [GREEDY])
    assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids == expected


def test_one_bad_prompt_among_many_leaves_no_request_behind(engine, expected):
    with pytest.raises(RequestError, match="empty"):
        engine.generate([[1, 2, 3], [], [4]], GREEDY)
    assert not engine.has_unfinished
    assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids == expected


def test_a_request_id_in_use_is_refused_and_the_first_goes_on(engine, expected):
    engine.add_request("a", [1, 2, 3], GREEDY)
    with pytest.raises(RequestError, match="already in use"):
        engine.add_request("a", [4], GREEDY)
    outputs = [o for o in iter_until_done(engine) if o.finished]
    assert [o.token_ids for o in outputs] == [expected]


def test_a_taken_id_among_n_samples_queues_none_of_them(engine):
    engine.add_request("a-1", [1], GREEDY)
    with pytest.raises(RequestError, match="a-1"):
        engine.add_request("a", [1], SamplingParams(n=3))
    assert engine.stats().waiting == 1


def test_a_bad_priority_is_refused_before_it_is_queued(compiled, expected):
    engine = compiled.engine(EngineConfig(num_kv_blocks=40, scheduling_policy="priority"))
    engine.add_request("good", [1, 2, 3], GREEDY)
    for bad in (None, 1.0, True, "1"):
        with pytest.raises(RequestError, match=f"priority={bad!r}"):
            engine.add_request("bad", [4, 5], GREEDY, priority=bad)
    outputs = [o for o in iter_until_done(engine) if o.finished]
    assert [o.token_ids for o in outputs] == [expected]


def test_numbers_of_numpy_are_numbers(compiled, expected):
    engine = compiled.engine(EngineConfig(num_kv_blocks=40, scheduling_policy="priority"))
    prompt = np.array([1, 2, 3])
    engine.add_request("a", list(prompt), GREEDY, priority=np.int64(2))
    outputs = [o for o in iter_until_done(engine) if o.finished]
    assert [o.token_ids for o in outputs] == [expected]
    assert engine.generate(list(prompt), GREEDY)[0].token_ids == expected
    whole = {"max_tokens": 5, "top_k": 3, "seed": 3, "logprobs": 1, "n": 2}
    real = {"temperature": 0.5, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5}
    params = SamplingParams(
        **{name: np.int32(value) for name, value in whole.items()},
        **{name: np.float32(value) for name, value in real.items()},
        stop_token_ids=[np.int64(7)],
    )
    plain = SamplingParams(**whole, **real, stop_token_ids=[7])
    assert params == plain and repr(params) == repr(plain)
    beams = [
        engine.beam_search([1, 2, 3], beam_width=of(2), max_tokens=of(4), length_penalty=penalty)
        for of, penalty in ((int, 0.5), (np.int64, np.float32(0.5)))
    ]
    assert beams[0] == beams[1] and type(beams[1][0].score) is float


def test_generate_finds_ids_of_its_own(engine, expected):
    for n in range(3):
        engine.add_request(f"request-{n}", [1], GREEDY)
    assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids == expected


@pytest.mark.parametrize("options", [dict(top_k=10**30), dict(temperature=1e-300)])
def test_extreme_values_do_not_stop_the_engine(engine, expected, options):
    out = engine.generate([[1, 2, 3]], SamplingParams(**{"max_tokens": 5, "top_k": 1, **options}))[0]
    assert len(out.token_ids) == 5
    if "temperature" in options:
        assert out.token_ids == expected


@pytest.mark.parametrize(
    "sizes", [dict(num_kv_blocks=10**12), dict(swap_bytes=1 << 50), dict(swap_bytes=10**30)], ids=str
)
def test_a_cache_larger_than_memory_is_refused(compiled, sizes):
    with pytest.raises(CacheCapacityError, match="cannot be allocated"):
        compiled.engine(EngineConfig(**{"num_kv_blocks": 40} | sizes))


def test_sizes_of_numpy_are_numbers(compiled, expected):
    sizes = {"num_kv_blocks": 40, "max_num_seqs": 2, "max_num_batched_tokens": 16, "seed": 3, "swap_bytes": 0}
    config = EngineConfig(**{name: np.int64(value) for name, value in sizes.items()})
    assert config == EngineConfig(**sizes) and type(config.max_num_seqs) is int
    assert compiled.engine(config).generate([[1, 2, 3]], GREEDY)[0].token_ids == expected
    assert CompileConfig(max_model_len=np.int32(64)).max_model_len == 64
    listed = EngineConfig(capture_decode_sizes=[np.int64(2)], capture_token_sizes=np.array([1, 2]))
    assert (listed.capture_decode_sizes, listed.capture_token_sizes) == ((2,), (1, 2))


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        *[(SamplingParams, "ignore_eos", value) for value in ("false", None, 1)],
        *[(CompileConfig, name, "no") for name in ("fusions", "map_weights", "strict")],
        *[(EngineConfig, f"{name}_policy", np.array([1, 2])) for name in ("scheduling", "swap")],
        (EngineConfig, "prefix_retention", np.array([1, 2])),
        *[(CompileConfig, name, np.array([1, 2])) for name in ("dtype", "executable", "quantization", "verify")],
        (CompileConfig, "activation_quantization", np.array([1, 2])),
        (CompileConfig, "pack_weights", torch.tensor([1, 2])),
        (CompileConfig, "workload", {1: 2}),
        (SamplingParams, "stop", ["\ud800"]),
    ],
)  # fmt: skip
def test_values_of_another_kind_are_named(kind, option, value):
    with pytest.raises((ConfigError, RequestError), match=option):
        kind(**{option: value})


def test_run_level_refuses_bad_sequences(compiled):
    for bad in ([1, 2], torch.tensor([[1]]), torch.tensor([VOCAB_SIZE]), torch.zeros(513, dtype=torch.int64)):
        with pytest.raises(ConfigError, match="run_level takes|outside the vocabulary"):
            compiled.run_level("fused", bad)


def test_aborting_an_unknown_request_does_nothing(engine):
    assert engine.abort("nobody") is None


@pytest.mark.parametrize("request_id", [[], None, 5])
def test_an_id_that_is_no_string_is_told(engine, request_id):
    for use in (engine.abort, lambda i: engine.fork(i, "b"), lambda i: engine.add_request(i, [1], GREEDY)):
        with pytest.raises(RequestError, match=r"request_id=.*: use .* string"):
            use(request_id)
    assert not engine.has_unfinished


BAD_CONFIGS = {
    "unknown compile option": (CompileConfig, dict(exectable="eager"), "did you mean 'executable'"),
    "unknown engine option": (EngineConfig, dict(num_blocks=4), "did you mean 'num_kv_blocks'"),
    "positional": (CompileConfig, ("cpu",), "keyword"),
    "executable": (CompileConfig, dict(executable="fast"), "eager, native, inductor"),
    "tensorrt fallback": (CompileConfig, dict(tensorrt_fallback="no"), "True or False"),
    "dtype": (CompileConfig, dict(dtype="int3"), "float32, bfloat16, float16"),
    "block size": (CompileConfig, dict(block_size=0), "block_size=0"),
    "device": (CompileConfig, dict(device="tpu"), "device='tpu'"),
    "device, no such GPU's name": (CompileConfig, dict(device="cuda:a"), "device='cuda:a'"),
    "verify": (CompileConfig, dict(verify="always"), "verify"),
    "both sizes": (EngineConfig, dict(kv_cache_bytes=1, num_kv_blocks=1), "not both"),
    "seqs": (EngineConfig, dict(max_num_seqs=0), "max_num_seqs=0"),
    "mixed prefill": (EngineConfig, dict(mixed_prefill_tokens=-1), "mixed_prefill_tokens=-1"),
    "engine seed": (EngineConfig, dict(seed=1.5), "seed=1.5"),
    "prefix caching": (EngineConfig, dict(prefix_caching="no"), "True or False"),
    "device, not a string": (CompileConfig, dict(device=3), "device=3"),
    "policy": (EngineConfig, dict(scheduling_policy="lifo"), "fcfs"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_bad_config_is_refused_when_it_is_made(case):
    cls, options, message = BAD_CONFIGS[case]
    with pytest.raises(ConfigError, match=message):
        cls(*options) if isinstance(options, tuple) else cls(**options)


def test_configs_cannot_be_changed_afterwards():
    with pytest.raises(AttributeError):
        CompileConfig().strict = False


def test_a_config_that_contradicts_the_model_is_refused(compiled):
    with pytest.raises(ConfigError, match="more than the 512 tokens"):
        pagebinder.compile_model(tiny_llama(), CompileConfig(max_model_len=513))
    with pytest.raises(CacheCapacityError, match="at least 2 are needed"):
        compiled.engine(EngineConfig(num_kv_blocks=1))
    with pytest.raises(ProviderError, match="registered"):
        pagebinder.compile_model(
            tiny_llama(), CompileConfig(executable="eager", providers={"paged_attention": "warp"})
        )
    with pytest.raises(ConfigError, match="no op"):
        pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager", providers={"attn": "cpu"}))


def test_things_that_are_not_models_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="Module, a checkpoint directory or an ONNX file"):
        pagebinder.compile_model(3)
    with pytest.raises(CheckpointError, match="not a directory"):
        pagebinder.compile_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        pagebinder.compile_model(tmp_path)


class MeanOverTokens(torch.nn.Module):
    """Looks like a decoder; every token sees the mean of all."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB_SIZE, 16)
        self.head = torch.nn.Linear(16, VOCAB_SIZE)

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)
        return self.head(x + x.mean(1, keepdim=True))


def test_an_unsupported_layer_is_an_error_that_names_it():
    with pytest.raises(CaptureError, match=r"mean.*it (reduces|works)"):
        pagebinder.compile_model(MeanOverTokens(), CompileConfig(executable="eager", block_size=16))


def test_a_model_in_float64_is_refused_with_what_to_do():
    with pytest.raises(CaptureError, match=r"float64.*model\.float\(\)"):
        pagebinder.compile_model(tiny_llama().double(), CompileConfig(executable="eager"))


class AttendsInFloat64(MeanOverTokens):
    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)
        heads = x[:, None].double()
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.head(x + attended[:, 0].float())


def test_code_that_attends_in_float64_is_named():
    with pytest.raises(
        CaptureError, match=r"test_bad_input\.py:\d+.*float64.*take the conversion out of its code"
    ):
        pagebinder.compile_model(AttendsInFloat64(), CompileConfig(executable="eager"))


class RenormedEmbedding(MeanOverTokens):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB_SIZE, 16, max_norm=1.0)

    def forward(self, input_ids, position_ids):
        return self.head(self.embed(input_ids))


def test_an_embedding_that_writes_to_its_weight_is_told_as_that():
    with pytest.raises(CaptureError, match=r"embedding_renorm.*writes to its weight.*max_norm"):
        pagebinder.compile_model(RenormedEmbedding(), CompileConfig(executable="eager"))


class FastPath(MeanOverTokens):
    def __init__(self, **kwargs):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 1)
        self.kwargs = kwargs

    def forward(self, input_ids, position_ids):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        return self.head(self.layers(self.embed(input_ids), mask=mask, **self.kwargs))


def test_torchs_fast_path_for_encoders_is_told_and_how_to_leave_it():
    pagebinder.compile_model(FastPath(is_causal=True), CompileConfig(executable="eager"))
    with pytest.raises(CaptureError, match=r"fast path.*is_causal=True"):
        pagebinder.compile_model(FastPath(), CompileConfig(executable="eager"))


def test_a_failing_step_loses_no_request(engine, expected, monkeypatch):
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    run = engine.model.executable.run
    object.__setattr__(engine.model.executable, "run", lambda inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    object.__setattr__(engine.model.executable, "run", run)
    outputs = [o for o in iter_until_done(engine) if o.finished]
    assert [o.token_ids for o in outputs] == [expected]


def test_an_interrupt_in_generate_frees_everything(engine, expected, monkeypatch):
    calls = iter(range(100))
    step = type(engine)._step

    def interrupted(self):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(type(engine), "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2, 3], [4, 5]], GREEDY)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.num_blocks - 1)
    assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids == expected


def raise_timeout(*_):
    raise TimeoutError


@pytest.mark.parametrize(
    ("handler", "error"), [(None, KeyboardInterrupt), (raise_timeout, TimeoutError)], ids=["ctrl-c", "alarm"]
)
def test_an_interrupt_at_any_moment_leaves_the_books_balanced(handler, error):
    """SIGINT from a timer, or an alarm whose handler raises, spread over steps of a window model with other
    requests in flight."""
    if handler is not None:
        signal.signal(signal.SIGALRM, handler)
    compiled = pagebinder.compile_model(tiny_mistral(20), CompileConfig(executable="eager", block_size=16))
    engine = compiled.engine(EngineConfig(num_kv_blocks=40, max_num_batched_tokens=16, check_integrity=True))
    params = SamplingParams(max_tokens=30, temperature=0.0)
    expected = engine.generate([list(range(50))], params)[0].token_ids
    engine.add_request("background", list(range(60, 100)), SamplingParams(max_tokens=200, temperature=0.0))
    interrupted = 0
    for i in range(40):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.0007 * i)
            try:
                engine.generate([list(range(50)), [7] * (i + 1)], params)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)  # it may come as late as here
        except error:
            interrupted += 1
        engine.check_integrity()
        stats = engine.stats()
        assert stats.running + stats.waiting <= 1  # the one in the background
    assert interrupted > 5
    assert engine.generate([list(range(50))], params)[0].token_ids == expected


@pytest.fixture(autouse=True)
def timer_raises_keyboard_interrupt():
    """The timer's signal is handed on as SIGINT, as a terminal would send it."""
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    yield
    signal.signal(signal.SIGALRM, before)


def test_nan_logits_are_reported_not_sampled(expected):
    model = tiny_llama()
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager", block_size=16))
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    engine = compiled.engine(EngineConfig(num_kv_blocks=40))
    with pytest.raises(FloatingPointError, match="NaN"):
        engine.generate([[1, 2, 3]], GREEDY)
    assert not engine.has_unfinished


def iter_until_done(engine):
    while engine.has_unfinished:
        yield from engine.step()
