"""Model -> captured graph: torch.export, made functional, with one calling convention for every level.

    captured(input_ids [T] int64, positions [T] int64) -> logits [T, V]

T is the number of tokens of one sequence, and dynamic. An encoder-decoder is captured as two such graphs, see
`encoder_decoder.py`. Weights are attributes of the GraphModule under the names
they have in the source model, shared with it and not copied.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import io
import logging
import re
import warnings
from collections.abc import Callable

import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from pagebinder.custom_ops.prompt_rows import ENTRY, POSITION_AXES
from pagebinder.errors import CaptureError
from pagebinder.frontend.attention_interface import attention_hook, has_functions_of_its_own
from pagebinder.frontend.chosen_rows import write_for_all_rows
from pagebinder.frontend.dtypes import hint_on_float16
from pagebinder.frontend.empty_masks import require_harmless
from pagebinder.frontend.equal_rows import merge_equal_rows
from pagebinder.frontend.experts_interface import experts_hook
from pagebinder.frontend.failed_traces import branch_by_values, line_that_fixed_the_length
from pagebinder.frontend.few_tokens import FewTokens, noting_branches, run_with_one_token
from pagebinder.frontend.function_caches import nothing_kept
from pagebinder.frontend.grad_mode import same_grad_mode_untraced
from pagebinder.frontend.language_model import entering, language_model
from pagebinder.frontend.last_row import ROUTE, every_row
from pagebinder.frontend.layer_observer import LENGTHS, Layer
from pagebinder.frontend.leaves import LEAVES, patched
from pagebinder.frontend.leaves.given_positions import GivenPositions, given_positions
from pagebinder.frontend.leaves.rope_by_length import length_limit
from pagebinder.frontend.length_limits import OF_CODE, OF_ROPE, LengthLimit, limit_of_tables, note_limit
from pagebinder.frontend.limited_export import (
    EXAMPLE_TOKENS,
    MAX_STEP_TOKENS,
    MIN_STEP_TOKENS,
    Traced,
    TracedInput,
    export_limited,
)
from pagebinder.frontend.mask_questions import questions_in, taken_as_chosen
from pagebinder.frontend.memo_trace import STRICT, past_memos
from pagebinder.frontend.numbering import numbering
from pagebinder.frontend.out_of_place import write_out_of_place
from pagebinder.frontend.own_caches import without_own_caches
from pagebinder.frontend.plain_calls import (
    checked_call,
    plain_call,
    takes_flat_ids,
    takes_positions,
    width_of_logits,
)
from pagebinder.frontend.plain_modules import rows_in
from pagebinder.frontend.program_checks import (
    is_transformed,
    refuse_operands_with_graphs,
    refuse_traced_constants,
    weights_behind_data,
)
from pagebinder.frontend.python_state import evaluation_mode, put_back, traced_in_steady_state
from pagebinder.frontend.repeated_layers import expand, repeated_layers, traced_once
from pagebinder.frontend.row_features import as_op
from pagebinder.frontend.sorted_experts import sorted_experts_hook
from pagebinder.frontend.source import ModelSource, configured_vocab_size
from pagebinder.frontend.tidy import tidy
from pagebinder.frontend.unpadded import said_for_unpadded
from pagebinder.frontend.unreadable import hint_on_script
from pagebinder.frontend.unsupported import refuse_unsupported
from pagebinder.frontend.weight_values import Decision, answering, note_decisions
from pagebinder.graph_tools import aten, attach, finish, graph_module

# Layers that are traced one after the other: with fewer, torch's cache of fake calls costs more than it saves.
CACHE_FROM = 4

# Models that write out the attention of their text, and take functions for that of their images: the hook would
# only take the mask away that the text needs.
WRITES_ITS_ATTENTION = {"GitForCausalLM"}


# Where torch finds that a graph would hold for some numbers of tokens only.
DEPENDS_ON_LENGTH = (
    ", as what it computes depends on that number (a factor made of the length, a choice among tokens, a branch, a "
    "loop over them){at}; a step of a served model has parts of sequences, so it would compute something else. What "
    "torch says"
)


# torch's words where code takes all tokens but one.
FROM_THE_SECOND = "((-1) + L['input_ids'].size()[0]) != 1"


class FlatTokens(torch.nn.Module):
    """Calls a decoder that takes [1, T] with flat [T] inputs, and returns flat logits [T, V].

    Positions count from 0 within a sequence; a model that counts from elsewhere gets them with its offset, and one
    that takes none has them given to its positional embeddings.
    """

    def __init__(
        self,
        source: torch.nn.Module,
        is_transformers: bool,
        given: GivenPositions | None = None,
        axes: int = 0,
        features: int = 0,
        entry: bool = False,
    ):
        super().__init__()
        self.source = source
        self.is_transformers = is_transformers
        self.given = given
        self.axes = axes
        self.features = features
        self.entry = entry
        # Looked for here: attributes are other modules while they are traced. In a tuple: it is no part of this.
        self.inner = (language_model(source) if features or entry else None,)
        self.offset = numbering(source).offset if is_transformers else 0
        self.call = None if is_transformers else plain_call(source)

    @same_grad_mode_untraced
    def forward(self, input_ids, positions):
        # For `export_limited`, where torch names the sizes: a model without positions does not equate them.
        torch._check(positions.shape[0] == input_ids.shape[0])
        input_ids, positions = input_ids.unsqueeze(0), positions.unsqueeze(0)
        if not self.is_transformers:
            returned = self.call(self.source, input_ids, positions)
            return rows_in(returned, type(self.source).__name__, input_ids.shape[1])
        positions = positions + self.offset if self.offset else positions
        if self.axes:
            positions = POSITION_AXES(positions[0], self.axes).unsqueeze(1)
        said = said_for_unpadded(self.source, input_ids)
        if self.given is None:
            with contextlib.ExitStack() as stack:
                if self.features:
                    stack.enter_context(as_op(self.inner[0], self.features))
                if self.entry:
                    stack.enter_context(entering(self.inner[0], ENTRY))
                return self.source(
                    input_ids=input_ids, position_ids=positions, use_cache=False, **said
                ).logits[0]
        with self.given.of_call(positions[0]):
            return self.source(input_ids=input_ids, use_cache=False, **said).logits[0]


def capture(
    source: ModelSource, *, hook: bool = True, axes: int = 0, features: int = 0, entry: bool = False
) -> tuple[GraphModule, str]:
    """Trace a decoder-only source model.

    A graph that holds only up to some length (of a mask buffer, a table of positions, RoPE's frequencies) says so,
    see `length_limits.py`.

    Args:
        hook: False leaves attention as transformers' "eager" or "sdpa" writes it, for the recognisers to find.
        axes: not 0: give a transformers model its positions along so many axes, for `prompt_rows.py`.
        features: let its language model add something behind so many layers, see `row_features.py`.
        entry: mark what a multimodal model gives its language model, see `language_model.py`.
    Returns:
        the captured graph and the route that led to it ("export", "export strict", "export up to 1024 tokens").
    Raises:
        CaptureError: the model cannot be traced for any number of tokens; says what was tried.
    """
    if not source.is_transformers:
        with nothing_kept(source.module):
            try:
                return _capture_plain(source, hook)
            except CaptureError:
                with put_back(source.module), evaluation_mode(source.module):
                    if not takes_flat_ids(source.module):
                        raise
            return _capture_plain(source, hook)
    if takes_positions(source.module):
        wrapper = FlatTokens(source.module, True, axes=axes, features=features, entry=entry)
        return trace(source, wrapper, token_inputs(source), hook=hook)
    with given_positions(source.module) as given:
        wrapper = FlatTokens(source.module, True, given if given.names else None)
        return trace(source, wrapper, token_inputs(source), hook=hook)


def _capture_plain(source: ModelSource, hook: bool) -> tuple[GraphModule, str]:
    wrapper = FlatTokens(source.module, False)
    with put_back(source.module), evaluation_mode(source.module):
        width = None if configured_vocab_size(source.config) else width_of_logits(source.module, wrapper.call)
        if width is not None:  # to try it with, see `with_vocabulary`
            source = dataclasses.replace(source, vocab_size=width)
        wrapper.call = checked_call(source.module, wrapper.call, source.vocab_size)
    return trace(source, wrapper, token_inputs(source), hook=hook)


def token_inputs(source: ModelSource, max_len: int | None = None) -> dict[str, TracedInput]:
    """The inputs that every captured graph begins with: ids and positions [T]."""
    num_tokens = max(MIN_STEP_TOKENS + 1, min(EXAMPLE_TOKENS, max_len or source.max_model_len))
    return {
        "input_ids": TracedInput(torch.zeros(num_tokens, dtype=torch.int64, device=source.device)),
        "positions": TracedInput(torch.arange(num_tokens, device=source.device)),
    }


def trace(
    source: ModelSource, wrapper: torch.nn.Module, inputs: dict[str, TracedInput], *, hook: bool = True
) -> tuple[GraphModule, str]:
    """Trace `wrapper`, which calls `source.module` with these inputs; see `capture`."""
    if source.is_transformers:
        refuse_unsupported(source.module)
    decisions: list[Decision] = []
    export = answering(source.module, functools.partial(_export, source, wrapper, inputs, hook), decisions)
    examples = [i.example for i in inputs.values()]
    program, route, few_tokens, of_code = past_memos(source, wrapper, examples, export, decisions)
    gm = _tidy_graph(program, list(inputs))
    merge_equal_rows(gm)
    finish(gm)
    if not source.is_transformers and every_row(gm, type(source.module).__name__):
        route += ROUTE
    _note_limits(gm, source, of_code)
    note_decisions(gm.graph, decisions)
    for few in few_tokens:
        few.require_same(gm, type(source.module).__name__)
    return gm, route


def _note_limits(gm: GraphModule, source: ModelSource, of_code: int | None) -> None:
    of_rope = length_limit(source.module)
    limits = [LengthLimit(n, why) for n, why in ((of_code, OF_CODE), (of_rope, OF_ROPE)) if n is not None]
    asked = max(source.max_model_len, source.encoder.max_len if source.encoder else 0)
    of_tables = limit_of_tables(gm.graph, min((asked, *(limit.num_tokens for limit in limits))))
    note_limit(gm.graph, limits if of_tables is None else [*limits, of_tables])


def _export(
    source: ModelSource,
    wrapper: torch.nn.Module,
    inputs: dict[str, TracedInput],
    hooked: bool,
    traced: Traced = traced_in_steady_state,
) -> tuple[ExportedProgram, str, list[FewTokens], int | None]:
    """The program, the route to it, what the source computes for few tokens where code asks for that, and the most
    tokens the program holds for (None = as many as one may ask for)."""
    sizes = {i.size_name: Dim(i.size_name, min=MIN_STEP_TOKENS, max=MAX_STEP_TOKENS) for i in inputs.values()}
    examples = tuple(i.example for i in inputs.values())
    dynamic_shapes = tuple({0: sizes[i.size_name]} for i in inputs.values())
    failures, places, by_values, by_length = [], [], "", ""

    def check_questions(program: ExportedProgram) -> None:
        if questions_in(program.graph):
            require_harmless(source, wrapper, examples, _unlift(program, list(inputs)))

    hooked = hooked and source.is_transformers and type(source.module).__name__ not in WRITES_ITS_ATTENTION
    hooked = hooked and not has_functions_of_its_own(source.module)
    hook = attention_hook(source.module) if hooked else contextlib.nullcontext()
    leaves, quiet = patched(LEAVES, source.module), warnings.catch_warnings()
    experts = experts_hook(source.module)
    in_order = sorted_experts_hook(source.module, wrapper, examples, source.vocab_size)
    evaluated = evaluation_mode(source.module)
    with hook, experts, leaves, evaluated, _quiet_torch(), torch.no_grad(), quiet, in_order:
        warnings.simplefilter("ignore")
        with put_back(source.module):
            same = repeated_layers(source.module, wrapper, _shorter_and_longer(source, inputs))
        # Strict, layers to copy. Other ways to trace run the code, which strict does not.
        attempts = [(False, []), (True, [])][: 2 if traced is traced_in_steady_state else 1]
        for strict, repeated in [(False, same), *attempts] if same else attempts:
            try:
                exported = functools.partial(
                    torch.export.export, wrapper, examples, dynamic_shapes=dynamic_shapes, strict=strict
                )
                # Graphs on the way are called by strict alone.
                lazy, watched = _use_lazy_graph_module(not strict), put_back(source.module)
                once = traced_once(repeated)
                cached = _caching_fake_calls(not repeated and _layers_alike(source.module) >= CACHE_FROM)
                # Dynamo reads the model's code itself, and would read ours.
                asked = contextlib.nullcontext() if strict else taken_as_chosen()
                with lazy, watched, once, cached, noting_branches(places), asked:
                    program = exported() if strict else traced(source.module, wrapper, exported)
                program, functionalised = _functional(program)
                if repeated:
                    expand(program.graph)
            except CaptureError:
                raise
            except Exception as error:
                by_values = by_values or branch_by_values(error)
                by_length = line_that_fixed_the_length(str(error)) or by_length
                if not repeated:
                    failures.append(f"  strict={strict}: {type(error).__name__}: {_first_lines(error)}")
                continue
            _check_range(program)
            check_questions(program)
            few = run_with_one_token(wrapper, examples, source.vocab_size, places)
            return program, _route(strict, repeated) + functionalised, few, None
        graph_of = functools.partial(_graph_of, input_names=list(inputs))
        if (found := export_limited(source, wrapper, inputs, traced, graph_of)) is not None:
            limited, few = found
            try:
                program, functionalised = _functional(limited.program)
                check_questions(program)
                return program, limited.route + functionalised, few, limited.most
            except CaptureError:
                raise
            except Exception as error:  # torch's, of tensors that a transform of functions made
                failures.append(f"  {limited.route}: {type(error).__name__}: {_first_lines(error)}")
    reason = f"{by_values}. What torch says" if by_values else ""
    if any("Constraints violated" in failure for failure in failures):
        reason = DEPENDS_ON_LENGTH.format(at=f" at {by_length}" * bool(by_length))
    if any(FROM_THE_SECOND in failure for failure in failures):
        failures.append(
            "  Parts from the second token on (x[:, 1:] = y[:, :-1]) may be F.pad(y, (0, 0, 1, -1))."
        )
    failures += filter(None, [hint_on_script(source.module), hint_on_float16(source.module)])
    raise CaptureError(
        f"{type(source.module).__name__} could not be traced by torch.export with a dynamic number of tokens"
        + "\n".join((f"{reason}:", *failures))
    )


def _caching_fake_calls(on: bool) -> contextlib.AbstractContextManager:
    """torch keeps the shapes that ops return for calls that are alike. That pays where several layers are traced one
    after the other; of a single layer few are, and what is kept takes a third of the time."""
    from torch._dynamo import config  # a large package, which the export imports

    return config.patch(fake_tensor_cache_enabled=on)


def _layers_alike(model: torch.nn.Module) -> int:
    """How many modules with parts are of one class, at most."""
    counts = collections.Counter(type(m) for m in model.modules() if next(m.children(), None) is not None)
    return max(counts.values(), default=0)


def _route(strict: bool, repeated: list[tuple[Layer, Layer]]) -> str:
    if not repeated:
        return STRICT if strict else "export"
    leaders = {leader.path for _, leader in repeated}
    return f"export, {len(repeated)} layers as copies of {len(leaders)}"


def _shorter_and_longer(source: ModelSource, inputs: dict[str, TracedInput]) -> list[Callable[[], tuple]]:
    """Make inputs of two lengths that the model takes, on the meta device."""
    names = list(dict.fromkeys(i.size_name for i in inputs.values()))

    def make(length: int) -> tuple:
        sizes = {name: length - n for n, name in enumerate(names)}
        examples = ((sizes[i.size_name], i.example) for i in inputs.values())
        return tuple(torch.empty((n, *x.shape[1:]), dtype=x.dtype, device="meta") for n, x in examples)

    lengths = sorted({min(length, source.max_model_len) for length in LENGTHS})
    return [functools.partial(make, length) for length in lengths]


@contextlib.contextmanager
def _quiet_torch():
    """A failed attempt makes torch log and print whole graphs; what matters of it is in the CaptureError."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _check_range(program: ExportedProgram) -> None:
    """A graph that is valid only from, say, 32 tokens on would be wrong for a decode step."""
    for symbol, bounds in program.range_constraints.items():
        if str(symbol).startswith("u"):
            continue  # a number that an assertion reads, or rows that a mask chooses: see `chosen_rows.py`
        if bounds.lower > MIN_STEP_TOKENS or bounds.upper < MAX_STEP_TOKENS:
            raise CaptureError(
                f"The captured graph holds only for {bounds.lower} <= {symbol} <= {bounds.upper} tokens: "
                "the model's code branches on the sequence length."
            )


def _functional(program: ExportedProgram) -> tuple[ExportedProgram, str]:
    """The program without writes into tensors, regions (of torch.autocast, whose casts become calls) and transforms
    of functions, and what that adds to its route."""
    weights_behind_data(program)
    refuse_traced_constants(program)
    without_own_caches(program)
    nodes = program.graph.nodes
    has_graphs = any(_is_region(n) or is_transformed(n) for n in nodes)
    if not has_graphs and not any(map(_is_mutating, nodes)):
        return program, ""
    if not has_graphs:
        write_out_of_place(program.graph)
    if has_graphs or any(map(_is_mutating, nodes)):
        program = program.run_decompositions({})
    refuse_operands_with_graphs(program)
    return program, ", functionalised"


def _graph_of(program: ExportedProgram, input_names: list[str]) -> GraphModule:
    return _tidy_graph(_functional(program)[0], input_names)


def _tidy_graph(functional: ExportedProgram, input_names: list[str]) -> GraphModule:
    gm = _unlift(functional, input_names)
    write_for_all_rows(gm)
    tidy(gm)
    return gm


def _is_mutating(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False)


def _is_region(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _unlift(program: ExportedProgram, input_names: list[str]) -> GraphModule:
    """Turn lifted parameter and buffer inputs into get_attr nodes that keep the source model's names."""
    graph = torch.fx.Graph()
    root = torch.nn.Module()
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
    mapping: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in program.graph.nodes:
        spec = specs.get(node.name) if node.op == "placeholder" else None
        if spec is None or spec.kind is InputKind.USER_INPUT:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
            continue
        name = name_in_graph(spec.target.removeprefix("source."))
        tensor = program.state_dict.get(spec.target)
        tensor = program.constants[spec.target] if tensor is None else tensor
        attach(root, name, tensor)
        mapping[node] = graph.get_attr(name)
        mapping[node].meta.update(node.meta)
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    _keep_writes(program, graph, mapping, output)
    user_output = next(
        value
        for spec, value in zip(program.graph_signature.output_specs, output.args[0])
        if spec.kind is OutputKind.USER_OUTPUT
    )
    output.args = (user_output,)
    for node, name in zip([n for n in graph.nodes if n.op == "placeholder"], input_names, strict=True):
        node.name = node.target = name
    return graph_module(root, graph, "Captured")


def name_in_graph(name: str) -> str:
    """A weight's name in a graph: its own, but for names of a model's top that graphs have themselves."""
    return f"source_{name}" if name.split(".")[0] in _graphs_own_names() else name


@functools.cache
def _graphs_own_names() -> set[str]:
    """What a GraphModule has beside what every module has, and the inputs of graphs."""
    own = set(dir(GraphModule(torch.nn.Module(), torch.fx.Graph()))) - set(dir(torch.nn.Module()))
    return own | {"input_ids", "positions", "encoder_states", "shape_env"}


def _keep_writes(
    program: ExportedProgram, graph: torch.fx.Graph, mapping: dict, output: torch.fx.Node
) -> None:
    """Functional export returns new values of buffers and inputs: write them back, so that the audit sees it."""
    inputs = {spec.target or spec.arg.name: spec.arg.name for spec in program.graph_signature.input_specs}
    old = {node.name: mapping[node] for node in program.graph.nodes if node.op == "placeholder"}
    for spec, value in zip(program.graph_signature.output_specs, output.args[0]):
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            with graph.inserting_before(output):
                write = graph.call_function(aten.copy_.default, (old[inputs[spec.target]], value))
            write.meta.update(value.meta)


def _first_lines(error: Exception, num_lines: int = 3) -> str:
    """Without what asks in torch's place (asking_code.py), which torch takes for the model's code."""
    lines = [_ASKED.sub("", line.strip()) for line in str(error).splitlines()]
    return " | ".join([line for line in lines if line and line != "Caused by:"][:num_lines])[:500]


_ASKED = re.compile(r" *\(\S*pagebinder/frontend/(few_tokens|mask_questions)\.py:\d+ in asked\)$")
