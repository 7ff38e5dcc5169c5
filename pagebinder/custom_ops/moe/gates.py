"""What an expert computes between its two projections: a `Gate`, as data and as a function of rows.

    gated       h = [gate | up] or interleaved      a(min(gate, limit)) * (clip(up, -limit, limit) + up_offset)
    not gated   h                                   a(h)

`a` is one of ACTIVATIONS; with `alpha` it is x * sigmoid(alpha * x), which is SiLU for alpha = 1.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "swish": None,  # x * sigmoid(alpha * x): see Gate.alpha
}


@dataclass(frozen=True, kw_only=True)
class Gate:
    """gated: is h a gate and a value? interleaved: gate and value take turns in h, else they are its halves.

    activation: a name in ACTIVATIONS. limit: bounds the gate from above and the value from both sides.
    alpha: of "swish" alone. up_offset: added to the value. in_float32: computed in float32, then rounded once.
    """

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    limit: float | None = None
    alpha: float | None = None
    up_offset: float = 0.0
    in_float32: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r}: use one of {', '.join(ACTIVATIONS)}")
        if (self.activation == "swish") != (self.alpha is not None):
            raise ValueError('alpha belongs to the activation "swish", and "swish" needs it')

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """h [S, 2 I] (gated) or [S, I] -> [S, I], every row alone."""
        dtype, h = h.dtype, h.float() if self.in_float32 else h
        if not self.gated:
            return self._activate(h).to(dtype)
        gate, up = (h[..., ::2], h[..., 1::2]) if self.interleaved else h.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        if self.up_offset:
            up = up + self.up_offset
        return (self._activate(gate) * up).to(dtype)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        if self.activation == "swish":
            return x * torch.sigmoid(x * self.alpha)
        return ACTIVATIONS[self.activation](x)

    def as_options(self) -> dict:
        """The keyword arguments of `moe_experts` that say this gate."""
        return asdict(self)

    def __str__(self) -> str:
        """ "silu(gate) * up, limit 7" for reports."""
        parts = [self.activation + ("(gate) * up" if self.gated else "")]
        parts += ["interleaved"] * self.interleaved + ["in float32"] * self.in_float32
        named = {"limit": self.limit, "alpha": self.alpha, "up +": self.up_offset or None}
        return ", ".join(parts + [f"{name} {value:g}" for name, value in named.items() if value is not None])
