"""docs/compatibility.md: what became of every architecture, written from the records of a full run.

A run in parts: `python -m tests.zoo.run --family causal --json causal.json`, and so on, then
`python -m tests.zoo.table causal.json seq2seq.json encoder.json`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from tests.zoo.architectures import FAMILIES
from tests.zoo.serving import STATUSES, Record

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
MAX_REASON = 160
TITLES = {
    "causal": "Decoders (transformers' causal language models)",
    "seq2seq": "Encoder-decoders (transformers' sequence-to-sequence language models)",
    "encoder": "Encoders (transformers' masked language models)",
    "multimodal": "Text of multimodal models (of which transformers has no class for text alone)",
}
MEANINGS = {
    "exact": "compiled strictly and served; every token, and its log-probability, is the source model's",
    "refused": "`compile_model` raised an error that says what it does not understand; nothing is served",
    "wrong": "served, and a token differs from the source model's: a bug",
    "error": "another failure than a refusal: a bug",
    "not built": "no tiny model can be made or run from its config alone; not judged",
    "not a decoder": "it does not generate one sequence of text tokens; not judged",
}
INTRODUCTION = """# Compatibility

Written by `make zoo` (do not edit). For every architecture in transformers' lists of language models a tiny model
with random weights is made from its config class (kinds of layers mixed, windows of 16 tokens), compiled with
`compile_model` and served: eight requests that come one by one and are prefilled in chunks beside decodes, prompts
whose beginning is cached, and a cache so small that requests are preempted. Each result is compared with runs of the
source model over the whole sequence, without a cache. Encoders compute sequences of mixed lengths in one batch, and
their rows are compared. Of models of text and images or audio the text is served: prompts are token ids alone. One
architecture again, with the whole message: `python -m tests.zoo.run NAME`.
"""


def write_page(records: Sequence[Record], path: Path = PAGE) -> None:
    path.write_text(page(records))


def page(records: Sequence[Record]) -> str:
    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}."
    parts = [INTRODUCTION, versions + "\n", _counts(records)]
    for family, title in TITLES.items():
        own = [record for record in records if record.family == family]
        if own:
            parts.append(f"## {title}\n\n{_rows(own)}")
    return "\n".join(parts)


def _counts(records: Sequence[Record]) -> str:
    families = [family for family in TITLES if any(r.family == family for r in records)]
    names = {
        "causal": "decoders",
        "seq2seq": "encoder-decoders",
        "encoder": "encoders",
        "multimodal": "multimodal",
    }
    lines = [
        "| result | " + " | ".join(names[f] for f in families) + " | meaning |",
        "|---|" + "---|" * (len(families) + 1),
    ]
    for status, meaning in MEANINGS.items():
        counts = [sum(r.status == status and r.family == f for r in records) for f in families]
        lines.append(f"| {status} | " + " | ".join(map(str, counts)) + f" | {meaning} |")
    totals = [sum(r.family == f for r in records) for f in families]
    lines.append("| all | " + " | ".join(map(str, totals)) + " | |")
    return "\n".join(lines) + "\n"


def _rows(records: Sequence[Record]) -> str:
    """Bugs first, then in alphabetical order."""
    bugs = STATUSES[:2]
    ordered = sorted(records, key=lambda r: (r.status not in bugs, r.name))
    lines = ["| architecture | class | result | state | reason |", "|---|---|---|---|---|"]
    for r in ordered:
        state = ", ".join(kind.replace("_", " ") for kind in r.state_kinds) if r.status == "exact" else ""
        lines.append(f"| {r.name} | {r.class_name} | {r.status} | {state} | {short(r)} |")
    return "\n".join(lines) + "\n"


def short(record: Record) -> str:
    """The reason on one line: of a list of findings the first, and how many there are."""
    lines = [line.strip() for line in record.reason.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    findings = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    text = lines[0]
    if findings:
        text = findings[0]
        count = re.search(r" in (\d+) way\(s\)", lines[0])
        more = int(count.group(1)) - 1 if count else len(findings) - 1
        text = f"{_trim(text, MAX_REASON - 15)} (and {more} more)" if more else text
    elif len(lines) > 1 and lines[0].endswith(":"):
        text = f"{lines[0]} {lines[1]}"
    return _trim(text, MAX_REASON).replace("|", "\\|")


def _trim(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 4].rsplit(" ", 1)[0] + " ..."


def main(files: Sequence[str]) -> None:
    records = [Record(**record) for file in files for record in json.loads(Path(file).read_text())]
    found = {(record.family, record.name) for record in records}
    missing = [
        f"{name} ({family})"
        for family in FAMILIES
        for name in FAMILIES[family]
        if (family, name) not in found
    ]
    if missing:
        raise SystemExit(f"{len(missing)} architectures are in none of the files, for example {missing[0]}.")
    write_page(records)


if __name__ == "__main__":
    main(sys.argv[1:])
