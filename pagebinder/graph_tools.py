"""Small helpers over torch.fx graphs that both the frontend and the passes use."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten

CASTS = (
    aten.to.dtype, aten.to.device, aten._to_copy.default, aten.to.dtype_layout, aten.type_as.default,
)  # fmt: skip
# Namespaces of ops that come with torch (2.11 to 2.15).
TORCHS = frozenset((
    "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_inductor_test", "_native", "_native_aot",
    "_quantized", "_test", "aten", "c10d", "c10d_functional", "coor", "debug_mode_ops", "debugprims", "export",
    "flex_gemm", "flex_lib", "fsdp", "higher_order", "inductor", "inductor_prims", "mempool", "mkl", "mkldnn",
    "mkldnn_prepacked", "onednn", "onnx", "onnx_symbolic", "prepacked", "prim", "prims", "profiler", "quantization",
    "quantized", "quantized_decomposed", "rngprims", "sparse", "static_runtime", "streams", "symm_mem",
))  # fmt: skip
IDENTITIES = (aten.alias.default, aten.contiguous.default, aten.clone.default, aten.detach.default)


def calls(graph: torch.fx.Graph, *targets) -> Iterator[Node]:
    """The call nodes of a graph with one of these targets, in execution order."""
    return (n for n in list(graph.nodes) if n.op == "call_function" and n.target in targets)


def is_call(value, *targets) -> bool:
    return isinstance(value, Node) and value.op == "call_function" and value.target in targets


def is_view_op(target) -> bool:
    """Do an op's results alias an operand which is not written: view, transpose, slice, reshape, expand, ...?"""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    aliases = [r.alias_info for r in target._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@functools.cache
def is_composite(target: torch._ops.OpOverload) -> bool:
    """Is an op made of other ops, so that its schema does not say what its results alias?"""
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


def size_text(number: int | torch.SymInt) -> str:
    """A size or stride, its symbols by their expression: compared so, two of them leave no guard behind."""
    return str(number.node.expr) if isinstance(number, torch.SymInt) else str(number)


def storage_of(tensor: torch.Tensor) -> int:
    """The same number for all views of one piece of memory."""
    return tensor.untyped_storage()._cdata


def operands(node: Node) -> Iterator[tuple[torch._C.Argument, Node]]:
    """(argument of the schema, node) of all operands of an op's call, those in lists too."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return
    for position, argument in enumerate(node.target._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for value in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(value, Node):
                yield argument, value


def written_by(node: Node) -> list[Node]:
    """Operands that a call writes to in place, by its schema."""
    return [n for argument, n in operands(node) if argument.is_write]


def skip_casts(value):
    """Walk up through dtype casts and identities to the node that made the value."""
    while is_call(value, *CASTS, *IDENTITIES):
        value = value.args[0]
    return value


def val(node: Node) -> torch.Tensor:
    """The fake tensor a node stands for (shape, dtype, device)."""
    return node.meta["val"]


def tensors(value) -> list[torch.Tensor]:
    """The fake tensors a node stands for: one, several, or none (a size, a write)."""
    found = value.meta.get("val") if isinstance(value, Node) else None
    items = found if isinstance(found, (list, tuple)) else [found]
    return [item for item in items if isinstance(item, torch.Tensor)]


def devices(node: Node) -> set[torch.device]:
    """Where the operands and results of a node lie."""
    return {t.device for n in (node, *node.all_input_nodes) for t in tensors(n)}


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype by its name in a LayerState, "float32" for example."""
    return str(tensor.dtype).removeprefix("torch.")


def arg(node: Node, position: int, name: str, default=None):
    """An argument of a call node, given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def einsum_labels(node: Node) -> tuple[list[list[str | int]], list[str | int]] | None:
    """Of an einsum a label for each dimension of each operand, and of the result; None: that is not written out.

    Letters are theirs; dimensions that "..." stands for are counted from its end, at which operands line up.
    """
    subscripts, arrow, result = node.args[0].replace(" ", "").partition("->")
    if not arrow:
        return None

    def of(one: str, value: Node) -> list[str | int]:
        before, dots, behind = one.partition("...")
        left = val(value).dim() - len(before) - len(behind)
        return [*before, *(range(left, 0, -1) if dots else ()), *behind]

    return [of(one, value) for one, value in zip(subscripts.split(","), node.args[1])], of(result, node)


# torch's name of the k-th module of `layers[a:b]`, where a list holds a module twice.
_SLICED = re.compile(r"slice\((None|\d+), [^)]*\)\.(\d+)")


def module_path(node: Node) -> str:
    """Path of the innermost source module a node was traced in, e.g. "model.layers.0.self_attn"."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    path = re.sub(r"L\['self'\]\.?|getattr\(|\)$", "", str(path))
    path = _SLICED.sub(lambda m: str(int(m[2]) + (0 if m[1] == "None" else int(m[1]))), path)
    return re.sub(r"^(L__self___)?source\.?", "", path)


def first_paths(model: torch.nn.Module) -> dict[str, str]:
    """Every path of a module -> that in `named_modules()`. They are different where a list holds a module twice:
    torch names its calls by either."""
    first = {id(module): path for path, module in model.named_modules()}
    return {path: first[id(module)] for path, module in model.named_modules(remove_duplicate=False)}


def source_line(node: Node) -> str:
    """File and line of the source model's code that made a node, or ""."""
    trace = node.meta.get("stack_trace") or ""
    found = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', trace)
    if not found:
        return ""
    file, line, function = found[-1]
    return f"{'/'.join(file.split('/')[-3:])}:{line} in {function}"


def describe(node: Node) -> dict[str, str]:
    """The keyword arguments that say where a node is, for Match and Refusal."""
    return {"node": node.name, "module_path": module_path(node)}


def attach(root: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Set root.<dotted name> to this very tensor, as a parameter or as a buffer."""
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    if isinstance(tensor, torch.nn.Parameter):
        root.register_parameter(leaf, tensor)
    else:
        root.register_buffer(leaf, tensor)


def attribute(root: torch.nn.Module, name: str) -> torch.Tensor:
    """What root.<dotted name> is: the tensor that a get_attr node reads."""
    value = root
    for part in name.split("."):
        value = getattr(value, part)
    return value


def attributes(gm: GraphModule) -> dict[str, torch.Tensor]:
    """The tensors that a graph reads, by the dotted names of its get_attr nodes."""
    names = dict.fromkeys(n.target for n in gm.graph.nodes if n.op == "get_attr")
    return {name: attribute(gm, name) for name in names}


def looked_up(gm: GraphModule) -> list[str]:
    """Names of the tensors of which a graph only takes rows: tables of embeddings."""
    others = {
        node.target
        for node in gm.graph.nodes
        if node.op == "get_attr" and not all(_takes_rows(user, node) for user in node.users)
    }
    return [name for name in attributes(gm) if name not in others]


def _takes_rows(user: Node, table: Node) -> bool:
    return is_call(user, aten.embedding.default) and table not in user.args[1:]


def graph_module(root: torch.nn.Module, graph: torch.fx.Graph, class_name: str) -> GraphModule:
    """A GraphModule whose Python code is written when it is first called or read, not after each pass: a compilation
    makes dozens of graphs and calls few of them."""
    return _LazyGraphModule(root, graph, class_name=class_name)


def clone(gm: GraphModule, level: str) -> GraphModule:
    """The start of the next level: a GraphModule with a graph of its own and the same weights."""
    return graph_module(gm, copy.deepcopy(gm.graph), level.capitalize())


def num_ops(gm: GraphModule) -> int:
    return sum(1 for n in gm.graph.nodes if n.op == "call_function")


def insert_call(
    graph: torch.fx.Graph, like: Node, target, args: tuple, kwargs: dict | None = None, *, value=None
) -> Node:
    """A new call before `like` that inherits its module path and source line.

    meta["val"] is `value`, where the caller knows it (it replaces a node of the same value), else computed.
    """
    kwargs = kwargs or {}
    with graph.inserting_before(like):
        node = graph.call_function(target, args, kwargs)
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    if value is None:
        set_val(node)
    else:
        node.meta["val"] = value
    return node


def insert_constant(gm: GraphModule, like: Node, name: str, tensor: torch.Tensor) -> Node:
    """A node before `like` that reads `tensor`, which becomes the attribute `name` of `gm`.

    Raises:
        ValueError: the module has another attribute of that name.
    """
    if hasattr(gm, name) or not name.isidentifier():
        raise ValueError(
            f"constant {name!r}: give an identifier that the graph's module has no attribute of."
        )
    attach(gm, name, tensor)
    with gm.graph.inserting_before(like):
        return read_attribute(gm, gm.graph.get_attr(name), device=device_of(gm.graph))


@dataclass(frozen=True)
class Recipe:
    """What a constant was made of: `function` of the attributes `weights`, given here with their tensors."""

    function: Callable[..., torch.Tensor]
    weights: Mapping[str, torch.Tensor]

    def made(self, others: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The constant for other weights; those that `others` lacks are its own."""
        with torch.no_grad():
            return self.function(*(others.get(name, tensor) for name, tensor in self.weights.items()))


_recipes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def insert_derived(
    gm: GraphModule, like: Node, name: str, function: Callable[..., torch.Tensor], weights: Sequence[Node]
) -> Node:
    """As `insert_constant`, of a tensor that is made of weights: function(*weights), a folded scale for example.

    The verifier runs graphs with other weights, too, and makes the constant anew of these. In an engine it is a copy:
    it does not follow weights that are changed later.

    Args:
        function: pure, of tensors alone. weights: nodes that read attributes of the graph's module.
    Raises:
        ValueError: the name is taken, a node reads no attribute, or the function gives no tensor.
    """
    others = [node for node in weights if not (isinstance(node, Node) and node.op == "get_attr")]
    if others:
        raise ValueError(f"constant {name!r}: {others[0]!r} is no node that reads a weight (get_attr).")
    recipe = Recipe(function, {node.target: attribute(gm, node.target) for node in weights})
    tensor = recipe.made({})
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"constant {name!r}: its function gave a {type(tensor).__name__} and no tensor.")
    if any(tensor is weight for weight in recipe.weights.values()):
        tensor = tensor.detach().clone()
    node = insert_constant(gm, like, name, tensor)
    _recipes[attribute(gm, name)] = recipe
    return node


def recipe_of(tensor: torch.Tensor) -> Recipe | None:
    """What a constant was made of, if it was put in by `insert_derived`."""
    return _recipes.get(tensor)


def read_attribute(gm: GraphModule, node: Node, device: torch.device | None = None) -> Node:
    """Set meta["val"] of a get_attr node: the attribute's dtype and sizes, on its device or the one given."""
    value = attribute(gm, node.target)
    with fake_mode_of(gm.graph):  # from_tensor would make sizes dynamic
        node.meta["val"] = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=device or value.device
        )
    return node


def set_val(node: Node) -> None:
    """Compute a call node's meta["val"] by running its fake kernel on its inputs' fake tensors.

    Composite ops run as Python: torch 2.11's linear and matmul in C++ ask for sizes as numbers, which would fix them.
    """
    fake_args, fake_kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _value)
    fake_mode = fake_mode_of(node.graph)
    with torch.no_grad():
        if fake_mode is None:
            node.meta["val"] = node.target(*fake_args, **fake_kwargs)
        else:
            with enable_python_dispatcher(), fake_mode:
                node.meta["val"] = node.target(*fake_args, **fake_kwargs)


def _value(node: Node):
    if node.op == "get_attr" and "val" not in node.meta:  # put there by hand
        read_attribute(node.graph.owning_module, node, device_of(node.graph))
    return node.meta["val"]


def fake_mode_of(graph: torch.fx.Graph):
    """The FakeTensorMode of the graph's inputs: all levels share one, so symbols keep their meaning."""
    for node in graph.nodes:
        if node.op == "placeholder":
            return getattr(node.meta.get("val"), "fake_mode", None)
    return None


def device_of(graph: torch.fx.Graph) -> torch.device | None:
    """The device of the graph's inputs, which is the model's; None: they have no metadata."""
    inputs = (n for n in graph.nodes if n.op == "placeholder")
    return next((t.device for n in inputs for t in tensors(n)), None)


def finish(gm: GraphModule) -> None:
    """Lint (elimination begins with it), dead-code elimination, recompile: the last line of every pass that changed
    something."""
    gm.graph.eliminate_dead_code()
    gm.recompile()
