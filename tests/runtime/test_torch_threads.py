"""Torch's loops stay in one thread while steps run that leave little to them; ours go on using all."""

from __future__ import annotations

import threading

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.custom_ops.cpu import build
from pagebinder.custom_ops.cpu.torch_threads import torch_threads
from pagebinder.runtime.executables.torch_share import PRODUCTS
from tests.helpers import tiny_llama

pytestmark = [
    pytest.mark.usefixtures("captured_once"),
    pytest.mark.skipif(build.problem() is not None, reason="needs the C++ kernels"),
]
SMALL = EngineConfig(num_kv_blocks=16, max_num_seqs=2)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    build.load()
    yield
    torch.set_num_threads(before)


def test_limits_nest_and_end(three_threads):
    with torch_threads(limited=True):
        assert torch.get_num_threads() == 1
        with torch_threads(limited=False):
            assert torch.get_num_threads() == 3
            with torch_threads(limited=True):
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(KeyboardInterrupt), torch_threads(limited=True):
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 3


def test_other_threads_are_not_limited(three_threads):
    seen = []
    with torch_threads(limited=True):
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert seen == [3]


def test_a_product_of_torch_uses_all_threads(three_threads):
    """100 rows in float32 are torch's, called by the op of ours: the same bits, limited or not."""
    x, weight = torch.randn(100, 64), torch.randn(96, 64)
    linear = torch.ops.pagebinder_cpu.linear.default
    expected = linear(x, weight)
    with torch_threads(limited=True):
        assert torch.equal(linear(x, weight), expected)
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize("executable", ["eager", "native"])
def test_a_step_limits_torch_and_an_error_ends_that(three_threads, executable, monkeypatch):
    compiled = pagebinder.compile_model(tiny_llama(), CompileConfig(executable=executable))
    assert compiled.executable.limits_torch
    step, seen = compiled.executable._step, []

    def watched(inputs):
        seen.append(torch.get_num_threads())
        if len(seen) == 3:
            raise RuntimeError("the third step")
        return step(inputs)

    engine = compiled.engine(SMALL)
    monkeypatch.setattr(compiled.executable, "_step", watched)
    with pytest.raises(RuntimeError, match="the third step"):
        engine.generate([[1, 2, 3]], GREEDY)
    assert seen == [1, 1, 1] and torch.get_num_threads() == 3


def test_what_torch_multiplies_keeps_its_threads():
    """Sizes that no kernel of ours takes; references; an encoder."""
    odd = tiny_llama(hidden_size=36, intermediate_size=70, head_dim=16)
    for model, config in (
        (odd, CompileConfig(executable="eager")),
        (tiny_llama(), CompileConfig(executable="eager", providers={"paged_attention": "reference"})),
    ):
        assert not pagebinder.compile_model(model, config).executable.limits_torch


class AnglesByAProduct(torch.nn.Module):
    """RoPE's angles as transformers 5.17 computes them: a product that sums over one element."""

    def __init__(self, inv_freq: torch.Tensor, scale: float):
        super().__init__()
        self.register_buffer("inv_freq", inv_freq)
        self.scale = scale

    def forward(self, x, position_ids):
        angles = (self.inv_freq[None, :, None] @ position_ids[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.scale).to(x.dtype), (angles.sin() * self.scale).to(x.dtype)


def test_a_product_that_sums_over_one_element_is_a_loop():
    model = tiny_llama()
    rope = model.model.rotary_emb
    model.model.rotary_emb = AnglesByAProduct(rope.inv_freq, rope.attention_scaling)
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    assert sum(n.target in PRODUCTS for n in compiled.graphs["fused"].graph.nodes) == 1
    assert compiled.executable.limits_torch


def test_an_artefact_remembers(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    compiled = pagebinder.compile_model(tmp_path / "model", CompileConfig(executable="native"))
    compiled.save(tmp_path / "saved")
    assert pagebinder.load(tmp_path / "saved").executable.limits_torch
