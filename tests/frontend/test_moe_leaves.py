"""Leaves of mixtures of experts: the same numbers as the source's loops, undone afterwards, never a silent miss."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import NllbMoeConfig, SwitchTransformersConfig, SwitchTransformersEncoderModel
from transformers.models.dbrx import modeling_dbrx
from transformers.models.jetmoe import modeling_jetmoe
from transformers.models.llama4 import modeling_llama4
from transformers.models.longcat_flash import modeling_longcat_flash
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeEncoder
from transformers.models.step3p7 import modeling_step3p7

from pagebinder.errors import CaptureError
from pagebinder.frontend.audit import audit
from pagebinder.frontend.capture import capture
from pagebinder.frontend.leaves import captured_leaves, patched
from pagebinder.frontend.leaves.moe import MOE_LEAVES
from pagebinder.frontend.source import source_from_module
from tests.graphs import count
from tests.moe_models import tiny_dbrx, tiny_jetmoe, tiny_llama4_moe, tiny_longcat_flash

OPS = torch.ops.pagebinder
WIDTH = 16


class Step3p7(nn.Module):
    """Step 3.7's experts between nothing: the model is served with images only, the experts are its text part's."""

    def __init__(self, swiglu_limit=0.5):
        super().__init__()
        config = SimpleNamespace(
            num_local_experts=5, hidden_size=WIDTH, moe_intermediate_size=8, hidden_act="silu"
        )
        self.experts = modeling_step3p7.Step3p7Experts(config, swiglu_limit)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
        self.table = torch.randn(128, WIDTH, generator=generator)

    def forward(self, ids, **kwargs):
        x = self.table[ids[0]]
        weights, chosen = x[:, :5].softmax(-1).topk(2, dim=-1)
        return SimpleNamespace(logits=self.experts(x, chosen, weights)[None])


MODELS = {
    "dbrx": (tiny_dbrx, [(modeling_dbrx.DbrxExperts, "forward")]),
    "jetmoe": (
        tiny_jetmoe,
        [(modeling_jetmoe.JetMoeMoE, "forward"), (modeling_jetmoe.JetMoeMoA, "map"),
         (modeling_jetmoe.JetMoeMoA, "reduce")],
    ),
    "llama4": (tiny_llama4_moe, [(modeling_llama4.Llama4TextMoe, "forward")]),
    "llama4 of three": (lambda: tiny_llama4_moe(num_experts_per_tok=3), []),
    "longcat-flash": (tiny_longcat_flash, [(modeling_longcat_flash.LongcatFlashExperts, "forward")]),
    "step-3.7": (Step3p7, [(modeling_step3p7.Step3p7Experts, "forward")]),
    "step-3.7 without a limit": (lambda: Step3p7(None), []),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_loop_and_is_put_back(name):
    build, methods = MODELS[name]
    model, before = build(), [getattr(*method) for method in methods]
    ids = torch.randint(128, (1, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with patched(MOE_LEAVES, model):
            got = model(ids, use_cache=False).logits
            assert all(getattr(*method) is not original for method, original in zip(methods, before))
    assert [getattr(*method) for method in methods] == before
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("build", "calls"), [(tiny_dbrx, 6), (tiny_longcat_flash, 2)])
def test_experts_become_their_ops_and_nothing_else_mixes_tokens(build, calls):
    model = build()
    gm, _ = capture(source_from_module(model))
    assert count(gm, OPS.expert_linear.default) == calls and audit(gm) == []
    assert len(captured_leaves(MOE_LEAVES, model, gm).matches) == calls
    next(n for n in gm.graph.nodes if n.target is OPS.expert_linear.default).target = OPS.rms_norm.default
    with pytest.raises(CaptureError, match="emitted"):
        captured_leaves(MOE_LEAVES, model, gm)


@pytest.mark.parametrize("name", ["dbrx", "jetmoe", "llama4", "longcat-flash", "step-3.7"])
def test_a_source_that_changed_is_an_error(name, monkeypatch):
    build, methods = MODELS[name]
    model = build()
    for owner, method in methods:
        with monkeypatch.context() as changed:
            changed.setattr(owner, method, lambda self, everything: everything)
            with pytest.raises(CaptureError, match="seen on transformers"), patched(MOE_LEAVES, model):
                pass


@pytest.mark.parametrize("router", ["switch", "nllb"])
def test_experts_with_a_capacity_are_refused(router):
    shape = {
        "vocab_size": 128,
        "d_model": 16,
        "d_kv": 8,
        "num_heads": 2,
        "num_experts": 2,
        "encoder_layers": 2,
    }
    shape |= {"encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_ff": 16, "num_layers": 2}
    config, build = {
        "switch": (SwitchTransformersConfig, SwitchTransformersEncoderModel),
        "nllb": (NllbMoeConfig, NllbMoeEncoder),
    }[router]
    model = build(config(**shape, encoder_sparse_step=2))
    with pytest.raises(CaptureError, match="router.*capacity of an expert"), patched(MOE_LEAVES, model):
        pass
