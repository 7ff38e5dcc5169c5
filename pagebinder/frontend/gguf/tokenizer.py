"""The tokenizer of a GGUF file: its vocabulary as a tokenizer of `tokenizers`, in the wrapper that transformers has.

    tokenizer.ggml.model   "gpt2": BPE of bytes, with merges; "llama": SentencePiece's BPE, scores say the merges;
                           "gemma4": the same pieces, with merges
    tokenizer.ggml.pre     how a text is split before; of a name that is not known nothing is guessed
    .tokens .token_type .scores .merges   .bos_token_id .add_bos_token ...   tokenizer.chat_template

Rows of the vocabulary that are unused stay out of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pagebinder.errors import CheckpointError
from pagebinder.frontend.gguf.file import GgufFile
from pagebinder.frontend.gguf.splits import (
    BEGINS_WITH_BOS,
    COMPOSED,
    DIGITS,
    GPT2,
    SPLITS,
    WHOLE_WORDS_FIRST,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # of tokenizer.ggml.token_type
SPACE = "▁"
BYTES, PIECES, MERGED_PIECES = "gpt2", "llama", "gemma4"  # of tokenizer.ggml.model
OF_PIECES = {"unknown": 0, "bos": 1, "eos": 2}  # SentencePiece's, where a file does not say
KINDS = {  # of what is said
    "model": str, "pre": str, "tokens": list, "token_type": list, "merges": list, "scores": list,
    **{f"{name}_token_id": int for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
    "add_bos_token": bool, "add_eos_token": bool, "add_space_prefix": bool,
}  # fmt: skip

# Tokens that end an answer, whatever a file says of them; "<|end|>" not of models that use channels, and two of these
# only where they are control tokens.
OFTEN_PLAIN = frozenset(("</s>", "<eos>"))
ALWAYS_ENDS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<EOT>", "<turn|>", "<|tool_response>",
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
        backend = _of_bytes(vocabulary) if vocabulary.model == BYTES else _of_pieces(vocabulary)
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
    ends.add(vocabulary.get("eos_token_id", OF_PIECES["eos"] if vocabulary.model == PIECES else None))
    control = {vocabulary.tokens[i]: i for i in vocabulary.numbers(CONTROL)}
    named = ENDS - ({"<|end|>"} if control.keys() >= {"<|return|>", "<|call|>"} else frozenset())
    named -= {"</s>"} if "<|tool_response>" in control else frozenset()  # a tag of Gemma 4's
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
        if self.model not in (BYTES, PIECES, MERGED_PIECES) or not self.tokens:
            return f"tokenizer.ggml.model {self.model!r}"
        if self.model == BYTES and self.get("pre") not in SPLITS:
            return f"tokenizer.ggml.pre {self.get('pre')!r}"
        needed = "scores" if self.model == PIECES else "merges"
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
        number = self.get(f"{kind}_token_id", OF_PIECES.get(kind) if self.model == PIECES else None)
        if number is None:
            return None
        if not 0 <= number < len(self.tokens):
            raise ValueError(f"its {kind}_token_id is {number}, of {len(self.tokens):,} tokens")
        return self.tokens[number]

    def merges(self) -> list[tuple[str, str]]:
        return [tuple(merge.split(" ", 1)) for merge in self.get("merges") or ()]

    def added(self, number: int) -> Any:
        from tokenizers import AddedToken

        is_control = self.type_of(number) == CONTROL
        return AddedToken(self.tokens[number], special=is_control, normalized=False)


def _of_bytes(vocabulary: _Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = vocabulary.get("pre")
    whole = pre in WHOLE_WORDS_FIRST
    backend = Tokenizer(models.BPE(vocab=vocabulary.ids(), merges=vocabulary.merges(), ignore_merges=whole))
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
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ids, is_merged = vocabulary.ids(), vocabulary.model == MERGED_PIECES
    begins_with_space = not is_merged and vocabulary.get("add_space_prefix", True)
    unknown = next((vocabulary.tokens[i] for i in vocabulary.numbers(UNKNOWN)), None)
    merges = vocabulary.merges() if is_merged else _merges(ids, vocabulary.get("scores") or ())
    backend = Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend(SPACE)] if begins_with_space else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    if is_merged:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
        backend.add_tokens(_unmerged_lines(vocabulary, backend.model))
    ends = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return backend


def _unmerged_lines(vocabulary: _Vocabulary, model: Any) -> list[Any]:
    """Tokens of several newlines that no merges make: llama.cpp finds them all the same."""
    lines = (i for i, token in enumerate(vocabulary.tokens) if token and not token.strip("\n"))
    return [vocabulary.added(i) for i in lines if len(model.tokenize(vocabulary.tokens[i])) > 1]


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

    always = vocabulary.model == MERGED_PIECES  # whatever the file says, in llama.cpp
    begins = vocabulary.model == PIECES or vocabulary.get("pre") in BEGINS_WITH_BOS
    bos = vocabulary.special("bos") if always or vocabulary.get("add_bos_token", begins) else None
    eos = vocabulary.special("eos") if vocabulary.get("add_eos_token", False) else None
    if (always or vocabulary.get("add_bos_token")) and bos is None:
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
    return template if vocabulary.model != BYTES else Sequence([ByteLevel(trim_offsets=False), template])
