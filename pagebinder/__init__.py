"""Pagebinder: unmodified PyTorch decoders, compiled onto a paged KV cache and served with continuous batching."""

from pagebinder.compile import CompiledModel, compile_model
from pagebinder.config import CompileConfig, EngineConfig, SamplingParams
from pagebinder.errors import (
    CacheCapacityError,
    CaptureError,
    CheckpointError,
    CompilerNotFoundError,
    ConfigError,
    PagebinderError,
    ProviderError,
    RequestError,
    UnsupportedLayerError,
)
from pagebinder.report import CompileReport
from pagebinder.runtime.engine import Engine
from pagebinder.runtime.outputs import EngineStats, RequestOutput

__version__ = "0.1.0"

__all__ = [
    "CacheCapacityError",
    "CaptureError",
    "CheckpointError",
    "CompileConfig",
    "CompileReport",
    "CompiledModel",
    "CompilerNotFoundError",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "PagebinderError",
    "ProviderError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "UnsupportedLayerError",
    "compile_model",
]
