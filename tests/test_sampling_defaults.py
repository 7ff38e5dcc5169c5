"""What a model's makers say of sampling: read from generation_config.json and GGUF files, kept by artefacts, and used
where nobody says other values."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import GenerationConfig
from typer.testing import CliRunner

import pagebinder
from pagebinder import CompileConfig, EngineConfig, RequestError, SamplingParams
from pagebinder.cli import app
from pagebinder.compile import explain_model
from pagebinder.frontend.model_path import source_from_path
from pagebinder.sampling_defaults import SaidOfSampling, described, said_by_config
from pagebinder.server import create_app
from tests.frontend.gguf_files import write_gguf
from tests.helpers import tiny_llama
from tests.server.serving import serving

PROMPT = list(range(5, 25))
SAID = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
OTHERS = {"suppress_tokens": [3, 7], "repetition_penalty": 1.3}
VOCAB = 128


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {}),
        (SAID, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"temperature": 0.6, "min_p": 0.1, "top_k": 20.0}, {"temperature": 0.6, "min_p": 0.1, "top_k": 20}),
        (
            SAID | {"do_sample": False, "repetition_penalty": 1.05},
            {"temperature": 0.0, "repetition_penalty": 1.05},
        ),
        ({"temperature": None, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0}, {}),
        ({"suppress_tokens": [7, 5, 500, -1], "temperature": 1.0}, {"suppress_tokens": (5, 7)}),
        ({"suppress_tokens": torch.tensor([7])}, {"suppress_tokens": (7,)}),
        ({"suppress_tokens": []}, {}),
        (
            {"num_beams": 1, "min_length": 0, "guidance_scale": 1.0, "bad_words_ids": None, "max_length": 20},
            {},
        ),
    ],
    ids=str,
)
def test_options_of_a_generation_config(said, expected):
    assert said_by_config(said, "it", VOCAB) == SaidOfSampling(expected)


@pytest.mark.parametrize(
    ("said", "note"),
    [
        ({"temperature": -1}, "it: temperature is left out: temperature=-1: use 0.0"),
        ({"top_p": 0}, "top_p is left out"),
        ({"top_k": "many"}, "top_k is left out"),
        ({"suppress_tokens": 5}, "suppress_tokens is left out"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens is left out"),
        ({"suppress_tokens": range(VOCAB)}, "suppress_tokens is left out: no token would be left"),
        (
            {"no_repeat_ngram_size": 3, "num_beams": 4},
            "asks for no_repeat_ngram_size, num_beams, which is not served",
        ),
    ],
    ids=str,
)
def test_what_is_left_out_is_said(said, note):
    found = said_by_config(said | {"min_p": 0.5}, "it", VOCAB)
    assert found.defaults == {"min_p": 0.5}
    assert len(found.notes) == 1 and note in found.notes[0]


def test_they_are_described():
    said = said_by_config(SAID | OTHERS, "it", VOCAB)
    assert (
        described(said.defaults)
        == "temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1.3, 2 tokens never"
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model = tiny_llama()
    model.generation_config = GenerationConfig(**SAID, **OTHERS)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def compiled(directory):
    return pagebinder.compile_model(directory, CompileConfig(executable="eager", dtype="float32"))


def test_params_begin_with_them(compiled):
    expected = SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.3, suppress_tokens=(3, 7), max_tokens=5
    )
    assert compiled.sampling_params(max_tokens=5) == expected
    greedy = compiled.sampling_params(temperature=0.0, suppress_tokens=())
    assert (greedy.temperature, greedy.top_k, greedy.suppress_tokens) == (0.0, 20, ())
    with pytest.raises(RequestError, match="warmth"):
        compiled.sampling_params(warmth=3)


def test_tokens_are_those_of_generate(compiled, directory):
    """Which suppresses tokens and penalises repetition, too."""
    engine = compiled.engine(EngineConfig(num_kv_blocks=64))
    got = engine.generate([PROMPT], compiled.sampling_params(temperature=0.0, max_tokens=24, ignore_eos=True))
    model = tiny_llama()
    model.generation_config = GenerationConfig.from_pretrained(directory)
    model.generation_config.update(do_sample=False, temperature=None, top_k=None, top_p=None)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, eos_token_id=None, pad_token_id=0
        )
    assert list(got[0].token_ids) == expected[0, len(PROMPT) :].tolist()
    plain = engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    assert plain[0].token_ids != got[0].token_ids


def test_reports_and_artefacts_have_them(compiled, directory, tmp_path):
    note = next(note for note in compiled.report.notes if note.startswith("Its makers sample with"))
    assert "temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1.3, 2 tokens never" in note
    assert note in explain_model(directory).report.notes
    compiled.save(tmp_path / "saved")
    assert pagebinder.load(tmp_path / "saved").sampling_params() == compiled.sampling_params()


def test_modules_have_them_too():
    model = tiny_llama()
    model.generation_config.update(**SAID)
    source = pagebinder.compile_model(model, CompileConfig(executable="eager")).source
    assert source.sampling_defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_gguf_files(tmp_path):
    options = {"temp": 0.75, "top_k": 64, "min_p": 0.5, "penalty_repeat": 1.5}
    more = {f"general.sampling.{name}": value for name, value in options.items()}
    write_gguf(tmp_path / "model.gguf", "llama", more=more | {"tokenizer.ggml.suppress_tokens": [5]})
    source = source_from_path(tmp_path / "model.gguf", weights=False)
    assert source.sampling_defaults == {
        "temperature": 0.75, "top_k": 64, "min_p": 0.5, "repetition_penalty": 1.5, "suppress_tokens": (5,),
    }  # fmt: skip


@pytest.mark.parametrize("takes", [True, False])
def test_a_server_takes_them_where_requests_do_not_say(compiled, takes):
    engine = compiled.engine(EngineConfig(num_kv_blocks=64))
    served = create_app(compiled, EngineConfig(num_kv_blocks=64), model_name="m", sampling_defaults=takes)
    asked = {"seed": 5, "max_tokens": 8, "ignore_eos": True}
    with serving(served) as server:
        for own in (
            {},
            {"temperature": 2.0, "top_k": 0},
            {"repetition_penalty": 1.0, "logit_bias": {"4": -50}},
        ):
            body = {"model": "m", "prompt": PROMPT, "return_token_ids": True} | asked | own
            status, answer = server.post("/v1/completions", body)
            assert status == 200, answer
            params = compiled.sampling_params(**asked, **own) if takes else SamplingParams(**asked, **own)
            expected = engine.generate([PROMPT], params)[0].token_ids
            assert answer["choices"][0]["token_ids"] == list(expected)


def test_the_command_begins_with_them(directory, compiled):
    """As it draws from the same seed, its tokens tell what it sampled with."""

    def said(*options: str) -> list[int]:
        ids = ",".join(map(str, PROMPT))
        arguments = ["generate", "--model", str(directory), "--executable", "eager", "--dtype", "float32"]
        result = CliRunner().invoke(
            app, [*arguments, "--prompt-ids", ids, "--max-tokens", "8", "--ignore-eos", "--json", *options]
        )
        assert result.exit_code == 0, result.output
        told = "temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1.3, 2 tokens never"
        told = told.removeprefix("temperature 0.6, ") if "--temperature" in options else told
        assert (told in " ".join(result.stderr.split())) == ("--plain-sampling" not in options)
        return json.loads(result.stdout)["token_ids"]

    engine = compiled.engine(EngineConfig(num_kv_blocks=64))
    asked = {"seed": 0, "max_tokens": 8, "ignore_eos": True}
    for options, params in (
        ((), compiled.sampling_params(**asked)),
        (("--temperature", "0"), compiled.sampling_params(**asked, temperature=0.0)),
        (("--plain-sampling",), SamplingParams(**asked)),
    ):
        assert said(*options) == list(engine.generate([PROMPT], params)[0].token_ids)


def test_tokens_that_are_never_chosen(compiled):
    """However far apart logits are, and whatever a bias says; a guide that allows no other gets its way."""
    engine = compiled.engine(EngineConfig(num_kv_blocks=64))
    options = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    plain = set(engine.generate([PROMPT], SamplingParams(**options))[0].token_ids)
    bias = dict.fromkeys(plain, 100.0)
    params = SamplingParams(**options, suppress_tokens=tuple(plain), logit_bias=bias)
    assert not plain & set(engine.generate([PROMPT], params)[0].token_ids)
    guided = SamplingParams(**options, suppress_tokens=(9,), guide=lambda ids: [9])
    assert set(engine.generate([PROMPT], guided)[0].token_ids) == {9}
    for ids, said in ((range(VOCAB), "names all tokens"), ([VOCAB], "outside the vocabulary")):
        with pytest.raises(RequestError, match=said):
            engine.generate([PROMPT], SamplingParams(suppress_tokens=list(ids)))
    with pytest.raises(RequestError, match="suppress_tokens="):
        SamplingParams(suppress_tokens=[-1])
