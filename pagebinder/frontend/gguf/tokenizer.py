"""The tokenizer of a GGUF file: its vocabulary as a tokenizer of `tokenizers`, in the wrapper that transformers has.

    tokenizer.ggml.model   "gpt2": BPE of bytes, with merges; "llama": SentencePiece's BPE, scores say the merges
    tokenizer.ggml.pre     how a text is split before; of a name that is not known nothing is guessed
    .tokens .token_type .scores .merges   .bos_token_id .add_bos_token ...   tokenizer.chat_template

Splits are those of the models' own tokenizer.json, as are NFC of Qwen 2 and the merges that Llama 3 leaves out. Rows
of the vocabulary that are unused stay out of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pagebinder.errors import CheckpointError
from pagebinder.frontend.gguf.file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # of tokenizer.ggml.token_type
SPACE = "▁"
OF_PIECES = {"unknown": 0, "bos": 1, "eos": 2}  # SentencePiece's, where a file does not say
KINDS = {  # of what is said
    "model": str, "pre": str, "tokens": list, "token_type": list, "merges": list, "scores": list,
    **{f"{name}_token_id": int for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
    "add_bos_token": bool, "add_eos_token": bool, "add_space_prefix": bool,
}  # fmt: skip

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_OF_CASES = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{0}|"
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{0}|{1}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2, DIGITS = "gpt2", "digits"  # GPT-2's own split, and single digits before that
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK3 = (  # one split after the other
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
TEKKEN = _OF_CASES.format("", r"\p{N}")
GPT4O = _OF_CASES.format(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "granite-docling", "exaone4"), GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "glm5", "chatglm-bpe"), LLAMA3),
    "seed-coder": SEED,
    **dict.fromkeys(("hunyuan-dense", "deepseek-v3"), DEEPSEEK3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
}  # fmt: skip
BEGINS_WITH_BOS = (  # where the file does not say
    "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken",
)  # fmt: skip
WHOLE_WORDS_FIRST = (*BEGINS_WITH_BOS, "glm4", "glm5")
COMPOSED = ("qwen2",)  # NFC

# Tokens that end an answer, whatever a file says of them; "<|end|>" not of models that use channels, and two of these
# only where they are control tokens.
OFTEN_PLAIN = frozenset(("</s>", "<eos>"))
ALWAYS_ENDS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<EOT>",
})  # fmt: skip
ENDS = OFTEN_PLAIN | ALWAYS_ENDS


def tokenizer_of(file: GgufFile) -> Any:
    """The tokenizer, or None where the file has none, or one that is not known (`unknown_tokenizer` says which).

    Raises:
        CheckpointError: its parts contradict each other.
    """
    vocabulary = _Vocabulary(file)
    if vocabulary.unknown() is not None:
        return None
    from transformers import PreTrainedTokenizerFast

    try:
        backend = _of_bytes(vocabulary) if vocabulary.model == "gpt2" else _of_pieces(vocabulary)
        known = vocabulary.numbers(CONTROL, USER_DEFINED, UNKNOWN)
        backend.add_tokens([vocabulary.added(token) for token in known])
        backend.post_processor = _with_ends(vocabulary)
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        given = {name: vocabulary.special(kind) for name, kind in names.items()}
    except Exception as error:  # tokenizers raises this very type
        raise CheckpointError(f"{file.path}: its vocabulary cannot be read: {error}") from error
    template = file.options.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        chat_template=template if isinstance(template, str) else None,
        **{name: token for name, token in given.items() if token is not None},
    )


def unknown_tokenizer(file: GgufFile) -> str | None:
    """What is not known of a file's tokenizer; None: it is known."""
    return _Vocabulary(file).unknown()


def end_tokens(file: GgufFile) -> frozenset[int]:
    """Ids that end an answer."""
    vocabulary = _Vocabulary(file)
    ends = {vocabulary.get(f"{name}_token_id") for name in ("eot", "eom")}
    ends.add(vocabulary.get("eos_token_id", OF_PIECES["eos"] if vocabulary.model == "llama" else None))
    control = {vocabulary.tokens[i]: i for i in vocabulary.numbers(CONTROL)}
    named = ENDS - ({"<|end|>"} if control.keys() >= {"<|return|>", "<|call|>"} else frozenset())
    ends |= {control[token] for token in named & control.keys()}
    return frozenset(i for i in ends if i is not None and 0 <= i < max(len(vocabulary.tokens), 1))


class _Vocabulary:
    """What a file says of its tokens."""

    def __init__(self, file: GgufFile):
        self._options = file.options
        for name, kind in KINDS.items():
            value = self.get(name, kind())
            parts = value if isinstance(value, list) else ()
            if not isinstance(value, kind) or len({type(part) for part in parts}) > 1:
                raise CheckpointError(f"{file.path}: tokenizer.ggml.{name} is {str(value)[:40]!r}.")
        self.model: str | None = self.get("model")
        self.tokens: list[str] = self.get("tokens") or []
        self._types: list[int] = self.get("token_type") or []
        table = file.tensors.get("token_embd.weight")
        if table is not None and len(self.tokens) > table.shape[0]:
            rows, count = table.shape[0], len(self.tokens)
            raise CheckpointError(
                f"{file.path} names {count:,} tokens, and its token_embd.weight has {rows:,} rows."
            )

    def get(self, name: str, default: Any = None) -> Any:
        return self._options.get(f"tokenizer.ggml.{name}", default)

    def unknown(self) -> str | None:
        """What is not known of it."""
        if self.model not in ("gpt2", "llama") or not self.tokens:
            return f"tokenizer.ggml.model {self.model!r}"
        if self.model == "gpt2" and self.get("pre") not in SPLITS:
            return f"tokenizer.ggml.pre {self.get('pre')!r}"
        needed = "merges" if self.model == "gpt2" else "scores"
        return None if self.get(needed) else f"no tokenizer.ggml.{needed}"

    def type_of(self, number: int) -> int:
        if self.tokens[number] in ALWAYS_ENDS:
            return CONTROL
        return self._types[number] if number < len(self._types) else NORMAL

    def numbers(self, *types: int) -> Iterator[int]:
        return (i for i in range(len(self.tokens)) if self.type_of(i) in types)

    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens) if self.type_of(i) != UNUSED}

    def special(self, kind: str) -> str | None:
        """The token of a kind, if there is one. Raises ValueError: its number is none of a token."""
        number = self.get(f"{kind}_token_id", OF_PIECES.get(kind) if self.model == "llama" else None)
        if number is None:
            return None
        if not 0 <= number < len(self.tokens):
            raise ValueError(f"its {kind}_token_id is {number}, of {len(self.tokens):,} tokens")
        return self.tokens[number]

    def added(self, number: int) -> Any:
        from tokenizers import AddedToken

        is_control = self.type_of(number) == CONTROL
        return AddedToken(self.tokens[number], special=is_control, normalized=False)


def _of_bytes(vocabulary: _Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = vocabulary.get("pre")
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.get("merges") or ()]
    whole = pre in WHOLE_WORDS_FIRST
    backend = Tokenizer(models.BPE(vocab=vocabulary.ids(), merges=merges, ignore_merges=whole))
    split = SPLITS[pre]
    own = split in (GPT2, DIGITS)
    first = [pre_tokenizers.Digits(individual_digits=True)] if split == DIGITS else []
    splits = () if own else (split,) if isinstance(split, str) else split
    first += [pre_tokenizers.Split(Regex(each), "isolated") for each in splits]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, in_bytes])
    if pre in COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _of_pieces(vocabulary: _Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids, begins_with_space = vocabulary.ids(), vocabulary.get("add_space_prefix", True)
    unknown = next((vocabulary.tokens[i] for i in vocabulary.numbers(UNKNOWN)), None)
    backend = Tokenizer(
        models.BPE(
            vocab=ids, merges=_merges(ids, vocabulary.get("scores") or ()), unk_token=unknown, fuse_unk=True,
            byte_fallback=True,
        )
    )  # fmt: skip
    prefix = [normalizers.Prepend(SPACE)] if begins_with_space else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    ends = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return backend


def _merges(ids: dict[str, int], scores) -> list[tuple[str, str]]:
    """Of two pieces that make one, the one with the highest score first."""
    found = []
    for piece, number in ids.items():
        if number < len(scores):
            halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
            found += [
                (-scores[number], ids[left], ids[right], (left, right))
                for left, right in halves
                if left in ids and right in ids
            ]
    return [pair for *_, pair in sorted(found)]


def _with_ends(vocabulary: _Vocabulary) -> Any:
    """What puts a text's first and last token to it."""
    from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

    begins = vocabulary.model == "llama" or vocabulary.get("pre") in BEGINS_WITH_BOS
    bos = vocabulary.special("bos") if vocabulary.get("add_bos_token", begins) else None
    eos = vocabulary.special("eos") if vocabulary.get("add_eos_token", False) else None
    if vocabulary.get("add_bos_token") and bos is None:
        raise ValueError("texts begin with a token that it does not name (bos_token_id)")
    first, last = ([bos] if bos else []), ([eos] if eos else [])
    template = TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[
            *first,
            "$A",
            *last,
            *(f"{token}:1" for token in first),
            "$B:1",
            *(f"{token}:1" for token in last),
        ],
        special_tokens=[(token, vocabulary.tokens.index(token)) for token in {*first, *last}],
    )
    return template if vocabulary.model == "llama" else Sequence([ByteLevel(trim_offsets=False), template])
