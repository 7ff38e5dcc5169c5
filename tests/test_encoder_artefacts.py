"""Artefacts of encoders alone: what is saved comes back bit for bit, with its tokenizer and its recipe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertForMaskedLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import pagebinder
from pagebinder import ArtefactError, CompileConfig, ConfigError
from pagebinder.cli import app
from pagebinder.compile import explain_model
from pagebinder.compiled_encoder import CompiledEncoder
from tests.test_encoder_only import EAGER, FAMILIES, bert, roberta, sentence_dir, sequences

ROOT = Path(pagebinder.__file__).parents[1]
WORDS = ("a", "binder", "holds", "many", "pages")
TEXTS = ["a binder holds many pages", "pages", "many many " * 30]


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A sentence-transformers directory in bfloat16 with a tokenizer that puts tokens around a text."""
    path = sentence_dir(tmp_path / "checkpoint", bert().bfloat16(), {"pooling_mode_mean_tokens": True})
    special = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}
    vocabulary = special | {word: i for i, word in enumerate(WORDS, start=4)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    named = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(path)
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_the_same_bits(family, tmp_path):
    compiled = pagebinder.compile_model(FAMILIES[family](), EAGER)
    compiled.save(tmp_path / "artefact")
    loaded = pagebinder.load(tmp_path / "artefact")
    assert isinstance(loaded, CompiledEncoder)
    assert all(map(torch.equal, loaded.encode_batch(sequences()), compiled.encode_batch(sequences())))
    ids = torch.tensor(sequences()[0])
    for level in compiled.graphs:
        assert torch.equal(loaded.run_level(level, ids), compiled.run_level(level, ids))
    assert loaded.explain() == compiled.explain()
    with pytest.raises(ConfigError, match="pooling of .* is not known"):
        loaded.embed(sequences())


def test_the_program_of_inductor_is_kept(tmp_path):
    compiled = pagebinder.compile_model(bert(), CompileConfig(executable="inductor"))
    compiled.save(tmp_path / "artefact")
    loaded = pagebinder.load(tmp_path / "artefact")
    assert loaded.report.executable == "inductor" and loaded.executable.name == "inductor"
    assert json.loads((tmp_path / "artefact" / "artefact.json").read_text())["executables"]["packed"][
        "program"
    ]
    assert all(map(torch.equal, loaded.encode_batch(sequences()), compiled.encode_batch(sequences())))


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_are_cut_pooled_and_normalised_as_before(side, checkpoint, tmp_path):
    if side == "left":
        path = checkpoint / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation_side": side}))
    compiled = pagebinder.compile_model(checkpoint, EAGER)
    compiled.save(tmp_path / "artefact")
    loaded = pagebinder.load(tmp_path / "artefact")
    assert loaded.source.tokenizer().truncation_side == side and loaded.max_tokens == 32
    expected = compiled.embed(TEXTS, truncate=True)
    assert torch.equal(loaded.embed(TEXTS, truncate=True), expected) and expected.norm(dim=-1).allclose(
        torch.ones(3)
    )
    for truncate in (True, False):
        assert loaded._tokenize(TEXTS, truncate) == compiled._tokenize(TEXTS, truncate)
    with pytest.raises(pagebinder.RequestError, match="Input 2 has 62 tokens"):
        loaded.embed(TEXTS)


def test_half_of_a_surrogate_pair_is_told(checkpoint, tmp_path):
    compiled = pagebinder.compile_model(checkpoint, EAGER)
    compiled.save(tmp_path / "artefact")
    for one in (compiled, pagebinder.load(tmp_path / "artefact")):
        for use in (one.embed, one.encode_batch):
            with pytest.raises(
                pagebinder.RequestError, match="input 1 is no Unicode text: character 3 is half"
            ):
                use(["whole", "cut\ud83d"])
        assert (
            repr(one) == "CompiledEncoder(BertModel, 2 layers that mix tokens, bfloat16 on cpu, run by eager)"
        )


@pytest.mark.parametrize("executable", ["inductor", "eager"])
def test_it_starts_without_transformers_dynamo_and_inductor(executable, checkpoint, tmp_path):
    pagebinder.compile_model(checkpoint, CompileConfig(executable=executable)).save(tmp_path / "artefact")
    script = f"""
import sys, pagebinder
print(pagebinder.load({str(tmp_path / "artefact")!r}).embed(["a binder"]).shape)
print([m for m in ("transformers", "torch._dynamo", "torch._inductor") if m in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.splitlines() == ["torch.Size([1, 64])", "[]"], result.stderr


def test_what_an_encoder_refuses_it_refuses_when_loaded(tmp_path):
    headed = pagebinder.compile_model(bert(BertForMaskedLM), EAGER)
    numbered = pagebinder.compile_model(roberta(), EAGER)
    for name, compiled in {"headed": headed, "numbered": numbered}.items():
        compiled.save(tmp_path / name)
    with pytest.raises(ConfigError, match="returns logits"):
        pagebinder.load(tmp_path / "headed").embed([[5, 6]], pooling="mean")
    with pytest.raises(pagebinder.RequestError, match="padding token 1"):
        pagebinder.load(tmp_path / "numbered").encode_batch([[5, 1]])
    with pytest.raises(ConfigError, match="generates nothing"):
        pagebinder.load(tmp_path / "headed").engine()


def test_what_cannot_be_saved_is_told(tmp_path):
    compiled = pagebinder.compile_model(bert(), EAGER)
    with pytest.raises(ConfigError, match="is an encoder: programs without Python run decoders"):
        compiled.save(tmp_path / "ahead", executable="aot")
    bert().save_pretrained(tmp_path / "source")
    with pytest.raises(ArtefactError, match="no weights"):
        explain_model(tmp_path / "source").save(tmp_path / "empty")


def test_from_the_command_line(checkpoint, tmp_path):
    run = CliRunner().invoke
    result = run(
        app, ["compile", str(checkpoint), "--executable", "eager", "--save", str(tmp_path / "artefact")]
    )
    assert result.exit_code == 0, result.output
    assert pagebinder.load(tmp_path / "artefact").embed(["pages"]).shape == (1, 64)
    result = run(app, ["generate", "--model", str(tmp_path / "artefact"), "--prompt", "pages"])
    assert result.exit_code != 0 and "generates nothing" in result.output
