"""Experts that get their tokens sorted, as DeepSeek's remote code and what was copied from it computes them.

    def moe_infer(self, x, topk_ids, topk_weight):         or flat ids and weights; self.experts: an nn.ModuleList
        idxs = topk_ids.view(-1).argsort()
        counts = cnts.sum(0).cpu().numpy()
        for i, n in enumerate(counts): ... self.experts[i](x[idxs // k][start : start + n])

How many rows an expert gets is a number of NumPy's there, which no trace sees. What such a method is to compute is
known, though: the sum over k of weights[:, k] * experts[ids[:, k]](x). So it is run beside a loop that computes this,
with what the model gives it and with other experts for the same tokens. Where both agree, the loop is traced instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from pagebinder.frontend.python_state import put_back, set_attribute

METHOD = "moe_infer"
LENGTHS = (1, 2, 7, 33)  # tokens with which a model is run
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}  # of the largest value
OF_16_BITS = 2e-2


@contextlib.contextmanager
def sorted_experts_hook(
    model: nn.Module, wrapper: nn.Module, examples: tuple[torch.Tensor, ...], vocab_size: int
) -> Iterator[None]:
    """While a model is traced, `wrapper` calling it with `examples` of ids and more."""
    modules = [m for m in model.modules() if _has_method(m)]
    with contextlib.ExitStack() as undo:
        if modules and not any(t.is_meta for t in (*model.parameters(), *examples)):
            for module, num_slots in _proven(modules, model, wrapper, examples, vocab_size).items():
                undo.enter_context(set_attribute(module, METHOD, functools.partial(_loop, module, num_slots)))
        yield


def _has_method(module: nn.Module) -> bool:
    experts = getattr(module, "experts", None)
    return isinstance(experts, nn.ModuleList) and len(experts) > 1 and callable(getattr(module, METHOD, None))


def _loop(
    module: nn.Module, num_slots: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """x [T, C], ids and weights [T, K], or as many entries in another shape -> [T, C]."""
    ids, weights = ids.reshape(-1, num_slots), weights.reshape(-1, num_slots)
    out = torch.zeros_like(x)
    for number, expert in enumerate(module.experts):
        if expert is not None:  # it is of another process
            token, slot = torch.where(ids == number)
            out.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).to(x.dtype))
    return out


@torch.no_grad()
def _proven(
    modules: list[nn.Module],
    model: nn.Module,
    wrapper: nn.Module,
    examples: tuple[torch.Tensor, ...],
    vocab_size: int,
) -> dict[nn.Module, int]:
    """The modules whose method is the loop, wherever the model calls it, and their K."""
    slots: dict[nn.Module, set[int | None]] = {module: set() for module in modules}
    generator = torch.Generator().manual_seed(0)
    ids, *others = examples
    with put_back(model), contextlib.ExitStack() as undo:
        for module in modules:
            spy = functools.partial(_compared, module, getattr(module, METHOD), slots[module], generator)
            undo.enter_context(set_attribute(module, METHOD, spy))
        for length in LENGTHS:
            tokens = torch.randint(vocab_size, (min(length, len(ids)),), generator=generator).to(ids.device)
            try:
                wrapper(tokens, *(other[: len(tokens)] for other in others))
            except Exception:  # whatever its code raises
                return {}
    return {module: next(iter(seen)) for module, seen in slots.items() if len(seen) == 1 and None not in seen}


def _compared(
    module: nn.Module, method: Callable, seen: set[int | None], generator: torch.Generator, *args, **kwargs
):
    """What the method returns. `seen` gets K, or None if it is not the loop."""
    out = method(*args, **kwargs)
    if len(args) != 3 or kwargs or not all(isinstance(arg, torch.Tensor) for arg in args):
        seen.add(None)
        return out
    x, ids, weights = args
    is_mixture = x.dim() == 2 and ids.dtype is torch.int64 and ids.numel() == weights.numel()
    if not is_mixture or ids.numel() % len(x) or ids.numel() // len(x) > len(module.experts):
        seen.add(None)
        return out
    num_slots = ids.numel() // len(x)
    drawn = torch.rand(len(x), len(module.experts), generator=generator).argsort(1)
    for which in (ids, drawn[:, :num_slots].contiguous().to(ids.device).view(ids.shape)):
        expected, got = method(x, which, weights), _loop(module, num_slots, x, which, weights)
        seen.add(num_slots if _is_same(got, expected) else None)
    return out


def _is_same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    if not isinstance(expected, torch.Tensor) or (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return False
    allowed = TOLERANCE.get(got.dtype, OF_16_BITS) * float(expected.abs().max())
    return bool((got - expected).abs().max() <= allowed)
