"""Writes a script that shows a divergence without Pagebinder's engine: plain torch, with our reference ops if needed.

DIR/reproduce.py     two functions, what is computed and what should be, and the error of one against the other
DIR/inputs.pt        the tensors that go in, each on its device; the source model's module, or its recorded output
"""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from pagebinder.compiler.locate import Divergence
from pagebinder.custom_ops.library import NAMESPACE, is_our_op
from pagebinder.custom_ops.providers import BUILTIN_MODULES, registered_providers
from pagebinder.graph_tools import TORCHS
from pagebinder.passes.graph_values import widened
from pagebinder.paths import replace_text, replaced

SCRIPT, INPUTS = "reproduce.py", "inputs.pt"
TRITON = "torch.ops.pagebinder_triton."

_HEAD = '''"""{title}

Reads {inputs} beside it. Needs torch{needs}. Exits with 1 if the two differ by more than {tolerance:g} of the spread.
"""

import operator
import sys
from pathlib import Path

import torch
from torch import device, inf, nan
'''

_TAIL = """

def main():
    data = torch.load(Path(__file__).parent / "{inputs}", weights_only={safe})
    with torch.inference_mode():
        got = computed(*[x.clone() if isinstance(x, torch.Tensor) else x for x in data["inputs"]])
        wanted = expected(data).reshape(got.shape)
    got, wanted = got.double(), wanted.double()
    error = (got - wanted).abs().max().item()
    relative = error / max(wanted.std(correction=0).item(), 1e-30)
    print(f"largest error {{error:.3g}}, that is {{relative:.3g}} of the spread of what is expected")
    sys.exit(not relative <= {tolerance!r})


main()
"""


def write_script(divergence: Divergence, directory: Path, title: str, tolerance: float) -> Path:
    """Write both files; returns the script's path."""
    directory.mkdir(parents=True, exist_ok=True)
    data = {"inputs": [_plain(x) for x in divergence.inputs]}
    functions = [_function("computed", divergence.graph, divergence.widen)]
    if divergence.expected_graph is not None:
        functions.append(_function("right", divergence.expected_graph, divergence.widen))
        body = '    return right(*[x.clone() if isinstance(x, torch.Tensor) else x for x in data["inputs"]])'
    elif _can_be_saved(divergence.module):
        data |= {
            "module": divergence.module,
            "args": divergence.module_args,
            "kwargs": divergence.module_kwargs,
        }
        body = (
            '    output = data["module"](*data["args"], **data["kwargs"])  # the module of the source model\n'
            "    return output[0] if isinstance(output, tuple) else output"
        )
    else:
        data["expected"] = _plain(divergence.expected)
        body = '    return data["expected"]  # recorded'
    functions.append(f"def expected(data):\n{body}")
    with replaced(directory / INPUTS) as new:
        torch.save(data, new)
    safe = "module" not in data
    text = "".join(functions)
    on_gpu = any(x.is_cuda for x in data["inputs"] if isinstance(x, torch.Tensor))
    needs = "" if safe else ", transformers"
    needs += " and pagebinder's ops" if "pagebinder" in text else ""
    needs += ", on a CUDA GPU" if on_gpu else ""
    head = _HEAD.format(title=title, inputs=INPUTS, needs=needs, tolerance=tolerance)
    if TRITON in text and os.environ.get("TRITON_INTERPRET") == "1":
        head += '\nimport os\n\nos.environ["TRITON_INTERPRET"] = "1"  # its kernels ran on the CPU\n'
    if "pagebinder" in text:
        head += "\nimport pagebinder.custom_ops  # registers torch.ops.pagebinder\n"
    head += _prepared(divergence.graph, divergence.expected_graph)
    for namespace in sorted(_others(divergence.graph, divergence.expected_graph)):
        head += f"\n# Import here what registers torch.ops.{namespace}.\n"
    tail = _TAIL.format(inputs=INPUTS, safe=safe, tolerance=tolerance)
    script = directory / SCRIPT
    replace_text(script, head + "".join(f"\n\n{f}\n" for f in functions) + tail)
    return script


def _others(*graphs: GraphModule | None) -> set[str]:
    """Namespaces of ops of the user's own."""
    ops = (n.target for gm in graphs if gm is not None for n in gm.graph.nodes if n.op == "call_function")
    called = {op.namespace for op in ops if isinstance(op, torch._ops.OpOverload) and not is_our_op(op)}
    return called - {*TORCHS, NAMESPACE}


def _prepared(*graphs: GraphModule | None) -> str:
    """Lines that make the ops of providers callable, each provider's own way."""
    by_namespace = {provider.namespace: provider for provider in registered_providers().values()}
    called: dict[str, dict[str, None]] = {}
    for node in (node for gm in graphs if gm is not None for node in gm.graph.nodes):
        namespace = getattr(node.target, "namespace", "")
        if namespace in by_namespace and namespace != NAMESPACE:
            called.setdefault(namespace, {})[node.target._opname] = None
    if not called:
        return ""
    imports, calls = "", ""
    for namespace, ops in called.items():
        provider = by_namespace[namespace]
        module = type(provider).__module__
        if module not in BUILTIN_MODULES:
            imports += f"import {module}  # registers the provider {provider.name!r}\n"
        calls += f"\nfor op in {list(ops)!r}:  # registers torch.ops.{namespace}\n"
        calls += f"    registered_providers()[{provider.name!r}].prepare(op)\n"
    return f"from pagebinder.custom_ops.providers import registered_providers\n{imports}{calls}"


def _can_be_saved(module: torch.nn.Module | None) -> bool:
    """A class that is defined inside a function or in the program itself cannot be imported by the script."""
    if module is None:
        return False
    if any(type(m).__module__ == "__main__" for m in module.modules()):
        return False
    try:
        pickle.dumps(module)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def _plain(value: Any) -> Any:
    """A tensor of its own memory, on its device: views of a whole cache or model would be saved with all of it."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        plain = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return plain.copy_(value)
    return value


def _function(name: str, gm: GraphModule, widen: bool) -> str:
    """A graph as a function, one line per node."""
    names = {n: re.sub(r"\W", "_", n.name) for n in gm.graph.nodes}
    parameters = ", ".join(names[n] for n in gm.graph.nodes if n.op == "placeholder")
    lines = [f"def {name}({parameters}):"]
    for node in gm.graph.nodes:
        if node.op == "call_function":
            lines.append(f"    {names[node]} = {_call(node, names, widen)}")
        elif node.op == "output":
            lines.append(f"    return {names[node.args[0]]}")
    return "\n".join(lines)


class _Name:
    """Prints as an expression."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _call(node: Node, names: dict[Node, str], widen: bool) -> str:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: _Name(names[n]))
    if widen:
        args, kwargs = map_aggregate((args, kwargs), widened)
    inside = [repr(a) for a in args] + [f"{k}={v!r}" for k, v in kwargs.items()]
    return f"{_target(node.target)}({', '.join(inside)})"


def _target(target) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    module = getattr(target, "__module__", "")
    return f"operator.{target.__name__}" if module == "_operator" else f"{module}.{target.__name__}"
