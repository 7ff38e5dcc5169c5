"""KV cache: blocks and prefix hashes, specs and plan, one manager per group, one coordinator. No torch."""

from pagebinder.runtime.kv.blocks import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlocksStored,
    FreeBlockQueue,
    KVCacheBlock,
    KVCacheIntegrityError,
)
from pagebinder.runtime.kv.coordinator import KVCacheManager, PrefixHit
from pagebinder.runtime.kv.hashing import RequestBlockHasher, hash_block, none_hash
from pagebinder.runtime.kv.manager_base import BlockTable, SingleTypeManager
from pagebinder.runtime.kv.managers import (
    MANAGERS,
    FullAttentionManager,
    SlidingWindowManager,
    make_manager,
)
from pagebinder.runtime.kv.planner import KVPlan, KVWaste, LayerPage, group_layers, plan_kv_cache
from pagebinder.runtime.kv.spec_builders import SPEC_BUILDERS, spec_from_state
from pagebinder.runtime.kv.specs import (
    AttentionSpec,
    ChunkedLocalSpec,
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

__all__ = [
    "MANAGERS",
    "SPEC_BUILDERS",
    "AllBlocksCleared",
    "AttentionSpec",
    "BlockPool",
    "BlockRemoved",
    "BlockTable",
    "BlocksStored",
    "ChunkedLocalSpec",
    "CrossAttentionSpec",
    "FreeBlockQueue",
    "FullAttentionManager",
    "FullAttentionSpec",
    "KVCacheBlock",
    "KVCacheGroup",
    "KVCacheIntegrityError",
    "KVCacheManager",
    "KVCacheSpec",
    "KVPlan",
    "KVWaste",
    "LatentSpec",
    "LayerPage",
    "PrefixHit",
    "RecurrentSpec",
    "RequestBlockHasher",
    "RingSpec",
    "ShortConvSpec",
    "SingleTypeManager",
    "SlidingWindowLatentSpec",
    "SlidingWindowManager",
    "SlidingWindowSpec",
    "group_layers",
    "hash_block",
    "make_manager",
    "none_hash",
    "plan_kv_cache",
    "spec_from_state",
]
