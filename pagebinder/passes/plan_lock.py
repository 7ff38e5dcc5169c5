"""The plan lock: what every layer was found to be and what it was rewritten into, as a diffable TOML file.

    format = 1
    [model]         class, hash of the config, dtype
    [options]       the compile options that shape the plan
    [[layers]]      one table for each run of equal layers:  path = "model.layers", layers = "0-31"
        state       what is kept between steps
        rewrites    every match, with the options that the graph's op now has
        refused     every refusal, with its reason
    [outside]       the same for what lies outside of layers: embedding, last norm, LM head
    [[kv_groups]]   which layers share a block table, and its block size
    [providers]     who serves each op, and what could have on the machine that wrote the lock

Everything but [providers] follows from the model and the options alone, so it is the same on every machine.
Not recorded: removed no-ops (their number is torch's business), names of nodes, lines of source.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from pagebinder.custom_ops.providers import available_providers
from pagebinder.graph_tools import module_path
from pagebinder.passes.layer_blocks import name_of_layers, place_of, to_ranges
from pagebinder.passes.lock_facts import is_ours, op_name, op_options, provider_of
from pagebinder.passes.lock_file import ENTRIES, FORMAT, lock_text
from pagebinder.report import CompileReport, Match, Refusal

OF_THIS_MACHINE = ("place_linears",)  # follow from the kernels that are here; [providers] has what came of it
NOT_REWRITES = (
    "simplify",
    "simplify_views",
    "place_constants",
    "audit",
    *OF_THIS_MACHINE,
)  # a dropped no-op and a proof change nothing that a layer computes
# Said elsewhere in the lock, or naming nodes or KV groups, which would make equal layers differ.
WITHOUT_DETAIL = ("page_", "gather_logits", "leaves")
STATE_FIELDS = ("kind", "window", "chunk", "num_kv_heads", "head_dim", "head_dim_v", "shape", "dtype")
# Keys of a config that name a file, a version or a way to run, and not a model.
NOT_THE_MODEL = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
)


def plan_lock(
    report: CompileReport,
    graphs: Mapping[str, GraphModule],
    *,
    model_config: Mapping | None,
    options: Mapping,
) -> dict[str, Any]:
    """The lock of a compiled model as plain data.

    Args:
        report: filled. graphs: its "semantic" and "fused" levels are read.
        model_config: the source model's options (a transformers config as a dict), or None.
        options: the compile options that shape the plan; None values are left out.
    """
    places, order = _Places(), _running_order(graphs)
    for row in report.layers:
        places.add(row["layer"], "state", _state(row))
    for path, entry in sorted(_rewrites(report, graphs), key=lambda item: order.get(item[0], -1)):
        places.add(path, "rewrites", entry)
    for refusal in sorted(refusals(report), key=lambda r: order.get(r.module_path, -1)):
        places.add(refusal.module_path, "refused", {"pattern": refusal.pattern, "reason": refusal.reason})
    model = {
        "class": report.model_class,
        "config": config_hash(model_config),
        "rope": _rope_of(model_config),
        "dtype": report.dtype,
    }
    lock = {
        "format": FORMAT,
        "model": model,
        "options": {key: value for key, value in options.items() if value is not None},
        "layers": places.folded(),
        "outside": places.outside(),
        "kv_groups": _kv_groups(report),
        "providers": _providers(report, graphs["fused"]),
    }
    return tomllib.loads(lock_text(lock))  # what is compared has been through the file's format


def _rope_of(model_config: Mapping | None) -> str:
    """What a config says about RoPE: its angles are numbers of the graph that no op names."""
    named = {k: v for k, v in (model_config or {}).items() if k.startswith("rope_")}
    return ", ".join(f"{key}={value}" for key, value in sorted(_flat(named)))


def _flat(values: Mapping, prefix: str = "") -> Iterator[tuple[str, str]]:
    """("rope_parameters.rope_theta", "10000.0"), ... of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def config_hash(model_config: Mapping | None) -> str:
    """A short hash of what a config says about the model; "none" for a module without one."""
    if model_config is None:
        return "none"
    kept = {k: v for k, v in model_config.items() if k not in NOT_THE_MODEL and not k.startswith("_")}
    text = json.dumps(kept, sort_keys=True, default=lambda value: type(value).__name__)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _running_order(graphs: Mapping[str, GraphModule]) -> dict[str, int]:
    """Module path -> when it first runs."""
    paths = [
        module_path(n) for name in ("encoder", "captured") if name in graphs for n in graphs[name].graph.nodes
    ]
    return {path: position for position, path in enumerate(dict.fromkeys(paths))}


class _Places:
    """Collects entries by layer, in the order in which the model runs, and folds equal layers."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, int | None], dict[str, list[dict]]] = {}

    def add(self, path: str, section: str, entry: dict) -> None:
        place = place_of(path)
        layer = self.entries.setdefault((place.stack, place.index), {name: [] for name in ENTRIES})
        layer[section].append({"at": place.inside, **entry})

    def folded(self) -> list[dict]:
        tables: dict[str, dict] = {}
        members: dict[str, list[int]] = {}
        for (stack, index), sections in sorted(self._layers(), key=lambda item: item[0]):
            content = {name: _counted(entries) for name, entries in sections.items() if entries}
            key = json.dumps([stack, content])
            tables.setdefault(key, {"path": stack, "layers": "", **content})
            members.setdefault(key, []).append(index)
        for key, table in tables.items():
            table["layers"] = to_ranges(members[key])
        return list(tables.values())

    def outside(self) -> dict[str, list[dict]]:
        sections = self.entries.get(("", None), {})
        return {name: _counted(entries) for name, entries in sections.items() if entries}

    def _layers(self) -> list:
        return [(key, sections) for key, sections in self.entries.items() if key[1] is not None]


def _counted(entries: Sequence[dict]) -> list[dict]:
    """Equal entries once, with `count`; ordered by their first appearance."""
    counts: dict[str, int] = {}
    for entry in entries:
        key = json.dumps(entry)
        counts[key] = counts.get(key, 0) + 1
    return [json.loads(key) | ({"count": n} if n > 1 else {}) for key, n in counts.items()]


def _state(row: Mapping) -> dict:
    facts = {key: row[key] for key in STATE_FIELDS if row.get(key) is not None}
    return facts | ({"shape": list(facts["shape"])} if "shape" in facts else {})


def refusals(report: CompileReport) -> list[Refusal]:
    """Refusals that follow from the model alone."""
    return [r for result in report.passes if result.name not in OF_THIS_MACHINE for r in result.refusals]


def _rewrites(report: CompileReport, graphs: Mapping[str, GraphModule]) -> list[tuple[str, dict]]:
    """(module path, entry) of every match, and of every op of ours that the source model holds by itself."""
    ours = {n.name: n for gm in _levels(graphs) for n in gm.graph.nodes if is_ours(n)}
    found, matched = [], set()
    for result in report.passes:
        for match in () if result.name in NOT_REWRITES else result.matches:
            node = None if result.name.startswith("page_") else ours.get(match.node)
            matched.add(match.node)
            options = {} if node is None else {"op": op_name(node), **op_options(node)}
            found.append((match.module_path, _entry(result.name, match, options)))
    native = [n for n in graphs["semantic"].graph.nodes if is_ours(n) and n.name not in matched]
    return found + [(module_path(n), {"op": op_name(n), **op_options(n)}) for n in native]


def _levels(graphs: Mapping[str, GraphModule]) -> list[GraphModule]:
    """Levels whose nodes matches may name; names of the semantic level win (it is last)."""
    return [graphs[level] for level in ("fused", "encoder", "semantic") if level in graphs]


def _entry(name: str, match: Match, options: Mapping) -> dict:
    entry = {"by": name, "pattern": match.pattern, **options}
    if entry.get("op") == match.pattern:
        del entry["op"]
    if match.detail and not options and not name.removeprefix("encoder.").startswith(WITHOUT_DETAIL):
        entry["detail"] = match.detail
    return entry


def _kv_groups(report: CompileReport) -> list[dict]:
    groups = []
    for index, group in enumerate(report.kv.get("group_facts", ())):
        rows = [row for row in report.layers if row["group"] == index]
        layers = folded_paths([row["layer"] for row in rows], [row["kind"] for row in rows])
        groups.append({"block_size": group["block_size"], "layers": layers})
    return groups


def folded_paths(paths: Sequence[str], kinds: Sequence[str] | None = None) -> list[str]:
    """["model.layers.0.attn", "model.layers.1.attn"] -> ["model.layers.[0-1].attn"], in order of appearance.

    `kinds`: a word for each path that is written behind it; only paths with the same word are folded.
    """
    members: dict[tuple[str, str], list[int]] = {}
    for path, kind in zip(paths, kinds or [""] * len(paths), strict=True):
        place = place_of(path)
        tail = (f".{place.inside}" if place.stack and place.inside else place.inside) + (
            f" {kind}" if kind else ""
        )
        members.setdefault((place.stack, tail), []).append(place.index)
    return [
        (name_of_layers(stack, indices) if stack else "") + tail for (stack, tail), indices in members.items()
    ]


def _providers(report: CompileReport, fused: GraphModule) -> dict[str, Any]:
    device = report.device.split(":")[0]
    served: dict[tuple[str, str], list[str]] = {}
    for node in fused.graph.nodes:
        if is_ours(node):
            served.setdefault((op_name(node), provider_of(node)), []).append(module_path(node))
    selected = {choice.op for choice in report.providers}
    choices = [
        {"op": op, "provider": provider, "layers": folded_paths(paths)}
        for (op, provider), paths in served.items()
        if op in selected
    ]
    available = [name for name, usable, _ in available_providers(device) if usable]
    return {"device": device, "available": available, "choices": choices}
