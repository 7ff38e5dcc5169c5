"""The examples of README and of pages under docs run as written, in one go; the links of all pages lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run_and_print_text(tmp_path):
    others = ("docs/usage.md", "docs/own_loop.md")
    pages = README.read_text() + "".join((README.parent / page).read_text() for page in others)
    code = "\n".join(re.findall(r"```python\n(.*?)```", pages, re.DOTALL))
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert len(result.stdout.split()) > 5


def test_the_page_on_own_models_runs(tmp_path):
    page = (README.parent / "docs/own_models.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "page.py").write_text(code)
    command = [sys.executable, tmp_path / "page.py"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "short_conv" in result.stdout and "RequestOutput" in result.stdout


@pytest.mark.parametrize(
    "page", [README, *sorted((README.parent / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert page.name != README.name or len(links) > 5
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []
