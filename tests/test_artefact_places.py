"""Where artefacts are written, and where their weights are found: the right ones, or an error with what to do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import pagebinder
from pagebinder import ArtefactError, CheckpointError, CompileConfig
from pagebinder.artefacts import files as artefact_files
from pagebinder.artefacts import weights as artefact_weights
from pagebinder.cli import app
from pagebinder.compile import explain_model
from tests.helpers import tiny_llama

pytestmark = pytest.mark.usefixtures("captured_once")

IDS = torch.arange(3, 24)
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A checkpoint and its artefact, side by side; not to be changed."""
    folder = tmp_path_factory.mktemp("project")
    tiny_llama().save_pretrained(folder / "checkpoint")
    compiled = pagebinder.compile_model(folder / "checkpoint", CompileConfig(executable="eager"))
    compiled.save(folder / "artefact")
    return folder


@pytest.fixture
def one(project, tmp_path) -> Path:
    """A project whose artefact knows its absolute place, too."""
    shutil.copytree(project / "checkpoint", tmp_path / "one" / "checkpoint")
    pagebinder.load(project / "artefact", checkpoint=tmp_path / "one" / "checkpoint").save(
        tmp_path / "one" / "artefact"
    )
    return tmp_path / "one"


@pytest.fixture(scope="module")
def expected(project) -> torch.Tensor:
    return logits(project / "artefact")


def logits(artefact, **options) -> torch.Tensor:
    return pagebinder.load(artefact, **options).run_level("fused", IDS)


def fine_tune(weights: Path, name: str = "model.layers.1.mlp.down_proj.weight") -> None:
    """Change one tensor; neither size nor time of the file tells."""
    times = os.stat(weights)
    tensors = load_file(weights)
    tensors[name] = tensors[name] * 1.001
    save_file(tensors, weights, metadata={"format": "pt"})
    assert os.stat(weights).st_size == times.st_size
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_another_fine_tune_of_equal_size_and_time_is_told_apart(one, expected, tmp_path):
    other = shutil.copytree(one / "checkpoint", tmp_path / "other" / "checkpoint")
    fine_tune(other / WEIGHTS)
    assert torch.equal(logits(one / "artefact"), expected)
    with pytest.raises(
        ArtefactError, match=f"{other / WEIGHTS}, which holds weights, is not the file.*--checkpoint"
    ):
        logits(one / "artefact", checkpoint=other)
    copied = shutil.copytree(one / "artefact", tmp_path / "other" / "artefact")
    assert torch.equal(logits(copied), expected), (
        "the file beside the copy is another one, that of before is there"
    )
    (one / "checkpoint").rename(tmp_path / "away")
    with pytest.raises(ArtefactError, match=f"{other / WEIGHTS}, which holds weights, is not the file"):
        logits(copied)
    assert torch.equal(logits(copied, checkpoint=tmp_path / "away"), expected)


def test_every_tensor_is_sampled_and_no_more_than_needed(tmp_path):
    file = tmp_path / "w.safetensors"
    names = [f"t{i}" for i in range(40)]
    save_file({name: torch.zeros(3 << 16) for name in names} | {"one": torch.zeros(1)}, file)
    num_bytes = file.stat().st_size
    header = file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")]
    spans = artefact_weights._sampled_spans(header)
    for begin, end in (entry["data_offsets"] for entry in json.loads(header).values()):
        assert any(begin <= offset and offset + size <= end for offset, size in spans)
    assert sum(size for _, size in spans) <= artefact_weights.SAMPLES * artefact_weights.SAMPLE_BYTES
    before = artefact_weights._sample(file, num_bytes)
    for name in ("t0", "t39", "one"):
        fine = {n: torch.full((3 << 16,), float(n == name)) for n in names} | {
            "one": torch.full((1,), float(name == "one"))
        }
        save_file(fine, file)
        assert artefact_weights._sample(file, num_bytes) != before, name
    for damaged in (b"", b"\xff" * 100, (5).to_bytes(8, "little") + b"[1,2]" + bytes(50)):
        file.write_bytes(damaged)
        assert artefact_weights._sample(file, len(damaged))


def test_an_artefact_without_samples_is_read_and_hashed(one, expected, monkeypatch):
    place, hashed = one / "checkpoint" / WEIGHTS, []
    facts = artefact_weights._content(place)
    monkeypatch.setattr(artefact_weights, "digest", lambda p: hashed.append(p) or artefact_files.digest(p))
    assert artefact_weights._problem(place, facts, verify=False) is None and not hashed
    del facts["sample"]
    assert artefact_weights._problem(place, facts, verify=False) is None and hashed == [place]


def test_what_is_given_as_checkpoint_must_be_a_directory(one, tmp_path):
    weights = one / "checkpoint" / WEIGHTS
    with pytest.raises(ArtefactError, match=f"{weights} is a file: give the directory that holds {WEIGHTS}"):
        logits(one / "artefact", checkpoint=weights)
    with pytest.raises(ArtefactError, match="nowhere does not exist: give"):
        logits(one / "artefact", checkpoint=tmp_path / "nowhere")
    for bad in ("~nobody-here/x", "a\0b", ""):
        with pytest.raises(ArtefactError, match="unknown|NUL|empty"):
            logits(one / "artefact", checkpoint=bad)
        with pytest.raises(ArtefactError, match="unknown|NUL|empty"):
            pagebinder.load(bad)
        with pytest.raises(CheckpointError, match="unknown|NUL|empty"):
            pagebinder.compile_model(bad)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_weights_that_may_not_be_read_are_told_so_by_the_system(one):
    check_unreadable(one)


def test_weights_that_may_not_be_read_are_told_so(one, monkeypatch):
    """As the system would say it: tests may run as root."""
    opened = open

    def refusing(path, *args, **kwargs):
        if Path(str(path)).name == WEIGHTS:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", refusing)
    monkeypatch.setattr("io.open", refusing)
    check_unreadable(one)


def check_unreadable(one):
    (one / "checkpoint" / WEIGHTS).chmod(0)
    with pytest.raises(
        ArtefactError, match=f"{WEIGHTS}, which holds weights, cannot be read: Permission denied"
    ):
        pagebinder.load(one / "artefact")
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} cannot be read: Permission denied"):
        pagebinder.compile_model(one / "checkpoint")


def test_weights_whose_file_was_cut_are_stored_inside(one, expected, tmp_path, caplog):
    compiled = pagebinder.load(one / "artefact")
    cut = shutil.copytree(one / "checkpoint", tmp_path / "cut")
    with open(cut / WEIGHTS, "r+b") as file:
        file.truncate(5000)
    compiled.source.path = cut
    compiled.save(tmp_path / "artefact")
    assert f"{cut / WEIGHTS} cannot be read any more" in caplog.text
    assert torch.equal(logits(tmp_path / "artefact"), expected)


def test_the_target_of_a_link_is_written(one, expected, tmp_path):
    compiled = pagebinder.load(one / "artefact")
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(real)
    for _ in range(2):
        compiled.save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink() and real.stat().st_mode & 0o777 == 0o700
        assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "one", "real"], "no junk"
        assert torch.equal(logits(tmp_path / "link"), expected)
    compiled.save(tmp_path / "new" / ".." / "other")
    assert torch.equal(logits(tmp_path / "new" / ".." / "other"), expected)


def test_a_directory_that_must_stay_is_refused_before_any_work(one, tmp_path, monkeypatch):
    compiled = pagebinder.load(one / "artefact")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for place in (".", here, here / "x" / "..", "../here"):
        with pytest.raises(
            ArtefactError, match=f"{here} is the working directory.* like {here / 'artefact'}"
        ):
            compiled.save(place)
    with pytest.raises(ArtefactError, match="holds other files"):
        compiled.save("..")
    monkeypatch.chdir(one / "artefact" / "graphs")
    with pytest.raises(ArtefactError, match=f"{one / 'artefact'} holds the working directory"):
        compiled.save(one / "artefact")
    monkeypatch.chdir(here)
    assert not list(here.iterdir()) and here.samefile(".")
    mounted = tmp_path / "a mount"
    mounted.mkdir()
    mounts = tmp_path / "mounts"
    mounts.write_text(f"1 2 0:3 / {tmp_path}/a\\040mount rw - tmpfs tmpfs rw\n")
    monkeypatch.setattr(artefact_files, "MOUNTS", mounts)
    with pytest.raises(ArtefactError, match="is a mount point"):
        compiled.save(mounted)
    result = CliRunner().invoke(app, ["compile", str(one / "checkpoint"), "--save", str(mounted)])
    assert result.exit_code == 2 and "is a mount point" in result.stderr
    for place in ("/dev/shm", "/proc"):
        with pytest.raises(ArtefactError, match="is a mount point|holds other files"):
            compiled.save(place)


def test_links_and_empty_directories_of_others_are_not_lost(one, tmp_path):
    artefact = one / "artefact"
    compiled = pagebinder.load(artefact)
    (tmp_path / "elsewhere").mkdir()
    for make in (
        lambda p: p.symlink_to(tmp_path / "elsewhere"),
        Path.mkdir,
        lambda p: p.symlink_to("nowhere"),
    ):
        make(artefact / "graphs" / "mine")
        with pytest.raises(ArtefactError, match="graphs/mine is none of its files and would be lost"):
            compiled.save(artefact)
        (artefact / "graphs" / "mine").rename(tmp_path / "out")
        (tmp_path / "out").unlink() if (tmp_path / "out").is_symlink() else (tmp_path / "out").rmdir()
    (artefact / artefact_files.ADAPTERS).mkdir(parents=True)  # which is empty where no op needs an adapter
    compiled.save(artefact)


def test_what_a_killed_save_left_goes_with_the_next_one(one, tmp_path):
    target = tmp_path / "kept"
    script = f"""
import sys, time, pagebinder
from pagebinder.artefacts import save
compiled = pagebinder.load({str(one / "artefact")!r})
def wait(*args):
    print("writing", flush=True)
    time.sleep(60)
save.save_weights = wait
compiled.save({str(target)!r})
"""
    running = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    compiled = pagebinder.load(one / "artefact")
    try:
        assert all(process.stdout.readline() == "writing\n" for process in running)
        running[0].send_signal(signal.SIGKILL)
        running[0].wait()
        (tmp_path / ".kept-0123abcd").mkdir()
        (tmp_path / ".kept-0123abcd" / "thesis.tex").write_text("no file of an artefact")
        (tmp_path / ".kept-again").mkdir()
        left = {p.name for p in tmp_path.glob(".kept-*")}
        assert len(left) == 4
        compiled.save(target)
        gone = left - {p.name for p in tmp_path.glob(".kept-*")}
        assert len(gone) == 1 and not gone & {".kept-0123abcd", ".kept-again"}, "the living one goes on"
    finally:
        for process in running:
            process.kill()
            process.communicate()
    compiled.save(target)
    assert {p.name for p in tmp_path.glob(".kept-*")} == {".kept-0123abcd", ".kept-again"}


def test_artefacts_are_no_checkpoints(one):
    for use in (explain_model, pagebinder.compile_model, pagebinder.bisect):
        with pytest.raises(CheckpointError, match=r"is an artefact, .*give the checkpoint.*pagebinder\.load"):
            use(one / "artefact")
    for command in (["explain"], ["bisect"], ["doctor", "--kv"]):
        result = CliRunner().invoke(app, [*command, str(one / "artefact")])
        assert result.exit_code == 2 and "is an artefact" in result.stderr


def test_the_command_line_takes_a_moved_checkpoint(one, tmp_path):
    run = CliRunner().invoke
    options = ["--prompt-ids", "1,2,3", "--max-tokens", "2", "--ignore-eos"]
    generate = ["generate", "--model", str(one / "artefact"), *options]
    before = run(app, generate)
    assert before.exit_code == 0, before.output
    moved = (one / "checkpoint").rename(tmp_path / "moved")
    result = run(app, generate)
    assert result.exit_code == 2 and "--checkpoint DIR" in result.stderr
    result = run(app, [*generate, "--checkpoint", str(moved)])
    assert result.exit_code == 0 and result.stdout == before.stdout
    result = run(app, [*generate, "--checkpoint", str(moved / WEIGHTS)])
    assert result.exit_code == 2 and f"is a file: give the directory that holds {WEIGHTS}" in result.stderr
    result = run(app, ["generate", "--model", str(moved), *options, "--checkpoint", str(moved)])
    assert result.exit_code == 2 and "is no artefact: leave it out" in result.stderr
    for command in ("serve", "bench", "export"):
        assert "--checkpoint" in run(app, [command, "--help"]).stdout


def test_an_artefact_outlives_two_interrupts(project, tmp_path, monkeypatch):
    """The second one while the first artefact is put back: it lies beside its place then."""
    artefact, rename, calls = tmp_path / "artefact", Path.rename, []
    compiled = pagebinder.load(project / "artefact")
    compiled.save(artefact)

    def interrupted(self, to):
        calls.append(to)
        if len(calls) in (2, 3):
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiled.save(artefact)
    monkeypatch.undo()
    (kept,) = tmp_path.iterdir()
    assert not artefact.exists() and (kept / "artefact.json").exists()
