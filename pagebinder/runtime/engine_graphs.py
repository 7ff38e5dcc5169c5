"""An engine's captured steps: whether it gets any, which sizes, and how a scheduled step is put into them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from pagebinder.config import EngineConfig
from pagebinder.errors import ConfigError, GraphCaptureError
from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.engine_setup import EngineModel
from pagebinder.runtime.graphs.buckets import Bucket, BucketTable
from pagebinder.runtime.graphs.step_graphs import StepGraphs
from pagebinder.runtime.kv import KVCacheManager
from pagebinder.runtime.scheduler_output import SchedulerOutput
from pagebinder.runtime.step_plan import StepPlanner

logger = logging.getLogger("pagebinder")


@dataclass
class EngineGraphs:
    """`graphs` of an engine, None where it runs every step as it is; `note` says why, or what is captured."""

    graphs: StepGraphs | None
    note: str

    def find(self, output: SchedulerOutput) -> Bucket | None:
        """The bucket of a scheduled step; None: it runs uncaptured."""
        if self.graphs is None:
            return None
        num_tokens, num_reqs = output.total_num_tokens, len(output.counts)
        is_decode = num_tokens == num_reqs > 0 and int(output.counts.min()) == 1
        return self.graphs.find(num_tokens, num_reqs, output.num_logits, is_decode=is_decode)

    def fill(self, bucket: Bucket, output: SchedulerOutput, planner: StepPlanner) -> torch.Tensor:
        """Pack a step's metadata, padded to its bucket, and send it to the device in one copy; returns the static
        input_ids there."""
        self.graphs.fill(
            bucket, output.total_num_tokens, len(output.counts), output.num_logits,
            lambda arrays: planner.fill(output, arrays),
        )  # fmt: skip
        return self.graphs.static_tensors(bucket)["input_ids"]

    def replay(self, bucket: Bucket, output: SchedulerOutput) -> torch.Tensor:
        return self.graphs.replay_bucket(bucket, output.num_logits)


def bucket_table(config: EngineConfig) -> BucketTable:
    """The shapes that an engine of this configuration captures. Raises ConfigError."""
    return BucketTable.of(
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        decode_sizes=config.capture_decode_sizes, token_sizes=config.capture_token_sizes,
    )  # fmt: skip


def engine_graphs(
    model: EngineModel, config: EngineConfig, arena: KVArena, kv: KVCacheManager
) -> EngineGraphs:
    """Capture an engine's steps, if it should: on a GPU unless told otherwise, on a CPU when asked to.

    Raises:
        ConfigError: capture="on", and steps of this model cannot be captured. CacheCapacityError: no memory.
        GraphCaptureError: an op cannot be captured though it is registered so (capture="on").
    """
    asked = config.capture == "on" or (model.must_capture and config.capture == "auto")
    if config.capture == "off" or (config.capture == "auto" and model.device.type != "cuda"):
        return EngineGraphs(None, "off")
    if model.not_captured is not None:
        if asked:
            raise ConfigError(
                f'Steps of this model cannot be captured: {model.not_captured} Use capture="off".'
            )
        return _refused(model.not_captured)
    widths = tuple(table.data.shape[1] for table in kv.tables)
    try:
        graphs = StepGraphs(
            model.executable, model.graph, model.kv_plan, arena.caches, bucket_table(config), device=model.device,
            max_model_len=model.max_model_len, vocab_size=model.vocab_size, widths=widths,
        )  # fmt: skip
    except GraphCaptureError as error:
        if asked:
            raise
        return _refused(str(error))
    return EngineGraphs(graphs, f"{graphs.backend.name}: {len(graphs.buckets.buckets)} sizes")


def _refused(reason: str) -> EngineGraphs:
    logger.warning("Steps are not captured, each one is launched op by op: %s", reason)
    return EngineGraphs(None, f"refused: {reason}")
