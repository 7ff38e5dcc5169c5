"""`pagebinder bench`: every batch size is measured, and the machine's rates stand beside."""

import json

from typer.testing import CliRunner

from pagebinder.cli import app
from pagebinder.commands.support import EXIT_ERROR
from pagebinder.models import tiny_path

FEW = ["--prompt-tokens", "8", "--new-tokens", "3", "--rounds", "1"]


def test_json_has_a_row_for_each_batch():
    result = CliRunner().invoke(
        app, ["bench", str(tiny_path()), *FEW, "--requests", "1", "--requests", "3", "--json"]
    )
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    assert [row["requests"] for row in measured["batches"]] == [1, 3]
    for row in measured["batches"]:
        assert row["prefill_tokens_per_second"] > 0 and 0 < row["outside"] < 1
        rate = 1e3 * row["requests"] / row["decode_step_ms"]
        assert abs(row["decode_tokens_per_second"] / rate - 1) < 1e-6
    assert measured["machine"]["flops"] > 0


def test_a_prompt_beyond_the_model_is_told():
    result = CliRunner().invoke(app, ["bench", str(tiny_path()), "--prompt-tokens", "100000"])
    assert result.exit_code == EXIT_ERROR
    assert "error" in result.output and "Traceback" not in result.output


def test_more_requests_than_memory_has_prompts_for():
    result = CliRunner().invoke(app, ["bench", str(tiny_path()), "--requests", "100000000"])
    assert result.exit_code == EXIT_ERROR and "65536" in result.output


def test_tokens_that_would_not_be_made_are_not_counted():
    sizes = ["--prompt-tokens", "1000", "--new-tokens", "64"]
    result = CliRunner().invoke(app, ["bench", str(tiny_path()), *sizes])
    assert result.exit_code == EXIT_ERROR
    assert "1000 prompt tokens and 64 new ones are more than the 1024" in " ".join(result.output.split())
