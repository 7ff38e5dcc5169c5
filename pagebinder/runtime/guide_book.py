"""From what users say that a text must look like to the guides of an engine's requests, by llguidance."""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from pagebinder.errors import ConfigError, RequestError
from pagebinder.guides import GUIDES, Choice, Grammar, JsonSchema, Regex
from pagebinder.runtime.guides import FunctionGuide, GrammarGuide, Guide, shortened

# Between the parts of JSON: small models get lost in white space that knows no end.
JSON_SPACE = r" ?|\n[ \t]{0,32}"
MOST_KEPT = 64  # grammars that are not compiled again
NO_END = "<|no end of sequence|>"


class GuideBook:
    """Makes the guides of one engine's requests. Grammars are compiled once; any thread may ask."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos)
        self._num_chosen = vocab_size  # tokens that a grammar may ask for
        self._compiled: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()

    def guide(self, wanted: Any, token_ids: list[int] | None = None) -> Guide | None:
        """A guide for one request, whose output so far is `token_ids`; None: nothing is wanted.

        Raises:
            RequestError: it cannot be compiled, admits no text, or does not admit `token_ids`.
            ConfigError: llguidance is not installed.
        """
        if wanted is None:
            return None
        guide, token_ids = self._made(wanted), token_ids or []
        if guide.num_allowed([], token_ids) < len(token_ids):
            raise RequestError("The guide does not admit the tokens that the request has already.")
        is_over = guide.ends_after(token_ids)
        allowed = None if is_over else guide.allowed(token_ids)
        if guide.error:
            raise RequestError(f"The guide gave up: {guide.error}")
        if is_over or (allowed is not None and not allowed.any()):
            raise RequestError("The guide admits no further token: there would be nothing to generate.")
        return guide

    def guides(self, wanted: Any, count: int) -> list[Guide | None]:
        """One for each sample of a prompt; what holds for the first holds for all. Raises as `guide`."""
        first = self.guide(wanted)
        return [first, *(None if wanted is None else self._made(wanted) for _ in range(count - 1))]

    def _made(self, wanted: Any) -> Guide:
        if not isinstance(wanted, GUIDES):
            return FunctionGuide(wanted, self._vocab_size)
        fresh = self.compiled(wanted)
        return GrammarGuide(fresh, self._num_chosen)

    def compiled(self, wanted: JsonSchema | Regex | Choice | Grammar) -> Any:
        """The matcher of a grammar; the first time this may take a second."""
        with self._lock:
            if wanted in self._compiled:
                self._compiled.move_to_end(wanted)
                return self._compiled[wanted]
        matcher = self._compile(wanted)
        with self._lock:
            self._compiled[wanted] = matcher
            while len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _compile(self, wanted: Any) -> Any:
        words, llguidance = self._words, _llguidance()
        matcher = llguidance.LLMatcher(words, _grammar(wanted, llguidance), log_level=0)
        if matcher.is_error():
            what = type(wanted).__name__
            raise RequestError(f"The guide ({what}) is wrong: {shortened(matcher.get_error())}")
        return matcher

    @functools.cached_property
    def _words(self) -> Any:
        """The tokenizer as llguidance knows it: 0.1 to 1 s."""
        llguidance = _llguidance()
        if self._tokenizer is None:
            raise RequestError("A guide for texts needs a tokenizer, and the model has none: use a function.")
        from tokenizers import Tokenizer

        try:
            backend = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
            backend.no_padding()
            backend.no_truncation()
            ends = self._eos
            if not ends:  # one of ours, which nothing ever chooses
                backend.add_special_tokens([NO_END])
                ends = [backend.token_to_id(NO_END)]
                self._num_chosen = min(self._num_chosen, ends[0])
            described = json.loads(backend.to_str())
            _without_prefix_space(described.get("pre_tokenizer"))
            _as_words(described)
            return llguidance.LLTokenizer(json.dumps(described), eos_token=ends)
        except Exception as error:
            raise RequestError(
                f"llguidance does not take this model's tokenizer ({shortened(str(error))}): use a function."
            ) from error


def _without_prefix_space(described: Any) -> None:
    """A blank that a tokenizer puts before every text is none before a part of one."""
    if isinstance(described, dict):
        if described.get("type") == "ByteLevel":
            described["add_prefix_space"] = False
        for part in described.get("pretokenizers", ()):
            _without_prefix_space(part)


def _as_words(described: dict[str, Any]) -> None:
    """Added tokens that are no special ones become words of the vocabulary: llguidance takes all that look like
    <these> for special, and then both asks for them in a text and refuses them."""
    words = described["model"].get("vocab")
    if not isinstance(words, dict):
        return
    in_bytes = "ByteLevel" in json.dumps([described.get("pre_tokenizer"), described.get("decoder")])
    kept = []
    for token in described.get("added_tokens", ()):
        text = token["content"]
        if token["special"] or not (text.startswith("<") and text.endswith(">")):
            kept.append(token)
        else:
            words.setdefault(_in_bytes(text) if in_bytes else text, token["id"])
    described["added_tokens"] = kept


def _in_bytes(text: str) -> str:
    """As tokenizers write bytes: one character that can be printed each."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "Guides for texts need llguidance: pip install 'pagebinder[guide]'. A function of your own works without."
        ) from error
    return llguidance


def _grammar(wanted: Any, llguidance: Any) -> str:
    """What a matcher is made from."""
    match wanted:
        case JsonSchema():
            spaces = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
            overrides = spaces if wanted.compact else {"whitespace_pattern": JSON_SPACE}
            try:
                return llguidance.LLMatcher.grammar_from_json_schema(wanted.schema, overrides=overrides)
            except ValueError as error:
                raise RequestError(f"The guide (JsonSchema) is wrong: {shortened(str(error))}") from error
        case Regex():
            return llguidance.LLMatcher.grammar_from_regex(wanted.pattern)
        case Choice():  # as one expression, whose size does not count
            return llguidance.LLMatcher.grammar_from_regex("|".join(map(_literal, wanted.options)))
        case Grammar():
            try:
                return llguidance.grammar_from("grammar", wanted.text)
            except ValueError as error:
                raise RequestError(f"The guide (Grammar) is wrong: {shortened(str(error))}") from error
    raise AssertionError(wanted)


def _literal(text: str) -> str:
    """An expression that only this text matches."""
    return "".join(c if c.isalnum() or c in " _" else f"\\x{{{ord(c):x}}}" for c in text)
