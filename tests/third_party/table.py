"""docs/third_party.md: what became of every case, written from a full run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from tests.third_party.case import Case
from tests.third_party.cases import COMMITS
from tests.third_party.serving import STATUSES, Record

PAGE = Path(__file__).parents[2] / "docs" / "third_party.md"
MAX_REASON = 260
INTRODUCTION = """# Models as they are published

Written by `python -m tests.third_party.run --checkouts DIR --write-docs` (do not edit). Each row is a model file of a
public repository, imported from a checkout of the commit named. A tiny model with random weights is made from its
class, compiled with `compile_model` and served: prompts of 1 to 120 tokens, several at once, cut into chunks of 24
tokens, some with a cached beginning. "exact" means that every token, and its log-probability, is what the model's own
forward says over the whole sequence; "refused" means that `compile_model` raised an error with the reason shown, and
nothing is served. "Adaptation" says what was done around the code so that it can be imported on a CPU; of the code
itself nothing was changed unless it says so.

No code of others is part of this repository. `python -m tests.third_party.run --list` prints the commands that make
the checkouts and the packages that their files import, `--checkouts DIR NAME` runs single cases and shows whole
messages.
"""


def write_page(cases: Sequence[Case], records: Sequence[Record], path: Path = PAGE) -> None:
    path.write_text(page(cases, records))


def page(cases: Sequence[Case], records: Sequence[Record]) -> str:
    by_name = {record.name: record for record in records}
    counts = ", ".join(
        f"{count} {status}" for status in reversed(STATUSES)
        if (count := sum(record.status == status for record in records))
    )  # fmt: skip
    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    lines = [
        INTRODUCTION,
        f"{versions}: {counts}.\n",
        "| case | repository, commit | file, class | what is unusual | adaptation | result |",
        "|---|---|---|---|---|---|",
    ]
    for case in sorted(cases, key=lambda c: (c.repository.lower(), c.name)):
        commit = COMMITS[case.repository][:10]
        lines.append(
            f"| {case.name} | {case.repository} {commit} | {case.file}, {case.class_name} | {case.unusual} "
            f"| {case.adaptation} | {_result(case, by_name[case.name])} |"
        )
    return "\n".join(lines) + "\n"


def _result(case: Case, record: Record) -> str:
    if record.status == "exact":
        return "exact: " + ", ".join(kind.replace("_", " ") for kind in record.state_kinds)
    checkout = re.escape(case.repository.replace("/", "+"))
    reason = re.sub(rf"[^\s()]*{checkout}/", "", short(record))  # wherever it lay
    return f"{record.status}: {reason}".replace("|", "\\|")


def short(record: Record) -> str:
    """The reason on one line: of a list of findings the first, and how many there are."""
    lines = [line.strip() for line in record.reason.splitlines() if line.strip()]
    findings = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    if not lines:
        return ""
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    text = (findings or lines)[0]
    if not findings and len(lines) > 1 and text.endswith(":"):
        text = f"{text} {lines[1]}"
    return (text if len(text) <= MAX_REASON else text[: MAX_REASON - 4].rsplit(" ", 1)[0] + " ...") + more
