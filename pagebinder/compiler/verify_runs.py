"""Runs the source model, and graphs of any level, on chosen sequences with chosen weights.

way                       call                                                       levels
alone                     one sequence, a fresh cache                                all
packed                    all sequences in one call, blocks dealt at random          paged, fused
packed, in two chunks     the first halves of all, then the rest over the same cache paged, fused
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule

from pagebinder.frontend.numbering import numbering
from pagebinder.frontend.plain_calls import checked_call, plain_call, takes_positions
from pagebinder.frontend.plain_modules import rows_in
from pagebinder.frontend.source import ModelSource
from pagebinder.passes.graph_values import GraphRunner, widened
from pagebinder.passes.layer_states import BUILDERS
from pagebinder.passes.quantize_weights import add_quantized
from pagebinder.passes.verifier import ALONE, Outputs
from pagebinder.runtime.kv import KVPlan
from pagebinder.runtime.packed_sequences import PackedSequences
from pagebinder.runtime.single_sequence import single_sequence_inputs

SAMPLE_MAX_TOKENS = 512
# Logits are large: only the last rows of each sequence are kept, and one packed call makes no more than so many.
KEPT_ROWS = 64
ROWS_OF_LAST = 8  # of a model that returns the last row alone: one call for each
MAX_PACKED_LOGITS = 1 << 30
# Windows up to this are outgrown three times, larger ones by a few tokens.
SHORT_WINDOW = 1024
PACKED, IN_TWO = "packed", "packed, in two chunks"


@dataclass
class World:
    """One set of weights: the source model that has them, and what graphs take in place of their own."""

    name: str
    module: torch.nn.Module
    dtype: torch.dtype
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    widen: bool = False

    def run(self, gm: GraphModule, inputs: dict[str, torch.Tensor], observe=None) -> torch.Tensor:
        if self.weights:
            add_quantized(gm, self.weights)
        runner = GraphRunner(gm, weights=self.weights, widen=self.widen, observe=observe, check_kernels=True)
        return runner.run_named(inputs)

    def convert(self, tensor: torch.Tensor) -> torch.Tensor:
        return widened(tensor) if self.widen else tensor


@dataclass(frozen=True)
class Sequences:
    """Token ids of each sequence, and of its encoder prompt."""

    ids: list[torch.Tensor]
    encoder_ids: list[torch.Tensor] | None = None


class Runs:
    """Runs graphs of any level on the sequences: each alone; once paged, also packed, and packed in two chunks."""

    def __init__(
        self,
        world: World,
        sequences: Sequences,
        plan: KVPlan,
        states: Sequence,
        encoder_states: list[torch.Tensor] | None = None,
        vocab_size: int = 1,
        kept_rows: int = KEPT_ROWS,
    ) -> None:
        self.kept_rows = kept_rows
        self.world, self.sequences, self.plan, self.states = world, sequences, plan, states
        self.encoder_states = encoder_states
        self.vocab_size = vocab_size

    def outputs(self, gm: GraphModule) -> Outputs:
        """What a graph returns for every sequence, in every way that it can be run."""
        indices = range(len(self.sequences.ids))
        outputs = {ALONE: [self.alone(gm, i)[-self.kept_rows :].clone() for i in indices]}
        if is_paged(gm):
            outputs |= {way: self._kept(self.packed(gm, way)) for way in (PACKED, IN_TWO)}
        return outputs

    @property
    def lengths(self) -> list[int]:
        return [len(x) for x in self.sequences.ids]

    @property
    def packed_ids(self) -> list[torch.Tensor]:
        """The sequences that are packed: all, or as many of the first (shortest) as there is memory for."""
        total, ids = 0, []
        for x in self.sequences.ids:
            total += len(x) * self.vocab_size
            if ids and total > MAX_PACKED_LOGITS:
                break
            ids.append(x)
        return ids

    def _kept(self, rows: list[torch.Tensor]) -> list[torch.Tensor | None]:
        missing = len(self.sequences.ids) - len(rows)
        return [x[-self.kept_rows :].clone() for x in rows] + [None] * missing

    def alone(self, gm: GraphModule, index: int, observe=None) -> torch.Tensor:
        return self.world.run(gm, self.inputs_alone(gm, index), observe)

    def inputs_alone(self, gm: GraphModule, index: int) -> dict[str, torch.Tensor]:
        """Inputs of a graph of any level for one sequence."""
        ids = self.sequences.ids[index]
        states = None if self.encoder_states is None else self.encoder_states[index]
        if not _has_caches(gm):
            inputs = {"input_ids": ids, "positions": torch.arange(len(ids), device=ids.device)}
            return inputs if states is None else {**inputs, "encoder_states": states}
        inputs = single_sequence_inputs(self.plan, self.states, ids, encoder_states=states)
        return {name: self.world.convert(tensor) for name, tensor in inputs.items()}

    def packed(
        self, gm: GraphModule, way: str, observe: Callable[[int, list], Callable] | None = None
    ) -> list[torch.Tensor]:
        """Logits of each packed sequence. `observe(call, spans)`: makes an observer of the values of each call."""
        ids, in_two = self.packed_ids, way == IN_TWO
        states = None if self.encoder_states is None else self.encoder_states[: len(ids)]
        packed = PackedSequences(
            self.plan, self.states, ids, encoder_states=states, convert=self.world.convert
        )
        cuts = [len(x) // 2 if in_two else 0 for x in ids]  # of one token: nothing in the first call
        calls = [[(0, cut) for cut in cuts]] * in_two + [[(cut, len(x)) for cut, x in zip(cuts, ids)]]
        parts = []
        for call, spans in enumerate(calls):
            if not any(end > start for start, end in spans):
                continue
            see = None if observe is None else observe(call, spans)
            parts.append(packed.split(self.world.run(gm, packed.inputs(spans), see), spans))
        return [torch.cat(pieces) for pieces in zip(*parts)]


def _has_caches(gm: GraphModule) -> bool:
    return any(n.op == "placeholder" and str(n.target).startswith("kv_cache_") for n in gm.graph.nodes)


def is_paged(gm: GraphModule) -> bool:
    """Is every op that keeps state on its cache, so that requests can share a call?"""
    return _has_caches(gm) and not any(
        n.op == "call_function" and n.target in BUILDERS for n in gm.graph.nodes
    )


def source_encoder_states(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """[E] -> [E, C], by the source model's own encoder."""
    with torch.inference_mode():
        return module.get_encoder()(input_ids=ids[None]).last_hidden_state[0]


def source_logits(
    module: torch.nn.Module, source: ModelSource, sequences: Sequences, encoder_states: list | None
) -> list[torch.Tensor]:
    """Logits of each sequence's last rows by the source itself: eager, without cache, attention hook or leaves."""
    states = [None] * len(sequences.ids) if encoder_states is None else encoder_states
    rows = (source_rows(module, source, ids, s) for ids, s in zip(sequences.ids, states))
    return [x[-KEPT_ROWS:].clone() for x in rows]


def source_rows(module, source: ModelSource, ids: torch.Tensor, encoder_states=None) -> torch.Tensor:
    """Logits [T, V]; [at most ROWS_OF_LAST, V] of the last tokens, by calls with fewer, of a model that returns those
    of the last one alone."""
    rows = call_source(module, source, ids, encoder_states)
    if len(rows) == 1 < len(ids):
        shorter = range(max(len(ids) - ROWS_OF_LAST, 0) + 1, len(ids))
        rows = torch.cat([*(call_source(module, source, ids[:n], encoder_states) for n in shorter), rows])
    return rows


def call_source(module, source: ModelSource, ids: torch.Tensor, encoder_states=None) -> torch.Tensor:
    """Logits [T, V], or [1, V] of the last token, as the model returns them."""
    with torch.inference_mode():
        if encoder_states is not None:
            from transformers.modeling_outputs import BaseModelOutput

            states = BaseModelOutput(last_hidden_state=encoder_states[None])
            return module(encoder_outputs=states, decoder_input_ids=ids[None], use_cache=False).logits[0]
        positions = torch.arange(len(ids), device=ids.device)[None]
        if source.is_transformers:
            own = positions + numbering(module).offset
            told = {"position_ids": own} if takes_positions(module) else {}
            return module(input_ids=ids[None], use_cache=False, **told).logits[0]
        call = checked_call(module, plain_call(module), source.vocab_size)
        return rows_in(call(module, ids[None], positions), type(module).__name__, len(ids))


def lengths_to_test(plan: KVPlan, states: Sequence, source: ModelSource, *, full: bool) -> list[int]:
    """Lengths at and beside every edge: of blocks, windows and chunks. The last is the longest of three or more."""
    blocks = {g.block_size for g in plan.groups if g.spec.kind != "cross_attention"}
    limits = {n for s in states for n in (getattr(s, "window", None), getattr(s, "chunk", None)) if n}
    limit = min(source.max_model_len, plan.max_model_len)
    if full:
        edges = {e + d for e in blocks | limits for d in (-1, 0, 1)}
        longest = max(limits | {min(blocks, default=8)})
        wanted = {1, 2, *edges, 3 * longest + 2 if longest <= SHORT_WINDOW else longest + KEPT_ROWS}
    else:
        wanted = {1, 5, *(e + 3 for e in blocks | limits if e <= SAMPLE_MAX_TOKENS)}
    shortest, *others = sorted({n for n in wanted if 1 <= n <= limit}) or [limit]
    # One token is never cut in two. First in a packed call, it would hide who takes positions from the batch's start.
    return [*others[:1], shortest, *others[1:]]


def choose_sequences(source: ModelSource, plan: KVPlan, states, lengths: Sequence[int]) -> Sequences:
    """Random token ids of these lengths that prompts may hold; of an encoder-decoder, encoder prompts of the same
    lengths, reversed."""
    counted = numbering(source.module).counted
    ids = [counted(random_tokens(n, source.vocab_size, source.device)) for n in lengths]
    if source.encoder is None:
        return Sequences(ids)
    facts = source.encoder
    encoder_lengths = [min(n, facts.max_len) for n in reversed(lengths)]
    encoder_ids = [random_tokens(n, facts.vocab_size, source.device, seed=1) for n in encoder_lengths]
    return Sequences(ids, [counted(x) for x in encoder_ids])


def random_tokens(num_tokens: int, vocab_size: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * seed + num_tokens)
    return torch.randint(vocab_size, (num_tokens,), generator=generator, device="cpu").to(device)
