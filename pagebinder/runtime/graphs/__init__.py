"""Steps captured once and replayed: CUDA graphs on a GPU, recorded calls on a CPU.

`StepGraphs` captures a bucket of shapes each and replays the one that a step fits; see its module.
"""

from pagebinder.runtime.graphs.buckets import Bucket, BucketTable
from pagebinder.runtime.graphs.step_graphs import GraphMemory, GraphStats, StepGraphs
from pagebinder.runtime.graphs.step_sequences import StepSequence

__all__ = ["Bucket", "BucketTable", "GraphMemory", "GraphStats", "StepGraphs", "StepSequence"]
