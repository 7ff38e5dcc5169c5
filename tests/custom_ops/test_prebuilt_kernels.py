"""Kernels that came compiled with the package: which are used, and when they are not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from rich.console import Console

from pagebinder.artefacts.machine import kernel_fits, kernel_key
from pagebinder.custom_ops.cpu import build, compiler, make_prebuilt, parts, prebuilt
from pagebinder.doctor import examine, render

REPOSITORY = Path(__file__).parents[2]
SOURCE = '#include "tiny.h"\nextern "C" int pagebinder_answer() { return ANSWER; }\n'
BASELINE = prebuilt.Level("baseline", (), frozenset())  # what every processor has
OTHERS = prebuilt.Level("others", (), frozenset({"a_feature_of_others"}))

pytestmark = pytest.mark.skipif(prebuilt.best_level() is None, reason="prebuilt kernels are for x86-64 Linux")


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package of one part of one line, with prebuilt libraries for the level that every processor has."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.cpp").write_text(SOURCE)
    (sources / "tiny.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(parts, "SOURCE_DIR", sources)
    for part in {*parts.PARTS} - {"core"}:
        monkeypatch.delitem(parts.PARTS, part)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    monkeypatch.setattr(prebuilt, "LEVELS", (OTHERS, BASELINE))
    monkeypatch.setenv("PAGEBINDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PAGEBINDER_CPU_MARCH", raising=False)
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_failure", {})
    monkeypatch.setattr(build, "_prebuilt_failure", [])
    monkeypatch.setattr(build, "_register", lambda part, path: None)
    prebuilt._find.cache_clear()
    make_prebuilt.make(BASELINE, prebuilt.FOLDER)
    yield sources
    prebuilt._find.cache_clear()


def no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")


def test_prebuilt_kernels_need_no_compiler_and_no_cache(package, monkeypatch, tmp_path):
    no_compiler(monkeypatch)
    assert build.problem() is None
    assert build.load() == prebuilt.FOLDER / "baseline" / "core.so"
    assert not (tmp_path / "cache").exists() and not build.compiler_is_proven()


def test_a_better_level_comes_first_if_the_processor_has_it(package, monkeypatch):
    make_prebuilt.make(OTHERS, prebuilt.FOLDER)
    found, why = build.in_use()
    assert found.level is BASELINE and why == "others: this processor has no a_feature_of_others"
    features = compiler.cpu_features()
    monkeypatch.setattr(compiler, "cpu_features", lambda: features + " a_feature_of_others")
    prebuilt._find.cache_clear()
    assert build.in_use()[0].level is OTHERS


@pytest.mark.parametrize(
    "changed, why",
    [
        ("source", "other sources"), ("header", "other sources"), ("torch", "made for torch 1.0"),
        ("flags", "other sources"), ("manifest", "cannot be read"), ("march", "PAGEBINDER_CPU_MARCH is set"),
        ("nothing there", "this installation has none"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_built_here(package, monkeypatch, changed, why):
    manifest = prebuilt.FOLDER / "baseline" / prebuilt.MANIFEST
    facts = json.loads(manifest.read_text())
    if changed == "source":
        (package / "tiny.cpp").write_text(SOURCE + "// edited\n")
    elif changed == "header":
        (package / "tiny.h").write_text("#define ANSWER 43\n")
    elif changed == "march":
        monkeypatch.setenv("PAGEBINDER_CPU_MARCH", "native")
    elif changed == "nothing there":
        manifest.unlink()
    else:
        text = json.dumps(facts | {changed: "1.0"})
        manifest.write_text(text if changed in facts else "{")
    found, reason = build.in_use()
    assert found is None and why in reason
    assert build.load() == build.library_path() and build.is_intact(build.library_path())


def test_a_damaged_library_is_told_and_built_here(package, caplog):
    (prebuilt.FOLDER / "baseline" / "core.so").write_bytes(b"")
    assert build.load() == build.library_path()
    assert "core.so is damaged" in caplog.text and build.in_use()[0] is None


def test_a_library_that_does_not_load_is_told_and_built_here(package, monkeypatch, caplog):
    def register(part, path):
        if path.is_relative_to(prebuilt.FOLDER):
            raise OSError("version GLIBCXX_9 not found")

    monkeypatch.setattr(build, "_register", register)
    assert build.load() == build.library_path() and "GLIBCXX_9 not found" in caplog.text


def test_they_are_made_once(package):
    library = prebuilt.FOLDER / "baseline" / "core.so"
    before = library.stat().st_mtime_ns
    make_prebuilt.make(BASELINE, prebuilt.FOLDER)
    assert library.stat().st_mtime_ns == before
    library.write_bytes(b"")
    make_prebuilt.make(BASELINE, prebuilt.FOLDER)
    assert library.stat().st_size and [p.name for p in prebuilt.FOLDER.iterdir()] == ["baseline"]


def test_an_artefact_keeps_its_kernels_where_they_fit(package, monkeypatch):
    """Saved with prebuilt kernels or built ones, loaded where the others are, or neither."""
    ready = kernel_key("core")
    monkeypatch.setenv("PAGEBINDER_CPU_MARCH", "native")
    assert not kernel_fits("core", ready)
    monkeypatch.delenv("PAGEBINDER_CPU_MARCH")
    native = build.build_key()
    assert native != ready and kernel_fits("core", native) and kernel_fits("core", ready)
    no_compiler(monkeypatch)
    assert kernel_fits("core", ready) and not kernel_fits("core", "of other sources")
    monkeypatch.setattr(prebuilt, "FOLDER", package)
    assert kernel_fits("core", ready) and kernel_fits("core", "of other sources")  # nothing else can be had


def test_doctor_tells_which_are_used(package):
    facts = examine()
    assert facts["cache"]["prebuilt"]["level"] == "baseline"
    console = Console(width=200)
    with console.capture() as text:
        console.print(render(facts))
    assert "prebuilt for baseline" in text.get()


def test_the_levels_flags_are_known_to_the_compiler():
    if compiler.problem() is not None:
        pytest.skip("no C++ compiler")
    assert all(compiler.accepts(level.options) for level in prebuilt.LEVELS)
    assert not compiler.accepts(("-mno-such-thing",))


def test_a_plain_wheel_has_no_kernels_and_no_platform(tmp_path):
    """And one with prebuilt kernels has both: setup.py, on a package of one file."""
    folder = tmp_path / "pagebinder/custom_ops/cpu"
    (folder / "prebuilt" / "a-level").mkdir(parents=True)
    (folder / "prebuilt" / "a-level" / "core.so").touch()
    (folder / "make_prebuilt.py").touch()
    for package in (folder, *folder.parents[:2]):
        (package / "__init__.py").touch()
    (tmp_path / "setup.py").write_text((REPOSITORY / "setup.py").read_text())
    found = '[tool.setuptools.packages.find]\ninclude = ["pagebinder*"]\n'
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "pagebinder"\nversion = "1"\n{found}')
    for value, tag in (("1", "py3-none-linux_x86_64"), ("", "py3-none-any")):
        command = [sys.executable, "setup.py", "-q", "bdist_wheel"]
        environment = {**os.environ, "PAGEBINDER_PREBUILT": value}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        names = ZipFile(tmp_path / "dist" / f"pagebinder-1-{tag}.whl").namelist()
        assert ("pagebinder/custom_ops/cpu/prebuilt/a-level/core.so" in names) == bool(value)
