"""A serving loop of your own, without our engine: captured steps, a block table per sequence, greedy tokens.

    python examples/own_loop.py [checkpoint directory]

`compiled.capture` captures the step for a few sizes (CUDA graphs on a GPU, recorded calls on a CPU) and gives you the
KV cache. Which sequences run, which blocks are theirs and which token comes next is this file's business:

    pack(sequences) -> metadata by name -> replay(metadata) -> logits, one row for each sequence
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import pagebinder
from pagebinder.models import tiny_path
from pagebinder.runtime.graphs import StepGraphs, StepSequence

PROMPTS = ("The open function", "In PostgreSQL, a table", "A list is")
NEW_TOKENS = 16
MAX_LEN = 128


@dataclass
class Sequence:
    """Tokens so far, how many are in the cache, and a block table for each KV group."""

    tokens: list[int]
    tables: list[list[int]]
    computed: int = 0
    new: list[int] = field(default_factory=list)

    def step(self) -> StepSequence:
        return StepSequence(tokens=self.tokens[self.computed :], start=self.computed, blocks=self.tables)


def generate(graphs: StepGraphs, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations of all prompts: one step for the prompts together, then one for each token."""
    free = iter(range(1, 1 << 30))  # block 0 is the null block
    sequences = []
    for prompt in prompts:
        length = len(prompt) + new_tokens
        tables = [[next(free) for _ in range(-(-length // g.block_size))] for g in graphs.plan.groups]
        sequences.append(Sequence(list(prompt), tables))
    for _ in range(new_tokens):
        logits = graphs.replay(graphs.pack([s.step() for s in sequences]))
        for sequence, token in zip(sequences, logits.argmax(-1).tolist()):
            sequence.computed = len(sequence.tokens)
            sequence.tokens.append(token)
            sequence.new.append(token)
    return [s.new for s in sequences]


def main() -> None:
    compiled = pagebinder.compile_model(sys.argv[1] if len(sys.argv) > 1 else tiny_path())
    tokenizer = compiled.source.tokenizer().backend_tokenizer
    blocks = sum(-(-MAX_LEN // group.block_size) for group in compiled.kv_spec.groups) * len(PROMPTS) + 1
    graphs = compiled.capture(num_kv_blocks=blocks, max_num_seqs=len(PROMPTS), max_model_len=MAX_LEN)
    print(graphs.explain())
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    for text, new in zip(PROMPTS, generate(graphs, prompts, NEW_TOKENS)):
        print(repr(text + tokenizer.decode(new)))
    print(dict(graphs.stats.replays), f"{graphs.stats.padding_tokens} padding tokens")


if __name__ == "__main__":
    main()
