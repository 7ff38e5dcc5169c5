"""Without a GPU, Triton's interpreter runs the kernels; triton reads that as it is first imported.

Tests that nightly.txt names are left out by day.
"""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

NIGHTLY = [
    line
    for line in (Path(__file__).parent / "nightly.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def pytest_collection_modifyitems(config, items):
    """A test that is asked for by its name runs at any time."""
    asked = any("::" in argument for argument in config.args) or config.option.keyword
    if os.environ.get("PAGEBINDER_NIGHTLY") == "1" or asked:
        return
    skip = pytest.mark.skip(reason="takes long: PAGEBINDER_NIGHTLY=1")
    unused = set(NIGHTLY)
    for item in items:
        if matching := [name for name in NIGHTLY if item.nodeid.startswith(name)]:
            unused -= set(matching)
            item.add_marker(skip)
    everything = [str(Path(__file__).parent)] == [str(Path(a).resolve()) for a in config.args]
    if everything and unused:
        raise pytest.UsageError(f"nightly.txt names no test: {', '.join(sorted(unused))}")
