"""The picture of an event log: what is in it, and what happens where it cannot be drawn."""

import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from pagebinder.cli import app
from pagebinder.errors import EventLogError
from pagebinder.runtime.kv.event_log import CACHED, GroupFacts, KVEventLog, StepRecord
from pagebinder.runtime.kv.picture import COLOURS, MAX_COLUMNS, column_edges, draw_pool, pool_figure


def group(kind="full_attention", layers=4, block_size=16):
    return GroupFacts(kind=kind, num_layers=layers, block_size=block_size, slots_per_block=block_size)


def record(step, groups, *, in_use=2, cached=1, num_blocks=21, **counts):
    n = len(groups)
    zeros = dict.fromkeys(
        ("deferred", "scheduled_tokens", "queried_tokens", "hit_tokens", "evictions", "allocations",
         "preemptions", "swaps_out", "swaps_in", "running", "waiting"), 0,
    )  # fmt: skip
    return StepRecord(
        step=step, time=0.01 * step, in_use=(in_use,) * n, cached=(cached,) * n,
        free=num_blocks - 1 - n * (in_use + cached), slots=(16 * in_use,) * n, tokens=(12 * in_use,) * n,
        **{**zeros, **counts},
    )  # fmt: skip


def make_log(num_steps, groups, *, has_owners=False, **counts):
    log = KVEventLog(21, tuple(groups), has_owners=has_owners)
    log.steps = [record(i, groups, **counts) for i in range(num_steps)]
    return log


KINDS = [group(), group("sliding_window"), group("sliding_window"), group("recurrent", block_size=256)]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
@pytest.mark.parametrize("num_steps", [1, 10, 5000])
def test_a_picture_is_written_for_runs_of_any_length(tmp_path, suffix, num_steps):
    path = tmp_path / f"pool{suffix}"
    draw_pool(make_log(num_steps, KINDS, hit_tokens=3, evictions=1), path)
    magic = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(magic)
    assert 5_000 < path.stat().st_size < 2_000_000


def test_there_is_one_area_per_kind_in_use_and_one_for_what_is_cached_of_it():
    figure = pool_figure(make_log(10, KINDS))
    blocks, _, waste = figure.axes
    labels = [area.get_label() for area in blocks.collections]
    assert labels[:3] == [
        "full attention (4 layers, block 16)",
        "sliding window (8 layers, block 16)",
        "recurrent (4 layers, block 256)",
    ]
    assert labels[3:] == [f"cached: {label}" for label in labels[:3]]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(legend) == sorted([*labels, "free"])
    assert blocks.get_ylim() == (0, 20)
    # The last area ends at all that is in use or cached: 4 groups of 2 + 1 blocks.
    assert max(path.vertices[:, 1].max() for path in blocks.collections[-1].get_paths()) == 12
    np.testing.assert_allclose(waste.lines[0].get_ydata(), 25.0)


def test_events_have_a_lane_each_if_they_happen():
    axes = pool_figure(make_log(10, KINDS, hit_tokens=7)).axes[1]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "prefix hits: 70 tokens",
        "evictions: 0 blocks",
    ]
    assert [len(marks.get_offsets()) for marks in axes.collections] == [10, 0]
    axes = pool_figure(make_log(3, KINDS, preemptions=1, swaps_out=2)).axes[1]
    assert [label.get_text() for label in axes.get_yticklabels()][2:] == ["preemptions: 3", "swaps out: 6"]


def test_small_pools_show_who_owns_each_block():
    log = make_log(4, [group()], has_owners=True)
    owners = [((1, "a"), (2, "b")), (), ((1, CACHED),), ((1, None), (3, "a"))]
    log.steps = [record(i, log.groups, owners=change) for i, change in enumerate(owners)]
    (image,) = pool_figure(log).axes[3].images
    pixels = image.get_array()
    a, b = ([int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in COLOURS[:2])
    white, grey = [255] * 3, [0xCF] * 3
    assert pixels.shape == (20, 4, 3)
    assert pixels[0].tolist() == [a, a, grey, white]
    assert pixels[1].tolist() == [b] * 4
    assert pixels[2].tolist() == [white, white, white, a]


def test_long_runs_are_cut_into_columns_that_lose_nothing():
    assert column_edges(10, 1000).tolist() == list(range(11))
    edges = column_edges(123_457, MAX_COLUMNS)
    assert (edges[0], edges[-1], len(edges)) == (0, 123_457, MAX_COLUMNS + 1)
    widths = np.diff(edges)
    assert widths.max() - widths.min() <= 1
    log = make_log(5000, [group()], hit_tokens=1)
    assert "5,000 tokens" in pool_figure(log).axes[1].get_yticklabels()[0].get_text()


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(EventLogError, match="holds no step"):
        pool_figure(make_log(0, KINDS))
    with pytest.raises(EventLogError, match=r"ends in \.svg, \.png, \.pdf"):
        draw_pool(make_log(2, KINDS), tmp_path / "pool.xyz")


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EventLogError, match=r"pip install 'pagebinder\[plot\]'"):
        draw_pool(make_log(2, KINDS), tmp_path / "pool.svg")


def test_the_command_draws_a_saved_log(tmp_path):
    make_log(10, KINDS).save(tmp_path / "run.jsonl")
    result = CliRunner().invoke(app, ["kv-picture", str(tmp_path / "run.jsonl"), str(tmp_path / "pool.svg")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "pool.svg").stat().st_size > 5_000


def test_the_command_names_a_folder_that_is_missing(tmp_path):
    make_log(3, KINDS).save(tmp_path / "run.jsonl")
    target = tmp_path / "nowhere" / "pool.svg"
    result = CliRunner().invoke(app, ["kv-picture", str(tmp_path / "run.jsonl"), str(target)])
    assert result.exit_code == 2
    assert "does not exist; create it first" in result.output and "Errno" not in result.output


def test_the_command_refuses_other_files_in_one_line(tmp_path):
    (tmp_path / "notes.txt").write_text("hello\n")
    result = CliRunner().invoke(app, ["kv-picture", str(tmp_path / "notes.txt"), str(tmp_path / "pool.svg")])
    assert result.exit_code == 2
    assert "notes.txt is no KV event log" in result.output
    assert not (tmp_path / "pool.svg").exists()
