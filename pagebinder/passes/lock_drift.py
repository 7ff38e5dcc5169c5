"""Where a compiled plan differs from its lock: what was expected, what is there instead, and what to do.

Layers are unfolded, compared one by one, and equal differences are folded again, so a norm that is refused in all
32 layers is one drift. For a rewrite that is missing, the refusal nearest to its place says why matching stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from pagebinder.graph_tools import module_path
from pagebinder.passes.layer_blocks import from_ranges, name_of_layers, place_of, to_ranges
from pagebinder.passes.lock_file import ENTRIES
from pagebinder.passes.plan_lock import refusals
from pagebinder.report import CompileReport, Refusal

ACCEPT = "if the change is meant, write the lock again (--lock)"
MEND = f"mend what the reason says in the model's source, or {ACCEPT}"
MAX_OPS_SHOWN = 8
IDENTITY = {"state": ("at",), "rewrites": ("at", "pattern", "by"), "refused": ("at", "pattern")}

Layer = tuple[str, int | None]


@dataclass(frozen=True, kw_only=True)
class Drift:
    """One difference. `where`: module path, layers folded, or a section of the lock."""

    where: str
    expected: str
    found: str
    remedy: str

    def __str__(self) -> str:
        lines = (
            f"{self.where}",
            f"  expected  {self.expected}",
            f"  found     {self.found}",
            f"  remedy    {self.remedy}",
        )
        return "\n".join(lines)


def plan_drift(
    expected: Mapping, found: Mapping, report: CompileReport, graphs: Mapping[str, GraphModule]
) -> list[Drift]:
    """All differences between a lock and the lock of what was compiled now, in model order.

    `report` and `graphs` (of the compilation now) give the refusals and ops at places that no longer match.
    """
    ours, theirs = found["model"], expected["model"]
    if ours["class"] != theirs.get("class"):
        remedy = "use this model's own lock, or write one with --lock"
        return [Drift(where="model", expected=str(theirs.get("class")), found=ours["class"], remedy=remedy)]
    drifts = [*_keys("model", theirs, ours), *_keys("options", expected["options"], found["options"])]
    stacks = list(_stacks(expected, found))
    drifts += [*stacks, *_Layers(expected, found, report, graphs).drifts()]
    if not stacks:  # with more or fewer layers, groups and providers follow
        drifts += _kv_groups(expected, found)
        if providers_comparable(expected, found):
            drifts += _providers(expected["providers"], found["providers"])
    return drifts


def providers_comparable(expected: Mapping, found: Mapping) -> bool:
    """Another device or other providers at hand make another choice right, which says nothing about the model."""
    keys = ("device", "available")
    return all(expected["providers"].get(key) == found["providers"].get(key) for key in keys)


def _keys(section: str, expected: Mapping, found: Mapping) -> Iterator[Drift]:
    for key in sorted({*expected, *found}):
        old, new = expected.get(key, "not set"), found.get(key, "not set")
        if old != new:
            with_it = f"without {key}" if key not in expected else f"with {key}={old!r}"
            remedy = f"compile {with_it}, or {ACCEPT}" if section == "options" else ACCEPT
            yield Drift(where=f"{section}.{key}", expected=str(old), found=str(new), remedy=remedy)


def _stacks(expected: Mapping, found: Mapping) -> Iterator[Drift]:
    """Stacks with more or fewer layers."""
    old, new = (_indices(lock) for lock in (expected, found))
    for stack in {**old, **new}:
        before, now = old.get(stack, set()), new.get(stack, set())
        if before != now:
            texts = [f"{len(s)} layers" + (f" ({to_ranges(s)})" if s else "") for s in (before, now)]
            remedy = f"compile the model that the lock was written for, or {ACCEPT}"
            yield Drift(where=stack, expected=texts[0], found=texts[1], remedy=remedy)


def _indices(lock: Mapping) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for table in lock["layers"]:
        found.setdefault(table["path"], set()).update(from_ranges(table["layers"]))
    return found


def _unfolded(lock: Mapping) -> dict[Layer, Mapping]:
    layers = {(t["path"], i): t for t in lock["layers"] for i in from_ranges(t["layers"])}
    return {**dict(sorted(layers.items())), ("", None): lock["outside"]}


def _entries(table: Mapping, section: str) -> list[dict]:
    """The entries of a section, each as often as its count says."""
    plain = [{k: v for k, v in entry.items() if k != "count"} for entry in table.get(section, [])]
    return [p for p, entry in zip(plain, table.get(section, [])) for _ in range(entry.get("count", 1))]


class _Layers:
    """Compares layer by layer, and folds equal differences of several layers."""

    def __init__(self, expected, found, report: CompileReport, graphs) -> None:
        self.expected, self.found = _unfolded(expected), _unfolded(found)
        self.refusals = refusals(report)
        self.ops: dict[str, list[str]] = {}
        for gm in (graphs.get("encoder"), graphs["semantic"]):
            for node in () if gm is None else gm.graph.nodes:
                if node.op == "call_function":
                    self.ops.setdefault(module_path(node), []).append(str(node.target))

    def drifts(self) -> list[Drift]:
        folded: dict[tuple, tuple[Drift, list[Layer]]] = {}
        for layer in self.expected:
            for inside, drift in self._of_layer(layer) if layer in self.found else ():
                key = (layer[0], inside, drift.expected, _without_node(drift.found))
                folded.setdefault(key, (drift, []))[1].append(layer)
        return [
            Drift(where=_where(layers, key[1]), expected=d.expected, found=d.found, remedy=d.remedy)
            for key, (d, layers) in folded.items()
        ]

    def _of_layer(self, layer: Layer) -> Iterator[tuple[str, Drift]]:
        told: set[tuple[str, str]] = (
            set()
        )  # (place, pattern) of rewrites: their refusals are part of the answer
        for section in ENTRIES:
            old, new = (_entries(side[layer], section) for side in (self.expected, self.found))
            for before, now in _pairs(_minus(old, new), _minus(new, old), IDENTITY[section]):
                entry = before or now
                place = (entry["at"], entry.get("pattern", ""))
                if section == "rewrites":
                    told.add(place)
                if section != "refused" or place not in told:
                    yield entry["at"], self._drift(layer, section, before, now)

    def _drift(self, layer: Layer, section: str, before: dict | None, now: dict | None) -> Drift:
        path = ".".join(
            part for part in (f"{layer[0]}.{layer[1]}" if layer[0] else "", (before or now)["at"]) if part
        )
        kind = {"state": "a layer's state", "rewrites": "a rewrite", "refused": "a refusal"}[section]
        if before is not None and now is not None:
            old, new = _differing(before, now)
            remedy = ACCEPT if section != "refused" else MEND
            return Drift(
                where=path, expected=f"{_head(before)}: {old}", found=f"{_head(now)}: {new}", remedy=remedy
            )
        if now is not None:
            remedy = MEND if section == "refused" else ACCEPT
            found = self._refusal_text(path, now) if section == "refused" else f"{kind}: {_text(now)}"
            return Drift(where=path, expected=f"nothing recorded of {_head(now)}", found=found, remedy=remedy)
        if section == "refused":
            return Drift(where=path, expected=f"refused: {_text(before)}", found="not refused", remedy=ACCEPT)
        found, is_refused = self._instead(path, before)
        return Drift(where=path, expected=_text(before), found=found, remedy=MEND if is_refused else ACCEPT)

    def _instead(self, path: str, entry: Mapping) -> tuple[str, bool]:
        """What is where a rewrite or state was expected (a refusal, other ops, no such module); is it a refusal."""
        nearest = self._nearest(path, entry.get("pattern", entry.get("kind", "")))
        if nearest is not None:
            return _refused(nearest), True
        ops = [op for p, names in self.ops.items() if p == path or p.startswith(f"{path}.") for op in names]
        if not ops:
            return "nothing: no op of the model comes from there", False
        shown = ", ".join(dict.fromkeys(ops[:MAX_OPS_SHOWN])) + (" ..." if len(ops) > MAX_OPS_SHOWN else "")
        return f"no match and no refusal; the ops there are {shown}", False

    def _nearest(self, path: str, pattern: str) -> Refusal | None:
        """The refusal of the same pattern at the place, of another one there, of the same in its layer."""
        here = [r for r in self.refusals if r.module_path == path or r.module_path.startswith(f"{path}.")]
        layer = place_of(path).layer
        near = [r for r in self.refusals if layer and place_of(r.module_path).layer == layer]
        for candidates in (here, near):
            same = [r for r in candidates if r.pattern == pattern]
            if same or (candidates is here and here):
                return (same or here)[0]
        return None

    def _refusal_text(self, path: str, entry: Mapping) -> str:
        for refusal in self.refusals:
            if (refusal.module_path, refusal.pattern, refusal.reason) == (
                path,
                entry["pattern"],
                entry["reason"],
            ):
                return _refused(refusal)
        return f"refused: {_text(entry)}"


def _refused(refusal: Refusal) -> str:
    line = f", {refusal.source_line}" if refusal.source_line else ""
    return f"{refusal.pattern} refused: {refusal.reason} (node {refusal.node}{line})"


def _without_node(text: str) -> str:
    return text.split(" (node ")[0]


def _where(layers: list[Layer], inside: str) -> str:
    stack = layers[0][0]
    if not stack:
        return inside or "outside of the layers"
    return ".".join(part for part in (name_of_layers(stack, [i for _, i in layers]), inside) if part)


def _minus(entries: list[dict], others: list[dict]) -> list[dict]:
    rest, left = list(others), []
    for entry in entries:
        if entry in rest:
            rest.remove(entry)
        else:
            left.append(entry)
    return left


def _pairs(
    old: list[dict], new: list[dict], identity: tuple[str, ...]
) -> Iterator[tuple[dict | None, dict | None]]:
    """(before, now) of entries about the same thing; None where one side has no counterpart."""
    rest = list(new)
    for before in old:
        same = [e for e in rest if all(e.get(key) == before.get(key) for key in identity)]
        now = same[0] if same else None
        if now is not None:
            rest.remove(now)
        yield before, now
    for now in rest:
        yield None, now


def _differing(before: Mapping, now: Mapping) -> tuple[str, str]:
    keys = [k for k in {**before, **now} if before.get(k) != now.get(k)]
    return _options(before, keys), _options(now, keys)


def _options(entry: Mapping, keys) -> str:
    return ", ".join(f"{key}={entry[key]}" if key in entry else f"no {key}" for key in keys)


def _head(entry: Mapping) -> str:
    return str(entry.get("pattern", entry.get("op", entry.get("kind", ""))))


def _text(entry: Mapping) -> str:
    by = f" by {entry['by']}" if "by" in entry else ""
    rest = _options(entry, [k for k in entry if k not in ("at", "pattern", "kind", "by")])
    return f"{_head(entry)}{by}" + (f" ({rest})" if rest else "")


def _kv_groups(expected: Mapping, found: Mapping) -> Iterator[Drift]:
    old, new = ([_group_text(g) for g in lock["kv_groups"]] for lock in (expected, found))
    if old != new:
        remedy = f"compile with the options and the workload of the lock, or {ACCEPT}"
        yield Drift(where="KV groups", expected="; ".join(old), found="; ".join(new), remedy=remedy)


def _group_text(group: Mapping[str, Any]) -> str:
    layers = ", ".join(map(str, group.get("layers", ())))
    return f"blocks of {group.get('block_size')}: {layers}"


def _providers(expected: Mapping, found: Mapping) -> Iterator[Drift]:
    """By op: choices are few, and each names its layers."""
    old, new = (_served(section) for section in (expected, found))
    for op in {**old, **new}:
        if old.get(op) != new.get(op):
            before, now = old.get(op, "no such op"), new.get(op, "no such op")
            remedy = f"pass providers={{{op!r}: ...}}, look at `pagebinder doctor`, or {ACCEPT}"
            yield Drift(where=f"provider of {op}", expected=before, found=now, remedy=remedy)


def _served(section: Mapping) -> dict[str, str]:
    served: dict[str, list[str]] = {}
    for choice in section.get("choices", ()):
        text = f"{choice.get('provider')} for {', '.join(map(str, choice.get('layers', ())))}"
        served.setdefault(str(choice.get("op")), []).append(text)
    return {op: "; ".join(texts) for op, texts in served.items()}
