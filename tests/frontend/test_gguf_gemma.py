"""GGUF files of Gemma 3n and 4: what they say of layers, what is refused, the tokenizer of Gemma 4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import pagebinder
from pagebinder import CheckpointError, CompileConfig
from pagebinder.frontend.gguf.file import read_gguf
from pagebinder.frontend.gguf.tokenizer import end_tokens, tokenizer_of, unknown_tokenizer
from pagebinder.frontend.model_path import source_from_path
from tests.frontend.gguf_files import write_gguf
from tests.frontend.test_gguf import tokens_of, tokens_of_plain
from tests.frontend.test_gguf_tokenizer import TEXTS, write

IDS = torch.arange(60)[None] % 80
INFINITY = float("inf")
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


def config_of(path):
    return source_from_path(path, weights=False).module.config


# ---- what files say ----------------------------------------------------------------------------------------------


def test_widths_of_kinds_of_layers(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "gemma4")
    said = config_of(path).to_dict()
    assert (said["head_dim"], said["num_key_value_heads"], said["attention_k_eq_v"]) == (64, 2, True)
    layer = source_from_path(path, weights=False).module.model.layers[2].self_attn
    assert (layer.head_dim, layer.k_proj.out_features, layer.v_proj) == (128, 128, None)
    assert said["rope_parameters"]["full_attention"] == {
        "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "double"), [("gemma4 with embeddings", False), ("gemma4 twice as wide", True)]
)
def test_keys_and_values_of_layers_that_have_those_of_others(name, double, tmp_path):
    """They are in released files, and nothing reads them; a file may lack them."""
    path = tmp_path / "model.gguf"
    write_gguf(path, name)
    source = source_from_path(path, weights=False)
    assert source.module.config.use_double_wide_mlp is double
    parts = ("attn_k", "attn_k_norm", "attn_v")
    assert source.tensors.left_over == tuple(f"blk.{i}.{part}.weight" for i in (2, 3) for part in parts)


def test_rows_that_the_converter_puts_behind_a_table(tmp_path):
    path = tmp_path / "model.gguf"
    plain = write_gguf(path, "gemma3n", vocab_size_per_layer_input=80)
    source = source_from_path(path, dtype=torch.float32)
    assert source.module.config.vocab_size_per_layer_input == 96
    with torch.no_grad():
        assert torch.equal(source.module(IDS).logits, plain(IDS).logits)


def test_what_gemma_3n_has_if_a_file_says_nothing(tmp_path):
    path = tmp_path / "model.gguf"
    names = (
        "activation_sparsity_scale",
        "altup.active_idx",
        "altup.num_inputs",
        "final_logit_softcapping",
        PATTERN,
    )
    more = dict.fromkeys(names) | {"attention.shared_kv_layers": None}
    write_gguf(path, "gemma3n", more=more, num_kv_shared_layers=0)
    config = config_of(path)
    assert config.activation_sparsity_pattern == [0.95] * 4 and config.final_logit_softcapping == 30.0
    assert (config.altup_active_idx, config.altup_num_inputs, config.num_kv_shared_layers) == (0, 4, 0)
    assert config.layer_types == ["sliding_attention"] * 4


def test_caps_of_gemma_4(tmp_path):
    """llama.cpp has one where a file says nothing."""
    path = tmp_path / "model.gguf"
    for said, cap in ((None, 30.0), (0.0, None), (20.0, 20.0)):
        write_gguf(path, "gemma4", more={"final_logit_softcapping": said})
        assert config_of(path).final_logit_softcapping == cap


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("gemma4", {PATTERN: [True, False, True]}, "sliding_window_pattern = .* is not served"),
        ("gemma4", {PATTERN: None}, "sliding_window_pattern = None is not served"),
        ("gemma4", {WINDOW: None}, "lacks gemma4.attention.sliding_window"),
        ("gemma4", {"attention.head_count_kv": [2, 1, 1]}, r"head_count_kv = \[2, 1, 1\] is not served"),
        ("gemma4", {"attention.head_count_kv": [2, 2, 0]}, r"head_count_kv = \[2, 2, 0\] is not served"),
        ("gemma4", {"attention.value_length_swa": 32}, "value_length_swa = 32 is not served"),
        ("gemma4", {"rope.dimension_count": 32}, "rope.dimension_count = 32 is not served"),
        ("gemma4", {"rope.dimension_count_swa": 32}, "rope.dimension_count_swa = 32 is not served"),
        ("gemma4", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, "scaling.type = 'linear' is not"),
        ("gemma4", {"attention.shared_kv_layers": 3}, "shared_kv_layers = 3 is not served"),
        ("gemma4", {"feed_forward_length": [256, 256, 512]}, r"feed_forward_length = \[256, 256, 512\]"),
        ("gemma4", {"final_logit_softcapping": -1.0}, "final_logit_softcapping = -1.0 is not served"),
        ("gemma4", {"attention.scale": 0.5}, "attention.scale = 0.5 is not served"),
        ("gemma4", {"embedding_length_per_layer_input": 256}, "lacks per_layer_token_embd.weight"),
        ("gemma4 with experts", {"expert_count": None}, "expert_used_count = 2 is not served"),
        ("gemma4 with embeddings", {PATTERN: [False, True] * 2}, "sliding_window_pattern = .* is not served"),
        ("gemma4 with embeddings", {PATTERN: [False, False, True, False]}, "shared_kv_layers = 2 is not served"),
        ("gemma4 twice as wide", {"feed_forward_length": [256, 256, 768, 768]}, "feed_forward_length = .* is not"),
        ("gemma3n", {"altup.active_idx": 4}, "altup.active_idx = 4 is not served"),
        ("gemma3n", {"altup.num_inputs": 3}, "altup"),
        ("gemma3n", {"activation_sparsity_scale": [INFINITY] * 4}, "activation_sparsity_scale = .* is not served"),
        ("gemma3n", {"activation_sparsity_scale": [float("nan")] * 4}, "sparsity_scale = .* is not served"),
        ("gemma3n", {"feed_forward_length": [256, 256, 256, 512]}, "differs from layer to layer"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_said(name, more, said, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, name, more=more)
    with pytest.raises(CheckpointError, match=said):
        source_from_path(path, weights=False)


def test_tables_of_other_tokens(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "gemma4 with embeddings", vocab_size=96, vocab_size_per_layer_input=128)
    with pytest.raises(CheckpointError, match="per_layer_token_embd.weight has 128 rows for 96 tokens"):
        source_from_path(path, weights=False)


@pytest.mark.parametrize("factors", [[1.0] * 16 + [8.0] * 48, [8.0] + [1.0] * 63, [1.0] * 32])
def test_other_factors_of_frequencies(factors, tmp_path, monkeypatch):
    from tests.frontend import gguf_gemma_files as files

    of_gemma4 = files.TENSORS["gemma4"]
    other = {"rope_freqs.weight": files.Stored(torch.tensor(factors))}
    monkeypatch.setitem(files.TENSORS, "gemma4", lambda model: of_gemma4(model) | other)
    write_gguf(tmp_path / "model.gguf", "gemma4")
    with pytest.raises(CheckpointError, match="rope_freqs.weight .*factors"):
        source_from_path(tmp_path / "model.gguf", weights=False)


# ---- tokens ------------------------------------------------------------------------------------------------------


def test_tokens(tmp_path):
    path = tmp_path / "model.gguf"
    plain = write_gguf(path, "gemma4 twice as wide", {"attn": "Q8_0", "": "Q4_0"})
    compiled = pagebinder.compile_model(path, CompileConfig(dtype="float32", executable="eager"))
    tokens = tokens_of_plain(plain)
    assert tokens_of(compiled) == tokens
    compiled.save(tmp_path / "saved")
    path.unlink()
    assert tokens_of(pagebinder.load(tmp_path / "saved")) == tokens


# ---- the tokenizer of Gemma 4 ------------------------------------------------------------------------------------

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", "<|tool_response>"]
MORE = ["a" + "\n" * count + " b" for count in (1, 2, 3, 5, 8)] + [
    "   x",
    "<turn|>\n<bos>",
    "</s>",
    "▁▁",
    "\x00",
]


def trained(newlines: bool) -> Tokenizer:
    """As Gemma 4's tokenizer.json is: BPE of lines, whose spaces are "▁"; bytes of what it does not know."""
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=80, show_progress=False,
    )  # fmt: skip
    tokenizer = pieces({}, [])
    tokenizer.train_from_iterator(
        [Path(__file__).read_text(), *TEXTS, *(["\n\n", "\n\n\n"] * 40 if newlines else [])], trainer
    )
    said = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in said["merges"] if newlines or "\n" not in "".join(merge)]
    vocabulary = said["vocab"] | {"</s>": len(said["vocab"])}
    if not newlines:
        vocabulary = {
            token: i for i, token in enumerate([*(t for t in vocabulary if t.strip("\n")), "\n", "\n\n"])
        }
    built = pieces(vocabulary, merges)
    built.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return built


def pieces(vocabulary, merges) -> Tokenizer:
    model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def written(path, tokenizer: Tokenizer, **options):
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.get)
    types = [6 if token.startswith("<0x") else 3 if token in SPECIAL[:5] else 1 for token in tokens]
    types[ids["<|tool_response>"]] = 4
    merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    said = {
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unk_token_id": 3,
        "add_bos_token": True,
        "add_space_prefix": False,
    }
    return read_gguf(write(path, "gemma4", tokens, types, rows=1000, token_merges=merges, **(said | options)))


def test_pieces_with_merges(tmp_path):
    tokenizer = trained(newlines=True)
    file = written(tmp_path / "m.gguf", tokenizer)
    built = tokenizer_of(file)
    for text in [*TEXTS, *MORE]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert built(text)["input_ids"] == [2, *ids], text
        assert built.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)
    ends = ("<eos>", "<turn|>", "<|tool_response>")
    assert end_tokens(file) == {tokenizer.token_to_id(token) for token in ends}
    assert built.decode([2, *built("x y")["input_ids"], 1], skip_special_tokens=True) == "x y"


def test_newlines_that_no_merges_make(tmp_path):
    built = tokenizer_of(written(tmp_path / "m.gguf", trained(newlines=False)))
    one, two = (built.convert_tokens_to_ids(token) for token in ("\n", "\n\n"))
    assert built("\n\n")["input_ids"] == [2, two] and built("\n")["input_ids"] == [2, one]


def test_texts_of_gemma_4_begin_with_a_token(tmp_path):
    """Whatever the file says."""
    tokenizer = trained(newlines=True)
    built = tokenizer_of(written(tmp_path / "a.gguf", tokenizer, add_bos_token=False))
    assert built("a")["input_ids"][0] == 2
    options = {"token_merges": ["a b"], "add_bos_token": False}
    file = read_gguf(write(tmp_path / "b.gguf", "gemma4", ["a", "b", "ab"], [1, 1, 1], **options))
    with pytest.raises(CheckpointError, match="does not name"):
        tokenizer_of(file)
    file = read_gguf(write(tmp_path / "c.gguf", "gemma4", ["a", "b"], [1, 1]))
    assert tokenizer_of(file) is None and unknown_tokenizer(file) == "no tokenizer.ggml.merges"
