"""The report as text and as HTML, through rich."""

from __future__ import annotations

import io
from collections import Counter
from itertools import groupby

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pagebinder.report import CompileReport

TEXT_WIDTH = 118


def explain_text(report: CompileReport, width: int = TEXT_WIDTH) -> str:
    """The report as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(report))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def explain_html(report: CompileReport, width: int = 140) -> str:
    """The report as one self-contained HTML page."""
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True)
    console.print(render(report))
    return console.export_html(inline_styles=True)


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
        Text("\nTime", style="bold"),
        Text("  " + "   ".join(f"{k} {v:.2f} s" for k, v in report.stage_seconds.items())),
        *(Text(f"note: {n}") for n in report.notes),
    )


def _header(report: CompileReport) -> Text:
    nodes = " -> ".join(f"{level} {count}" for level, count in report.node_counts.items())
    why = f" ({report.executable_why})" if report.executable_why else ""
    return Text(
        f"{report.model_class}: {report.num_parameters:,} parameters, {report.weight_bytes / 1e6:,.1f} MB of "
        f"{report.dtype} on {report.device}\n"
        f"captured by {report.capture_route}; ops per level: {nodes}\n"
        f"executable: {report.executable or 'none (explain only)'}{why}"
    )


def _layers(report: CompileReport) -> Table:
    """One row for each run of equal layers."""
    table = Table(show_edge=False, pad_edge=False)
    for name, justify in (("layers", "left"), ("state", "left"), ("KV heads x (K + V)", "right"), ("dtype", "left"),
                          ("bytes of T tokens, one layer", "right"), ("bytes/token", "right"), ("group", "right")):  # fmt: skip
        table.add_column(name, justify=justify)

    def key(layer: dict):
        return tuple(v for k, v in layer.items() if k != "layer")

    for _, run in groupby(report.layers, key=key):
        run = list(run)
        first, last = run[0], run[-1]
        name = first["layer"] if len(run) == 1 else f"{first['layer']} .. {last['layer']} ({len(run)})"
        window = f" (W={first['window']})" if first["window"] is not None else ""
        heads = f"{first['num_kv_heads']} x ({first['head_dim']} + {first['head_dim_v']})"
        table.add_row(name, first["kind"] + window, heads, first["dtype"], first["formula"],
                      f"{first['bytes_per_token']:,}", str(first["group"]))  # fmt: skip
    return table


def _passes(report: CompileReport) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for name, justify in (("pass", "left"), ("matched", "right"), ("refused", "right"), ("ops", "right"),
                          ("seconds", "right"), ("what", "left")):  # fmt: skip
        table.add_column(name, justify=justify)
    for p in report.passes:
        kinds = Counter(f"{m.pattern}" + (f" [{m.detail}]" if m.detail else "") for m in p.matches)
        if p.name == "simplify":
            kinds = Counter(m.pattern for m in p.matches)
        what = "; ".join(f"{count} {kind}" for kind, count in kinds.most_common(3))
        table.add_row(p.name, str(len(p.matches)), str(len(p.refusals)), f"{p.num_ops_before} -> {p.num_ops_after}",
                      f"{p.seconds:.2f}", what)  # fmt: skip
    return table


def _refusals(report: CompileReport) -> list[Text]:
    if not report.refusals:
        return [Text("  refused: nothing")]
    lines = [Text("  refused:")]
    for r in report.refusals:
        where = ", ".join(x for x in (r.module_path, r.source_line) if x)
        lines.append(Text(f"    {r.pattern} at {r.node} ({where}): {r.reason}"))
    return lines


def _providers(report: CompileReport) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for name in ("op", "provider", "nodes", "why"):
        table.add_column(name)
    for choice in report.providers:
        why = choice.why
        for name, reasons in choice.rejected.items():
            why += f"; not {name}: {'; '.join(reasons)}"
        table.add_row(choice.op, choice.provider, str(choice.num_nodes), why)
    return table
