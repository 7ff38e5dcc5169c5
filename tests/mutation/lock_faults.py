"""Faults after which every number is right, and the plan is not the one that was agreed: only the lock sees them."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mistral import modeling_mistral

from pagebinder.custom_ops.cpu.provider import CpuProvider
from tests import helpers
from tests.mutation.bases import WINDOW
from tests.mutation.changes import without
from tests.mutation.faults import LOCK, Fault


def fault(name: str, imitates: str, inject=None, says: str = "", **options) -> Fault:
    options = {"base": "mistral", **options}
    return Fault(name=name, imitates=imitates, net=LOCK, inject=inject, says=says, **options)


def other_mistral(**changed):
    return lambda: helpers.tiny_mistral(**{"window": WINDOW, **changed})


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuProvider, "reasons_against", lambda self, need: ["the compiler is another one today"])


def norm_written_anew(patch: pytest.MonkeyPatch) -> None:
    """The same value, as no recogniser knows it."""

    def forward(self, x):
        h = x.float()
        length = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
        spread = torch.sqrt(length * length / h.shape[-1] + self.variance_epsilon)
        return self.weight * torch.exp(torch.log(torch.ones_like(spread)) - torch.log(spread)) * h

    patch.setattr(modeling_mistral.MistralRMSNorm, "forward", forward)


def rope_written_anew(patch: pytest.MonkeyPatch) -> None:
    def apply(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        turn = torch.zeros(q.shape[-1], q.shape[-1])
        half = q.shape[-1] // 2
        turn[range(half), range(half, 2 * half)] = 1.0
        turn[range(half, 2 * half), range(half)] = -1.0
        return q * cos + (q @ turn) * sin, k * cos + (k @ turn) * sin

    patch.setattr(modeling_mistral, "apply_rotary_pos_emb", apply)


LOCK_FAULTS = [
    fault("norms no longer matched", "a recogniser that silently matches nothing", without("recognise_rms_norm"),
          "expected  rms_norm"),
    fault("RoPE no longer matched", "a pattern broken by a new torch", without("recognise_rope"), "expected  rope"),
    fault("gated activation no longer matched", "a pass dropped from the pipeline",
          without("recognise_gated_activation"), "gated_activation"),
    fault("fusion lost", "a fusion switched off by a merge", without("fuse_add_rms_norm"), "add_rms_norm"),
    fault("norm written in another way", "a refactoring in a new version of transformers", norm_written_anew,
          "rms_norm", recapture=True),
    fault("RoPE written in another way", "rotate_half as a product with a matrix", rope_written_anew, "rope",
          recapture=True),
    fault("kernels replaced by the reference", "a toolchain that is gone: right, and ten times slower",
          without_kernels, "provider of"),
    fault("one layer more", "another checkpoint under the same name", model=other_mistral(num_hidden_layers=3),
          says="3 layers"),
    fault("window doubled in the config", "a config edited by hand", model=other_mistral(window=2 * WINDOW),
          says="window"),
    fault("KV heads doubled", "a converted checkpoint with repeated KV heads",
          model=other_mistral(num_key_value_heads=4), says="num_kv_heads"),
    fault("another eps in the config", "rms_norm_eps lost in a conversion", model=other_mistral(rms_norm_eps=1e-5),
          says="eps"),
    fault("another RoPE base", "rope_theta lost in a conversion",
          model=other_mistral(rope_parameters={"rope_type": "default", "rope_theta": 1000.0}), says="config"),
    fault("bfloat16 in place of float32", "a default dtype that has changed",
          model=lambda: helpers.tiny_mistral(WINDOW).bfloat16(), says="bfloat16"),
]  # fmt: skip
