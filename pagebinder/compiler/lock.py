"""Between `compile_model` and the plan lock: which lock is read, checked, written, and when.

A lock is read before the model is captured, so that a damaged file is told at once, and checked before the
executable is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from pagebinder.config import CompileConfig
from pagebinder.errors import PlanDriftError
from pagebinder.frontend.source import ModelSource
from pagebinder.passes.lock_drift import Drift, plan_drift, providers_comparable
from pagebinder.passes.lock_file import read_plan_lock, require_writable, write_plan_lock
from pagebinder.passes.own_passes import pass_name
from pagebinder.passes.plan_lock import plan_lock
from pagebinder.report import CompileReport
from pagebinder.runtime.kv import KVPlan

MAX_DRIFTS_SHOWN = 20


def expected_plan(config: CompileConfig) -> dict[str, Any] | None:
    """The lock that the config asks for, read. Raises PlanLockError, also if one is to be written and cannot be."""
    if config.lock is not None:
        require_writable(config.lock)
    return None if config.locked is None else read_plan_lock(config.locked)


def lock_of(
    source: ModelSource,
    config: CompileConfig,
    plan: KVPlan,
    report: CompileReport,
    graphs: Mapping[str, GraphModule],
) -> dict[str, Any]:
    """The lock of what was compiled, as data."""
    options = {
        "max_model_len": plan.max_model_len,
        "block_size": config.block_size,
        "fusions": config.fusions,
        "kv_dtype": config.kv_dtype,
        "index_dtype": config.index_dtype,
        "quantization": config.quantization,
        "activation_quantization": config.activation_quantization,
        "passes": [f"{level}: {pass_name(run)}" for level, own in config.passes.items() for run in own]
        or None,
        "workload": None if config.workload is None else repr(plan.workload),
    }
    return plan_lock(report, graphs, model_config=config_of(source), options=options)


def settle_lock(
    expected: dict[str, Any] | None,
    source: ModelSource,
    config: CompileConfig,
    plan: KVPlan,
    report: CompileReport,
    graphs: Mapping[str, GraphModule],
) -> None:
    """Compare with `config.locked`, write `config.lock`; neither costs anything where it was not asked for.

    Raises:
        PlanDriftError: the plan differs from the lock.
        OSError: the lock cannot be written.
    """
    if expected is None and config.lock is None:
        return
    lock = lock_of(source, config, plan, report, graphs)
    if expected is not None:
        drifts = plan_drift(expected, lock, report, graphs)
        if drifts:
            raise PlanDriftError(_message(config.locked, drifts), tuple(drifts))
        report.notes.append(f"the plan is the one in {config.locked}{_not_compared(expected, lock)}")
    if config.lock is not None:
        write_plan_lock(lock, config.lock)


def config_of(source: ModelSource) -> dict | None:
    """The model's own options: what differs from their defaults for transformers, all fields of a dataclass."""
    config = source.config
    if isinstance(config, Mapping):  # of an artefact
        return dict(config)
    if hasattr(config, "to_diff_dict"):
        return config.to_diff_dict()
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) else None


def _message(path: str | Path, drifts: list[Drift]) -> str:
    shown = "\n".join(str(drift) for drift in drifts[:MAX_DRIFTS_SHOWN])
    more = len(drifts) - MAX_DRIFTS_SHOWN
    rest = f"\n... and {more} more" if more > 0 else ""
    places = "1 place" if len(drifts) == 1 else f"{len(drifts)} places"
    return f"The plan differs from the lock {path} in {places}:\n{shown}{rest}"


def _not_compared(expected: Mapping, lock: Mapping) -> str:
    if providers_comparable(expected, lock):
        return ""
    texts = [
        f"{', '.join(p['available'])} on {p['device']}" for p in (expected["providers"], lock["providers"])
    ]
    return f"; providers were not compared: the lock saw {texts[0]}, here are {texts[1]}"
