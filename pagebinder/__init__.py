"""Pagebinder: unmodified PyTorch decoders, compiled onto a paged KV cache and served with continuous batching.

The public names are imported on first use, so that `pagebinder --help` need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pagebinder.collector import collector_paused
from pagebinder.errors import (
    ArtefactError,
    CacheCapacityError,
    CaptureError,
    CheckpointError,
    CompilerNotFoundError,
    ConfigError,
    ForkedProcessError,
    PagebinderError,
    PlanDriftError,
    PlanLockError,
    ProviderError,
    RequestError,
    UnsupportedLayerError,
    VerificationError,
)

if TYPE_CHECKING:
    from pagebinder.artefacts.load import load
    from pagebinder.compile import compile_model
    from pagebinder.compiled_encoder import CompiledEncoder
    from pagebinder.compiled_model import CompiledModel
    from pagebinder.compiler.bisect import BisectResult, bisect
    from pagebinder.config import CompileConfig, EngineConfig, SamplingParams
    from pagebinder.guides import Choice, Grammar, JsonSchema, Regex
    from pagebinder.report import CompileReport
    from pagebinder.runtime.engine import Engine
    from pagebinder.runtime.outputs import EngineStats, RequestOutput
    from pagebinder.runtime.speculation import DraftRequest, ModelDrafter, NgramDrafter

__version__ = "0.1.0"

__all__ = [
    "ArtefactError",
    "BisectResult",
    "CacheCapacityError",
    "CaptureError",
    "CheckpointError",
    "Choice",
    "CompileConfig",
    "CompileReport",
    "CompiledEncoder",
    "CompiledModel",
    "CompilerNotFoundError",
    "ConfigError",
    "DraftRequest",
    "Embeds",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "ForkedProcessError",
    "Grammar",
    "JsonSchema",
    "ModelDrafter",
    "NgramDrafter",
    "PagebinderError",
    "PlanDriftError",
    "PlanLockError",
    "ProviderError",
    "Regex",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StepSequence",
    "UnsupportedLayerError",
    "VerificationError",
    "bisect",
    "compile_model",
    "load",
]

_HOMES = {
    "BisectResult": "compiler.bisect",
    "Choice": "guides",
    "CompileConfig": "config",
    "CompileReport": "report",
    "CompiledEncoder": "compiled_encoder",
    "CompiledModel": "compiled_model",
    "DraftRequest": "runtime.speculation",
    "Embeds": "custom_ops.prompt_rows",
    "Engine": "runtime.engine",
    "EngineConfig": "config",
    "EngineStats": "runtime.outputs",
    "Grammar": "guides",
    "JsonSchema": "guides",
    "ModelDrafter": "runtime.speculation",
    "NgramDrafter": "runtime.speculation",
    "Regex": "guides",
    "RequestOutput": "runtime.outputs",
    "SamplingParams": "config",
    "StepSequence": "runtime.graphs",
    "bisect": "compiler.bisect",
    "compile_model": "compile",
    "load": "artefacts.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with collector_paused():  # torch's objects would be looked through again and again, 0.1 s each time
        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    globals()[name] = value = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
