"""`export_onnx(contrib=True)`: ONNX Runtime's GroupQueryAttention computes what our attention does, or is refused."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.errors import ExportError
from pagebinder.export.onnx import write_onnx
from pagebinder.export.onnx_contrib import check_contrib
from tests.export.onnx_runs import greedy, in_steps, nothing_yet, session
from tests.graphs import VOCAB_SIZE, captured, run
from tests.helpers import tiny_gemma3

ops = torch.ops.pagebinder
T = 12


class Forms(torch.nn.Module):
    """What the operator has attributes and operands for; 2 query heads of one KV head."""

    def __init__(self):
        super().__init__()
        self.kv = torch.nn.Linear(16, 16)
        self.sinks = torch.nn.Parameter(torch.tensor([1.0, -2.0]))

    def forward(self, x, positions):
        q, kv = x[0].view(-1, 2, 8), self.kv(x[0]).view(-1, 1, 16)
        k, v = kv[..., :8], kv[..., 8:]
        forms = ({}, {"window": 4}, {"soft_cap": 0.5}, {"sinks": self.sinks, "window": 4, "soft_cap": 0.5})
        outs = (ops.attention(q, k, v, scale=0.7, **form).flatten(1) for form in forms)
        return torch.cat(list(outs), dim=-1)[None]


def test_forms_in_onnx_runtime(tmp_path):
    torch.manual_seed(0)
    graph = captured(Forms())
    path = write_onnx(graph, tmp_path / "model.onnx", cached=True, contrib=True)
    model = session(path)
    for rows, ends in (
        (1, (7, 8, 9, T)),
        (3, (9, 10, 11, T)),
    ):  # several tokens behind a context: one row only
        ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, (rows, T))
        for row, row_ids in zip(in_steps(model, ids, ends, capacity=T + 3), ids, strict=True):
            expected = run(graph, T, input_ids=torch.from_numpy(row_ids)).numpy()
            np.testing.assert_allclose(row, expected, rtol=0, atol=2e-6)
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds.count("GroupQueryAttention") == 4 and "Attention" not in kinds
    assert shared_buffers(model, ids[:1]) == greedy(model, ids[0].tolist(), 3)


def shared_buffers(model, prompt: np.ndarray) -> list[int]:
    """Greedy tokens with each cache bound as past and present at once."""
    past = nothing_yet(model, 1, T + 3)
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(cache) for cache in past.values()]
    ids, position, tokens = prompt, 0, []
    for _ in range(3):
        binding = model.io_binding()
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(ids))
        binding.bind_cpu_input("position_ids", np.arange(position, position + ids.shape[1])[None])
        for name, value in zip(past, values, strict=True):
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        binding.bind_output("logits")
        model.run_with_iobinding(binding)
        logits = next(out for out in binding.get_outputs() if out.shape()[-1] == 64)
        position += ids.shape[1]
        ids = logits.numpy()[:, -1:].argmax(-1)
        tokens.append(int(ids[0, 0]))
    return tokens


def test_a_model_gives_the_engines_tokens(tmp_path):
    compiled = pagebinder.compile_model(tiny_gemma3(), CompileConfig(executable="eager"))
    model = session(compiled.export_onnx(tmp_path, contrib=True)[0])
    prompts = [[5, 9, 100, 7], list(range(3, 40))]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    served = compiled.engine(EngineConfig(num_kv_blocks=64)).generate(prompts, params)
    for prompt, output in zip(prompts, served, strict=True):
        assert greedy(model, prompt, 24) == list(output.token_ids)


def heads(x):
    return x[0].view(-1, 2, 8)


REFUSED = {
    "not causal": lambda x: ops.attention(heads(x), heads(x), heads(x), scale=1.0, causal=False),
    "chunks": lambda x: ops.attention(heads(x), heads(x), heads(x), scale=1.0, chunk=4),
    "ALiBi": lambda x: ops.attention(heads(x), heads(x), heads(x), None, x[0, 0, :2], scale=1.0),
    "8 wide and its values 4": lambda x: ops.attention(heads(x), heads(x), heads(x)[..., :4], scale=1.0),
    "4 wide, and not a multiple": lambda x: ops.attention(*[x[0].view(-1, 4, 4)] * 3, scale=1.0),
    "bias by distance": lambda x: ops.relative_attention(*[heads(x)] * 3, x[0, :2], scale=1.0, num_behind=8),
    "No layer": lambda x: x[0],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_compute_is_refused(reason):
    graph = captured(lambda x, positions: REFUSED[reason](x).flatten(1)[None])
    with pytest.raises(ExportError, match=reason):
        check_contrib(graph)
