"""The table of published models is well-formed; its runner tells what it has not, what is exact and what is wrong.

No checkout is needed: one is made up in a temporary directory.
"""

from __future__ import annotations

import pytest
import torch

from tests.third_party import run as runner
from tests.third_party.case import Built, Case, scaled
from tests.third_party.cases import COMMITS, all_cases
from tests.third_party.checkouts import Checkout
from tests.third_party.serving import check
from tests.third_party.table import page

MADE_UP = """
import torch
from torch import nn
from torch.nn import functional as F


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(128, 32), nn.Linear(32, 96), nn.Linear(32, 128)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + y.transpose(1, 2).flatten(2))
"""
REPOSITORY = "someone/tiny"


def tiny(checkout: Checkout):
    return scaled(checkout.load("made_up_model").Tiny())


def tiny_that_says_otherwise(checkout: Checkout):
    model = tiny(checkout)
    return Built(model, lambda ids: -model(torch.tensor([ids]))[0])


def made_up(build, name="tiny", **options) -> Case:
    return Case(name, REPOSITORY, "made_up_model.py", "Tiny", "nothing", build, **options)


@pytest.fixture
def checkouts(tmp_path):
    folder = tmp_path / "someone+tiny"
    folder.mkdir()
    (folder / "made_up_model.py").write_text(MADE_UP)
    return tmp_path


@pytest.fixture
def only(monkeypatch):
    """Lets the runner know these cases alone."""

    def choose(*cases):
        monkeypatch.setattr(runner, "all_cases", lambda: list(cases))
        monkeypatch.setitem(COMMITS, REPOSITORY, "0" * 40)

    return choose


def test_every_case_has_a_commit_and_fits_the_table():
    cases = all_cases()
    assert len(cases) >= 50
    assert {case.repository for case in cases} == set(COMMITS)
    assert all(len(commit) == 40 for commit in COMMITS.values())
    for case in cases:
        cells = (case.name, case.file, case.class_name, case.unusual, case.adaptation)
        assert all(cells) and not any("|" in cell or "\n" in cell for cell in cells), case.name
        assert case.file.endswith(".py") and not case.file.startswith("/")


def test_missing_checkouts_are_told_with_the_commands_that_make_them(tmp_path, only, capsys):
    only(made_up(tiny))
    assert runner.main(["--checkouts", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"git clone https://github.com/{REPOSITORY} {tmp_path}/someone+tiny" in out
    assert f"checkout {'0' * 40}" in out and "1 without a checkout" in out
    assert runner.main(["--checkouts", str(tmp_path), "--list"]) == 0


def test_a_model_is_exact_and_one_that_says_otherwise_is_wrong(checkouts, only, capsys):
    wrong = made_up(tiny_that_says_otherwise, name="otherwise")
    only(made_up(tiny), wrong)
    assert runner.main(["--checkouts", str(checkouts), "--jobs", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if " tiny " in line] == ["exact"]
    assert [line.split()[0] for line in lines if " otherwise " in line] == ["WRONG"]
    only(made_up(tiny))
    assert runner.main(["--checkouts", str(checkouts), "--jobs", "1"]) == 0


def test_what_is_not_installed_and_what_cannot_be_built_is_said(checkouts):
    record = check(made_up(tiny, needs=("no_such_package",)), checkouts)
    assert (record.status, record.reason) == ("not run", "it needs no_such_package")
    assert check(made_up(lambda checkout: 1 / 0), checkouts).status == "error"


def test_the_page_has_a_row_for_each_case(only):
    cases = [made_up(tiny), made_up(tiny, name="other")]
    only(*cases)
    record = runner.Record("tiny", "refused", "It relates tokens:\n  - a | b\n  - c")
    text = page(cases, [record, runner.Record("other", state_kinds=("full_attention",))])
    assert "refused: a \\| b (and 1 more) |" in text and "exact: full attention |" in text
