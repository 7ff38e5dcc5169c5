"""Leaf: MLA's expansion of the latent into keys and values, without the in-place writes of the source.

    source    key = new_empty(...); key[..., :nope].copy_(k_nope); key[..., nope:].copy_(k_rot)
    here      key = cat(k_nope, k_rot)

All MLA families of transformers have the same method `expand_kv(kv_nope, k_rot)`. The attention over its result is
ordinary: H heads of width nope + rope, values of width v_head_dim. Each module's own method is run beside ours on a
few random rows before the capture, so a family that expands otherwise is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import LIBRARY, Leaf

METHOD = "expand_kv"
PROBED_TOKENS = 3


def expand_kv(module: torch.nn.Module, kv_nope: torch.Tensor, k_rot: torch.Tensor):
    """kv_nope [1, 1, T, L], k_rot [1, 1, T, R] -> keys [1, H, T, N + R], values [1, H, T, Dv]."""
    widths = [module.qk_nope_head_dim, module.v_head_dim]
    kv = module.kv_b_proj(kv_nope[:, 0]).unflatten(-1, (-1, sum(widths))).transpose(1, 2)
    k_nope, value = torch.split(kv, widths, dim=-1)
    return torch.cat((k_nope, k_rot.expand(-1, k_nope.shape[1], -1, -1)), dim=-1), value


@dataclass(frozen=True, kw_only=True)
class LatentExpansion(Leaf):
    """For every module of the library that has the method, whatever its class is called.

    `latent_attention.py` says which of them are traced in this form.
    """

    def modules(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        return {
            path: module
            for path, module in model.named_modules()
            if hasattr(type(module), METHOD) and type(module).__module__.startswith(LIBRARY + ".")
        }

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for path, module in self.modules(model).items():
                require_known_expansion(self, path, module)
                setattr(module, METHOD, partial(expand_kv, module))
                undo.callback(delattr, module, METHOD)
            yield


def require_known_expansion(leaf: Leaf, path: str, module: torch.nn.Module) -> None:
    """The module's own method and ours give the same on random rows; on the meta device the same shapes.

    Raises:
        CaptureError: they do not, or the method takes other arguments.
    """
    leaf._fitting_method(module, METHOD, _ours)
    weight, generator = module.kv_b_proj.weight, torch.Generator().manual_seed(0)
    rows = [torch.randn(1, 1, PROBED_TOKENS, width, generator=generator).to(weight.device, weight.dtype)
            for width in (weight.shape[1], module.qk_rope_head_dim)]  # fmt: skip
    with torch.no_grad():
        theirs, ours = getattr(module, METHOD)(*rows), expand_kv(module, *rows)
    same = [a.shape == b.shape and (a.is_meta or torch.equal(a, b)) for a, b in zip(theirs, ours)]
    if not all(same):
        raise CaptureError(leaf._changed(f"{path} expands its latent otherwise"))


def _ours(kv_nope, k_rot):
    """The arguments that the source's method must take."""
