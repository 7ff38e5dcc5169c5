"""Modules that are not transformers': what forward may return, and how many token ids there are.

    forward returns                               logits
    x [1, T, V], x [T, V]                         x
    x [1, 1, V], x [1, V], x [V]                  x, of the last token alone (last_row.py)
    x, an object with x as .logits                x
    {"logits": x, ...}, (x, loss), [x, ...]       x; the rest is not computed

Without config.vocab_size the captured graph says how many ids there are: as many as logits, which must be as many as
rows in the table that input_ids look up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from pagebinder.errors import CaptureError
from pagebinder.frontend.look_ups import look_ups
from pagebinder.frontend.onnx_module import OnnxDecoder
from pagebinder.frontend.source import ModelSource, configured_vocab_size, end_tokens
from pagebinder.graph_tools import CASTS, IDENTITIES, aten, is_call, val

_RENAMINGS = (
    aten.unsqueeze.default, aten.squeeze.dim, aten.view.default, aten.reshape.default, *CASTS, *IDENTITIES,
)  # fmt: skip


def logits_in(returned: Any, name: str) -> torch.Tensor:
    """The tensor of logits in what the forward method of `name` returned. Raises CaptureError: there is none."""
    if isinstance(returned, Mapping):
        logits = returned.get("logits")
    elif isinstance(returned, (tuple, list)) and not hasattr(returned, "logits"):
        logits = returned[0] if returned else None
    else:
        logits = getattr(returned, "logits", returned)
    if not isinstance(logits, torch.Tensor) or not logits.dim():
        raise CaptureError(
            f"{name}.forward returns {_described(returned)}: no logits are found in it. Return logits [1, T, V], a "
            'tuple that begins with them, or a dict with "logits".'
        )
    return logits


def rows_in(returned: Any, name: str, num_tokens: int) -> torch.Tensor:
    """Logits [T, V], or [1, V] of the last token, in what the forward method of `name` returned for [1, T] ids."""
    logits = logits_in(returned, name)
    if logits.dim() == 1:
        return logits[None]
    # While it is traced nothing may be asked of the number of tokens.
    if logits.dim() == 2 and statically_known_true(logits.shape[0] == num_tokens):
        return logits
    is_last = (
        logits.dim() == 2 and isinstance(logits.shape[1], int) and statically_known_true(logits.shape[0] == 1)
    )
    return logits if is_last else logits[0]


def with_vocabulary(source: ModelSource, captured: GraphModule) -> ModelSource:
    """`source` with as many ids as the captured graph of a plain module says there are.

    Raises:
        CaptureError: it does not return logits [1, T, V] of the vocabulary.
    """
    if source.is_transformers or isinstance(source.module, OnnxDecoder):
        return source
    width, what = _width_of_logits(source, captured)
    told = configured_vocab_size(source.config)
    num_ids = _num_rows_of_ids(captured.graph) if told is None else told
    if num_ids is not None and (width < num_ids or (told is None and width > num_ids)):
        where = "rows of the table that input_ids look up" if told is None else "config.vocab_size"
        remedy = "; where the table has other rows than there are tokens, give the module a `config` with vocab_size"
        raise CaptureError(
            f"{what}, and there are {num_ids:,} token ids ({where}): it must return one logit for each"
            f"{remedy if told is None else ''}."
        )
    if told is not None:
        return source
    ends = end_tokens(source.config, source.module, width)
    return replace(source, vocab_size=width, eos_token_ids=ends)


def _width_of_logits(source: ModelSource, captured: GraphModule) -> tuple[int, str]:
    """V of a graph that returns floating [T, V], and a sentence's start that says what it returns."""
    (output,) = captured.graph.find_nodes(op="output")
    rows = val(output.args[0])
    what = f"{type(source.module).__name__}.forward returns {_described(rows[None])}"
    num_tokens = val(next(n for n in captured.graph.nodes if n.target == "input_ids")).shape[0]
    one_each = rows.dim() == 2 and isinstance(rows.shape[0], torch.SymInt) and isinstance(rows.shape[1], int)
    if not (one_each and rows.is_floating_point() and rows.shape[0].node.expr == num_tokens.node.expr):
        raise CaptureError(
            f"{what}: it must return logits, a floating-point [1, T, V], for each of T tokens."
        )
    return rows.shape[1], what


def _num_rows_of_ids(graph: Graph) -> int | None:
    """Rows of the smallest table that input_ids look up as they are; None: there is no such table."""
    return min((look_up.num_rows for look_up in look_ups(graph) if _are_ids(look_up.index)), default=None)


def _are_ids(node: Node) -> bool:
    while is_call(node, *_RENAMINGS):
        node = node.args[0]
    return node.op == "placeholder" and node.target == "input_ids"


def _described(value: Any) -> str:
    """A type, of tensors with dtype and shape, sizes that vary as T, T + 5 and so on."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(_size_text, value.shape))
        return f"{str(value.dtype).removeprefix('torch.')} [{sizes}]"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of ({', '.join(map(_described, value))})"
    return type(value).__name__


def _size_text(size: int | torch.SymInt) -> str:
    if not isinstance(size, torch.SymInt):
        return str(size)
    expression = size.node.expr
    return str(expression.subs(dict.fromkeys(expression.free_symbols, sympy.Symbol("T"))))
