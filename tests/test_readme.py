"""The README's examples run as written, one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run_and_print_text(tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
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


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    assert links
    assert all((README.parent / link).exists() for link in links)
