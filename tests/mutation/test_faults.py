"""Every seeded fault is caught by the net that the catalogue names, and sound models pass all nets."""

from __future__ import annotations

import pytest

import pagebinder
import pagebinder.compile as compiler
from pagebinder.errors import PagebinderError
from tests.helpers import by_day, nightly
from tests.mutation.bases import BASES, _capture, base, compile_base, config, lock_path
from tests.mutation.catalogue import FAULTS, PAGE, page
from tests.mutation.faults import ERRORS, NOTHING, Fault

# One of each kind of layer; those of faults by day are captured anyway.
BASES_BY_DAY = ("mistral", "gemma2", "lfm2", "gpt-oss experts", "bart", "plain", "written out")
IN_FULL = {"alibi", "by distance", "plain", "written out"} | {f.base for f in FAULTS if f.verify == "full"}


def compile_with(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Compile the broken model, or the base with the fault in the compiler, with all nets stretched."""
    locked = lock_path(fault.base)
    model = base(fault.base) if fault.model is None else fault.model()
    if fault.inject is not None:
        fault.inject(patch)
    if fault.model is None and not fault.recapture and compiler._capture is _capture:
        compile_base(fault.base, fault.verify, locked=locked)
    else:
        pagebinder.compile_model(model, config(fault.verify, locked=locked))


def as_parameter(fault: Fault, number: int):
    """Each twelfth fault by day, some for every net, and all of them at night."""
    marks = [pytest.mark.xfail(strict=True, reason=fault.why_missed)] if fault.net == NOTHING else []
    if number % 12:
        marks.append(nightly)
    return pytest.param(fault, id=fault.name, marks=marks)


@pytest.mark.parametrize("fault", [as_parameter(f, i) for i, f in enumerate(FAULTS)])
def test_every_fault_is_caught(fault, monkeypatch):
    with pytest.raises(PagebinderError) as caught:
        compile_with(fault, monkeypatch)
    if fault.net != NOTHING:
        assert isinstance(caught.value, ERRORS[fault.net]), caught.value
        assert fault.says in str(caught.value)


@pytest.mark.parametrize("name", by_day(BASES, BASES_BY_DAY))
def test_without_a_fault_all_nets_are_silent(name):
    report = compile_base(name, "full" if name in IN_FULL else "sample", locked=lock_path(name)).report
    assert report.verified and all(s.max_rel_error <= s.tolerance for s in report.verified if s.judged)
    assert any("the plan is the one in" in note for note in report.notes)


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run: python -m tests.mutation.catalogue"


def test_names_are_distinct():
    assert len({f.name for f in FAULTS}) == len(FAULTS) >= 40
