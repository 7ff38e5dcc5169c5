"""The functions that leaves put in place of transformers': same arguments, one op of ours each.

They serve one sequence from its first token, [1, T, ...], as a capture runs it. What they are told is a whitelist:
an argument that nobody here understands is an error, because an ignored one compiles a wrong model in silence.
"""

from __future__ import annotations

import math

import torch

from pagebinder.errors import CaptureError
from pagebinder.frontend.attention_interface import IGNORED

# What transformers passes on to kernels that are not here; it has no meaning for the result.
IGNORED_HERE = IGNORED | {"chunk_size"}
L2NORM_EPS = 1e-6


def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
    """x [1, C, T], weight [C, K], bias [C] or None -> [1, C, T]."""
    _require_plain("causal_conv1d_fn", hidden_states, kwargs)
    if activation not in (None, "silu", "swish"):
        raise CaptureError(f"A causal convolution with the activation {activation!r} is not known here.")
    out_TC = torch.ops.pagebinder.short_conv(
        hidden_states[0].transpose(0, 1), weight, bias, activation=None if activation is None else "silu"
    )
    return out_TC.transpose(0, 1).unsqueeze(0)


def torch_chunk_gated_delta_rule(
    query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    **kwargs,
):  # fmt: skip
    """q, k [1, T, G, Dk], v [1, T, H, Dv], g and beta [1, T, H] -> ([1, T, H, Dv], None)."""
    _require_plain("torch_chunk_gated_delta_rule", query, kwargs)
    _require_no_state("torch_chunk_gated_delta_rule", initial_state, output_final_state)
    out = torch.ops.pagebinder.gated_delta_rule(
        query[0],
        key[0],
        value[0],
        g[0],
        beta[0],
        scale=query.shape[-1] ** -0.5,
        l2norm_eps=L2NORM_EPS if use_qk_l2norm_in_kernel else None,
    )
    return out.unsqueeze(0), None


def mamba2_chunk_scan(
    hidden_states, dt, A, B, C, D=None, dt_bias=None, initial_states=None, dt_softplus=False,
    dt_limit=(0.0, math.inf), return_final_states=False, **kwargs,
):  # fmt: skip
    """x [1, T, H, P], dt [1, T, H], A [H], B and C [1, T, G, N], D and dt_bias [H] -> [1, T, H, P] float32."""
    _require_plain("mamba2_chunk_scan", hidden_states, kwargs)
    _require_no_state("mamba2_chunk_scan", initial_states, return_final_states)
    low, high = (float(limit) for limit in dt_limit)
    return torch.ops.pagebinder.ssd(
        hidden_states[0],
        dt[0],
        A,
        B[0],
        C[0],
        D,
        dt_bias,
        dt_softplus=bool(dt_softplus),
        dt_min=low,
        dt_max=high if math.isfinite(high) else None,
    ).unsqueeze(0)


def _require_plain(name: str, x: torch.Tensor, kwargs: dict) -> None:
    unknown = {k for k, v in kwargs.items() if k not in IGNORED_HERE and v is not None and v is not False}
    if unknown:
        raise CaptureError(
            f"{name} is passed {sorted(unknown)}, which is not understood here; ignoring it could change the result."
        )
    if x.shape[0] != 1:
        raise CaptureError(f"{name} is called with {x.shape[0]} sequences during capture; one is expected.")


def _require_no_state(name: str, initial_state, wants_final_state: bool) -> None:
    if initial_state is not None or wants_final_state:
        raise CaptureError(f"{name} is given a cache during capture, which runs without one.")
