"""KV cache: blocks and prefix hashes, specs and plan, one manager per group, one coordinator. No torch."""

from pagebinder.runtime.kv.alternatives import ConstraintCost, NextBest
from pagebinder.runtime.kv.block_table import BlockTable
from pagebinder.runtime.kv.blocks import BlockPool, KVCacheIntegrityError
from pagebinder.runtime.kv.constraints import KernelConstraints
from pagebinder.runtime.kv.context import CacheContext, GroupHit, GroupPrefix
from pagebinder.runtime.kv.coordinator import KVCacheManager
from pagebinder.runtime.kv.copies import BlockCopy, SwapCopy
from pagebinder.runtime.kv.cross_manager import CrossAttentionManager
from pagebinder.runtime.kv.event_log import KVEventLog
from pagebinder.runtime.kv.event_recorder import KVEventRecorder
from pagebinder.runtime.kv.events import AllBlocksCleared, BlockRemoved, BlocksStored
from pagebinder.runtime.kv.fence import StepFence
from pagebinder.runtime.kv.free_queue import FreeBlockQueue, KVCacheBlock
from pagebinder.runtime.kv.hashing import RequestBlockHasher, hash_block, none_hash
from pagebinder.runtime.kv.host_blocks import HostBlocks, SwapImage
from pagebinder.runtime.kv.manager_base import SingleTypeManager
from pagebinder.runtime.kv.managers import (
    MANAGERS,
    ChunkedLocalManager,
    FullAttentionManager,
    SlidingWindowManager,
    make_manager,
)
from pagebinder.runtime.kv.picture import draw_pool
from pagebinder.runtime.kv.plan import NO_GROUP, KVPlan, KVWaste, LayerPage
from pagebinder.runtime.kv.planner import plan_kv_cache, plan_specs
from pagebinder.runtime.kv.prefix_search import PrefixHit
from pagebinder.runtime.kv.recurrent_manager import RecurrentManager
from pagebinder.runtime.kv.retention import PrefixRetention
from pagebinder.runtime.kv.ring_manager import RingManager
from pagebinder.runtime.kv.rows import RequestRows, RowArray
from pagebinder.runtime.kv.spec_builders import SPEC_BUILDERS, spec_from_state
from pagebinder.runtime.kv.specs import (
    BLOCK_SIZE,
    ENCODER_TOKENS,
    TOKENS,
    AttentionSpec,
    ChunkedLocalSpec,
    CompressedLatentSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    LatentSpec,
    RecurrentSpec,
    RingSpec,
    ShortConvSpec,
    SlidingWindowLatentSpec,
    SlidingWindowSpec,
)
from pagebinder.runtime.kv.workload import Workload
from pagebinder.runtime.request import Request

__all__ = [
    "BLOCK_SIZE",
    "ENCODER_TOKENS",
    "MANAGERS",
    "NO_GROUP",
    "SPEC_BUILDERS",
    "TOKENS",
    "AllBlocksCleared",
    "AttentionSpec",
    "BlockCopy",
    "BlockPool",
    "BlockRemoved",
    "BlockTable",
    "BlocksStored",
    "CacheContext",
    "ChunkedLocalManager",
    "ChunkedLocalSpec",
    "CompressedLatentSpec",
    "ConstraintCost",
    "CrossAttentionManager",
    "CrossAttentionSpec",
    "FreeBlockQueue",
    "FullAttentionManager",
    "FullAttentionSpec",
    "GroupHit",
    "GroupPrefix",
    "HostBlocks",
    "KVCacheBlock",
    "KVCacheGroup",
    "KVCacheIntegrityError",
    "KVCacheManager",
    "KVCacheSpec",
    "KVEventLog",
    "KVEventRecorder",
    "KVPlan",
    "KVWaste",
    "KernelConstraints",
    "LatentSpec",
    "LayerPage",
    "NextBest",
    "PrefixHit",
    "PrefixRetention",
    "RecurrentManager",
    "RecurrentSpec",
    "Request",
    "RequestBlockHasher",
    "RequestRows",
    "RingManager",
    "RingSpec",
    "RowArray",
    "ShortConvSpec",
    "SingleTypeManager",
    "SlidingWindowLatentSpec",
    "SlidingWindowManager",
    "SlidingWindowSpec",
    "StepFence",
    "SwapCopy",
    "SwapImage",
    "Workload",
    "draw_pool",
    "hash_block",
    "make_manager",
    "none_hash",
    "plan_kv_cache",
    "plan_specs",
    "spec_from_state",
]
