"""Prompts of embeddings: token ids from FIRST_ROW_ID on are rows of a table that the graph holds.

    input_ids                  5   9   2^30+4   2^30+5   7
    embedding(weight, .)       w5  w9  .        .        w7         what the model's own embedding returns
    embedding(prompt_rows, .)  .   .   r4       r5       .          what somebody wrote there: parts of an image, say
    where                      w5  w9  r4       r5       w7

Rows come in where a multimodal model calls its language model with embeddings, or else where the only embedding of
the ids returns them. What the ids are read for besides (embeddings of each layer: Gemma 3n, small models of Gemma 4)
reads a table of the ids that stood in the place of rows.

The table is an attribute of the graph, [S, C] in the dtype of the embedding's result, and written in place while
requests hold its rows (`runtime/prompt_rows.py`): for all that comes after, such tokens are tokens like any other.
What `inputs_embeds` is in transformers' models is what the rows are, which is checked by running both. Where RoPE
turns by positions of several axes (time, height and width of images), rows have positions of their own in a second
table [S, A], and tokens the same along each axis. What is added to rows behind the first layers (`row_features.py`)
is in tables [S, C], one for each. Where layers let parts of an image see each other, a table [S] says how many of the
tokens behind it a row sees (`lookahead.py`).
"""

from __future__ import annotations

import contextlib
import inspect

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.prompt_rows import (
    ENTRY,
    FEATURES,
    FIRST_ROW_ID,
    IDS,
    LOOKAHEAD,
    POSITION_AXES,
    POSITIONS,
    ROW_FEATURES,
    ROWS,
    PromptTables,
    empty_table,
)
from pagebinder.errors import ConfigError
from pagebinder.frontend.language_model import entering, language_model
from pagebinder.frontend.lookahead import attention_of, kinds_that_see_on, let_see_on
from pagebinder.frontend.model_kinds import text_config
from pagebinder.frontend.python_state import evaluation_mode
from pagebinder.frontend.row_features import adding, num_features
from pagebinder.frontend.source import ModelSource
from pagebinder.graph_tools import (
    CASTS,
    IDENTITIES,
    aten,
    calls,
    finish,
    insert_call,
    insert_constant,
    is_call,
    is_view_op,
    module_path,
    source_line,
    val,
)

# How models write other ids over those of placeholders, which the ids of rows are none of.
SWAPS = (
    aten.eq.Scalar, aten.ne.Scalar, aten.bitwise_or.Tensor, aten.bitwise_and.Tensor, aten.bitwise_not.default,
    aten.__or__.Tensor, aten.__and__.Tensor,
    aten.logical_or.default, aten.logical_and.default, aten.logical_not.default, aten.where.self,
    aten.where.ScalarSelf, aten.where.ScalarOther, aten.masked_fill.Scalar, aten.masked_fill.Tensor,
    aten.index_put.default,
)  # fmt: skip
CHECKED_TOKENS = 5
# Of the spread of the logits, and of what tokens differ by: both sides round in other places, but a missing factor or
# offset is no rounding.
TOLERANCE, TIMES_TOKENS = 0.05, 4.0


def what_rows_bring(source: ModelSource) -> dict[str, int]:
    """What a capture is told of rows: along how many axes they have positions, behind how many layers features,
    whether there is a language model whose entry can be marked."""
    if not source.is_transformers:
        return {}
    has_entry = language_model(source.module) is not None
    return {"axes": _position_axes(source), "features": num_features(source.module), "entry": has_entry}


def _position_axes(source: ModelSource) -> int:
    """Along how many axes RoPE of a transformers model counts positions; 0: they are one number."""
    config = text_config(source.config)
    said = (getattr(config, name, None) for name in ("rope_parameters", "rope_scaling"))
    sections = next((value["mrope_section"] for value in said if value and value.get("mrope_section")), ())
    return len(sections)


def add_prompt_rows(gm: GraphModule, source: ModelSource, num_rows: int) -> PromptTables:
    """Let the captured graph take rows in the place of token ids; in place.

    Returns:
        the tables, for num_rows rows, zeros.
    Raises:
        ConfigError: the model reads token ids elsewhere, too, or its `inputs_embeds` are something else than the
            result of its embedding.
    """
    entry = next(calls(gm.graph, ENTRY), None)
    token_ids = None
    if entry is None:
        table = _add_behind_lookup(gm, source, num_rows)
    else:
        table, token_ids = _add_at_entry(gm, source, entry, num_rows)
    tables = PromptTables(
        table,
        _add_positions(gm, source, num_rows),
        _add_features(gm, table),
        _add_lookahead(gm, source, num_rows),
        token_ids,
    )
    finish(gm)
    _check_against_source(gm, source, tables)
    return tables


def _add_behind_lookup(gm: GraphModule, source: ModelSource, num_rows: int) -> torch.Tensor:
    """Rows in the place of what the only embedding returns: the table."""
    lookup = _only_lookup(gm, type(source.module).__name__, checked=_takes_embeds(source))
    result = _of_module(lookup, source.module)
    ids, weight = lookup.args[1], lookup.args[0]
    is_row, number = _which_rows(gm, lookup, ids, num_rows)
    own = insert_call(gm.graph, lookup, aten.clamp.default, (ids, None, val(weight).shape[0] - 1))
    lookup.update_arg(1, own)
    return _put_rows(gm, source, result, is_row, number, num_rows)


def _add_at_entry(
    gm: GraphModule, source: ModelSource, entry: Node, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows in the place of what the language model is given: the table, and that of token ids where they are read for
    anything besides."""
    ids = next(n for n in gm.graph.nodes if n.op == "placeholder")
    readers = list(ids.users)
    before = next(n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr"))
    is_row, number = _which_rows(gm, before, ids, num_rows)
    token_ids = None
    if _is_read_besides(ids, entry):
        token_ids = empty_table(num_rows, dtype=torch.int64, device=source.device)
        stored = insert_constant(gm, before, IDS, token_ids)
        stood = insert_call(gm.graph, before, aten.index_select.default, (stored, 0, number))
        own = insert_call(gm.graph, before, aten.where.self, (is_row, stood, ids), value=val(ids))
    else:
        own = insert_call(gm.graph, before, aten.masked_fill.Scalar, (ids, is_row, 0))
    ids.replace_all_uses_with(own, delete_user_cb=lambda user: user in readers)
    table = _put_rows(gm, source, entry, is_row, number, num_rows)
    entry.replace_all_uses_with(entry.args[0])
    gm.graph.erase_node(entry)
    return table, token_ids


def _is_read_besides(ids: Node, entry: Node) -> bool:
    """Does a result depend on the ids in another way than by what the language model is given?"""
    reached, seen = [ids], {ids, entry}
    for node in reached:  # grows
        if node.op == "output":
            return True
        if not is_call(node, aten.sym_size.int):
            reached += [user for user in node.users if user not in seen]
            seen.update(node.users)
    return False


def _put_rows(
    gm: GraphModule, source: ModelSource, result: Node, is_row: Node, number: Node, num_rows: int
) -> torch.Tensor:
    """Rows where `is_row` [T] or [1, T], in the place of `result` [1, T, C]: the table."""
    table = empty_table(num_rows, val(result).shape[-1], dtype=val(result).dtype, device=source.device)
    after = result.next
    node = insert_constant(gm, after, ROWS, table)
    row = insert_call(gm.graph, after, aten.embedding.default, (node, number))
    is_row = insert_call(gm.graph, after, aten.unsqueeze.default, (is_row, -1))
    both = insert_call(gm.graph, after, aten.where.self, (is_row, row, result), value=val(result))
    result.replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)
    return table


def _which_rows(gm: GraphModule, before: Node, ids: Node, num_rows: int) -> tuple[Node, Node]:
    """Which ids are rows, and their numbers, 0 for tokens; in the shape of the ids."""
    is_row = insert_call(gm.graph, before, aten.ge.Scalar, (ids, FIRST_ROW_ID))
    number = insert_call(gm.graph, before, aten.sub.Tensor, (ids, FIRST_ROW_ID))
    return is_row, insert_call(gm.graph, before, aten.clamp.default, (number, 0, num_rows - 1))


def _add_positions(gm: GraphModule, source: ModelSource, num_rows: int) -> torch.Tensor | None:
    """Positions of rows, where there are axes: the table."""
    node = next(calls(gm.graph, POSITION_AXES), None)
    if node is None:
        return None
    ids, positions = (n for n in gm.graph.nodes if n.op == "placeholder")
    table = empty_table(num_rows, node.args[1], dtype=torch.int64, device=source.device)
    stored = insert_constant(gm, node, POSITIONS, table)
    is_row, number = _which_rows(gm, node, ids, num_rows)
    row = insert_call(gm.graph, node, aten.index_select.default, (stored, 0, number))
    row = insert_call(gm.graph, node, aten.transpose.int, (row, 0, 1))
    both = insert_call(gm.graph, node, aten.where.self, (is_row, row, positions), value=val(node))
    node.replace_all_uses_with(both)
    return table


def _add_features(gm: GraphModule, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What is added to rows behind layers: the tables, in the order of the layers."""
    ids, found = next(n for n in gm.graph.nodes if n.op == "placeholder"), []
    for node in calls(gm.graph, ROW_FEATURES):
        table = empty_table(*rows.shape, dtype=rows.dtype, device=rows.device)
        stored = insert_constant(gm, node, FEATURES.format(node.args[1]), table)
        is_row, number = _which_rows(gm, node, ids, len(rows))
        row = insert_call(gm.graph, node, aten.embedding.default, (stored, number))
        is_row = insert_call(gm.graph, node, aten.unsqueeze.default, (is_row, -1))
        added = insert_call(gm.graph, node, aten.where.ScalarOther, (is_row, row, 0.0))
        added = insert_call(gm.graph, node, aten.unsqueeze.default, (added, 0), value=val(node))
        node.replace_all_uses_with(added)
        found.append((node.args[1], table))
    return tuple(table for _, table in sorted(found, key=lambda item: item[0]))


def _add_lookahead(gm: GraphModule, source: ModelSource, num_rows: int) -> torch.Tensor | None:
    """How many of those behind them rows see, where some layers let them: the table."""
    kinds = kinds_that_see_on(source.module) if source.is_transformers else frozenset()
    nodes = attention_of(gm, kinds)
    if not nodes:
        return None
    ids, first = (next(n for n in gm.graph.nodes if n.op == "placeholder"), nodes[0])
    table = empty_table(num_rows, dtype=torch.int32, device=source.device)
    stored = insert_constant(gm, first, LOOKAHEAD, table)
    is_row, number = _which_rows(gm, first, ids, num_rows)
    ahead = insert_call(gm.graph, first, aten.index_select.default, (stored, 0, number))
    ahead = insert_call(gm.graph, first, aten.mul.Tensor, (ahead, is_row))
    let_see_on(nodes, ahead)
    return table


def describe_prompt_rows(tables: PromptTables) -> str:
    rows = tables.rows
    size = sum(table.numel() * table.element_size() for table in tables.by_name.values()) / 2**20
    return (
        f"Prompts may hold embeddings: {len(rows):,} at a time, {rows.shape[1]:,} wide, in {rows.dtype} "
        f"({size:,.1f} MiB)."
    )


def _only_lookup(gm: GraphModule, model: str, *, checked: bool) -> Node:
    """The embedding of the token ids. Raises ConfigError where something else reads them. `checked`: the graph will
    be compared with the source, so ids may be swapped on the way, where they are those of placeholders."""
    lookups, first = [], next(n for n in gm.graph.nodes if n.op == "placeholder")
    for node in dict.fromkeys(_readers(first, SWAPS if checked else ())):
        if is_call(node, aten.embedding.default) and node.args[0].op == "get_attr":
            lookups.append(node)
        elif is_call(node, aten.sym_size.int):
            continue
        else:
            where = ", ".join(filter(None, (module_path(node), source_line(node))))
            raise ConfigError(
                f"prompt_embeds: {model} reads token ids not only to embed them, and an embedding has none: "
                f"{node.target} ({where}). Serve it without prompt_embeds."
            )
    if len(lookups) != 1:
        raise ConfigError(
            f"prompt_embeds: {model} looks token ids up in {len(lookups)} tables, and a prompt's embedding stands "
            "for the row of one. Serve it without prompt_embeds."
        )
    return lookups[0]


def _readers(ids: Node, swaps: tuple) -> list[Node]:
    """What reads the ids, seen through views and casts, and through what swaps ids for others."""
    found = []
    for user in ids.users:
        passed_on = is_view_op(user.target) or is_call(user, *CASTS, *IDENTITIES, *swaps)
        found += _readers(user, swaps) if passed_on else [user]
    return found


def _of_module(lookup: Node, model: torch.nn.Module) -> Node:
    """What the module that looks up returns: some scale the row. Raises ConfigError where it is several values."""
    path = module_path(lookup)
    try:
        is_embedding = isinstance(model.get_submodule(path), torch.nn.Embedding)
    except AttributeError:
        is_embedding = False
    if not is_embedding:
        return lookup
    inside, returned = [lookup], []
    for node in inside:  # grows
        users = [user for user in node.users if user.op != "output"]
        within = [user for user in users if f"{module_path(user)}.".startswith(f"{path}.")]
        inside += [user for user in within if user not in inside]
        if len(within) < len(node.users):
            returned.append(node)
    if len(returned) != 1:
        raise ConfigError(
            f"prompt_embeds: {type(model.get_submodule(path)).__name__} ({path}) returns {len(returned)} values of a "
            "token, and a prompt's embedding stands for one. Serve it without prompt_embeds."
        )
    return returned[0]


def _takes_embeds(source: ModelSource) -> bool:
    return source.is_transformers and "inputs_embeds" in inspect.signature(source.module.forward).parameters


def _check_against_source(gm: GraphModule, source: ModelSource, tables: PromptTables) -> None:
    """Does the graph compute of rows what the source model computes of `inputs_embeds`? Of models that take them."""
    table, axes = tables.rows, {}
    if not _takes_embeds(source) or source.device.type == "meta":
        return
    count = min(CHECKED_TOKENS, len(table), source.max_model_len)
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(count, table.shape[1], generator=generator).to(table)
    table[:count] = embeds
    positions = torch.arange(count, device=source.device)
    if tables.positions is not None:
        along = torch.randint(0, count, tuple(tables.positions[:count].shape), generator=generator).to(
            positions
        )
        tables.positions[:count] = along
        axes = {"position_ids": along.T[:, None]}
    told = entered = contextlib.nullcontext()
    for features in tables.features:
        features[:count] = torch.randn(count, table.shape[1], generator=generator).to(table)
    if tables.features:
        everywhere = torch.ones(1, count, dtype=torch.bool, device=source.device)
        told = adding(
            language_model(source.module), everywhere, [features[:count] for features in tables.features]
        )
    tokens = torch.arange(count, device=source.device) % source.vocab_size
    given = {"inputs_embeds": embeds[None]}
    if tables.token_ids is not None:  # both are given, each in its place
        tables.token_ids[:count] = tokens
        given = {"input_ids": tokens[None]}
        entered = entering(language_model(source.module), lambda _: embeds[None])
    try:
        with evaluation_mode(source.module), torch.no_grad():
            with told, entered:
                wanted = source.module(**given, use_cache=False, **axes).logits[0].float()
            found = gm(FIRST_ROW_ID + positions, positions).float()
            of_tokens = (
                gm(tokens, positions) - source.module(input_ids=tokens[None], use_cache=False).logits[0]
            )
    finally:
        for written in tables.by_name.values():
            written.zero_()
    limit = TOLERANCE * wanted.std() + TIMES_TOKENS * of_tokens.abs().max()
    if (wanted - found).abs().max() > limit:
        raise ConfigError(
            f"prompt_embeds: {type(source.module).__name__} computes something else of inputs_embeds than of rows in "
            "the place of its embedding's. Serve it without prompt_embeds."
        )
