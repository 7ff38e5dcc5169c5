"""A serving loop of your own, without our engine: continuous batching over captured steps, blocks that you manage.

    python examples/own_loop.py [checkpoint directory]

`compiled.capture` captures the step for a few sizes (CUDA graphs on a GPU, recorded calls on a CPU) and gives you the
KV cache. Which sequences run, which blocks are theirs and which token comes next is this file's business:

    admit -> give blocks -> pack(sequences) -> metadata by name -> replay(metadata) -> logits -> next tokens
                  ^                                                                        |
                  +------------ blocks behind windows, and of sequences that ended <-------+

docs/own_loop.md says what a loop must keep to.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field

import pagebinder
from pagebinder import StepSequence
from pagebinder.models import tiny_path
from pagebinder.runtime.graphs import StepGraphs

PROMPTS = ("The open function", "In PostgreSQL, a table", "A list is", "import os", "The SELECT statement")
NEW_TOKENS = 16
MAX_LEN, MAX_SEQS, MAX_TOKENS = 128, 3, 16  # of a sequence; of a step: sequences, tokens


@dataclass
class Sequence:
    """Tokens so far, how many of them are in the cache, and a block table for each KV group."""

    prompt: list[int]
    new_tokens: int
    tables: list[list[int]]
    computed: int = 0
    new: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.new


class Loop:
    """Prompts wait until a sequence's place is free, and are computed in chunks beside the others' next tokens."""

    def __init__(self, graphs: StepGraphs, num_kv_blocks: int) -> None:
        self.graphs, self.groups = graphs, graphs.plan.groups
        self.free = deque(range(1, num_kv_blocks))  # block 0 is the null block; all groups share the others
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, prompt: list[int], new_tokens: int) -> Sequence:
        self.waiting.append(Sequence(prompt, new_tokens, [[] for _ in self.groups]))
        return self.waiting[-1]

    def step(self) -> None:
        while self.waiting and len(self.running) < MAX_SEQS:
            self.running.append(self.waiting.popleft())
        room, parts = MAX_TOKENS, []
        for sequence in self.running:
            end = min(len(sequence.tokens), sequence.computed + room)
            if end > sequence.computed and self._has_blocks(sequence, end):
                parts.append((sequence, end))
                room -= end - sequence.computed
        if not parts:  # a loop that may get here takes the blocks of a sequence, which starts anew later
            raise RuntimeError("no sequence has enough blocks")
        # A prompt that goes on in the next step needs no logits.
        logits = self.graphs.replay(
            self.graphs.pack(
                StepSequence(
                    tokens=s.tokens[s.computed : end], start=s.computed, blocks=s.tables,
                    num_logits=int(end == len(s.tokens)),
                )
                for s, end in parts
            )
        )  # fmt: skip
        chosen = iter(logits.argmax(-1).tolist())
        for sequence, end in parts:
            if end == len(sequence.tokens):
                sequence.new.append(next(chosen))
            sequence.computed = end
            if len(sequence.new) == sequence.new_tokens:
                self.running.remove(sequence)
                self._give_back(sequence, [[] for _ in self.groups])

    def _has_blocks(self, sequence: Sequence, end: int) -> bool:
        """Give back what no later step needs, and take blocks for tokens up to `end`, if there are enough."""
        needed = self.graphs.needed_entries(sequence.computed, end)
        self._give_back(sequence, needed)
        missing = [
            (table, entry)
            for table, entries in zip(sequence.tables, needed)
            for entry in entries
            if entry >= len(table) or not table[entry]
        ]
        if len(missing) > len(self.free):
            return False
        for table, entry in missing:
            table += [0] * (entry + 1 - len(table))
            table[entry] = self.free.popleft()
        return True

    def _give_back(self, sequence: Sequence, needed: list[list[int]]) -> None:
        for table, entries in zip(sequence.tables, needed):
            for entry in set(range(len(table))) - set(entries):
                if table[entry]:
                    self.free.append(table[entry])
                    table[entry] = 0


def generate(
    graphs: StepGraphs, num_kv_blocks: int, prompts: list[list[int]], new_tokens: int
) -> list[list[int]]:
    """Greedy continuations of all prompts."""
    loop = Loop(graphs, num_kv_blocks)
    sequences = [loop.add(prompt, new_tokens) for prompt in prompts]
    while loop.waiting or loop.running:
        loop.step()
    assert len(loop.free) == num_kv_blocks - 1, "a block was lost"
    return [sequence.new for sequence in sequences]


def main() -> None:
    compiled = pagebinder.compile_model(sys.argv[1] if len(sys.argv) > 1 else tiny_path())
    tokenizer = compiled.source.tokenizer().backend_tokenizer
    blocks = sum(-(-MAX_LEN // group.block_size) for group in compiled.kv_spec.groups) * MAX_SEQS + 1
    graphs = compiled.capture(
        num_kv_blocks=blocks, max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN
    )
    print(graphs.explain())
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    for text, new in zip(PROMPTS, generate(graphs, blocks, prompts, NEW_TOKENS)):
        print(repr(text + tokenizer.decode(new)))
    print(dict(graphs.stats.replays), f"{graphs.stats.padding_tokens} padding tokens")


if __name__ == "__main__":
    main()
