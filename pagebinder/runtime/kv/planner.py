"""Layer states -> plan: which layers share a block table, block sizes, where each layer's page lies.

    states --spec_from_state--> specs --kind_variants--> kinds --best_layouts--> layout --> groups, pages, next best
              (spec_builders)            (kinds)                (optimise)

The layout is the one that wastes the fewest bytes over a workload (workload.py) among those that kernels allow
(constraints.py). Nothing is padded to match something else unless that is cheapest, and then the plan says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pagebinder.errors import ConfigError
from pagebinder.runtime.kv.alternatives import constraint_cost, next_best
from pagebinder.runtime.kv.checks import require_whole
from pagebinder.runtime.kv.constraints import KernelConstraints, check_block_size
from pagebinder.runtime.kv.kinds import LayerKind, granularity, kind_variants
from pagebinder.runtime.kv.optimise import Layout, best_layouts
from pagebinder.runtime.kv.plan import NO_GROUP, KVPlan, KVWaste, LayerPage
from pagebinder.runtime.kv.spec_builders import spec_from_state, without_idle_limit
from pagebinder.runtime.kv.specs import KVCacheGroup, KVCacheSpec
from pagebinder.runtime.kv.workload import UNLIMITED_TOKENS, Workload

if TYPE_CHECKING:
    from pagebinder.custom_ops.layer_state import LayerState

__all__ = [
    "KVPlan",
    "KVWaste",
    "KernelConstraints",
    "LayerPage",
    "Workload",
    "choose_block_size",
    "plan_kv_cache",
    "plan_specs",
]

# Only used to look at a state before a block size is chosen.
ANY_BLOCK_SIZE = 16


def plan_kv_cache(
    states: Sequence[LayerState],
    *,
    block_size: int | None = None,
    max_model_len: int,
    max_encoder_tokens: int | None = None,
    workload: Workload | Mapping[str, Any] | None = None,
    constraints: KernelConstraints | None = None,
) -> KVPlan:
    """Group the layers, choose block sizes and lay out pages so that the workload wastes the fewest bytes.

    Args:
        block_size: tokens per block of the layers with rows; None chooses. Checkpoint intervals are always chosen.
        max_encoder_tokens: most tokens that cross attention looks at; None: no limit is known.
        workload: what to plan for; None: `Workload.default`; a mapping has its fields by name.
    Layers are named by module path; a path that occurs twice gets `#index` appended. A layer that keeps nothing
    (attention inside an encoder) has an empty page in group NO_GROUP.
    Raises ConfigError for bad sizes or no layers, UnsupportedLayerError for a state without a spec.
    """
    check_block_size(block_size)
    require_whole("max_model_len", max_model_len, 1, "token")
    paths = Counter(state.layer for state in states)
    names = [s.layer if paths[s.layer] == 1 else f"{s.layer}#{s.index}" for s in states]
    specs = {
        name: spec_from_state(state, ANY_BLOCK_SIZE, max_model_len)
        for name, state in zip(names, states, strict=True)
    }
    return plan_specs(
        specs, block_size=block_size, max_model_len=max_model_len, max_encoder_tokens=max_encoder_tokens,
        workload=workload, constraints=constraints,
    )  # fmt: skip


def plan_specs(
    specs: Mapping[str, KVCacheSpec | None],
    *,
    block_size: int | None = None,
    max_model_len: int,
    max_encoder_tokens: int | None = None,
    workload: Workload | Mapping[str, Any] | None = None,
    constraints: KernelConstraints | None = None,
) -> KVPlan:
    """As `plan_kv_cache`, from specs by layer name; their block sizes (but a ring's) are replaced. None: no state.

    A window or chunk that is at least max_model_len is no limit: the layer is planned as full attention.
    """
    check_block_size(block_size)
    require_whole("max_model_len", max_model_len, 1, "token")
    load = Workload.of(workload, max_model_len, max_encoder_tokens)
    constraints = constraints or KernelConstraints()
    kept = {name: without_idle_limit(s, max_model_len) for name, s in specs.items() if s is not None}
    if not kept:
        raise ConfigError("no layer keeps KV state: there is no cache to plan; serve the model without one")
    _check_encoders(kept, load, workload)

    def variants(limits: KernelConstraints) -> list[list[LayerKind]]:
        return kind_variants(kept, limits, block_size, max_model_len, max_encoder_tokens)

    plan = _best_plan(specs, variants(constraints), max_model_len, load, constraints)
    free = replace(constraints, min_run_bytes=0)
    if _sizes(variants(free)) == _sizes(variants(constraints)):
        return plan
    other = _best_plan(specs, variants(free), max_model_len, load, free)
    return replace(plan, constraint_cost=constraint_cost(plan, other, constraints))


def _sizes(variants: list[list[LayerKind]]) -> list[list[tuple[int, ...]]]:
    return [[kind.block_sizes for kind in kinds] for kinds in variants]


def _check_encoders(
    specs: Mapping[str, KVCacheSpec], load: Workload, given: Workload | Mapping[str, Any] | None
) -> None:
    """Encoders are given exactly where cross attention looks at them; those of the default workload go unheeded."""
    if any(spec.kind == "cross_attention" for spec in specs.values()):
        if not load.encoders:
            raise ConfigError(
                "workload: give encoders, the lengths of what the cross-attention layers look at."
            )
        return
    own = given.get("encoders") if isinstance(given, Mapping) else given and given.encoders
    default = Workload.default(1).encoders
    if own and [tokens for tokens, _ in load.encoders] != [tokens for tokens, _ in default]:
        raise ConfigError("workload: this model has no encoder (no cross attention); leave encoders out.")


def _best_plan(
    specs: Mapping[str, KVCacheSpec | None],
    variants: list[list[LayerKind]],
    max_model_len: int,
    load: Workload,
    constraints: KernelConstraints,
) -> KVPlan:
    (kinds, best), *others = best_layouts(variants, load, constraints)
    groups = _groups(kinds, best)
    pages = {
        page.layer: page for i, group in enumerate(groups) for page in _place_pages(i, group, constraints)
    }
    nothing = {"group": NO_GROUP, "slot": NO_GROUP, "offset_bytes": 0, "page_bytes": 0}
    plan = KVPlan(
        groups=groups,
        layers=tuple(pages.get(name) or LayerPage(layer=name, **nothing) for name in specs),
        bytes_per_block=best.bytes_per_block,
        max_model_len=max_model_len,
        workload=load,
        granularity=granularity(group.spec for group in groups),
        next_best=next_best(best, *others[0]) if others else None,
    )
    assert plan.bytes_per_block == max(plan._taken_bytes), (
        "the layout's block is as large as its largest group"
    )
    return plan


def choose_block_size(states: Sequence[LayerState]) -> int:
    """The smallest block size, in tokens, at which every layer's runs are as long as kernels want them."""
    constraints = KernelConstraints()
    if not states:
        return constraints.attention_blocks[0]
    specs = tuple(spec_from_state(state, ANY_BLOCK_SIZE, UNLIMITED_TOKENS) for state in states)
    return constraints.block_sizes(specs, None)[0]


def _groups(kinds: Sequence[LayerKind], layout: Layout) -> tuple[KVCacheGroup, ...]:
    return tuple(
        group for kind, (size, n) in zip(kinds, layout.choices, strict=True) for group in kind.groups(size, n)
    )


def _place_pages(index: int, group: KVCacheGroup, constraints: KernelConstraints) -> list[LayerPage]:
    """Pages one after the other, each at an aligned offset."""
    pages, offset = [], 0
    for slot, (layer, spec) in enumerate(zip(group.layers, group.layer_specs, strict=True)):
        size = constraints.align(spec.page_size_bytes)
        pages.append(LayerPage(layer=layer, group=index, slot=slot, offset_bytes=offset, page_bytes=size))
        offset += size
    return pages
