"""An engine's memory, planned before any of it is allocated.

    weights (there already) | KV cache | captured steps | values of the largest step |  free
                             `--------------- must fit in what is available ---------------'

What a step needs is found by running its graph over tensors without memory (`graphs/predict.py`). On a CPU, where an
allocation that is too large ends the process only when it is written, that is done if the KV cache takes a good part
of what is available; on a GPU always.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from pagebinder.config import EngineConfig
from pagebinder.errors import CacheCapacityError, GraphCaptureError
from pagebinder.runtime.engine_graphs import bucket_table
from pagebinder.runtime.engine_setup import EngineModel, num_blocks
from pagebinder.runtime.graphs.buckets import BucketTable
from pagebinder.runtime.graphs.predict import predict_graphs

logger = logging.getLogger("pagebinder")

# Of what is available on a CPU: below, activations are not looked at.
SMALL_SHARE = 0.25
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that an engine takes on its device. `step`: values of a step of the largest size, beside the KV cache;
    `captured`: of captured steps, 0 if there are none. None: not looked at. `available`: None where nobody can tell.
    """

    num_blocks: int
    kv_cache: int
    step: int | None
    captured: int | None
    available: int | None

    @property
    def total(self) -> int:
        # A captured step and one that is not never run at once, but what they have taken is not given back.
        return self.kv_cache + (self.captured or 0) + (self.step or 0)

    def parts(self, config: EngineConfig) -> str:
        parts = [f"KV cache of {self.num_blocks:,} blocks {_gib(self.kv_cache)}"]
        if self.step is not None:
            parts.append(f"a step of {config.max_num_batched_tokens:,} tokens {_gib(self.step)}")
        if self.captured:
            parts.append(f"captured steps {_gib(self.captured)}")
        return ", ".join(parts)


def plan_memory(model: EngineModel, config: EngineConfig) -> MemoryPlan:
    """What an engine will take. Raises CacheCapacityError, with what to change, if that is not there."""
    count = num_blocks(model, config)
    kv_cache, available = count * model.kv_plan.bytes_per_block, available_bytes(model.device)
    step = captured = None
    is_small = model.device.type == "cpu" and (available is None or kv_cache < SMALL_SHARE * available)
    if not is_small and model.not_captured is None and model.graph is not None:
        step, captured = _step_bytes(model, config)
    plan = MemoryPlan(num_blocks=count, kv_cache=kv_cache, step=step, captured=captured, available=available)
    if available is not None and plan.total > available:
        raise CacheCapacityError(_what_to_change(plan, model, config))
    return plan


def available_bytes(device: torch.device) -> int | None:
    """Memory that can be had on a device now; None where that is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    found = [n for n in (_meminfo(), _cgroup_limit()) if n is not None]
    return min(found, default=None)


def _meminfo() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:  # not Linux
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_limit() -> int | None:
    """Of a container: its limit without what it uses, page cache that can go apart."""
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or an older kernel
        return None
    return None if limit == "max" else int(limit) - int(used) + int(stat.get("inactive_file", 0))


def _step_bytes(model: EngineModel, config: EngineConfig) -> tuple[int | None, int | None]:
    overlap = getattr(model.executable, "overlap", None)
    options = {"device": model.device, "max_model_len": model.max_model_len, "overlap": overlap}
    largest = BucketTable.of(
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens, decode_sizes=(),
        token_sizes=[config.max_num_batched_tokens],
    )  # fmt: skip
    captures = config.capture == "on" or (config.capture == "auto" and model.device.type == "cuda")
    try:
        step = predict_graphs(model.graph, model.kv_plan, model.states, largest, **options).memory.total
        if not captures:
            return step, 0
        buckets = bucket_table(config)
        return step, predict_graphs(model.graph, model.kv_plan, model.states, buckets, **options).memory.total
    except GraphCaptureError:  # said where steps are captured
        return None, None
    except (
        RuntimeError,
        ValueError,
        NotImplementedError,
    ) as error:  # of an op that runs, but not without memory
        logger.warning("What a step takes is not planned, only the KV cache is: %s", error)
        return None, None


def _what_to_change(plan: MemoryPlan, model: EngineModel, config: EngineConfig) -> str:
    room = plan.available - (plan.total - plan.kv_cache)
    blocks, others = room // model.kv_plan.bytes_per_block, []
    if plan.step is not None:
        others.append(f"lower max_num_batched_tokens={config.max_num_batched_tokens}")
    if plan.captured:
        others.append('capture fewer sizes (capture_token_sizes, capture="off")')
    if blocks >= 2:
        num_bytes = blocks * model.kv_plan.bytes_per_block
        others.insert(0, f"give num_kv_blocks <= {blocks:,} (kv_cache_bytes <= {num_bytes:,})")
    change = " or ".join(others) or "free memory on the device, or take a smaller model"
    least = "" if blocks >= 2 else " not even the smallest KV cache fits;"
    return (
        f"The engine's memory cannot be allocated on {model.device}: it needs {_gib(plan.total)} "
        f"({plan.parts(config)}), and {_gib(plan.available)} are available;{least} {change}."
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
