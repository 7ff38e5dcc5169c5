"""The command line as a user meets it: results on stdout, errors as one line on stderr, exit codes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import pagebinder
from pagebinder import doctor
from pagebinder.cli import app
from pagebinder.commands.support import printable
from pagebinder.models import tiny_path

pytestmark = pytest.mark.usefixtures("captured_once")

PROMPT = "the cache holds keys"
ROOT = Path(pagebinder.__file__).parents[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A random two-layer Llama with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([PROMPT * 3], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8192, bos_token_id=0, eos_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def config_only(checkpoint, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config_only")
    (path / "config.json").write_text((checkpoint / "config.json").read_text())
    return path


@pytest.fixture(scope="module")
def no_tokenizer(checkpoint, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("no_tokenizer")
    for name in ("config.json", "model.safetensors"):
        (path / name).symlink_to(checkpoint / name)
    return path


def run(*args, stdin: str | None = None):
    return CliRunner().invoke(app, [str(a) for a in args], input=stdin)


def succeed(*args, **kwargs) -> str:
    result = run(*args, **kwargs)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*args, **kwargs) -> str:
    """Runs a command that must end with exit code 2, nothing on stdout and no traceback; returns stderr."""
    result = run(*args, **kwargs)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    return " ".join(result.stderr.replace("│", " ").split())


def generate(model, *args, **kwargs) -> str:
    return succeed("generate", "--model", model, "--executable", "eager", *args, **kwargs)


def test_help_names_the_commands():
    text = succeed("--help")
    for command in ("demo", "generate", "serve", "explain", "compile", "doctor"):
        assert command in text
    assert "--repetition-penalty" in succeed("generate", "--help")


def test_the_command_starts_without_torch():
    code = "import sys, pagebinder.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_version():
    assert succeed("--version") == f"pagebinder {pagebinder.__version__}\n"


def test_explain_needs_only_a_config(config_only):
    text = succeed("explain", config_only)
    assert "LlamaForCausalLM" in text and "full_attention" in text and "none (explain only)" in text


def test_explain_as_json_and_html(config_only, tmp_path):
    page = tmp_path / "report.html"
    text = succeed(
        "explain", config_only, "--json", "--html", page, "--block-size", 32, "--max-model-len", 100
    )
    report = json.loads(text)
    assert report["kv"]["block_sizes"] == [32] and report["kv"]["max_model_len"] == 100
    assert len(report["layers"]) == 2 and report["executable"] == ""
    assert page.read_text().startswith("<!DOCTYPE html>") and "paged_attention" in page.read_text()


def test_generate_json_is_what_the_engine_gives(checkpoint):
    lines = generate(
        checkpoint, "--prompt", PROMPT, "--prompt", "keys", "--prompt-ids", "5, 6,7", "--max-tokens", 12,
        "--temperature", 0, "--logprobs", 2, "--json",
    ).splitlines()  # fmt: skip
    compiled = pagebinder.compile_model(checkpoint, pagebinder.CompileConfig(executable="eager"))
    params = pagebinder.SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
    expected = compiled.engine().generate([PROMPT, "keys", [5, 6, 7]], params)
    printed = sorted((json.loads(line) for line in lines), key=lambda line: line["index"])
    assert [p["prompt"] for p in printed] == [PROMPT, "keys", None]
    for p, e in zip(printed, expected, strict=True):
        assert (p["token_ids"], p["text"]) == (e.token_ids, e.text)
        assert (p["finish_reason"], p["prompt_token_ids"]) == (e.finish_reason, e.prompt_token_ids)
        assert [len(position) for position in p["logprobs"]] == [len(position) for position in e.logprobs]


def test_generate_streams_one_prompt_from_stdin(checkpoint):
    options = ("--max-tokens", 8, "--temperature", 0, "--ignore-eos")
    piped = generate(checkpoint, "--prompt", "-", *options, stdin=PROMPT + "\n")
    given = generate(checkpoint, "--prompt", PROMPT, *options, "--json")
    assert piped == json.loads(given)["text"] + "\n"


def test_generate_prints_every_sample_and_repeats_itself(checkpoint):
    options = ("--prompt", PROMPT, "--prompt", "keys", "--n", 2, "--max-tokens", 6, "--seed", 3)
    text = generate(checkpoint, *options)
    for name in ("[0, sample 0]", "[0, sample 1]", "[1, sample 0]", "[1, sample 1]"):
        assert name in text
    assert generate(checkpoint, *options) == text


def test_generate_prints_token_ids_without_a_tokenizer(no_tokenizer):
    text = generate(
        no_tokenizer, "--prompt-ids", "5,6", "--max-tokens", 4, "--temperature", 0, "--ignore-eos"
    )
    assert len([int(token) for token in text.split()]) == 4


def test_generate_stops_at_a_token(checkpoint):
    options = ("--prompt", PROMPT, "--temperature", 0, "--ignore-eos", "--json", "--max-tokens", 8)
    tokens = json.loads(generate(checkpoint, *options))["token_ids"]
    stopped = json.loads(generate(checkpoint, *options, "--stop-token-id", tokens[2]))
    assert (
        stopped["token_ids"] == tokens[: tokens.index(tokens[2]) + 1] and stopped["finish_reason"] == "stop"
    )


def test_generate_follows_a_guide(checkpoint, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "a.gbnf"
    properties = {"é": {"enum": [1, 2]}}
    schema.write_text(json.dumps({
        "type": "object", "properties": properties, "required": ["é"], "additionalProperties": False
    }))  # fmt: skip
    grammar.write_text('root ::= "a" [0-9]{2}')
    options = ("--prompt", PROMPT, "--temperature", 0.3, "--max-tokens", 300)
    assert json.loads(generate(checkpoint, *options, "--json-schema", schema))["é"] in (1, 2)
    assert re.fullmatch("a[0-9]{2}\n", generate(checkpoint, *options, "--grammar", grammar))
    assert re.fullmatch("x{3,5}\n", generate(checkpoint, *options, "--regex", "x{3,5}"))
    assert generate(checkpoint, *options, "--choice", "yes", "--choice", "no") in ("yes\n", "no\n")
    for wrong, message in {
        ("--regex", "(["): r"The guide \(Regex\) is wrong", ("--json-schema", grammar): "schema is no JSON",
        ("--grammar", tmp_path / "none"): "cannot be read", ("--regex", "a", "--choice", "b"): "by one of them",
    }.items():  # fmt: skip
        assert re.search(
            message, fail("generate", "--model", checkpoint, "--executable", "eager", *options, *wrong)
        )


def test_errors_say_what_to_do(checkpoint, config_only, no_tokenizer, tmp_path):
    given = ("--prompt", "x")
    assert "does not exist" in fail("explain", tmp_path / "nowhere")
    assert "is a file" in fail("explain", checkpoint / "config.json")
    assert "no config.json" in fail("explain", tmp_path)
    assert "no *.safetensors" in fail("generate", "--model", config_only, *given)
    assert "no *.safetensors" in fail("compile", config_only)
    assert "no tokenizer.json" in fail("generate", "--model", no_tokenizer, *given)
    assert "no tokenizer.json" in fail(
        "generate", "--model", no_tokenizer, "--prompt-ids", "5", "--stop", "x"
    )
    assert "no tokenizer.json" in fail(
        "generate", "--model", no_tokenizer, "--prompt-ids", "5", "--regex", "x"
    )
    assert "at least one --prompt" in fail("generate", "--model", checkpoint)
    assert "whole numbers" in fail("generate", "--model", checkpoint, "--prompt-ids", "1;2")
    assert "use 0 < top_p <= 1" in fail("generate", "--model", checkpoint, *given, "--top-p", 1.5)
    assert "add --json" in fail("generate", "--model", checkpoint, *given, "--logprobs", 1)
    assert "executable='gpu' is unknown" in fail("compile", checkpoint, "--executable", "gpu")
    assert "No such option" in fail("generate", "--model", checkpoint, "--promt", "x")


def test_files_that_cannot_be_written_are_named_before_any_work(config_only, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("x")
    monkeypatch.setattr("pagebinder.compile.explain_model", None)
    for command in (
        ("explain", config_only, "--html"),
        ("compile", config_only, "--lock"),
        ("kv-picture", file),
    ):
        assert "is a directory: give the file" in fail(*command, tmp_path)
        assert "none does not exist; create it first" in fail(*command, tmp_path / "none" / "x.html")
        assert "file is no directory" in fail(*command, file / "x.html")
    for command in (("compile", config_only, "--save"), ("export", "--onnx", config_only)):
        assert "file is no directory" in fail(*command, file / "new" / "folder")
    if Path("/proc/self").is_dir():  # a file system that takes no files, not even root's
        assert "/proc cannot be written to" in fail("compile", config_only, "--save", "/proc/folder")
    assert "is a file" in fail("compile", config_only, "--save", file)
    assert file.read_text() == "x" and len(list(tmp_path.iterdir())) == 1


def test_errors_of_the_engine(checkpoint):
    command = ("generate", "--model", checkpoint, "--executable", "eager")
    assert "out of range" in fail(*command, "--prompt-ids", "5,300")
    assert "prompt is empty" in fail(*command, "--prompt", "-", stdin="")


def test_debug_shows_the_traceback(tmp_path, monkeypatch):
    assert isinstance(run("--debug", "explain", tmp_path).exception, pagebinder.CheckpointError)
    monkeypatch.setenv("PAGEBINDER_DEBUG", "1")
    assert isinstance(run("explain", tmp_path).exception, pagebinder.CheckpointError)


def test_compile_dumps_the_four_graphs(checkpoint, tmp_path):
    text = succeed("compile", checkpoint, "--executable", "eager", "--dump-graphs", tmp_path / "graphs")
    assert "eager (requested)" in text and "executable" in text
    dumped = {path.stem: path.read_text() for path in (tmp_path / "graphs").iterdir()}
    assert set(dumped) == {"captured", "semantic", "paged", "fused"}
    for source in dumped.values():
        compile(source, "graph", "exec")
    assert "paged_attention" in dumped["paged"] and "paged_attention" not in dumped["semantic"]


def test_ctrl_c_ends_quietly(checkpoint, tmp_path):
    saved = str(tmp_path / "saved")  # starts in seconds less than what is compiled first
    succeed("compile", checkpoint, "--executable", "eager", "--save", saved)
    command = [sys.executable, "-m", "pagebinder", "generate", "--model", saved, "--prompt-ids", "5"]
    options = ["--ignore-eos", "--max-tokens", "8000"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.decode()) == (130, "interrupted\n")


def test_ctrl_c_while_the_command_line_is_imported(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}
    command = [sys.executable, "-m", "pagebinder", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"]])
def test_a_full_disk_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pagebinder", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


def test_arguments_are_utf8_whatever_the_locale(checkpoint):
    """Bytes that a locale has no characters for reach Python as halves of surrogate pairs."""
    escaped = "naïve".encode().decode("ascii", "surrogateescape")
    options = ("--max-tokens", 1, "--json")
    line = json.loads(generate(checkpoint, "--prompt", escaped, *options))
    assert line["prompt"] == "naïve"
    generating = ("generate", "--model", checkpoint, "--prompt")
    assert "prompt is not valid UTF-8" in fail(*generating, "a\udcff")
    assert "stop string is not valid UTF-8" in fail(*generating, "a", "--stop", "\udcff")


def test_weights_that_are_no_numbers_are_one_line(checkpoint, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    assert "NaN logits" in fail("generate", "--model", broken, "--prompt-ids", "5", "--executable", "eager")


def test_a_closed_pipe_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pagebinder", "doctor"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr.decode()) == (1, "")


def test_doctor():
    text = succeed("doctor")
    for fact in (
        "torch",
        "transformers",
        "memory",
        "C++ compiler",
        "provider reference",
        "Models can run here",
    ):
        assert fact in text
    flex = text[text.index("provider flex_attention") : text.index("provider reference")]
    assert flex.count("\n") < 5 and "no kernel for the other" in flex


def test_doctor_as_json_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    facts = json.loads(succeed("doctor", "--json"))
    assert "no-such-compiler" in facts["compiler"]["problem"]
    usable = {provider["name"]: provider["usable"] for provider in facts["providers"]}
    assert usable["reference"]
    assert facts["can_run"] is True
    served = {p["name"]: [op for op, reasons in p["ops"].items() if not reasons] for p in facts["providers"]}
    assert "paged_attention" in served["flex_attention"]


def test_doctor_fails_where_nothing_can_run(monkeypatch):
    monkeypatch.setattr(doctor, "_providers", list)
    assert run("doctor").exit_code == 1


def test_doctor_and_the_package_agree_on_versions():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in ("torch", "transformers"):
        low, high = doctor.SUPPORTED[name]
        major, minor = high.split(".")
        assert f"{name}>={low},<{major}.{int(minor) + 1}" in wanted
        assert doctor._range_problem(name, f"{high}.9+cpu") == ""
        assert "not tested" in doctor._range_problem(name, f"{major}.{int(minor) + 1}.0")


def test_a_terminal_gets_no_escape_codes():
    assert printable("a\x1b[31mb\x9bc\td\né世") == "a[31mbc\td\né世"


def test_demo_runs_the_shipped_model():
    assert (tiny_path() / "config.json").is_file(), "the package ships without its checkpoint"
    text = succeed("demo", "--executable", "eager", "--max-tokens", 24)
    assert all(f"[{i}] ##" in text for i in (1, 2, 3))
    hits = next(line for line in text.splitlines() if line.startswith("prefix cache"))
    assert int(hits.split()[2]) > 2 * 5 * 16, "two texts take at least five blocks each from the cache"
    assert "tokens/s" in text and "preemptions" in text and "captured" in text


def test_closed_streams_end_quietly_or_with_an_error(checkpoint):
    """As a shell closes them: `>&-`."""
    command = (
        f"{sys.executable} -m pagebinder generate --model {checkpoint} --max-tokens 2 --executable eager"
    )
    for rest, code, message in (
        ("--prompt x >&- 2>&- <&-", 0, ""),
        ("--prompt - <&-", 2, "stdin, which is closed"),
        ("--prompt x --device nothing 2>&-", 2, ""),
    ):
        run = subprocess.run(["sh", "-c", f"{command} {rest}"], cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == code and message in " ".join(run.stderr.split()), run.stderr
        assert "Traceback" not in run.stderr and "Exception" not in run.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["explain"],
        ["compile"],
        ["bisect"],
        ["generate", "--prompt-ids", "1", "--model"],
        ["doctor", "--kv"],
        ["kv-picture", "x"],
    ],
)
def test_paths_that_are_none_are_refused(args):
    assert "path is empty" in fail(*args, "")
    assert "~nobody-here stands for is unknown" in " ".join(fail(*args, "~nobody-here/x").split())
