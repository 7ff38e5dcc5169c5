"""Our semantic ops mean what ONNX's operators mean: against onnx's reference evaluator, attribute by attribute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagebinder.custom_ops.attention.cross import cross_attention_reference
from pagebinder.custom_ops.attention.semantic import attention_reference, visible_keys
from pagebinder.custom_ops.norm.rms_norm import rms_norm_reference
from pagebinder.custom_ops.rope.rope import rope_reference
from tests.export.evaluated import onnx_results

B, H, L, D, DV, SCALE = 2, 4, 5, 8, 6, 0.3
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def random(*shape, seed=0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def flat(x_BHLD: np.ndarray) -> np.ndarray:
    """[B, H, L, D] -> [B, L, H * D], the 3-D form."""
    return x_BHLD.transpose(0, 2, 1, 3).reshape(x_BHLD.shape[0], x_BHLD.shape[2], -1)


MASKS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "both sides": {"causal": False, "window": 3},
    "chunk": {"causal": True, "chunk": 4},
    "alibi": {"causal": True, "alibi_slopes": SLOPES},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("past", [0, 6])
@pytest.mark.parametrize("dims", [3, 4])
def test_attention(mask, soft_cap, kv_heads, past, dims):
    q, k, v = random(B, H, L, D), random(B, kv_heads, L, D, seed=1), random(B, kv_heads, L, DV)
    old_k = random(B, kv_heads, past, D, seed=2) if past else None
    old_v = random(B, kv_heads, past, DV, seed=2) if past else None
    rule = {"causal": False, **MASKS[mask]}
    slopes = rule.pop("alibi_slopes", None)
    attributes = {"scale": SCALE, "softcap": soft_cap or 0.0}
    given = None
    if mask == "causal":
        attributes["is_causal"] = 1
    elif mask != "none":
        p, j = torch.arange(past, past + L)[:, None], torch.arange(past + L)
        given = visible_keys(p, j, **rule)
        if slopes is not None:
            given = torch.where(given, slopes[:, None, None] * (j - p), -torch.inf)[None]
        given = given.numpy()
    if dims == 3:
        attributes |= {"q_num_heads": H, "kv_num_heads": kv_heads}
    operands = (flat(x) if dims == 3 else x for x in (q, k, v))
    inputs = dict(zip("QKV", operands)) | {"mask": given, "past_key": old_k, "past_value": old_v}
    out, *present = onnx_results("Attention", inputs, 3 if past else 1, **attributes)
    if past:
        k, v = np.concatenate([old_k, k], axis=2), np.concatenate([old_v, v], axis=2)
        np.testing.assert_array_equal(present[0], k)
        np.testing.assert_array_equal(present[1], v)
    q_all = np.concatenate([np.zeros((B, H, past, D), np.float32), q], axis=2)
    ours = [
        attention_reference(
            *(torch.from_numpy(x[b]).transpose(0, 1) for x in (q_all, k, v)),
            alibi_slopes=slopes, scale=SCALE, soft_cap=soft_cap, **rule,
        )[past:].transpose(0, 1)
        for b in range(B)
    ]  # fmt: skip
    ours = torch.stack(ours).numpy()
    np.testing.assert_allclose(flat(ours) if dims == 3 else ours, out, atol=2e-6)


@pytest.mark.parametrize("lengths", [(7, 7), (3, 6)])
def test_attention_to_another_sequence(lengths):
    q, k, v = random(B, H, L, D), random(B, 2, 7, D), random(B, 2, 7, DV)
    inputs = {"Q": q, "K": k, "V": v, "mask": None, "past_key": None, "past_value": None}
    (out,) = onnx_results("Attention", inputs | {"num_keys": np.array(lengths)}, scale=SCALE)
    for b, num_keys in enumerate(lengths):
        q_b, k_b, v_b = (torch.from_numpy(x[b]).transpose(0, 1) for x in (q, k, v))
        ours = cross_attention_reference(q_b, k_b[:num_keys], v_b[:num_keys], scale=SCALE)
        np.testing.assert_allclose(ours.transpose(0, 1).numpy(), out[b], atol=2e-6)


@pytest.mark.parametrize("shape", [(D,), (L, D), (B, L, H, D)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm(shape, eps):
    x, weight = random(*shape), random(D, seed=1)
    (out,) = onnx_results("RMSNormalization", {"X": x, "scale": weight}, epsilon=eps, axis=-1)
    ours = rms_norm_reference(torch.from_numpy(x), torch.from_numpy(weight), eps=eps, tail="cast_scale")
    np.testing.assert_allclose(ours.numpy(), out, atol=2e-6)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("dim", [0, 4])
@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("with_positions", [False, True])
def test_rope(interleaved, dim, dims, with_positions):
    x, width = random(B, H, L, D), dim or D
    angles = random(16, width // 2)
    positions = np.random.default_rng(0).integers(0, 16, (B, L))
    cos, sin = np.cos(angles), np.sin(angles)
    of_token = (torch.from_numpy(table[positions])[:, None] for table in (cos, sin))
    tables = {"cos": cos, "sin": sin, "positions": positions}
    if not with_positions:
        tables = {"cos": cos[positions], "sin": sin[positions]}
    attributes = {"interleaved": interleaved, "rotary_embedding_dim": dim}
    if dims == 3:
        attributes["num_heads"] = H
    (out,) = onnx_results("RotaryEmbedding", {"X": flat(x) if dims == 3 else x, **tables}, **attributes)
    turned, kept = torch.from_numpy(x)[..., :width], torch.from_numpy(x)[..., width:]
    style = "interleaved" if interleaved else "chunked"
    ours = torch.cat([rope_reference(turned, *of_token, style=style), kept], dim=-1).numpy()
    np.testing.assert_allclose(flat(ours) if dims == 3 else ours, out, atol=2e-6)
