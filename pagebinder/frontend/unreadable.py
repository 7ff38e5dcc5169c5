"""Modules whose code or weights cannot be read by a trace: each is told before it, with what to give instead.

torch.jit.script, torch.jit.trace      TorchScript has no Python code
quantize_dynamic, prepare + convert    weights packed in objects of torch's own
FSDP2 (fully_shard), tensor parallel   weights in shards (DTensor)
cpu_offload, disk_offload              weights that are fetched while a layer runs, and are on meta before
"""

from __future__ import annotations

import torch

from pagebinder.errors import CaptureError

PACKED = "torch.ao.nn.quantized"
MOST_NAMED = 3


def refuse_unreadable(module: torch.nn.Module) -> None:
    """Raises CaptureError: `module` is one of those above. A model that is on meta altogether has no weights."""
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            f"{name} is TorchScript (torch.jit.script or torch.jit.trace), whose Python code is gone: compile the "
            "torch.nn.Module that it was made from, with its weights."
        )
    packed = {path: part for path, part in module.named_modules() if _is_packed(path, part)}
    if packed:
        kind = type(next(iter(packed.values())))
        raise CaptureError(
            f"{_named(packed)} of {name} keep their weights packed ({kind.__module__}.{kind.__name__}, as "
            "quantize_dynamic makes them), which no trace can read: compile the model as it was, with "
            'CompileConfig(quantization="int8") if weights shall be small.'
        )
    weights = dict(module.named_parameters())
    if sharded := [path for path, weight in weights.items() if type(weight.data).__name__ == "DTensor"]:
        raise CaptureError(
            f"{_named(sharded)} of {name} are kept in shards (DTensor: FSDP2, tensor parallelism), and what is "
            "compiled is a whole model: load it without sharding."
        )
    absent = [path for path, weight in weights.items() if weight.is_meta]
    if absent and (len(absent) < len(weights) or _fetches_weights(module)):
        raise CaptureError(
            f"{_named(absent)} of {name} are on the meta device, as offloaded weights are (cpu_offload, "
            "disk_offload, a device_map that does not fit): load the model onto one device."
        )


def hint_on_script(module: torch.nn.Module) -> str:
    """What to say of a model that could not be traced: torch.export takes few parts that are TorchScript."""
    parts = [path for path, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    whole = [path for path in parts if not any(path.startswith(f"{other}.") for other in parts)]
    if not whole:
        return ""
    return (
        f"  {_named(whole)}: TorchScript (torch.jit.script or torch.jit.trace), which torch.export may not be able "
        "to call: put the torch.nn.Module there that it was made from, with its weights."
    )


def _is_packed(path: str, part: torch.nn.Module) -> bool:
    return type(part).__module__.startswith(PACKED) and not path.endswith("_packed_params")  # its own part


def _fetches_weights(module: torch.nn.Module) -> bool:
    """Has a part a hook of accelerate's that fetches its weights for the length of a call?"""
    hooks = [part._hf_hook for part in module.modules() if hasattr(part, "_hf_hook")]
    hooks += [hook for several in hooks for hook in getattr(several, "hooks", ())]
    return any(getattr(hook, "offload", False) for hook in hooks)


def _named(paths) -> str:
    first = ", ".join(path or "the model" for path in [*paths][:MOST_NAMED])
    return first + (f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else "")
