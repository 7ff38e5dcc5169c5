"""Draws benchmarks/results/compare_engines.json: throughput against batch, and a decode step op by op.

python benchmarks/plot_compare.py

Writes docs/throughput.svg and docs/step_by_op.svg. Needs matplotlib (`pip install 'pagebinder[plot]'`).
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from compare_engines_report import kept
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
COLOURS = {  # told apart by people who see few colours, too
    "pagebinder": "#0072b2", "vllm": "#d55e00", "llama.cpp": "#009e73", "transformers generate": "#cc79a7",
    "transformers generate_batch": "#999999",
}  # fmt: skip
PANELS = {"decode_tokens_per_second": "decode, tokens/s", "prefill_tokens_per_second": "prefill, tokens/s"}


def throughput(batches: dict[str, dict]) -> Figure:
    """A panel for each of decode and prefill, a line for each engine."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(1, 2), PANELS.items()):
        for name, colour in COLOURS.items():
            points = [(int(n), c["engines"][name][key]) for n, c in batches.items() if name in c["engines"]]
            if points:
                axes.plot(*zip(*points), marker="o", color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks([int(n) for n in batches], labels=list(batches))
        if key.startswith("decode"):  # over two orders of magnitude
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("requests at once")
        axes.set_title(label, loc="left")
        _plain(axes)
    figure.axes[0].legend(frameon=False)
    return figure


def step_by_op(rows: list[dict]) -> Figure:
    """A panel for each batch: what each op takes, and the least it could take at the machine's rates."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    names = sorted(
        {name for row in rows for name in row["ops"]}, key=lambda n: rows[0]["ops"].get(n, {"ms": 0})["ms"]
    )
    places = range(len(names))
    for axes, row in zip(figure.subplots(1, len(rows), sharey=True, squeeze=False)[0], rows):
        ops = [row["ops"].get(name, {"ms": 0.0, "limit_ms": 0.0}) for name in names]
        axes.barh(places, [op["ms"] for op in ops], color="#9ecae1", label="measured")
        axes.barh(
            places,
            [op["limit_ms"] for op in ops],
            height=0.35,
            color="#08519c",
            label="at the machine's rates",
        )
        axes.set_yticks(places, labels=[name.replace("_", " ") for name in names])
        axes.set_title(f"{row['requests']} request(s): {row['step_ms']:.0f} ms", loc="left")
        axes.set_xlabel("ms of a decode step")
        _plain(axes)
    figure.axes[-1].legend(frameon=False, loc="lower right")
    return figure


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)


def main() -> None:
    """Draw what there are results for."""
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: small files that can be searched
    matplotlib.rcParams["svg.hashsalt"] = "pagebinder"  # equal figures are equal files
    results = kept()
    for name, case, draw in (("throughput", "batch", throughput), ("step_by_op", "step", step_by_op)):
        if case in results:
            draw(results[case]).savefig(DOCS / f"{name}.svg", metadata={"Date": None})
            print(f"wrote docs/{name}.svg")


if __name__ == "__main__":
    main()
