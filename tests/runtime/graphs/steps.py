"""Prompts, steps of several sequences over captured graphs, and the memory of their caches."""

from __future__ import annotations

import torch

from pagebinder.runtime.graphs import StepGraphs, StepSequence


def prompts(*lengths: int) -> list[list[int]]:
    """Prompts of these lengths, with ids of a vocabulary of 128."""
    return [[(7 * i + 3 * j) % 127 + 1 for j in range(length)] for i, length in enumerate(lengths)]


def steps(graphs: StepGraphs) -> list[list[StepSequence]]:
    """Prompts, then a chunk beside decodes, then decodes, then more of them than there are sequences at first."""
    lens, tables, done, made = (20, 3, 9), [], [0, 0, 0], []
    blocks = iter(range(1, 40))
    for length in lens:
        needs = (-(-(length + 4) // group.block_size) for group in graphs.plan.groups)
        tables.append([[next(blocks) for _ in range(need)] for need in needs])
    for counts in ((11, 3, 0), (9, 1, 0), (1, 1, 0), (1, 1, 9), (1, 1, 1)):
        step = []
        for i, count in enumerate(counts):
            if count:
                tokens = [(17 * i + 5 * (done[i] + j)) % 127 + 1 for j in range(count)]
                step.append(StepSequence(tokens=tokens, start=done[i], blocks=tables[i]))
                done[i] += count
        made.append(step)
    return made


def memory(graphs: StepGraphs) -> torch.Tensor:
    """The bytes of the whole arena, as every cache is a view of it."""
    storage = next(iter(graphs.caches.values())).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage)
