"""The report as text, through rich."""

from __future__ import annotations

import io
import re
from collections import Counter
from itertools import pairwise, takewhile

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pagebinder.report import CompileReport

TEXT_WIDTH = 118
# Runs of layer numbers that are written out.
MAX_RUNS = 4


def explain_text(report: CompileReport, width: int = TEXT_WIDTH) -> str:
    """The report as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(report))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def render(report: CompileReport) -> Group:
    """A rich renderable of the whole report."""
    return Group(
        _header(report),
        Text("\nLayers and their state", style="bold"),
        _layers(report),
        Text("\nKV cache", style="bold"),
        *(Text(line, overflow="fold") for line in report.kv.get("lines", ())),
        Text("\nRewrites", style="bold"),
        _passes(report),
        *_refusals(report),
        Text("\nProviders", style="bold"),
        _providers(report),
        *_captured_steps(report),
        *_streams(report),
        *_verification(report),
        Text("\nTime", style="bold"),
        Padding(Text(", ".join(f"{k} {v:.2f} s" for k, v in report.stage_seconds.items())), (0, 0, 0, 1)),
        *(Text(f"weights: {line}") for line in report.weight_layout),
        *(Text(f"note: {n}") for n in report.notes),
    )


def _header(report: CompileReport) -> Text:
    counts = dict(report.node_counts)
    encoder = f"; encoder {counts.pop('encoder')}" if "encoder" in counts else ""
    nodes = " -> ".join(f"{level} {count}" for level, count in counts.items()) + encoder
    why = f" ({report.executable_why})" if report.executable_why else ""
    is_quantized = any(p.name == "quantize_weights" and p.matches for p in report.passes)
    read = f"; the compiled graph reads {report.graph_weight_bytes / 1e6:,.1f} MB" if is_quantized else ""
    return Text(
        f"{report.model_class}: {report.num_parameters:,} parameters, {report.weight_bytes / 1e6:,.1f} MB of "
        f"{report.dtype} on {report.device}{read}\n"
        f"captured by {report.capture_route}; ops per level: {nodes}\n"
        f"executable: {report.executable or 'none (explain only)'}{why}"
    )


def _layers(report: CompileReport) -> Table:
    """One row for all layers that differ in nothing but their numbers."""
    prefix = _common_prefix([layer["layer"] for layer in report.layers])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layers" + (f" of {prefix}" if prefix else ""), overflow="fold")
    for name, justify in (("state", "left"), ("heads x (K + V)", "right"), ("stored", "left"),
                          ("bytes at T", "right"), ("per token", "right"), ("group", "right")):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=True)

    alike: dict[tuple, list[dict]] = {}
    for layer in report.layers:
        facts = tuple(v for k, v in layer.items() if k != "layer")
        alike.setdefault((re.sub(r"\d+", "*", layer["layer"]), facts), []).append(layer)
    for layers in alike.values():
        first = layers[0]
        per_token = f"{first['bytes_per_token']:,}" if first["bytes_per_token"] else "-"
        group = "-" if first["group"] is None else str(first["group"])
        names = _names([layer["layer"].removeprefix(f"{prefix}.") for layer in layers])
        table.add_row(names, first["kind"] + _limit(first), _what(first), _stored(first), first["formula"],
                      per_token, group)  # fmt: skip
    return table


def _limit(layer: dict) -> str:
    if layer["window"] is not None:
        return f" (W={layer['window']})"
    return "" if layer["chunk"] is None else f" (C={layer['chunk']})"


def _stored(layer: dict) -> str:
    """The layout of bytes, where it is more than a dtype."""
    return layer["dtype"] if layer["layout"] in (None, "plain") else layer["layout"]


def _what(layer: dict) -> str:
    """KV heads x (K + V widths), the width of latent rows, the shape of a state, or nothing."""
    if layer["layout"] is not None:
        return f"{layer['head_dim']} wide"
    if layer["num_kv_heads"] is not None:
        return f"{layer['num_kv_heads']} x ({layer['head_dim']} + {layer['head_dim_v']})"
    return "-" if layer["shape"] is None else " x ".join(map(str, layer["shape"]))


def _common_prefix(paths: list[str]) -> str:
    """Leading parts that all of several paths have, and that are no layer's name: "model.layers"."""
    parts = [path.split(".")[:-1] for path in paths]
    common = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*parts))]
    return ".".join(common) if len(paths) > 1 else ""


def _names(paths: list[str]) -> str:
    """ "model.layers.0.self_attn", "model.layers.1.self_attn" -> "model.layers.[0-1].self_attn (2)"."""
    if len(paths) == 1:
        return paths[0]
    parts = [path.split(".") for path in paths]
    differing = [i for i, column in enumerate(zip(*parts)) if len(set(column)) > 1]
    if len(differing) != 1:
        return f"{paths[0]} .. {paths[-1]} ({len(paths)})"
    (place,) = differing
    if all(part[place].isdigit() for part in parts):
        numbers = _numbers([int(part[place]) for part in parts])
        return ".".join((*parts[0][:place], f"[{numbers}]", *parts[0][place + 1 :])) + f" ({len(paths)})"
    return f"{paths[0]} .. {paths[-1]} ({len(paths)})"


def _numbers(numbers: list[int]) -> str:
    """0-31 without gaps, "2, 4, .. 42" in equal steps, else runs: "0-4, 6-10, 12"."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(steps) == 1 and steps != {1} and len(numbers) > 2:
        return f"{numbers[0]}, {numbers[1]}, .. {numbers[-1]}"
    runs = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(shown if len(shown) <= MAX_RUNS else [*shown[: MAX_RUNS - 1], f".. {shown[-1]}"])


def _passes(report: CompileReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (("pass", "left"), ("matched", "right"), ("refused", "right"), ("ops", "right"),
                          ("seconds", "right"), ("what", "left")):  # fmt: skip
        table.add_column(name, justify=justify)
    for p in report.passes:
        kinds = Counter(f"{m.pattern}" + (f" [{m.detail}]" if m.detail else "") for m in p.matches)
        if p.name == "simplify":
            kinds = Counter(m.pattern for m in p.matches)
        what = "; ".join(f"{count} {kind}" for kind, count in kinds.most_common(3))
        table.add_row(p.name, str(len(p.matches)), str(len(p.refusals)), f"{p.num_ops_before} -> {p.num_ops_after}",
                      f"{p.seconds:.2f}", Text(what))  # fmt: skip
    return table


def _refusals(report: CompileReport) -> list[Padding]:
    """One line per pattern, reason and kind of place; layers that differ only by number are counted."""
    if not report.refusals:
        return [Padding("refused: nothing", (0, 0, 0, 1))]
    places: dict[tuple, list[str]] = {}
    for r in report.refusals:
        kind_of_place = re.sub(r"\d+", "*", r.module_path)
        places.setdefault((r.pattern, r.reason, kind_of_place, r.source_line), []).append(
            r.module_path or r.node
        )
    lines = [Padding("refused (these places run as the model wrote them):", (0, 0, 0, 1))]
    for (pattern, reason, kind_of_place, source_line), paths in places.items():
        where = paths[0] if len(paths) == 1 else f"{kind_of_place} ({len(paths)} places)"
        line = f" [{source_line}]" if source_line else ""
        lines.append(Padding(Text(f"{pattern} at {where}: {reason}{line}"), (0, 0, 0, 3)))
    return lines


def _providers(report: CompileReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("op", "provider", "nodes", "why"):
        table.add_column(name)
    for choice in report.providers:
        why = choice.why
        for name, reasons in choice.rejected.items():
            why += f"; not {name}: {'; '.join(reasons)}"
        table.add_row(choice.op, choice.provider, str(choice.num_nodes), why)
    return table


def _captured_steps(report: CompileReport) -> list[Text | Padding]:
    """What an engine of default size captures, and the memory that it will take."""
    if not report.captured_steps:
        return []
    title = Text("\nCaptured steps (EngineConfig(), on a GPU)", style="bold")
    return [title, *(Padding(Text(line), (0, 0, 0, 1)) for line in report.captured_steps)]


def _streams(report: CompileReport) -> list[Text | Padding]:
    """Which ops run side by side."""
    if not report.streams:
        return []
    title = Text("\nTwo streams (CompileConfig(streams=...))", style="bold")
    return [title, *(Padding(Text(line), (0, 0, 0, 1)) for line in report.streams)]


def _verification(report: CompileReport) -> list[Text | Table]:
    """One row per step that was verified: the largest error of all runs, and how many rewrites were certified."""
    if not report.verified:
        return []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (("level", "left"), ("step", "left"), ("max error", "right"), ("of the spread", "right"),
                          ("tolerated", "right"), ("certificates", "right"), ("worst on", "left")):  # fmt: skip
        table.add_column(name, justify=justify)
    certificates = {(p.level, p.name.removeprefix("encoder.")): p.certificates for p in report.passes}
    on_purpose = {(p.level, p.name) for p in report.passes if p.changes_numbers}
    runs: dict[tuple, list] = {}
    for step in report.verified:
        runs.setdefault((step.chain, step.level, step.name), []).append(step)
    for (_, level, name), steps in runs.items():
        worst = max(steps, key=lambda s: s.max_rel_error / s.tolerance)
        row = f"{worst.worst}, {worst.weights} weights, {worst.dtype}" if worst.max_abs_error else "identical"
        why = "it changes numbers on purpose" if (level, name) in on_purpose else "scores that choose may tie"
        row += "" if worst.judged else f" (not judged: {why})"
        table.add_row(level, name, f"{worst.max_abs_error:.1e}", f"{worst.max_rel_error:.1e}",
                      f"{worst.tolerance:g}", _certified(certificates.get((level, name), ())), row)  # fmt: skip
    return [Text("\nVerification", style="bold"), table, *_uncertified(report)]


def _certified(certificates) -> str:
    total = sum(c.count for c in certificates)
    return f"{sum(c.count for c in certificates if not c.reason)}/{total}" if total else "-"


def _uncertified(report: CompileReport) -> list[Padding]:
    """Why rewrites were not tested on their own, one line per pass and reason."""
    lines = {}
    for p in report.passes:
        for c in p.certificates:
            if c.reason:
                lines[f"{p.name}: not tested alone, {c.reason}"] = None
    return [Padding(Text(line), (0, 0, 0, 1)) for line in lines]
