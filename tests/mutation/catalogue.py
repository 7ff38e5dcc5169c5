"""All faults, and the page that lists them: `python -m tests.mutation.catalogue` writes docs/safety_net.md."""

from __future__ import annotations

from pathlib import Path

from tests.mutation.audit_faults import CAPTURE_FAULTS, MIXING_FAULTS
from tests.mutation.faults import AUDIT, LOCK, NOTHING, VERIFIER, Fault
from tests.mutation.lock_faults import LOCK_FAULTS
from tests.mutation.pass_faults import CAPTURED_FAULTS, PASS_FAULTS

PAGE = Path(__file__).parents[2] / "docs" / "safety_net.md"
FAULTS = [*MIXING_FAULTS, *CAPTURE_FAULTS, *PASS_FAULTS, *CAPTURED_FAULTS, *LOCK_FAULTS]

INTRODUCTION = """# Safety net

A compiler for models goes wrong in silence: a window that is off by one, a soft cap that a kernel does not know, a
convolution that nobody saw. Pagebinder has three nets for that. This page lists {total} accidents, each seeded on
purpose by a test, and which net catches it. `python -m tests.mutation.catalogue` writes this page from the tests'
own list; a test fails when it is out of date, when a fault slips through, or when a net raises an alarm over
one of the same {bases} models without a fault.

| net | when it runs | error | faults it catches first |
|---|---|---|---|
| audit: masks and leaves proven, layers counted, no other op relates tokens | always | `CaptureError` | {audit} |
| verifier: every step against the one before or the source model | if asked | `VerificationError` | {verifier} |
| lock: the plan against the one that was agreed | if given | `PlanDriftError` | {lock} |

"Caught by" names the first net that catches a fault with all three stretched: `CompileConfig(verify="sample",
locked="plan.lock")`, or `verify="full"` where the table says so. After a fault that the lock catches, the compiled
model still agrees with its source. But for *norm rounds late*: one unit in the last place of bfloat16 is no more than
a sum in another order, which the verifier must tolerate.
{missed}
Beside these, `tests/fuzz` composes decoders at random (norms, RoPE styles, masks, ways to write attention, illegal
ingredients): each is served token for token, or refused with a reason.
"""
TITLES = {
    "Models that relate tokens": MIXING_FAULTS,
    "Capture, hook and leaves": CAPTURE_FAULTS,
    "Passes and providers": PASS_FAULTS,
    "Recurrences and experts": CAPTURED_FAULTS,
    "Right numbers, another plan": LOCK_FAULTS,
}


def page() -> str:
    """The text of docs/safety_net.md."""
    counts = {net: sum(f.net == net for f in FAULTS) for net in (AUDIT, VERIFIER, LOCK, NOTHING)}
    missed = (
        f"\n**{counts[NOTHING]} of them are caught by no net**; the tables say why.\n"
        if counts[NOTHING]
        else ""
    )
    facts = {"total": len(FAULTS), "bases": len({f.base for f in FAULTS}), "missed": missed}
    text = INTRODUCTION.format(**facts, **{net: counts[net] for net in (AUDIT, VERIFIER, LOCK)})
    for title, faults in TITLES.items():
        text += f"\n## {title}\n\n| fault | imitates | caught by |\n|---|---|---|\n"
        text += "".join(f"| {f.name} | {f.imitates} | {_caught_by(f)} |\n" for f in faults)
    return text


def _caught_by(fault: Fault) -> str:
    if fault.net == NOTHING:
        return f"NOT caught: {fault.why_missed}"
    return f"{fault.net} (full)" if fault.net == VERIFIER and fault.verify == "full" else fault.net


if __name__ == "__main__":
    PAGE.write_text(page())
