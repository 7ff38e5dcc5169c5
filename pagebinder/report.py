"""What the compiler did, as data: what matched, what was refused and why, providers, memory, time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path


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


@dataclass(kw_only=True)
class PassResult:
    """What one pass answered; the pass manager adds time and op counts."""

    name: str
    matches: list[Match] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    changed: bool = False
    num_ops_before: int = 0
    num_ops_after: int = 0
    seconds: float = 0.0
    max_abs_error: float | None = None


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
    """Everything `explain()` prints. `to_dict()` is JSON-ready."""

    model: str = ""
    model_class: str = ""
    num_parameters: int = 0
    weight_bytes: int = 0
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
    stage_seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def matches(self) -> list[Match]:
        return [m for p in self.passes for m in p.matches]

    @property
    def refusals(self) -> list[Refusal]:
        return [r for p in self.passes for r in p.refusals]

    def to_dict(self) -> dict:
        """The report as plain dicts, lists, strings and numbers."""
        return asdict(self)

    def to_html(self, path) -> None:
        """Write the report as one self-contained HTML page to `path`."""
        from pagebinder.explain import explain_html

        Path(path).write_text(explain_html(self), encoding="utf-8")
