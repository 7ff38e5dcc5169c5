"""A picture of an event log: the pool over time, as SVG or PNG.

    blocks   | ######## in use, by kind of layer ######## | oooo cached oooo |      free      |   over steps
    events   |  ^ prefix hits      v evictions      x preemptions    <> swaps                 |
    waste    |  ~~~~ share of the memory in use that no token fills ~~~~                      |
    owners   |  one row per block, coloured by the request that holds it (small pools only)   |

Needs matplotlib (`pip install 'pagebinder[plot]'`), which is imported when a picture is drawn. Runs of any length
are cut into at most MAX_COLUMNS columns: means for levels, sums for events, the last owner for single blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pagebinder.errors import EventLogError
from pagebinder.paths import replaced, user_path
from pagebinder.runtime.kv.event_log import CACHED, KVEventLog, cannot_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")
MAX_COLUMNS = 1000
MAX_MARKS = 120
# Okabe and Ito's palette: tells apart for all common kinds of colour blindness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#B8A200")
FREE_COLOUR, CACHED_COLOUR = "#FFFFFF", "#CFCFCF"
GRID = {"color": "#000000", "alpha": 0.12, "linewidth": 0.6}
# Field of StepRecord, lane label, unit of the total, marker, colour.
EVENTS = (
    ("hit_tokens", "prefix hits", "tokens", "^", "#009E73"),
    ("evictions", "evictions", "blocks", "v", "#D55E00"),
    ("preemptions", "preemptions", "", "X", "#000000"),
    ("swaps_out", "swaps out", "", "<", "#CC79A7"),
    ("swaps_in", "swaps in", "", ">", "#0072B2"),
)


def draw_pool(log: KVEventLog, path: str | Path) -> None:
    """Write the picture of a log to `path` (.svg, .png or .pdf).

    Raises EventLogError for a log without steps, another suffix, a file that cannot be written, or if matplotlib is
    not installed.
    """
    path = user_path(path, EventLogError)
    if path.suffix.lower() not in SUFFIXES:
        raise EventLogError(f"cannot draw to {path}: choose a name that ends in {', '.join(SUFFIXES)}")
    figure = pool_figure(log)
    try:
        with replaced(path) as new:
            figure.savefig(new, dpi=130)
    except OSError as error:
        raise cannot_write(path, error) from error


def pool_figure(log: KVEventLog) -> Figure:
    """The picture as a matplotlib figure; axes from top to bottom: blocks, events, waste, and owners if known."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EventLogError(
            "drawing needs matplotlib, which is not installed: pip install 'pagebinder[plot]'"
        ) from error
    if not log.steps:
        raise EventLogError("the event log holds no step, so there is nothing to draw")
    edges = column_edges(len(log.steps), MAX_COLUMNS)
    heights = [3.6, 0.28 * len(_lanes(log)) + 0.25, 1.3]
    if log.has_owners:
        heights.append(min(0.6 + 0.035 * log.num_blocks, 5.0))
    figure = Figure(figsize=(12, sum(heights) + 1.3), layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights})
    _draw_blocks(axes[0], log, edges)
    _draw_events(axes[1], log)
    _draw_waste(axes[2], log, edges)
    if log.has_owners:
        _draw_owners(axes[3], log, edges)
    _finish(figure, axes, log)
    return figure


def column_edges(num_steps: int, max_columns: int) -> np.ndarray:
    """Steps [edges[i], edges[i + 1]) make column i; one step a column as long as that fits."""
    return np.unique(np.linspace(0, num_steps, min(num_steps, max_columns) + 1).astype(int))


def _means(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """[S] -> [columns], with the last column doubled so that a stepped line reaches the last edge."""
    means = np.add.reduceat(values, edges[:-1]) / np.diff(edges)
    return np.append(means, means[-1])


def _series(log: KVEventLog) -> list[tuple[str, list[int]]]:
    """(label, groups): groups of one kind and block size are one series."""
    kinds: dict[tuple[str, int], list[int]] = {}
    for i, group in enumerate(log.groups):
        kinds.setdefault((group.kind, group.block_size), []).append(i)
    series = []
    for (kind, block_size), groups in kinds.items():
        layers = sum(log.groups[i].num_layers for i in groups)
        plural = "s" if layers > 1 else ""
        label = f"{kind.replace('_', ' ')} ({layers} layer{plural}, block {block_size:,})"
        series.append((label, groups))
    return series


def _draw_blocks(axes: Axes, log: KVEventLog, edges: np.ndarray) -> None:
    in_use = np.array([step.in_use for step in log.steps], dtype=float)
    cached = np.array([step.cached for step in log.steps], dtype=float)
    layers, colours, labels = [], [], []
    series = _series(log)
    for counts, tint, prefix in ((in_use, False, ""), (cached, True, "cached: ")):
        for i, (label, groups) in enumerate(series):
            colour = COLOURS[i % len(COLOURS)]
            layers.append(_means(counts[:, groups].sum(axis=1), edges))
            colours.append(_tint(colour) if tint else colour)
            labels.append(prefix + label)
    areas = axes.stackplot(edges, *layers, step="post", colors=colours, labels=labels, linewidth=0)
    for area in areas[len(series) :]:
        area.set(hatch="////", edgecolor="#FFFFFF", linewidth=0)
    axes.set_ylim(0, log.num_usable_blocks)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("blocks (white: free)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", **GRID)


def _lanes(log: KVEventLog) -> list[tuple]:
    """The kinds of events that happened; hits and evictions are always shown."""
    return [event for event in EVENTS if event[0] in ("hit_tokens", "evictions") or log.total(event[0])]


def _draw_events(axes: Axes, log: KVEventLog) -> None:
    """A lane of marks per kind of event; the area of a mark grows with how much happened."""
    edges = column_edges(len(log.steps), MAX_MARKS)
    middles = (edges[:-1] + edges[1:]) / 2
    lanes = _lanes(log)
    for lane, (name, _, _, marker, colour) in enumerate(lanes):
        counts = np.add.reduceat([getattr(step, name) for step in log.steps], edges[:-1])
        there = counts > 0
        areas = 14 + 50 * counts[there] / max(counts.max(), 1)
        axes.scatter(
            middles[there], np.full(there.sum(), lane), s=areas, marker=marker, color=colour, linewidth=0
        )
    totals = [f"{label}: {log.total(name):,} {unit}".rstrip() for name, label, unit, _, _ in lanes]
    axes.set_yticks(range(len(lanes)), totals, fontsize=8)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", **GRID)


def _draw_waste(axes: Axes, log: KVEventLog, edges: np.ndarray) -> None:
    waste = _means(100 * np.array([step.waste for step in log.steps]), edges)
    axes.plot(edges, waste, drawstyle="steps-post", color="#000000", linewidth=1.1)
    axes.axhline(100 * log.mean_waste, color="#D55E00", linewidth=1.1, linestyle="--", label="mean")
    axes.annotate(
        f"mean {100 * log.mean_waste:.1f} %", (1, 100 * log.mean_waste), xycoords=("axes fraction", "data"),
        xytext=(5, 0), textcoords="offset points", va="center", color="#D55E00", fontsize=9,
    )  # fmt: skip
    axes.set_ylim(0, max(1.0, min(100.0, 1.15 * waste.max())))
    axes.set_ylabel("waste (%)")
    axes.grid(axis="y", **GRID)


def _draw_owners(axes: Axes, log: KVEventLog, edges: np.ndarray) -> None:
    """One row per block, one column per column of steps."""
    pixels = np.full((log.num_blocks, len(edges) - 1, 3), _rgb(FREE_COLOUR), dtype=np.uint8)
    colours: dict[str, tuple] = {CACHED: _rgb(CACHED_COLOUR)}
    last_steps = {int(edge) - 1: column for column, edge in enumerate(edges[1:])}
    for step, owners in log.owners_over_time():
        column = last_steps.get(step)
        if column is None:
            continue
        for block_id, owner in owners.items():
            if owner not in colours:
                colours[owner] = _rgb(COLOURS[(len(colours) - 1) % len(COLOURS)])
            pixels[block_id, column] = colours[owner]
    # Block 0 is the null block: nobody owns it, so the picture begins with block 1.
    extent = (edges[0], edges[-1], log.num_blocks - 0.5, 0.5)
    axes.imshow(pixels[1:], extent=extent, aspect="auto", interpolation="nearest")
    axes.set_ylabel("block id")


def _finish(figure: Figure, axes: Sequence[Axes], log: KVEventLog) -> None:
    """What the axes share: frames, the axis of steps, the legends and the headline."""
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_xlim(0, len(log.steps))
    seconds = log.steps[-1].time
    took = f"{seconds:,.1f} s" if seconds >= 1 else f"{1000 * seconds:,.0f} ms"
    axes[-1].set_xlabel(f"engine step (all together {took})")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    size = f", {log.num_usable_blocks * log.bytes_per_block / 2**20:,.1f} MiB" if log.bytes_per_block else ""
    title = (
        f"KV-cache pool of {log.num_usable_blocks:,} blocks{size}: {log.hit_rate:.1%} of prompt tokens hit"
    )
    _legend_of_blocks(figure, axes[0], title)
    if log.has_owners:
        _legend_of_owners(figure)


def _legend_of_blocks(figure: Figure, axes: Axes, title: str) -> None:
    from matplotlib.patches import Patch

    handles, labels = axes.get_legend_handles_labels()
    half = len(handles) // 2
    # Column by column: a kind of layer, and below it what is cached of it.
    order = [i for pair in zip(range(half), range(half, 2 * half)) for i in pair]
    handles = [*(handles[i] for i in order), Patch(facecolor=FREE_COLOUR, edgecolor="#888888")]
    labels = [*(labels[i] for i in order), "free"]
    figure.legend(
        handles, labels, loc="outside upper center", ncols=min(half + 1, 4), frameon=False, fontsize=9,
        title=title, title_fontproperties={"size": 12, "weight": "bold"},
    )  # fmt: skip


def _legend_of_owners(figure: Figure) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    requests = tuple(Patch(color=colour) for colour in COLOURS)
    handles = [requests, Patch(color=CACHED_COLOUR), Patch(facecolor=FREE_COLOUR, edgecolor="#888888")]
    figure.legend(
        handles, [f"a request each, {len(COLOURS)} colours in turn", "cached", "free"],
        loc="outside lower center", ncols=3, frameon=False, fontsize=9, handlelength=6,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip


def _bytes(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _rgb(colour: str) -> tuple[int, int, int]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def _tint(colour: str) -> tuple[float, float, float]:
    """Two thirds of the way to white."""
    return tuple((part / 255 + 2) / 3 for part in _rgb(colour))
