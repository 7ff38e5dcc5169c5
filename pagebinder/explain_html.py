"""The report as one HTML page that needs no network and no JavaScript: `explain_page.html.j2` filled in.

Here are the numbers of the page: totals, the time of each op at this machine's rates, and texts of sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from pagebinder.explain_rates import Rates, measured_rates
from pagebinder.report import CompileReport

TEMPLATE = "explain_page.html.j2"
LEVELS = ("captured", "semantic", "paged", "fused")
STEPS = ("decode", "prefill")
BYTES = ("weight_bytes", "activation_bytes", "cache_bytes")
LONG_NUMBER = re.compile(r"\d{4,}")


def explain_html(report: CompileReport, rates: Rates | None = None) -> str:
    """The page. `rates`: of the machine to judge by; None measures this one."""
    rates = rates or measured_rates(report.device, report.dtype)
    blocks = report.blocks()
    entries = [(cost, block["count"]) for block in blocks for cost in block["costs"]]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    env = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    env.filters.update(si=si, size=size, seconds=seconds, formula=formula, module=module)
    env.globals.update(timed=lambda numbers: timed(numbers, rates), changed=changed)
    return env.get_template(TEMPLATE).render(
        report=report,
        rates=rates,
        blocks=blocks,
        levels=LEVELS,
        steps=STEPS,
        step_texts=blocks[0]["steps"] if blocks else {},
        totals={step: total(((c["numbers"][step], n) for c, n in entries), rates) for step in STEPS},
        by_op=by_op(entries, rates),
        uncounted=sorted({cost["op"] for cost, _ in entries if not cost["counted"]}),
        refusals=_folded_refusals(blocks),
        verified=list(report.verified),
        stream_texts=_stream_texts(report),
    )


def timed(numbers: Mapping[str, float], rates: Rates) -> dict[str, Any]:
    """Numbers of an op with its bytes in total, its time at the rates, and which of the two rates binds."""
    moved = sum(numbers[name] for name in BYTES)
    return {
        **numbers,
        "bytes": moved,
        "seconds": rates.seconds(numbers["flops"], moved),
        "binds": rates.binds(numbers["flops"], moved),
    }


def total(numbers: Iterable[tuple[Mapping[str, float], int]], rates: Rates) -> dict[str, Any]:
    """Sums over (numbers of an op, how often it runs). The time is the sum of the ops' times."""
    sums = dict.fromkeys(("flops", *BYTES, "bytes", "seconds"), 0.0)
    bound = {"compute": 0.0, "memory": 0.0}
    for one, count in numbers:
        facts = timed(one, rates)
        bound[facts["binds"]] += count * facts["seconds"]
        for name in sums:
            sums[name] += count * facts[name]
    return {**sums, "bound": bound, "binds": max(bound, key=bound.__getitem__)}


def by_op(entries: Iterable[tuple[Mapping[str, Any], int]], rates: Rates) -> list[dict[str, Any]]:
    """Totals for each kind of op over the whole model, the most expensive in decoding first."""
    found: dict[str, list] = {}
    for cost, count in entries:
        found.setdefault(cost["op"], []).append((cost, count))
    rows = []
    for op, costs in found.items():
        steps = {step: total(((c["numbers"][step], n) for c, n in costs), rates) for step in STEPS}
        counted = all(c["counted"] for c, _ in costs)
        rows.append({"op": op, "calls": sum(n for _, n in costs), "counted": counted, **steps})
    return sorted(rows, key=lambda row: -row["decode"]["seconds"])


def changed(row: Mapping[str, Any], level: str) -> bool:
    """Did the step to this level change the module's ops? Shapes do not count."""
    if level == LEVELS[0]:
        return False
    before, now = row[LEVELS[LEVELS.index(level) - 1]], row[level]
    return _essence(before) != _essence(now)


def _essence(cells: Iterable[Mapping[str, Any]]) -> list[tuple]:
    return [(c["op"], c["provider"], c["options"], c["count"]) for c in cells]


def _folded_refusals(blocks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{"block": block["title"], **refusal} for block in blocks for refusal in block["refusals"]]


def _stream_texts(report: CompileReport) -> list[str]:
    """What is said of streams besides the forks, which are a table."""
    told = {fork["text"] for fork in report.stream_forks}
    return [line for line in report.streams if line not in told]


def module(at: str) -> str:
    """The place inside a layer; the layer itself has no name of its own."""
    return at or "(layer)"


def si(value: float) -> str:
    """1234567 -> "1.23 M"."""
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.3g}"


def size(value: float) -> str:
    """Bytes in binary units: 1536 -> "1.5 KiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return (
                f"{value / 1024**power:.3g} {unit}"
                if value < 1000 * 1024**power
                else f"{value / 1024**power:,.0f} {unit}"
            )
    return f"{value:.0f} B"


def seconds(value: float) -> str:
    for limit, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def formula(text: str) -> str:
    """A formula for reading: long numbers in units, products with a dot, powers raised by a caret."""
    short = LONG_NUMBER.sub(lambda m: si(float(m[0])).replace(" ", ""), text)
    return short.replace("**", "^").replace("*", "·")
