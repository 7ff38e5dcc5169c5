"""A fault: a small function that breaks the compiler or the model on purpose, and the net that must catch it.

    audit      what is captured is not understood, or relates tokens      CaptureError
    verifier   a step changes the logits                                  VerificationError
    lock       the plan is not the one that was agreed                    PlanDriftError

All nets are stretched for every fault; the one named is the first that catches it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pagebinder.errors import CaptureError, PlanDriftError, VerificationError

AUDIT, VERIFIER, LOCK, NOTHING = "audit", "verifier", "lock", "nothing"
ERRORS = {AUDIT: CaptureError, VERIFIER: VerificationError, LOCK: PlanDriftError}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One seeded fault.

    imitates: the accident in the field that it stands for. base: the sound model beside it, in `bases.BASES`.
    inject: breaks something, to be undone by the patch. model: makes a broken model instead of the base.
    says: what the error names. verify: the cheapest mode that catches it. recapture: the capture itself must run
    again, as the fault is in it. why_missed: for a fault that no net catches.
    """

    name: str
    imitates: str
    net: str
    base: str
    inject: Callable[[pytest.MonkeyPatch], None] | None = None
    model: Callable | None = None
    says: str = ""
    verify: str = "sample"
    recapture: bool = False
    why_missed: str = ""
