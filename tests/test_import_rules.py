"""Who may import whom, read from the source of every file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pagebinder

PACKAGE = Path(pagebinder.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

ROOMS = {"frontend", "passes", "custom_ops", "runtime", "models", "export", "server"}
MAY_IMPORT = {
    "custom_ops": set(),
    "models": {"custom_ops"},
    "frontend": {"custom_ops"},
    "passes": {"custom_ops"},
    "runtime": {"custom_ops"},
    "export": {"custom_ops"},
    "server": {"runtime"},
}
LEAVES = {
    "ambient",
    "collector",
    "config",
    "config_checks",
    "errors",
    "forks",
    "guides",
    "interrupts",
    "report",
    "graph_tools",
    "paths",
    "sampling_defaults",
    "sampling_params",
    "explain",
    "explain_html",
    "explain_rates",
}  # of the package, not of a room
# These know all rooms.
TOP = {
    *("cli", "commands", "compile", "compiler", "compiled_model", "compiled_encoder", "artefacts"),
    *("describe", "doctor", "__init__", "__main__"),
}
LAZY = {("report", "explain_html"), ("config", "runtime")}  # inside functions only

WITHOUT_TORCH = [
    "pagebinder.runtime.request",
    "pagebinder.runtime.scheduler",
    *sorted(
        ".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts)
        for f in (PACKAGE / "runtime" / "kv").glob("*.py")
        if f.stem != "__init__"
    ),
    "pagebinder.runtime.kv",
]


def name_of(file: Path) -> str:
    parts = list(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(f): f for f in FILES}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(file: Path, *, at_run_time: bool = False, lazy: bool = True) -> set[str]:
    """Modules a file imports by absolute name; without those for type checkers, or inside functions, on demand."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if at_run_time and is_type_checking(node):
            return
        if not lazy and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide which room is meant"
            found.add(node.module)
            found.update(f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in NAMES)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text(encoding="utf-8")))
    return found


def place(module: str) -> str | None:
    """ "frontend", "errors", ... : the room or root module that a dotted name of ours is in."""
    parts = module.split(".")
    if parts[0] != "pagebinder":
        return None
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.parametrize("name", NAMES)
def test_imports_go_down_only(name):
    here = place(name)
    for module in imports(NAMES[name]):
        there = place(module)
        if there is None or there == here or here in TOP:
            continue
        allowed = LEAVES | MAY_IMPORT.get(here, set()) | {other for leaf, other in LAZY if leaf == here}
        assert there in allowed, f"{name} imports {module}"


def test_every_file_has_a_known_place():
    assert {p for name in NAMES if (p := place(name)) not in TOP} <= ROOMS | LEAVES


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_leaves_import_only_leaves(name):
    at_top = {place(m) for m in imports(PACKAGE / f"{name}.py", lazy=False)} - {None}
    anywhere = {place(m) for m in imports(PACKAGE / f"{name}.py")} - {None}
    assert at_top <= LEAVES
    assert {(name, other) for other in anywhere - at_top} <= LAZY


def reachable(module: str) -> set[str]:
    """All modules that are loaded with one, packages around it left out."""
    seen, queue = set(), [module]
    while queue:
        for name in imports(NAMES[queue.pop()], at_run_time=True):
            if name not in seen:
                seen.add(name)
                queue += [name] if name in NAMES else []
    return seen


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_block_and_request_bookkeeping_never_imports_torch(module):
    assert not {m for m in reachable(module) if m.split(".")[0] in ("torch", "transformers")}


def test_nothing_of_the_package_is_importable_from_outside_it():
    """`custom_ops` beside `pagebinder.custom_ops` would register ops twice."""
    rooms = sorted(ROOMS)
    script = f"import importlib.util as u; print([m for m in {rooms} if u.find_spec(m)])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_second_import_under_another_name_cannot_register_ops_again():
    script = f"""
import sys
import torch
import pagebinder.custom_ops
op = torch.ops.pagebinder.attention.default
sys.path.insert(0, {str(PACKAGE)!r})
try:
    import custom_ops.attention.semantic
except RuntimeError as error:
    print("refused" if "pagebinder::" in str(error) else error)
else:
    print("registered twice")
print(torch.ops.pagebinder.attention.default is op)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["refused", "True"]
