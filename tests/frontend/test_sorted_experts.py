"""Methods that sort tokens by experts with NumPy's numbers: the loop that they are is traced, if they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CaptureError, CompileConfig, EngineConfig, SamplingParams
from tests.frontend import expert_loops as loops
from tests.frontend.expert_loops import NUM_EXPERTS, TOP_K, Expert
from tests.frontend.test_chosen_rows import PROMPTS, Decoder, greedy
from tests.graphs import Embedded, captured_model, count

MIXTURE = torch.ops.pagebinder.moe_experts.default


class Sorted(nn.Module):
    """A mixture whose subclasses say how sorted tokens meet experts."""

    def __init__(self, body=None):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(loops.WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))

    def forward(self, h, positions=None):
        x = h.view(-1, h.shape[-1])
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        return self.moe_infer(x, *self.given(ids, weights)).view(h.shape)

    def given(self, ids, weights):
        return ids, weights

    def parts(self, x, order, ids):
        """(expert, sorted rows of x, their places in the order) of each that somebody chose."""
        counts, start = ids.flatten().bincount(minlength=NUM_EXPERTS).cpu().numpy(), 0
        for i, n in enumerate(counts):
            if n:
                places = order[start : start + n]
                yield self.experts[i], x[places // TOP_K], places
            start += n


class ByIds(Sorted):
    """ids [T, K]: outputs are joined, put back in order, and weighed."""

    def moe_infer(self, x, topk_ids, topk_weight):
        order = topk_ids.view(-1).argsort()
        outs = torch.cat([expert(rows) for expert, rows, _ in self.parts(x, order, topk_ids)])
        back = torch.empty_like(outs)
        back[order] = outs
        return (back.view(*topk_ids.shape, -1) * topk_weight.unsqueeze(-1)).sum(1)


class ByFlatIds(Sorted):
    """ids [T K], weights [T K, 1]: each expert's weighed outputs are added where they belong."""

    def given(self, ids, weights):
        return ids.view(-1), weights.view(-1, 1)

    def moe_infer(self, x, flat_ids, flat_weights):
        y, order = torch.zeros_like(x), flat_ids.argsort()
        for expert, rows, places in self.parts(x, order, flat_ids):
            token = (places // TOP_K)[:, None].expand(-1, x.shape[1])
            y.scatter_reduce_(0, token, expert(rows) * flat_weights[places], reduce="sum")
        return y


@pytest.mark.parametrize("kind", [ByIds, ByFlatIds])
def test_tokens_are_those_of_the_module(kind):
    model = Decoder(None)
    model.mixtures = nn.ModuleList(kind() for _ in range(2))
    model.eval()
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager", verify="sample"))
    assert count(compiled.graphs["semantic"], MIXTURE) == 2
    assert all("moe_infer" not in vars(m) for m in model.modules())
    engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_batched_tokens=4))
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert [list(a.token_ids) for a in answers] == [greedy(model, prompt, 8) for prompt in PROMPTS]


class Capacity(ByFlatIds):
    def parts(self, x, order, ids):
        return ((expert, rows[:4], places[:4]) for expert, rows, places in super().parts(x, order, ids))


class Unweighed(ByIds):
    def moe_infer(self, x, topk_ids, topk_weight):
        return super().moe_infer(x, topk_ids, torch.ones_like(topk_weight))


class ByTheFirst(ByIds):
    """As the loop for the ids that the router gives, which are sorted by weight, and not for others."""

    def moe_infer(self, x, topk_ids, topk_weight):
        best = self.router(x).argmax(-1, keepdim=True)
        return super().moe_infer(x, topk_ids.where(topk_ids[:, :1] == best, topk_ids.flip(1)), topk_weight)


class WithAnother(ByIds):
    def moe_infer(self, x, topk_ids, topk_weight):
        return super().moe_infer(x, topk_ids, topk_weight), None

    def forward(self, h, positions=None):
        self.moe_infer, moe_infer = lambda *args: moe_infer(*args)[0], self.moe_infer
        try:
            return super().forward(h)
        finally:
            del self.moe_infer


@pytest.mark.parametrize("kind", [Capacity, Unweighed, ByTheFirst, WithAnother])
def test_methods_that_are_no_such_loop_are_traced_and_refused(kind):
    with pytest.raises(CaptureError, match=r"numpy\(\)|could not be traced|branches|changes attributes"):
        captured_model(Embedded(kind()).eval())


def test_without_values_nothing_is_taken_for_a_loop():
    with pytest.raises(CaptureError, match="could not be traced"):
        captured_model(Embedded(ByIds()).eval().to("meta"))
