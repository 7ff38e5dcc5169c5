"""`pagebinder doctor --kv DIR`: the plan of a cache, from a config.json alone."""

import json

import pytest
from transformers import Gemma3TextConfig
from typer.testing import CliRunner

import pagebinder
from pagebinder.cli import app
from pagebinder.commands.plan import parse_bytes, parse_tokens
from pagebinder.compile import explain_model
from pagebinder.errors import ConfigError
from pagebinder.runtime.kv import Workload

pytestmark = pytest.mark.usefixtures("captured_once")


@pytest.fixture(scope="module")
def config_only(tmp_path_factory):
    """Six layers, five with a window of 64 tokens; no weights."""
    path = tmp_path_factory.mktemp("config")
    Gemma3TextConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=64, max_position_embeddings=4096,
        architectures=["Gemma3ForCausalLM"],
    ).save_pretrained(path)  # fmt: skip
    return path


def run(*args):
    return CliRunner().invoke(app, ["doctor", *map(str, args)])


def succeed(*args) -> str:
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*args) -> str:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    return " ".join(result.stderr.replace("│", " ").split())


def test_the_plan_is_printed(config_only):
    text = succeed("--kv", config_only, "--context", 1000, "--context", 4096, "--memory", "1GiB")
    assert "0: full_attention" in text and "sliding_window 64" in text
    assert "next best under the constraints costs" in text
    for words in ("waste over the workload", "ceiling(T/", "at 1,000", "in 1 GiB"):
        assert words in text
    assert all(len(line) <= 118 for line in text.splitlines())


def test_lengths_in_k_and_memory_in_its_own_unit(config_only):
    text = succeed("--kv", config_only, "--context", "2k", "--memory", "3MiB", "--memory", "5000")
    assert "at 2,048" in text and "in 3 MiB" in text and "in 4.88281 KiB" in text
    assert [parse_tokens(t) for t in ("8000", "32k", " 1K ")] == [8000, 32_768, 1024]


def test_the_json_has_what_the_constraint_costs(config_only):
    facts = json.loads(succeed("--kv", config_only, "--json"))
    assert facts["constraint_cost"]["saved_bytes"] > 0
    assert facts["constraint_cost"]["wasted_percent"] < facts["workload_waste_percent"]


def test_an_encoder_has_no_plan(tmp_path):
    config = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 32, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2, "vocab_size": 50}))
    result = CliRunner().invoke(app, ["doctor", "--kv", str(tmp_path)])
    assert result.exit_code == 2 and "holds an encoder, which has no KV cache" in result.stderr


def test_blocks_are_no_larger_than_requests(config_only):
    facts = json.loads(succeed("--kv", config_only, "--max-model-len", 10, "--json"))
    assert facts["block_sizes"] == [16] and facts["constraint_cost"] is None


def test_the_plan_as_json_is_that_of_the_workload(config_only, tmp_path):
    file = tmp_path / "load.toml"
    file.write_text("contexts = [[300, 0.5], [4000, 0.5]]\nconcurrency = 4\n")
    text = succeed("--kv", config_only, "--workload", file, "--memory", "20GiB", "--context", 4000, "--json")
    facts = json.loads(text)
    load = Workload.of({"contexts": [[300, 0.5], [4000, 0.5]], "concurrency": 4}, 4096)
    plan = explain_model(config_only, pagebinder.CompileConfig(workload=load)).kv_spec
    assert plan.workload == load
    assert facts["bytes_per_block"] == plan.bytes_per_block
    assert facts["workload_waste_bytes"] == plan.wasted_bytes
    assert [g["layers"] for g in facts["group_facts"]] == [list(g.layers) for g in plan.groups]
    assert sum(facts["group_facts"][0]["workload_waste_bytes"].values()) == plan.group_waste[0].bytes
    requests = plan.capacity(20 << 30, 4000)
    fits = {"memory_bytes": 20 << 30, "context_tokens": 4000, "encoder_tokens": 0, "requests": requests}
    assert facts["fits"] == [fits]


def test_bad_options_say_what_to_do(config_only, tmp_path):
    file = tmp_path / "load.toml"
    file.write_text("concurency = 4\n")
    assert "did you mean 'concurrency'" in fail("--kv", config_only, "--workload", file)
    file.write_text("concurrency = \n")
    assert "is not a TOML file" in fail("--kv", config_only, "--workload", file)
    missing = fail("--kv", config_only, "--workload", tmp_path / "nowhere.toml")
    assert "nowhere.toml does not exist" in missing and "Errno" not in missing
    assert "no memory at all" in fail("--kv", config_only, "--memory", "0")
    assert "write it like 8000 or 32k" in fail("--kv", config_only, "--context", "32kb")
    assert "write it like 20GiB" in fail("--kv", config_only, "--memory", "much")
    assert "contexts of 1 to 4,096 tokens" in fail("--kv", config_only, "--context", 5000)
    assert "add --kv" in fail("--context", 5000)
    assert "does not exist" in fail("--kv", tmp_path / "missing")
    assert "use a whole number" in fail("--kv", config_only, "--block-size", 0)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("20GiB", 20 << 30), ("1.5 gb", 1_500_000_000), ("4096", 4096), ("512MiB", 512 << 20), ("3 B", 3)],
)
def test_amounts_of_memory(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "20 PiBs", "1e9", "nan"])
def test_what_is_no_amount_of_memory(text):
    with pytest.raises(ConfigError, match="20GiB"):
        parse_bytes(text)
