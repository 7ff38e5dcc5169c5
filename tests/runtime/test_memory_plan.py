"""An engine's memory is planned before it is allocated; what does not fit is an error that says what to change."""

import re

import pytest

from pagebinder import CompileConfig, EngineConfig, compile_model
from pagebinder.errors import CacheCapacityError
from pagebinder.runtime import memory_plan
from pagebinder.runtime.memory_plan import available_bytes
from tests.helpers import tiny_llama

GIB = 1 << 30


@pytest.fixture(scope="module")
def model():
    return compile_model(tiny_llama(), CompileConfig(executable="eager", block_size=16))


@pytest.fixture
def with_memory(monkeypatch):
    def set_to(num_bytes: int) -> None:
        monkeypatch.setattr(memory_plan, "available_bytes", lambda device: num_bytes)

    return set_to


def test_a_plan_of_what_will_be_taken(model, with_memory):
    per_block = model.kv_spec.bytes_per_block
    with_memory(4 * 100 * per_block - 1)
    engine = model.engine(
        EngineConfig(num_kv_blocks=100, capture="on", max_num_batched_tokens=64, max_num_seqs=4)
    )
    plan = engine.memory
    assert (plan.num_blocks, plan.kv_cache) == (100, 100 * per_block)
    assert plan.captured == engine.loop.captured.graphs.memory.total > 0 and plan.step > 0
    with_memory(GIB)  # a small cache on a CPU: steps are not looked at
    assert model.engine(EngineConfig(num_kv_blocks=100)).memory.step is None


def test_a_cache_that_does_not_fit_says_how_many_blocks_would(model, with_memory):
    with_memory(8 << 20)
    config = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    with pytest.raises(CacheCapacityError, match="KV cache of 100,000 blocks .* available") as caught:
        model.engine(EngineConfig(num_kv_blocks=100_000, **config))
    blocks = int(re.search(r"num_kv_blocks <= ([\d,]+)", str(caught.value))[1].replace(",", ""))
    assert "or lower max_num_batched_tokens=64" in str(caught.value)
    assert model.engine(EngineConfig(num_kv_blocks=blocks, **config)).memory.num_blocks == blocks
    with pytest.raises(CacheCapacityError):
        model.engine(EngineConfig(num_kv_blocks=blocks + 1, **config))


def test_a_step_that_does_not_fit_names_the_step(model, with_memory):
    with_memory(100_000)
    with pytest.raises(
        CacheCapacityError, match="not even the smallest KV cache.*max_num_batched_tokens=2048"
    ) as caught:
        model.engine(EngineConfig(num_kv_blocks=4, capture="on"))
    assert "capture fewer sizes" in str(caught.value)


def test_available_memory(model, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_plan, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_plan, "CGROUP", tmp_path)
    assert available_bytes(model.device) is None
    assert model.engine(EngineConfig(num_kv_blocks=4)).memory.available is None
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert available_bytes(model.device) == 5000 * 1024
    for name, text in (
        ("memory.max", "max"),
        ("memory.current", "1000000"),
        ("memory.stat", "inactive_file 400000"),
    ):
        (tmp_path / name).write_text(text + "\n")
    assert available_bytes(model.device) == 5000 * 1024
    (tmp_path / "memory.max").write_text("2000000\n")
    assert available_bytes(model.device) == 1_400_000


def test_an_op_that_needs_memory_leaves_the_cache_planned_and_is_told(
    model, with_memory, monkeypatch, caplog
):
    def needs_memory(*args, **options):
        raise NotImplementedError("my_op has no kernel for meta tensors")

    monkeypatch.setattr(memory_plan, "predict_graphs", needs_memory)
    with_memory(100 * model.kv_spec.bytes_per_block)
    plan = model.engine(EngineConfig(num_kv_blocks=100, max_num_batched_tokens=64)).memory
    assert (plan.num_blocks, plan.step, plan.captured) == (100, None, None)
    assert "only the KV cache is: my_op has no kernel" in caplog.text
