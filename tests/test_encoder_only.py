"""Encoders alone: captured, packed, and equal to the source model on every sequence by itself."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BigBirdConfig,
    BigBirdModel,
    DistilBertConfig,
    DistilBertModel,
    FNetConfig,
    FNetModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
)

import pagebinder
from pagebinder import CaptureError, CheckpointError, CompileConfig, ConfigError, RequestError
from pagebinder.compiled_encoder import CompiledEncoder
from pagebinder.compiler import encoder as compile_encoder_module
from pagebinder.frontend import unsupported
from pagebinder.frontend.numbering import Numbering, numbering
from pagebinder.graph_tools import calls
from tests.helpers import by_day, scale_weights
from tests.tolerances import assert_close

VOCAB_SIZE = 96
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 66,
}
EAGER = CompileConfig(executable="eager")
LENGTHS = (7, 1, 40, 2, 23)


def bert(cls=BertModel, **overrides):
    return scale_weights(cls(BertConfig(**{**SHAPE, **overrides})))


def roberta():
    return scale_weights(RobertaModel(RobertaConfig(**SHAPE, pad_token_id=1)))


def distilbert():
    config = DistilBertConfig(
        vocab_size=VOCAB_SIZE, dim=64, n_layers=2, n_heads=4, hidden_dim=96, max_position_embeddings=64
    )
    return scale_weights(DistilBertModel(config))


def modernbert():
    """One full layer, then one that sees three tokens to each side; RoPE."""
    options = {"local_attention": 6, "global_attn_every_n_layers": 2, "pad_token_id": 0}
    options |= {f"{name}_token_id": None for name in ("bos", "eos", "cls", "sep")}
    return scale_weights(ModernBertModel(ModernBertConfig(**{**SHAPE, **options})))


def t5_encoder():
    config = T5Config(vocab_size=VOCAB_SIZE, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    return scale_weights(T5EncoderModel(config))


def mpnet():
    """A bias by distance, whose last bucket begins beyond the tests' sequences; attention written by hand."""
    return scale_weights(MPNetModel(MPNetConfig(**{**SHAPE, "max_position_embeddings": 200})))


FAMILIES = {
    "bert": bert,
    "roberta": roberta,
    "distilbert": distilbert,
    "modernbert": modernbert,
    "t5": t5_encoder,
    "mpnet": mpnet,
}


def sequences(lengths=LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def rows_of(model, ids: list[int]) -> torch.Tensor:
    """The source model on one sequence, given nothing but its ids."""
    with torch.no_grad():
        out = model(input_ids=torch.tensor([ids]))
    return (out.logits if hasattr(out, "logits") else out.last_hidden_state)[0]


@pytest.fixture(scope="module")
def model():
    return bert()


@pytest.fixture(scope="module")
def compiled(model):
    return pagebinder.compile_model(model, EAGER)


@pytest.mark.parametrize("family", by_day(FAMILIES, ["bert", "modernbert", "t5"]))
def test_each_sequence_of_a_packed_batch_is_the_source_models(family):
    model = FAMILIES[family]()
    compiled = pagebinder.compile_model(model, EAGER)
    assert isinstance(compiled, CompiledEncoder)
    prompts = sequences()
    rows = compiled.encode_batch(prompts)
    assert [len(r) for r in rows] == list(LENGTHS)
    for ids, actual in zip(prompts, rows):
        assert_close(actual, rows_of(model, ids))


def test_every_level_is_the_source_model(model, compiled):
    (ids,) = sequences((19,))
    for level in ("captured", "semantic", "packed"):
        assert_close(compiled.run_level(level, torch.tensor(ids)), rows_of(model, ids))
    assert len(list(calls(compiled.graphs["packed"].graph, torch.ops.pagebinder.attention.default))) == 0
    assert [match.pattern for match in compiled.report.matches].count("packed_attention") == 2
    assert [state.kind for state in compiled.states] == ["encoder_only"] * 2
    assert "packed_attention" in compiled.explain() and "BertModel" in compiled.explain()


def test_a_model_with_a_head_returns_logits():
    model = bert(BertForMaskedLM)
    compiled = pagebinder.compile_model(model, EAGER)
    (ids,) = sequences((11,))
    assert_close(compiled.encode_batch([ids])[0], rows_of(model, ids))
    with pytest.raises(ConfigError, match="returns logits"):
        compiled.embed([ids], pooling="mean")


def test_compiled_by_inductor_once_for_all_lengths(model):
    compiled = pagebinder.compile_model(model, CompileConfig(executable="inductor"))
    for prompts in (
        sequences(),
        sequences((1,)),
        sequences((2,)),
        sequences((1, 1, 1)),
        sequences((64, 64, 3)),
    ):
        for ids, actual in zip(prompts, compiled.encode_batch(prompts), strict=True):
            assert_close(actual, rows_of(model, ids))


@pytest.mark.parametrize("budget", [1, 8, 41, 10_000])
def test_results_do_not_depend_on_the_token_budget_and_keep_the_order(compiled, budget):
    whole = compiled.encode_batch(sequences())
    cut = compiled.encode_batch(sequences(), max_num_batched_tokens=budget)
    for a, b in zip(whole, cut, strict=True):
        assert_close(a, b)


def test_a_sequence_learns_nothing_of_its_neighbours(compiled):
    first, second = sequences((9, 30)), sequences((9, 30), seed=1)
    alone = compiled.encode_batch([first[0]])[0]
    assert torch.equal(compiled.encode_batch([second[1], first[0]])[1], compiled.encode_batch([*first])[0])
    assert_close(compiled.encode_batch([second[1], first[0]])[1], alone)


def test_pooling(model, compiled):
    prompts = sequences()
    rows = [rows_of(model, ids) for ids in prompts]
    expected = {
        "mean": [r.mean(0) for r in rows],
        "max": [r.amax(0) for r in rows],
        "cls": [r[0] for r in rows],
        "lasttoken": [r[-1] for r in rows],
    }
    for pooling, vectors in expected.items():
        assert_close(
            compiled.embed(prompts, pooling=pooling, max_num_batched_tokens=30), torch.stack(vectors)
        )
    unit = compiled.embed(prompts, pooling="mean", normalize=True)
    assert_close(unit.norm(dim=-1), torch.ones(len(prompts)))


def test_positions_begin_behind_the_padding_index():
    model = roberta()
    assert numbering(model) == Numbering(2, 1)
    assert numbering(bert()) == Numbering()
    compiled = pagebinder.compile_model(model, EAGER)
    assert compiled.max_tokens == 64  # of 66 rows of the position table, the first two are never reached
    with pytest.raises(RequestError, match="Input 1 contains the padding token 1"):
        compiled.encode_batch([[5, 6], [5, 1, 6]])


def test_a_wrong_numbering_is_found_when_compiling(monkeypatch):
    monkeypatch.setattr(compile_encoder_module, "capture_encoder_only", _captured_without_offset)
    with pytest.raises(CaptureError, match="differs from the source model by"):
        pagebinder.compile_model(roberta(), EAGER)


def _captured_without_offset(source):
    from pagebinder.frontend import encoder_only

    before = encoder_only.numbering
    encoder_only.numbering = lambda module: Numbering()
    try:
        return encoder_only.capture_encoder_only(source)
    finally:
        encoder_only.numbering = before


def test_token_mixing_that_is_not_attention_is_refused(monkeypatch):
    model = scale_weights(FNetModel(FNetConfig(**SHAPE)))
    with pytest.raises(CaptureError, match="Fourier transform over the sequence"):
        pagebinder.compile_model(model, EAGER)
    monkeypatch.setattr(unsupported, "TRAITS", ())  # a family that nobody has heard of
    with pytest.raises(CaptureError, match="relates tokens in"):
        pagebinder.compile_model(model, EAGER)


def test_a_model_that_changes_itself_is_refused_and_left_as_it_was(monkeypatch):
    """BigBird turns to full attention, for good, when it is given a short text."""
    monkeypatch.setattr(
        unsupported, "TRAITS", ()
    )  # it is known by its trait; another such model would not be
    model = scale_weights(BigBirdModel(BigBirdConfig(**SHAPE | {"num_hidden_layers": 1}, block_size=4)))
    attention = model.encoder.layer[0].attention.self
    with pytest.raises(CaptureError, match=r"attention_type \('block_sparse' -> 'original_full'\)"):
        pagebinder.compile_model(model, EAGER)
    assert model.attention_type == "block_sparse" and model.encoder.layer[0].attention.self is attention


def test_bad_input_is_an_error_that_names_the_input(compiled):
    cases = {
        "The list of inputs is empty": [],
        "Give a list of texts": "one text",
        "Input 1 is empty": [[5], []],
        "Input 1 is neither": [[5], [5, "a"]],
        "Input 0 has 67 tokens; this model takes 66 at most": [[5] * 67],
        f"Input 1 has a token id outside the vocabulary of {VOCAB_SIZE}": [[5], [VOCAB_SIZE]],
        "Input 0 has a token id outside": [[-1]],
    }
    for message, inputs in cases.items():
        with pytest.raises(RequestError, match=message):
            compiled.encode_batch(inputs)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        compiled.encode_batch(["text"])
    with pytest.raises(ConfigError, match="max_num_batched_tokens=0"):
        compiled.encode_batch([[5]], max_num_batched_tokens=0)
    with pytest.raises(ConfigError, match="pooling='median'"):
        compiled.embed([[5]], pooling="median")
    with pytest.raises(ConfigError, match="pooling of BertModel is not known"):
        compiled.embed([[5]])
    with pytest.raises(ConfigError, match="generates nothing"):
        compiled.engine()
    assert len(compiled.encode_batch([[5] * 67], truncate=True)[0]) == 66


def test_options_of_a_cache_are_refused():
    with pytest.raises(ConfigError, match="block_size: these options are about a decoder's cache"):
        pagebinder.compile_model(bert(), CompileConfig(executable="eager", block_size=16))
    without_effect = ({"kv_dtype": "int8"}, {"index_dtype": "fp8"}, {"cascade": True}, {"streams": "on"})
    for options in without_effect:
        with pytest.raises(ConfigError, match=f"{next(iter(options))}: these options are about a decoder's"):
            pagebinder.compile_model(bert(), CompileConfig(executable="eager", **options))
    with pytest.raises(ConfigError, match="pack_weights='coded' is for decoders"):
        pagebinder.compile_model(bert(), CompileConfig(executable="eager", pack_weights="coded"))
    with pytest.raises(ConfigError, match="max_model_len=500"):
        pagebinder.compile_model(bert(), CompileConfig(executable="eager", max_model_len=500))


def sentence_dir(path, model, pooling: dict, kinds=("Transformer", "Pooling", "Normalize")):
    import json

    model.save_pretrained(path)
    parts = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(parts))
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}')
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"pooling_mode": []}, "pooling_mode is a name"),
        ({"pooling_mode": [1]}, "pooling_mode is a name"),
        ({"pooling_mode_mean_tokens": "false"}, "pooling_mode_mean_tokens is true or false, not 'false'"),
    ],
)
def test_a_pooling_that_says_nothing_is_an_error(tmp_path, pooling, message):
    path = sentence_dir(tmp_path, bert(BertForMaskedLM), pooling)
    with pytest.raises(CheckpointError, match=message):
        pagebinder.compile_model(path, EAGER)


def test_older_directories_name_the_model_in_the_file_of_options(tmp_path):
    path = sentence_dir(tmp_path, bert(BertForMaskedLM), {"pooling_mode": "mean"})
    (path / "sentence_bert_config.json").rename(path / "sentence_xlm-roberta_config.json")
    compiled = pagebinder.compile_model(path, EAGER)
    assert compiled.max_tokens == 32
    with pytest.raises(ConfigError, match="normalize is True, False or None, not 'no'"):
        compiled.embed(sequences((5,)), normalize="no")


def test_a_sentence_transformers_directory_says_how_to_pool(tmp_path):
    model = bert(BertForMaskedLM)  # the head is not used: embeddings are made of hidden states
    path = sentence_dir(tmp_path, model, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    compiled = pagebinder.compile_model(path, EAGER)
    assert compiled.max_tokens == 32
    prompts = sequences((5, 20))
    with torch.no_grad():
        expected = [model.bert(input_ids=torch.tensor([ids])).last_hidden_state[0, 0] for ids in prompts]
    assert_close(compiled.embed(prompts), torch.nn.functional.normalize(torch.stack(expected), dim=-1))


@pytest.mark.parametrize(
    "pooling, kinds, message",
    [
        ({"pooling_mode": "weightedmean"}, ("Transformer", "Pooling"), "its pooling is weightedmean"),
        ({"pooling_mode": ["cls", "max"]}, ("Transformer", "Pooling"), r"its pooling is cls \+ max"),
        ({}, ("Transformer", "Pooling", "Dense"), "its modules are Transformer -> Pooling -> Dense"),
    ],
)
def test_a_recipe_that_is_not_known_is_not_guessed(tmp_path, pooling, kinds, message):
    compiled = pagebinder.compile_model(sentence_dir(tmp_path, bert(), pooling, kinds), EAGER)
    with pytest.raises(ConfigError, match=message):
        compiled.embed([[5, 6]])
    assert compiled.embed([[5, 6]], pooling="mean").shape == (1, 64)


def test_a_broken_recipe_is_told_when_compiling(tmp_path):
    path = sentence_dir(tmp_path, bert(), {})
    (path / "modules.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"modules\.json cannot be read"):
        pagebinder.compile_model(path, EAGER)
