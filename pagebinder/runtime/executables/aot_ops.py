"""Our ops for programs without Python: small C++ libraries that are written here and built by the local compiler.

Our kernels are C++, and their schemas are defined in Python. A program without Python loads, in this order,

    schemas.so          defines the schemas                           (Python has them: never loaded there)
    <part>.so           our kernels, as Python loads them             see custom_ops/cpu/build.py
    adapters/<op>.so    `pagebinder_aot::<op>_without_<argument>`: calls <op> with an empty list for the argument

Built libraries are kept in the cache of our kernels, under a digest of their source and compiler.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from pagebinder.custom_ops.cpu import build as cpu_build
from pagebinder.custom_ops.cpu import compiler
from pagebinder.custom_ops.library import NAMESPACE as OURS
from pagebinder.custom_ops.library import is_our_op, library, op_info, overload
from pagebinder.errors import ProviderError
from pagebinder.graph_tools import TORCHS

ADAPTERS = "pagebinder_aot"
# In an artefact.
OPS_FOLDER = Path("program") / "ops"
ADAPTERS_FOLDER = OPS_FOLDER / "adapters"
HEADER = """// Written by pagebinder.
#include <torch/csrc/stable/library.h>
#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // torch 2.11: its former name
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif
"""


def native_problem(target: Any) -> str | None:
    """Why a program without Python cannot call what a node calls; None: it can, or it is none of our ops."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in TORCHS:
        return None
    if not is_our_op(target):
        name = target._schema.name
        return f"{target.name()}, which is written in Python" if name in OPDEFS else None
    if target.namespace == OURS and op_info(target._opname).transparent:
        return None  # it dissolves into ops of torch
    in_python = library(target.namespace)._op_impls  # "<namespace>/<op>/<dispatch key>"; Meta is for tracing
    if any(key.rsplit("/", 2)[1:2] == [target._opname] and not key.endswith("/Meta") for key in in_python):
        return f"{target.name()}, which is written in Python"
    return None


def schemas_library(ops: Iterable[str]) -> Path | None:
    """A library that defines the schemas of those of our ops that are called; None where there are none."""
    called = {name: _overload_of(name) for name in ops}
    wrapped = [_wrapped(op) for op in called.values() if op.namespace == ADAPTERS]
    ours = {op.name(): op for op in (*called.values(), *wrapped) if _has_schema_in_python(op)}
    if not ours:
        return None
    lines = [HEADER]
    for namespace in sorted({op.namespace for op in ours.values()}):
        schemas = sorted(_bare(op) for op in ours.values() if op.namespace == namespace)
        lines += [f"STABLE_TORCH_LIBRARY_FRAGMENT({namespace}, m) {{"]
        lines += [f"  m.def({_literal(schema)});" for schema in schemas] + ["}"]
    return _built("\n".join(lines))


def adapter_names(ops: Iterable[str]) -> list[str]:
    """The adapters among some ops."""
    return [name for name in ops if name.startswith(f"{ADAPTERS}::")]


def native_ops(ops: Iterable[str]) -> list[str]:
    """The ops that are called in the end: those of adapters in place of the adapters."""
    return [_wrapped_name(name) if name.startswith(f"{ADAPTERS}::") else name for name in ops]


def adapter(op: torch._ops.OpOverload, without: tuple[str, ...]) -> torch._ops.OpOverload:
    """The op `op` without some arguments, for which it gets empty lists; built and registered if it is not there.

    Raises ProviderError.
    """
    name = f"{op.namespace}__{op._opname}__without_{'_and_'.join(without)}"
    full = f"{ADAPTERS}::{name}"
    if not is_registered(full):
        path = adapter_library(full)
        torch.ops.load_library(str(path))

        def fake(*args, **kwargs):
            given = dict(zip((a.name for a in overload(ADAPTERS, name)._schema.arguments), args))
            return op(**given, **kwargs, **{argument: [] for argument in without})

        torch.library.register_fake(full, fake)
    return overload(ADAPTERS, name)


def adapter_library(full: str) -> Path:
    """The library of an adapter by its name, built if necessary. Raises ProviderError."""
    op, without = overload(*_wrapped_name(full).split("::")), full.partition("__without_")[2].split("_and_")
    arguments, returns = op._schema.arguments, len(op._schema.returns)
    rest = iter(range(len(arguments)))
    values = ["nothing()" if a.name in without else f"stack[{next(rest)}]" for a in arguments]
    values += ["0"] * (returns - len(values))
    name = full.partition("::")[2]
    bare = _schema_without(op, name, without)
    return _built(f"""{HEADER}
namespace {{
StableIValue nothing() {{
  StableListHandle list;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(0, &list));
  return torch::stable::detail::from(list);
}}
void call(StableIValue* stack, uint64_t, uint64_t) {{
  StableIValue whole[] = {{{", ".join(values)}}};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("{op.namespace}::{op._opname}", "{op._schema.overload_name}", whole, TORCH_ABI_VERSION));
  for (int i = 0; i < {returns}; ++i) stack[i] = whole[i];
}}
}}  // namespace
STABLE_TORCH_LIBRARY_FRAGMENT({ADAPTERS}, m) {{ m.def({_literal(bare)}); }}
STABLE_TORCH_LIBRARY_IMPL({ADAPTERS}, CompositeExplicitAutograd, m) {{ m.impl("{name}", &call); }}
""")


def load_adapters(names: Iterable[str], folder: Path) -> None:
    """Register the adapters that are not there yet, from a folder that keeps them. Raises OSError."""
    for full in adapter_names(names):
        if not is_registered(full):
            torch.ops.load_library(str(folder / f"{full.partition('::')[2]}.so"))


def is_registered(full: str) -> bool:
    return torch._C._dispatch_has_kernel(full)


def _wrapped_name(full: str) -> str:
    """pagebinder_aot::pagebinder_cpu__linears__without_biases -> pagebinder_cpu::linears, the op behind it."""
    namespace, name = full.partition("::")[2].partition("__without_")[0].split("__", 1)
    return f"{namespace}::{name}"


def _wrapped(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    return overload(*_wrapped_name(op.name()).split("::"))


def _overload_of(name: str) -> torch._ops.OpOverload:
    namespace, _, rest = name.partition("::")
    return overload(namespace, rest)


def _has_schema_in_python(op: torch._ops.OpOverload) -> bool:
    return op.namespace.startswith(OURS) and op.namespace != ADAPTERS


def _bare(op: torch._ops.OpOverload) -> str:
    """The schema without its namespace."""
    return str(op._schema).partition("::")[2]


def _schema_without(op: torch._ops.OpOverload, name: str, without: Iterable[str]) -> str:
    """The schema under another name, without arguments that are lists of tensors."""
    text = _bare(op)
    for argument in without:
        text = text.replace(f", Tensor[] {argument}", "").replace(f"Tensor[] {argument}, ", "")
    return name + text[text.index("(") :]


def _literal(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _built(source: str) -> Path:
    """The library of one source, from the cache or built. Raises ProviderError."""
    command = compiler.find_compiler()
    root = Path(torch.__file__).parent
    facts = (source, compiler.version(), str(torch.__version__))
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]
    path = cpu_build.cache_root() / f"aot-{key}" / "ops.so"
    if cpu_build.is_intact(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            file, made = Path(folder) / "ops.cpp", Path(folder) / "ops.so"
            file.write_text(source, encoding="utf-8")
            command = [*command, "-O1", "-std=c++17", "-fPIC", "-shared", f"-I{root / 'include'}", str(file)]
            command += [f"-L{root / 'lib'}", "-ltorch_cpu", "-o", str(made)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                last_lines = "\n".join(result.stderr.strip().splitlines()[-15:])
                raise ProviderError(f"compiling our ops failed: {shlex.join(command)}\n{last_lines}")
            digest = made.with_suffix(".sha256")
            digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
            os.replace(made, path)
            os.replace(digest, path.with_name(path.name + ".sha256"))
    except OSError as error:
        raise ProviderError(
            f"cannot keep libraries in {path.parent} ({error}); set PAGEBINDER_CACHE to a writable folder"
        ) from error
    return path
