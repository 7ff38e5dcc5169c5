"""Weights that no kernel of a GPU reads, before a model goes there: in 6 bits, of tables, in groups below 32."""

from __future__ import annotations

from dataclasses import replace

import torch

from pagebinder.custom_ops.linear.weight_formats import weight_format
from pagebinder.frontend.coded_experts import QuantizedExperts
from pagebinder.frontend.quantized_module import QuantizedLinear
from pagebinder.report import Match, PassResult, Refusal

REASON = "no kernel of a GPU reads {format}: it is expanded"


def fit_for_gpu(model: torch.nn.Module, dtype: torch.dtype, result: PassResult) -> None:
    """Codes that stand for integers get 8 bits, which changes no number; other modules get plain weights of `dtype`.
    Both is said: matches of `result` are of other formats, or become refusals."""
    renamed = {
        path: module.widen_codes()
        for path, module in model.named_modules()
        if isinstance(module, QuantizedLinear | QuantizedExperts)
    }
    result.matches[:] = [_of_formats(match, renamed.get(match.module_path, {})) for match in result.matches]
    expand_small_groups(model, dtype, result)


def _of_formats(match: Match, renamed: dict[str, str]) -> Match:
    detail = match.detail
    for old, new in renamed.items():
        detail = detail.replace(old, new)
    return replace(match, detail=detail)


def expand_small_groups(model: torch.nn.Module, dtype: torch.dtype, result: PassResult) -> None:
    """Give such modules of a model plain weights of `dtype`, and say so: matches of `result` become refusals."""
    reasons = {}
    for path, module in list(model.named_modules()):
        if not isinstance(module, QuantizedLinear | QuantizedExperts):
            continue
        formats = module.formats.values() if isinstance(module, QuantizedExperts) else (module.format,)
        small = [name for name in formats if weight_format(name).gpu_problem]
        if not small:
            continue
        reasons[path] = REASON.format(format=small[0])
        if isinstance(module, QuantizedLinear):
            model.set_submodule(path, _linear(module, dtype))
        else:
            module.expand()
    kept = [match for match in result.matches if match.module_path not in reasons]
    lost = [match for match in result.matches if match.module_path in reasons]
    result.refusals += [
        Refusal(
            pattern=match.pattern, reason=reasons[match.module_path], node="", module_path=match.module_path
        )
        for match in lost
    ]
    result.matches[:] = kept


def _linear(module: QuantizedLinear, dtype: torch.dtype) -> torch.nn.Linear:
    weight = module.weight().to(dtype)
    linear = torch.nn.Linear(*reversed(weight.shape), bias=False, device="meta", dtype=dtype)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if module.bias is not None:
        linear.bias = torch.nn.Parameter(module.bias.detach()[: len(weight)], requires_grad=False)
    return linear
