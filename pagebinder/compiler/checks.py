"""What must hold of a semantic graph before it is paged: all state found, nothing else relating tokens. How long
sequences may be."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from pagebinder.compiler.tokenwise import check_tokenwise, tokenwise_ops
from pagebinder.config import CompileConfig
from pagebinder.custom_ops.attention.cross import CROSS_ATTENTION
from pagebinder.custom_ops.attention.indexed import INDEXED_ATTENTION
from pagebinder.custom_ops.attention.lookahead import LOOKAHEAD_ATTENTION
from pagebinder.custom_ops.attention.relative import RELATIVE_ATTENTION
from pagebinder.custom_ops.attention.semantic import ATTENTION
from pagebinder.custom_ops.library import OpInfo
from pagebinder.custom_ops.mla.mla import MLA_ATTENTION
from pagebinder.custom_ops.sparse.semantic import COMPRESSED_ATTENTION
from pagebinder.errors import CaptureError, ConfigError
from pagebinder.frontend.audit import audit
from pagebinder.frontend.dtypes import hint_on_float16
from pagebinder.frontend.length_limits import limit_of
from pagebinder.frontend.source import ModelSource
from pagebinder.graph_tools import calls, module_path, num_ops
from pagebinder.passes.page_recurrent import PAGED as RECURRENT_OPS
from pagebinder.report import CompileReport, PassResult

TOLD = {
    "attention": "attention",
    "causal_conv": "a convolution or shift",
}  # patterns whose refusals come first
MAX_PROBLEMS_SHOWN = 8
DECODER_ATTENTION = (
    ATTENTION,
    RELATIVE_ATTENTION,
    LOOKAHEAD_ATTENTION,
    INDEXED_ATTENTION,
    MLA_ATTENTION,
    COMPRESSED_ATTENTION,
)


def unexplained(
    semantic: GraphModule,
    encoder: GraphModule | None,
    source: ModelSource,
    config: CompileConfig,
    report: CompileReport,
    max_model_len: int,
) -> str | None:
    """Prove that attention was found everywhere and nothing else mixes tokens; strict: raise if not.

    Returns:
        None, or with strict=False what is not explained.
    Raises:
        CaptureError: strict, and something is not explained; an op of `tokenwise_ops` does relate tokens.
        ConfigError: one of `tokenwise_ops` is called by no graph.
    """
    graphs = [semantic] if encoder is None else [semantic, encoder]
    of_passes = bool(config.passes.get("semantic"))
    declared = tokenwise_ops(config.tokenwise_ops, graphs, report, of_passes=of_passes)
    violations = audit(semantic, bidirectional=source.encoder_only, tokenwise=declared)
    violations += [] if encoder is None else audit(encoder, bidirectional=True, tokenwise=declared)
    size = num_ops(semantic)
    report.passes.append(
        PassResult(
            name="audit",
            refusals=[v.as_refusal() for v in violations],
            num_ops_before=size,
            num_ops_after=size,
        )
    )
    problems = [  # first: what the audit finds in an attention layer follows from its refusal
        f"{TOLD[r.pattern]} refused in {r.module_path or r.node}: {r.reason} ({r.source_line})"
        for r in report.refusals
        if r.pattern in TOLD
    ]
    if not problems and any("two token dimensions" in v.reason for v in violations):
        problems.append(
            "no softmax was found that could make attention of these: keys weighed by another function (sigmoid, "
            "relu, powers, ...), or by a softmax in pieces that are not known, are not served"
        )
    problems += [str(v) for v in violations]
    in_code = {m.node for p in report.passes for m in p.matches if m.pattern == "causal_conv"}
    problems += _miscounted(semantic, encoder, source, in_code)
    if not problems:
        check_tokenwise(declared, graphs, source, max_model_len)
        return None
    shown = "\n".join(f"  - {p}" for p in problems[:MAX_PROBLEMS_SHOWN])
    more = len(problems) - MAX_PROBLEMS_SHOWN
    message = (
        f"{type(source.module).__name__} relates tokens in {len(problems)} way(s) that are not explained, so paging "
        f"it could change its results:\n{shown}" + (f"\n  ... and {more} more" if more > 0 else "")
    )
    hint = hint_on_float16(source.module)
    message += f"\n{hint}" if hint else ""
    if config.strict:
        raise CaptureError(message)
    return message


def _miscounted(
    semantic: GraphModule, encoder: GraphModule | None, source: ModelSource, in_code: set[str]
) -> list[str]:
    """Kinds of layers of which the graph has more or fewer than the config says. `in_code`: names of recurrences that
    were found in a model's code, which no config counts."""
    problems = []
    attention = list(_attention(semantic))
    recurrences = [n for n in calls(semantic.graph, *RECURRENT_OPS) if n.name not in in_code]
    recurrent = {_layer_call(node) for node in recurrences}
    # A config counts layers that run several times each time (ALBERT), or once (Dory).
    attention_once = sum(not _is_run_again(node) for node in attention)
    recurrent_once = len({path for path, _ in recurrent})
    counts = [
        ("attention", {len(attention), attention_once}, source.num_attention_layers),
        ("recurrent", {len(recurrent), recurrent_once}, source.num_recurrent_layers),
    ]
    if encoder is not None:
        of_encoder = _count(encoder, ATTENTION, RELATIVE_ATTENTION)
        counts += [
            ("cross attention", {_count(semantic, CROSS_ATTENTION)}, source.num_attention_layers),
            ("encoder attention", {of_encoder}, source.encoder.num_attention_layers),
        ]
    for kind, found, expected in counts:
        if expected is not None and expected not in found:
            hint = _called_again(semantic) if max(found) > expected and kind == "attention" else ""
            problems.append(f"{max(found)} {kind} layers were found, but the config says {expected}{hint}")
    if not attention and source.num_attention_layers is None:
        problems.append("0 attention layers were found, but a decoder needs some")
    return problems


def _called_again(semantic: GraphModule) -> str:
    """What to say where all layers attend several times: the model inside a wrapper is called more than once."""
    times = Counter(module_path(node) for node in _attention(semantic))
    path, most = times.most_common(1)[0]
    if most < 2 or len(set(times.values())) > 1:
        return ""
    return f": {path} is called {most} times in a step. Call the model once"


def _attention(semantic: GraphModule) -> Iterator[Node]:
    return calls(semantic.graph, *(op.overload for op in DECODER_ATTENTION))


def _is_run_again(node: Node) -> bool:
    """Is it of a layer that its model runs several times (a loop), and not for the first time? The cache that every
    attention gets is then one for each of them. A module's second call is "...@1" in torch's stack of modules."""
    stack = node.meta.get("nn_module_stack") or {}
    again = next((str(path) for key, (path, _) in stack.items() if re.search(r"@\d+$", str(key))), None)
    return again is not None and re.search(r"\.\d+$", again) is not None


def _layer_call(node: Node) -> tuple[str, str]:
    """The path of the layer that a node is of, and which of its calls ("1" is the second, see above)."""
    path, stack = _layer(module_path(node)), node.meta.get("nn_module_stack") or {}
    key = next((str(key) for key, (inner, _) in stack.items() if str(inner).endswith(path)), "")
    return path, key.partition("@")[2]


def _layer(path: str) -> str:
    """The part of a module path that names the layer: up to its first number ("model.layers.3")."""
    found = re.match(r".*?\.\d+(?=\.|$)", path)
    return found.group() if found else path


def _count(gm: GraphModule, *ops: OpInfo) -> int:
    return sum(1 for _ in calls(gm.graph, *(op.overload for op in ops)))


def longest(source: ModelSource, config: CompileConfig) -> int:
    """max_model_len of the config, else of the model. Raises ConfigError: more than the model was made for."""
    if config.max_model_len is None:
        return source.max_model_len
    if config.max_model_len > source.max_model_len and not source.says_length:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than {source.max_model_len}, our default for a model that "
            "does not say how long its sequences may be: say it with max_position_embeddings in its config (`config` "
            "of the module, or config.json), or lower max_model_len."
        )
    if config.max_model_len > source.max_model_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the {source.max_model_len} tokens that the "
            "model was made for; lower it."
        )
    return config.max_model_len


def bounded(max_model_len: int, captured: GraphModule, config: CompileConfig, report: CompileReport) -> int:
    """No longer than the captured graph holds: its code, a buffer or a table may end earlier.

    Raises:
        ConfigError: the config asks for more.
    """
    limit = limit_of(captured.graph)
    if limit is None or limit.num_tokens >= max_model_len:
        return max_model_len
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len={max_model_len} is more than the {limit.num_tokens} tokens that the captured graph holds "
            f"for: beyond, {limit.reason}; lower it."
        )
    report.notes.append(f"max_model_len is {limit.num_tokens}: beyond, {limit.reason}.")
    return limit.num_tokens
