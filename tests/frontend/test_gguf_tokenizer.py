"""Tokenizers of GGUF files: vocabularies as llama.cpp writes them, against the tokenizers that they come from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import pagebinder
from pagebinder.errors import CheckpointError
from pagebinder.frontend.gguf.file import read_gguf
from pagebinder.frontend.gguf.splits import SPLITS
from pagebinder.frontend.gguf.tokenizer import end_tokens, tokenizer_of, unknown_tokenizer
from pagebinder.frontend.model_path import tokenizer_problem
from tests.frontend.gguf_files import write_gguf

CORPUS = [Path(__file__).read_text(), "Grüße, 你好 Привет 3.14 100000 🚀 don't I'LL we've " * 20]
TEXTS = [
    "Hello world", "  two  spaces and\ttabs \n\n\n", "Grüße aus München, 你好世界", "3.14159 1000000 12",
    "don't I'LL",
    "🚀👨‍👩‍👧", "<|im_start|>user\nhi<|im_end|>", "", " ", "\r\n\r\n", "f(x)->y[3];;;", "\u00a0nbsp", "e\u0301",
]  # fmt: skip
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]


def trained(split) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(
        [AddedToken(token, special=token != "<tool>", normalized=False) for token in SPECIAL]
    )
    return tokenizer


def by_regex(*regexes: str):
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = (pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes)
    return pre_tokenizers.Sequence([*splits, in_bytes])


BPE = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    **{
        pre: by_regex(*([SPLITS[pre]] if isinstance(SPLITS[pre], str) else SPLITS[pre]))
        for pre in (
            "llama-bpe", "qwen2", "qwen35", "glm4", "seed-coder", "hunyuan-dense", "bailingmoe2", "exaone-moe",
            "kimi-k2", "minimax-m2", "deepseek-llm", "hunyuan", "deepseek-coder", "minicpm5", "stablelm2",
        )
    },
}  # fmt: skip


def vocabulary(tokenizer: Tokenizer) -> tuple[list[str], list[int]]:
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.get)
    return tokens, [{"<tool>": 4}.get(token, 3) if token in SPECIAL else 1 for token in tokens]


def write(path: Path, model: str | None, tokens=(), types=(), rows=4, **options) -> Path:
    writer = GGUFWriter(path, "llama")
    if model is not None:
        writer.add_tokenizer_model(model)
    if tokens:
        writer.add_token_list(tokens)
        writer.add_token_types(types)
    for name, value in options.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((rows, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", BPE)
def test_bpe_of_bytes(pre, tmp_path):
    tokenizer = trained(BPE[pre])
    tokens, types = vocabulary(tokenizer)
    merges = [" ".join(pair) for pair in _merges(tokenizer)]
    end = tokens.index("<|im_end|>")
    file = read_gguf(
        write(
            tmp_path / "m.gguf", "gpt2", tokens, types, token_merges=merges, tokenizer_pre=pre, eos_token_id=end,
            bos_token_id=end, add_bos_token=False, rows=700, chat_template="{{ messages[0]['content'] }}",
        )
    )  # fmt: skip
    built = tokenizer_of(file)
    for text in TEXTS:
        wanted = "\u00e9" if pre in ("qwen2", "qwen35") and text == "e\u0301" else text  # NFC
        assert built(text)["input_ids"] == tokenizer.encode(wanted, add_special_tokens=False).ids, text
        assert built.decode(built(text)["input_ids"]) == wanted
    assert end_tokens(file) == {end, tokens.index("<|endoftext|>")}
    assert built.decode([end, *built("a")["input_ids"]], skip_special_tokens=True) == "a"
    assert built.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    options = {"token_merges": merges, "tokenizer_pre": pre, "bos_token_id": end, "rows": 700}
    with_bos = read_gguf(write(tmp_path / "b.gguf", "gpt2", tokens, types, **options))
    assert (tokenizer_of(with_bos)("a")["input_ids"][0] == end) == (pre == "llama-bpe")


def _merges(tokenizer: Tokenizer) -> list:
    return json.loads(tokenizer.to_str())["model"]["merges"]


def test_pieces(tmp_path):
    """SentencePiece's: scores say what is merged first, other characters are bytes, a space is put in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = ["▁", "a", "b", "c", "ab", "▁a", "bc", "▁ab", "abc", "\n"]
    scores = [0.0] * len(pieces) + [
        -100.0,
        -101.0,
        -102.0,
        -103.0,
        -2.0,
        -1.0,
        -3.0,
        -4.0,
        -5.0,
        -6.0,
        -104.0,
    ]
    file = read_gguf(
        write(
            tmp_path / "m.gguf", "llama", [*pieces, *words], types + [1] * len(words), token_scores=scores,
            rows=300,
        )
    )  # fmt: skip
    tokenizer = tokenizer_of(file)
    at = {piece: i for i, piece in enumerate([*pieces, *words])}
    # "▁a" is merged before "ab": ▁a|b|c -> ▁a|bc
    assert tokenizer("abc")["input_ids"] == [1, at["▁a"], at["bc"]]
    assert tokenizer("a\né")["input_ids"] == [1, at["▁a"], at["\n"], at["<0xC3>"], at["<0xA9>"]]
    assert tokenizer("a</s>b")["input_ids"] == [1, at["▁a"], 2, at["▁"], at["b"]]
    assert tokenizer.decode(tokenizer(" abc é")["input_ids"], skip_special_tokens=True) == " abc é"
    assert end_tokens(file) == {2}


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("gpt2", {"tokenizer_pre": "never-heard-of"}, "tokenizer.ggml.pre 'never-heard-of'"),
        ("gpt2", {}, "tokenizer.ggml.pre None"),
        ("gpt2", {"tokenizer_pre": "gpt-2"}, "no tokenizer.ggml.merges"),
        ("llama", {}, "no tokenizer.ggml.scores"),
        ("t5", {}, "tokenizer.ggml.model 't5'"),
        (None, {}, "tokenizer.ggml.model None"),
    ],
)
def test_what_is_not_known_is_no_tokenizer(model, options, said, tmp_path):
    file = read_gguf(write(tmp_path / "m.gguf", model, ["a", "b"], [1, 1], **options))
    assert tokenizer_of(file) is None and unknown_tokenizer(file) == said
    assert said in tokenizer_problem(tmp_path / "m.gguf")
    trained(BPE["gpt-2"]).save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_problem(tmp_path / "m.gguf") is None


def test_parts_that_contradict_each_other(tmp_path):
    for options, said in (
        ({"token_merges": ["x y"]}, "vocabulary cannot be read"),
        ({"token_merges": ["a b"], "bos_token_id": 7}, "bos_token_id is 7, of 3 tokens"),
        ({"token_merges": ["a b"], "add_bos_token": True}, "does not name"),
    ):
        options = {"tokenizer_pre": "gpt-2"} | options
        file = read_gguf(write(tmp_path / "m.gguf", "gpt2", ["a", "b", "ab"], [1, 1, 1], **options))
        with pytest.raises(CheckpointError, match=said):
            tokenizer_of(file)
    file = read_gguf(write(tmp_path / "m.gguf", "gpt2", list("abcde"), [1] * 5))
    with pytest.raises(CheckpointError, match="names 5 tokens, and its token_embd.weight has 4 rows"):
        tokenizer_of(file)


def test_split_names_are_all_distinct_models():
    assert (
        len(set(SPLITS.values())) == 15
        and {"llama-bpe", "qwen2", "gpt-2", "tekken", "gpt-4o"} <= SPLITS.keys()
    )


def test_texts_through_a_model_and_its_artefact(tmp_path):
    """A prompt of text, and the same from what was saved, without the file."""
    tokenizer = trained(BPE["qwen2"])
    tokens, types = vocabulary(tokenizer)
    path = tmp_path / "model.gguf"
    more = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types, "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(tokenizer)],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }  # fmt: skip
    write_gguf(path, "qwen3", "Q8_0", more=more, vocab_size=640)
    compiled = pagebinder.compile_model(path)
    params = pagebinder.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    output = compiled.engine().generate(["two words"], params)[0]
    assert output.text == tokenizer.decode(list(output.token_ids), skip_special_tokens=True)
    compiled.save(tmp_path / "saved")
    path.unlink()
    loaded = pagebinder.load(tmp_path / "saved")
    assert loaded.engine().generate(["two words"], params)[0].text == output.text
    assert (tmp_path / "saved" / "tokenizer" / "chat_template.jinja").read_text() == more[
        "tokenizer.chat_template"
    ]
