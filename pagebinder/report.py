"""What the compiler did, as data: what matched, what was refused and why, providers, memory, time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import ClassVar

from pagebinder.paths import replace_text, user_path


@dataclass(frozen=True, kw_only=True)
class Match:
    """A rewrite that happened: which pattern, at which node, in which layer of the source model."""

    pattern: str
    node: str
    module_path: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A site that looked like `pattern` and was left alone, with the reason and where it comes from."""

    pattern: str
    reason: str
    node: str
    module_path: str
    source_line: str = ""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """One kind of rewrite, before and after, tested on its own with random inputs; `count` matches are of this kind.

    `max_rel_error`: largest error relative to the spread of the outputs. `reason`: why it could not be taken out of
    the graph and tested on its own ("" = it was).
    """

    pattern: str
    node: str
    module_path: str
    count: int
    max_abs_error: float | None = None
    max_rel_error: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class VerifiedStep:
    """A step of the compilation that was run before and after, on the same sequences.

    `chain`: "decoder" or "encoder". `weights`: "model" or "rescaled". `dtype`: what was computed in. `worst`: the
    sequence with the largest error. Errors are of logits (states, of an encoder); the relative one is in units of
    their standard deviation. `judged`: an error above `tolerance` would have been a VerificationError.
    """

    chain: str
    level: str
    name: str
    weights: str
    dtype: str
    num_sequences: int
    max_abs_error: float
    max_rel_error: float
    tolerance: float
    worst: str
    judged: bool = True


@dataclass(kw_only=True)
class PassResult:
    """What one pass answered; the pass manager adds time and op counts, the verifier errors and certificates.

    `level` is the graph it changed, where it was verified. Errors are those of whole graphs, before and after the
    pass: the largest of all runs. `changes_numbers`: on purpose, so errors of whole graphs are measured, not judged.
    `rounds_values`: what is computed is rounded to few bits from here on, so later steps are judged less strictly.
    `rounds_activations`: so is what goes through the network: a value that lands on the next code moves others over
    the edge behind it, until as much has changed as by this pass. Later steps are judged by that.
    `mixes_tokens`: a token's numbers depend on all tokens of its step from here on, so that sequences are only
    compared alone.
    """

    name: str
    level: str = ""
    matches: list[Match] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    changed: bool = False
    changes_numbers: bool = False
    rounds_values: bool = False
    rounds_activations: bool = False
    mixes_tokens: bool = False
    num_ops_before: int = 0
    num_ops_after: int = 0
    seconds: float = 0.0
    max_abs_error: float | None = None
    max_rel_error: float | None = None
    certificates: list[Certificate] = field(default_factory=list)


@dataclass(kw_only=True)
class ProviderChoice:
    """Which implementation serves an op, at how many nodes, why, and why not the others."""

    op: str
    provider: str
    why: str
    num_nodes: int
    rejected: dict[str, list[str]] = field(default_factory=dict)


@dataclass(kw_only=True)
class CompileReport:
    """Everything `explain()` prints. `to_dict()` is JSON-ready.

    `weight_bytes` are the source model's, `graph_weight_bytes` those that the last graph reads. `captured_steps`:
    what an engine captures by default, and its memory; `streams`: which ops run side by side on two streams, or why
    none do, and `stream_forks` the same as numbers, an entry for each kind of fork: where, count (of layers), side
    and beside (ops), waits, serial_us and parallel_us (of one layer), text. They are filled in for `explain()`.
    """

    model: str = ""
    model_class: str = ""
    num_parameters: int = 0
    weight_bytes: int = 0
    graph_weight_bytes: int = 0
    dtype: str = ""
    device: str = ""
    executable: str = ""
    executable_why: str = ""
    capture_route: str = ""
    node_counts: dict[str, int] = field(default_factory=dict)
    passes: list[PassResult] = field(default_factory=list)
    layers: list[dict] = field(default_factory=list)
    kv: dict = field(default_factory=dict)
    providers: list[ProviderChoice] = field(default_factory=list)
    verified: list[VerifiedStep] = field(default_factory=list)
    captured_steps: list[str] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)
    stream_forks: list[dict] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    weight_layout: list[str] = field(default_factory=list)  # how linear layers read theirs on this machine

    _describe_blocks: ClassVar[Callable[[CompileReport], list[dict]] | None] = None  # set per report, no data

    @property
    def headline(self) -> str:
        """The model in a few words."""
        layers = f"{len(self.layers)} layers that mix tokens"
        return f"{self.model_class}, {layers}, {self.dtype} on {self.device}, run by {self.executable or 'nothing'}"

    @property
    def matches(self) -> list[Match]:
        return [m for p in self.passes for m in p.matches]

    @property
    def refusals(self) -> list[Refusal]:
        return [r for p in self.passes for r in p.refusals]

    def to_dict(self) -> dict:
        """The report as plain dicts, lists, strings and numbers."""
        return asdict(self)

    def blocks(self) -> list[dict]:
        """The graphs side by side with equal layers folded, and costs by op (see passes/layer_view.py).

        Made from the compiled graphs when asked for, as formulas take a moment; empty for a report without graphs.
        """
        return [] if self._describe_blocks is None else self._describe_blocks(self)

    def to_html(self, path) -> None:
        """Write the report as one self-contained HTML page to `path`. Raises ConfigError, OSError."""
        from pagebinder.explain_html import explain_html

        replace_text(user_path(path), explain_html(self))
