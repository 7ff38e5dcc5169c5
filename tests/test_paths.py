"""Paths of users are read with an error that helps; a file of theirs is replaced whole, or stays as it was."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from pagebinder import ConfigError, paths
from pagebinder.errors import EventLogError, PlanLockError
from pagebinder.passes.lock_file import read_plan_lock, write_plan_lock
from pagebinder.paths import replace_text, replaced, user_path
from pagebinder.report import CompileReport
from pagebinder.runtime.kv.event_log import KVEventLog


@pytest.mark.parametrize(
    ("path", "message"),
    [("", "is empty"), ("a\0b", "NUL"), ("~nobody-here/x", "home directory that ~nobody-here stands for")],
)
def test_what_is_no_path_is_refused_by_all_who_take_one(path, message):
    with pytest.raises(ConfigError, match=message):
        user_path(path)
    with pytest.raises(ConfigError, match=message):
        CompileReport().to_html(path)
    for use in (read_plan_lock, lambda p: write_plan_lock({}, p)):
        with pytest.raises(PlanLockError, match=message):
            use(path)
    with pytest.raises(EventLogError, match=message):
        KVEventLog.load(path)


def test_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/a") == tmp_path / "a" and user_path("a/~") == Path("a/~")


def full(path: Path) -> None:
    with open(path, "w") as file:
        file.write("the beginning")
    raise OSError(errno.ENOSPC, "No space left on device")  # as `write` says it: no name


def test_a_full_disk_leaves_what_was_there_and_is_named(tmp_path):
    file = tmp_path / "plan.lock"
    for expected in (None, "old"):
        if expected:
            file.write_text(expected)
        with pytest.raises(OSError, match=f"No space left on device: '{file}'"), replaced(file) as new:
            full(new)
        assert [p.read_text() for p in tmp_path.iterdir()] == [expected] * bool(expected)
    with pytest.raises(KeyboardInterrupt), replaced(file) as new:
        new.write_text("half")
        raise KeyboardInterrupt
    assert file.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    replace_text(file, "new")
    assert file.read_text() == "new" and len(list(tmp_path.iterdir())) == 1


def test_links_and_permissions_stay_and_devices_are_written(tmp_path, monkeypatch):
    real, link = tmp_path / "there" / "real.txt", tmp_path / "link.txt"
    real.parent.mkdir()
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    replace_text(link, "new")
    assert link.is_symlink() and real.read_text() == "new" and real.stat().st_mode & 0o777 == 0o640
    replace_text("/dev/null", "text")
    script = "from pagebinder.paths import replace_text; replace_text('/dev/stdout', 'text')"
    assert subprocess.run([os.sys.executable, "-c", script], capture_output=True, text=True).stdout == "text"
    monkeypatch.setattr(paths.os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match=f"Permission denied: '{link}'"):
        replace_text(link, "not allowed")


def test_a_file_that_is_mounted_is_overwritten(tmp_path, monkeypatch):
    def busy(*_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    file = tmp_path / "plan.lock"
    file.write_text("old")
    monkeypatch.setattr(paths.os, "replace", busy)
    replace_text(file, "new")
    assert file.read_text() == "new" and len(list(tmp_path.iterdir())) == 1


def test_a_lock_a_page_and_a_log_are_replaced_whole(tmp_path, monkeypatch):
    def failing(self, *args, **kwargs):
        full(self)

    files = [tmp_path / name for name in ("plan.lock", "page.html", "kv.jsonl")]
    for file in files:
        file.write_text("old")
    log = KVEventLog(num_blocks=2, bytes_per_block=1, groups=())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", failing)
        patch.setattr(Path, "open", failing)
        for file, write in zip(
            files,
            (
                lambda p: write_plan_lock({}, p),
                CompileReport(dtype="float32", device="cpu").to_html,
                log.save,
            ),
        ):
            with pytest.raises((OSError, EventLogError), match="No space left on device"):
                write(file)
    assert [file.read_text() for file in files] == ["old"] * 3
