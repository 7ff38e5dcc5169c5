"""The comparison of engines: workers run one at a time, tokens are timed as they come, goals say what they say."""

import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks.test_traces import BENCHMARKS

COUNTING = '''
from worker import serve


class Counting:
    """One step gives each request one token: 0, 1, 2, ... Two requests at a time."""

    def __init__(self):
        self.requests = {}

    def add(self, request, prompt, max_tokens):
        self.requests[request] = [0, max_tokens]

    def step(self):
        new = {}
        for request in list(self.requests)[:2]:
            state = self.requests[request]
            new[request] = [state[0]]
            state[0] += 1
            if state[0] == state[1]:
                del self.requests[request]
        return new

    def busy(self):
        return bool(self.requests)


serve(Counting())
'''


@pytest.fixture(scope="module")
def modules():
    """The benchmark's modules import each other by plain names."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import compare_engines_cases
        import compare_engines_goals
        import compare_engines_workers

        yield compare_engines_cases, compare_engines_goals, compare_engines_workers
    finally:
        sys.path.remove(str(BENCHMARKS))


def state_of(worker) -> str:
    return Path(f"/proc/{worker.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.fixture
def pool(modules, tmp_path):
    script = tmp_path / "counting.py"
    script.write_text(COUNTING)
    _, _, workers = modules
    path = {"PYTHONPATH": str(workers.PEERS)}
    engine = workers.Engine(sys.executable, str(script), "pagebinder", environment=path)
    with workers.Pool({"pagebinder": engine, "peer": engine}, {"threads": 1}, tmp_path, lambda: 2.0) as pool:
        yield pool


def test_a_worker_is_stopped_but_while_it_is_asked(pool):
    answer = pool["pagebinder"].ask({"batch": {"prompts": [[1], [2], [3]], "max_tokens": 3}})
    assert answer["tokens"] == [[0, 1, 2]] * 3
    assert answer["decoded"] == 2  # the third request began when the others had ended
    assert state_of(pool["peer"]) == state_of(pool["pagebinder"]) == "T"
    processes = [worker.process for worker in pool.workers.values()]
    pool.__exit__()
    assert [process.poll() for process in processes] == [0, 0]


def test_cases_have_medians_rounds_and_ratios(pool, modules):
    cases, compared, _ = modules
    names = ["pagebinder", "peer"]
    batch = cases.batch(pool, names, 100, 2, (4, 5), 3)
    assert batch["equal_tokens"] == {"peer": 1.0}
    assert [len(batch["engines"][name]["rounds"]) for name in names] == [3, 3]
    assert batch["engines"]["peer"]["read_bytes_per_second"] == 2.0
    trace = cases.arrivals(100, 3, 0.001)
    assert trace == cases.arrivals(100, 3, 0.001)
    mixed = cases.mixed(pool, names, trace, 1)["engines"]["peer"]
    assert 0 < mixed["first_token_p50"] <= mixed["first_token_p99"] < mixed["seconds"]
    rounds = [{"x": 1.0}, {"x": 4.0}], [{"x": 1.0}, {"x": 1.0}]
    engines = {name: {"x": 0.0, "rounds": rows} for name, rows in zip(names, rounds)}
    assert compared.ratio(engines, "x", "peer") == 2.5


def test_who_is_slow_is_asked_once(modules, monkeypatch):
    cases, _, _ = modules
    now = iter(range(0, 10_000, 60))
    monkeypatch.setattr(cases, "PATIENCE_SECONDS", 100)
    monkeypatch.setattr(cases.time, "perf_counter", lambda: next(now))

    def ask(name: str, number: int) -> dict:
        if name == "slow":
            next(now)
        return {"round": number}

    assert cases.in_turns(["fast", "slow"], ask, 2) == {
        "slow": [{"round": -1}],
        "fast": [{"round": 0}, {"round": 1}],
    }


def test_a_worker_that_dies_says_why(modules, tmp_path):
    _, _, workers = modules
    script = tmp_path / "dying.py"
    script.write_text("raise SystemExit('no memory left')")
    with pytest.raises(RuntimeError, match="no memory left"):
        workers.Worker(
            workers.Engine(sys.executable, str(script), ""), {"threads": 1}, tmp_path / "dying.log"
        )


def test_the_mixed_load_is_held_against_what_its_steps_read_and_multiply(modules):
    _, compared, _ = modules
    times = {f"{what}_p{p}": 1.0 for what in ("first_token", "between_tokens") for p in (50, 99)}
    engines = {
        name: {"rounds": [row], **row}
        for name, rate in (("pagebinder", 3.0), ("vllm", 2.0))
        for row in [{"tokens_per_second": rate, "seconds": 60 / rate, **times}]
    }
    arrivals = [
        [1.0, 50, 2],
        [7.0, 10, 1],
    ]  # 5 s for 500 FLOPs, 1 s for 100 bytes of weights and K and V; 1 s, 1 s
    results = {
        "costs": {"weight_bytes": 10, "kv_bytes_per_token": 1, "head_weights": 0},
        "limits": {"read": 60.0, "product": 100.0},
        "mixed": {"engines": engines, "arrivals": arrivals},
    }
    first, *latencies = compared.goals(results)
    assert (first["value"], first["allowed"], first["pass"]) == (1.5, 30 / 8, False)
    assert len(latencies) == 4 and all(g["pass"] for g in latencies)


def test_goals_are_made_of_what_there_is(modules):
    _, compared, _ = modules
    rates = {"prefill_tokens_per_second": 100.0, "decode_tokens_per_second": 10.0}
    engines = {name: rates | {"rounds": [rates]} for name in ("pagebinder", "vllm")}
    results = {
        "costs": {"weight_bytes": 100, "kv_bytes_per_token": 10}, "limits": {"read": 1000.0, "product": 1e4},
        "settings": {"lengths": [8, 4]},
        "batch": {n: {"engines": engines, "prefill_flops": 800, "prompt_tokens": 10} for n in ("1", "32")},
        "start": {"vllm": {"ready_seconds": 90.0}},
    }  # fmt: skip
    judged = {g["name"]: (g["value"], g["pass"]) for g in compared.goals(results)}
    assert judged == {
        "decode, 1 request, share of read bandwidth": (1.0, True),
        "prefill, 1 request(s), over the best peer (vllm)": (1.0, False),
        "prefill, 1 request(s), share of the matrix rate": (0.8, True),
        "decode, 32 request(s), over vLLM": (1.0, False),
    }
    allowed = {g["name"]: g["allowed"] for g in compared.goals(results) if "allowed" in g}
    assert allowed == {
        "prefill, 1 request(s), over the best peer (vllm)": 1.25,  # 1e4 / 80 products of a token, over 100
        "decode, 32 request(s), over vLLM": 32 / (3.3 * 10.0),  # 3.3 seconds to read 100 + 32 x 10 x 10 bytes
    }


def test_reading_is_held_against_what_memory_gave_beside_it(modules):
    """Of 100 bytes a step: twice the rate while memory gives twice as much is the same share."""
    _, compared, _ = modules
    rows = [
        {"decode_tokens_per_second": rate, "read_bytes_per_second": read, "prefill_tokens_per_second": 1.0}
        for rate, read in ((5.0, 1000.0), (10.0, 2000.0), (10.0, 2000.0))
    ]
    engines = {name: rows[1] | {"rounds": rows} for name in ("pagebinder", "llama.cpp")}
    results = {
        "costs": {"weight_bytes": 100, "kv_bytes_per_token": 0}, "limits": {"read": 4000.0, "product": 1e9},
        "settings": {"lengths": [8, 4]},
        "batch": {"1": {"engines": engines, "prefill_flops": 800, "prompt_tokens": 10}},
    }  # fmt: skip
    share, over_llama, *_ = compared.goals(results)
    assert share["value"] == 0.5
    assert over_llama["allowed"] == 2.0


def test_a_step_reads_the_experts_that_its_tokens_choose(modules, tmp_path):
    """Four of 40 bytes each, one for each token, beside 60 bytes for all."""
    from checkpoints import Costs

    costs = Costs(weight_bytes=220, kv_bytes_per_token=0, expert_bytes=40, experts=4, experts_per_token=1)
    assert costs.weight_bytes_per_token == costs.decode_flops == 100
    assert costs.decode_bytes(1) == 100 and costs.decode_bytes(2) == 60 + 40 * (1 + 3 / 4)
    assert 219 < costs.decode_bytes(32) < 220
    assert Costs(weight_bytes=220, kv_bytes_per_token=0).decode_bytes(8) == 220


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_costs_of_a_checkpoint(modules, tmp_path, name):
    """Read from its config: what its tensors say, but for its norms."""
    import checkpoints
    from transformers import AutoModelForCausalLM

    config = getattr(checkpoints, name)()
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    num_bytes = {n: 2 * p.numel() for n, p in model.named_parameters()}
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    costs = checkpoints.costs(tmp_path)
    of_experts = sum(size for n, size in num_bytes.items() if ".experts." in n)
    assert costs.weight_bytes == 1000 and costs.experts * costs.expert_bytes == of_experts
    assert 2 * costs.head_weights == num_bytes["model.embed_tokens.weight"]
    heads = config.num_key_value_heads * config.head_dim
    assert costs.kv_bytes_per_token == 2 * 2 * config.num_hidden_layers * heads
    assert checkpoints.max_positions(tmp_path) == config.max_position_embeddings
