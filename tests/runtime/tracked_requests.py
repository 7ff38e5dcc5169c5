"""What is known of an engine's requests without the engine: their texts, their answers, what they may share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagebinder.config import SamplingParams
from tests.runtime.hash_oracle import EOS, Oracle


class Node:
    """A token of known texts: how many requests have it here, and what follows it."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node] = {}

    def add(self, token: int) -> Node:
        child = self.children.setdefault(token, Node())
        child.count += 1
        return child


class KnownTexts:
    """Tokens of all requests of one salt in a tree; a node counts the requests that pass it."""

    def __init__(self) -> None:
        self.root = Node()

    def common_prefix(self, tokens: Sequence[int]) -> int:
        """Leading tokens that another request has too, if `tokens` is in the tree itself."""
        node, length = self.root, 0
        for token in tokens:
            node = node.children[token]
            if node.count < 2:
                break
            length += 1
        return length


@dataclass
class Tracked:
    """A request and all that is known of it without the engine. `node` is its place in the known texts.
    `is_alone`: neither a fork nor one of several samples, which share blocks without the prefix cache."""

    request_id: str
    prompt: list[int]
    tokens: list[int]
    params: SamplingParams
    seed: int
    salt: str | None
    oracle: Oracle
    node: Node
    max_tokens: int
    is_alone: bool

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.oracle.feed(token)
        self.node = self.node.add(token)

    @property
    def finish_reason(self) -> str | None:
        if self.tokens and self.tokens[-1] == EOS and not self.params.ignore_eos:
            return "stop"
        return "length" if len(self.tokens) == self.max_tokens else None
