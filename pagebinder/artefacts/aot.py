"""What `save(dir, executable="aot")` adds to an artefact, so that a program without Python can run its steps.

    step_plan.json       what to load and what to pass, see below
    program/<graph>/     the compiled graph: model.so, model.json           runtime/executables/aot.py
    program/ops/         schemas.so and adapters/<op>.so                    runtime/executables/aot_ops.py

step_plan.json; paths are relative to the directory:

    libraries   to be loaded, in this order, before any program
    sizes       names of sizes that differ from step to step, and what they count
    cache       bytes_per_block, and for each group of layers its kind and block_size in tokens. A cache is one span
                of num_blocks * bytes_per_block bytes, zero at first; block 0 belongs to no request
    files       that hold weights: path, absolute (where they were at saving), bytes
    programs    graph -> library, outputs, and inputs in call order, each with name, dtype, shape and a role:
                a role of ROLES  what the caller computes for each step, with the group whose it is
                "cache"          a view of the span: offset_bytes, strides (in values)
                "weight"         offset_bytes in files[file], stored_dtype and stored_shape there, to be converted
                                 to dtype. With strides (in values) it is then laid out so, with view and permute
                                 it is brought into another order: x.view(view).permute(permute).contiguous().
                                 With coded_by, an op of the libraries, it is converted to plain_dtype instead, and
                                 op(x, memory) writes its codes into new memory of dtype and shape

`examples/aot_step` is such a program.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from pagebinder.artefacts.files import TENSORS, write_json
from pagebinder.custom_ops.cpu.parts import ELEMENT_PARTS
from pagebinder.custom_ops.cpu.provider import parts_of
from pagebinder.errors import ArtefactError
from pagebinder.graph_tools import attribute, dtype_name, val
from pagebinder.passes.graph_values import REDUCED, rounded_to
from pagebinder.passes.verifier import TOLERANCES
from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.executables import AOTExecutable, EagerExecutable, Executable, input_names
from pagebinder.runtime.executables.aot import LIBRARY, compile_aot
from pagebinder.runtime.executables.aot_ops import (
    ADAPTERS_FOLDER,
    OPS_FOLDER,
    adapter_library,
    adapter_names,
    native_ops,
    schemas_library,
)

if TYPE_CHECKING:
    from pagebinder.compiled_model import CompiledModel

STEP_PLAN = "step_plan.json"
STEP_PLAN_FORMAT = 1
CODER = "pagebinder_cpu::code_linear_weight"  # in the library that has the linear op itself

ROLES = {
    "input_ids": "tokens of the step, one request after the other",
    "positions": "position of each token in its request",
    "logits_rows": "tokens whose logits are wanted",
    "query_start_loc": "first token of each request, and the number of tokens",
    "seq_lens": "tokens of each request in the cache, with those of this step",
    "slot_mapping": "where each token's state is written: block * block size + offset",
    "block_table": "blocks of each request, by position",
    "shared_lens": "leading tokens that each request shares with others of the step, 0 if none",
    "shared_leaders": "the request whose block table a group of sharers reads",
    "shared_tokens": "tokens of the step, those of a group of sharers one after the other",
    "encoder_states": "what the encoder made of this step's encoder prompts, one after the other",
    "encoder_lens": "encoder tokens of each request",
}
SIZES = {
    "num_tokens": "tokens of the step",
    "num_logits": "rows of logits",
    "num_reqs": "requests of the step",
    "num_reqs_plus_1": "num_reqs + 1",
    "num_blocks": "blocks of the cache",
    "table_rows": "rows of block tables, at least num_reqs",
    "table_width_<group>": "columns of the group's block table: blocks of a request at most",
    "num_encoder_tokens": "tokens of encoder prompts",
}
# Names of dtypes in safetensors.
STORED = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def save_compiled_ahead(
    executable: Executable, compiled: CompiledModel, level: str, folder: Path, trial: Callable[[], dict]
) -> AOTExecutable:
    """Compile a graph ahead of time, or copy the library that it runs by, and compare it with what runs it here.

    Args:
        folder: of the artefact. trial: makes the inputs of the same short step at each call.
    Raises:
        ArtefactError: it cannot be compiled, or computes something else. CompilerNotFoundError. OSError.
    """
    gm, target = compiled.graphs[level], folder / "program" / level
    if isinstance(executable, AOTExecutable):
        executable.save(target)
        return executable
    compile_aot(gm, target)
    weights = (attribute(gm, n.target) for n in _weight_nodes(gm).values())
    kept = AOTExecutable(target, input_names(gm), weights)
    kept.limits_torch = executable.limits_torch
    expected = executable.run(trial())
    dtype = rounded_to(gm, expected.dtype)
    if isinstance(executable, EagerExecutable) and dtype in REDUCED:
        return kept  # eager rounds after every op: where experts or selected rows nearly tie, it takes others
    ours = kept.run(trial())
    spread = expected.float().std().clamp(min=1e-6)
    error = ((ours.float() - expected.float()).abs().max() / spread).item()
    if not error <= TOLERANCES[dtype]:
        raise ArtefactError(
            f'executable="aot": what AOTInductor made of the {level} graph differs from the {executable.name} '
            f"executable by {error:.2g} of the logits' spread: save without it, and report this."
        )
    return kept


def write_step_plan(
    compiled: CompiledModel, programs: Mapping[str, AOTExecutable], table: Mapping, folder: Path
) -> None:
    """Write step_plan.json, and the libraries of ops. `table`: what weights.json holds; it lies in `folder`."""
    called = sorted({op for program in programs.values() for op in program.called_ops})
    plan = compiled.kv_spec
    weights = _WeightPlaces(table, folder)
    views = KVArena(plan, compiled.states, 1, compiled.device).caches
    data = {
        "format": STEP_PLAN_FORMAT,
        "vocab_size": compiled.source.vocab_size,
        "max_model_len": compiled.max_model_len,
        "libraries": _save_ops(called, folder),
        "sizes": SIZES,
        "cache": {
            "bytes_per_block": plan.bytes_per_block,
            "groups": [{"kind": g.spec.kind, "block_size": g.block_size} for g in plan.groups],
        },
        "files": [{k: f[k] for k in ("path", "absolute", "bytes") if k in f} for f in table["files"]],
        "programs": {
            level: {
                "library": f"program/{level}/{LIBRARY}",
                "inputs": [*_step_inputs(compiled, level, views), *_weights(compiled, level, weights)],
                "outputs": _outputs(compiled, level),
            }
            for level in programs
        },
    }
    write_json(folder / STEP_PLAN, data)


def _save_ops(called: list[str], folder: Path) -> list[str]:
    """Copy or build the libraries that define ops; returns all libraries to load, in order."""
    libraries = []
    (folder / ADAPTERS_FOLDER).mkdir(parents=True)
    schemas = schemas_library(called)
    if schemas is not None:
        libraries.append((OPS_FOLDER / "schemas.so").as_posix())
        shutil.copy(schemas, folder / libraries[-1])
    names = [op.partition("::")[2] for op in native_ops(called)]
    parts = {p for name in names for p in parts_of(name)}
    parts |= {p for p in ELEMENT_PARTS if parts and (folder / "kernels" / f"{p}.so").exists()}
    libraries += [f"kernels/{part}.so" for part in sorted(parts)]
    for name in adapter_names(called):
        libraries.append((ADAPTERS_FOLDER / f"{name.partition('::')[2]}.so").as_posix())
        shutil.copy(adapter_library(name), folder / libraries[-1])
    return libraries


def _step_inputs(compiled: CompiledModel, level: str, views: Mapping[str, torch.Tensor]) -> list[dict]:
    entries = []
    for node in compiled.graphs[level].graph.nodes:
        if node.op != "placeholder":
            continue
        value = {"name": node.target, "dtype": dtype_name(val(node)), "shape": _shape(node)}
        if node.target in views:
            view = views[node.target]
            place = {"offset_bytes": view.storage_offset() * view.itemsize, "strides": list(view.stride())}
            entries.append({**value, "role": "cache", **place})
            continue
        role, group = re.fullmatch(r"(.*?)(?:_(\d+))?", node.target).groups()
        entries.append({**value, "role": role, "meaning": ROLES[role]})
        entries[-1] |= {} if group is None else {"group": int(group)}
    return entries


def _shape(node: Node) -> list[int | str]:
    """Sizes as numbers, or by the names that the passes gave them."""
    names = node.meta.get("size_names")
    if names is None:  # what the captured graph has: one row per token, of the decoder or of its encoder
        first = "num_encoder_tokens" if node.target == "encoder_states" else "num_tokens"
        names = (first, *val(node).shape[1:])
    return [size if isinstance(size, str) else int(size) for size in names]


def _weight_nodes(gm) -> dict[str, Node]:
    """The nodes that read weights, the first of each, in call order."""
    nodes: dict[str, Node] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            nodes.setdefault(node.target, node)
    return nodes


def _weights(compiled: CompiledModel, level: str, places: _WeightPlaces) -> list[dict]:
    gm = compiled.graphs[level]
    tensors = {name: attribute(gm, name) for name in _weight_nodes(gm)}
    return [
        {"name": name, "dtype": dtype_name(tensor), "shape": list(tensor.shape)}
        | {"role": "weight", **places.of(level, name, tensor)}
        for name, tensor in tensors.items()
    ]


def _packing(packed: torch.Tensor) -> dict[str, list[int]]:
    """How the stored [N, K] becomes a packed weight, see custom_ops/linear/packed_weights.py."""
    panels, steps, tiles, pairs, columns, two = packed.shape
    return {"view": [panels, tiles, columns, steps, pairs, two], "permute": [0, 3, 1, 4, 2, 5]}


def _outputs(compiled: CompiledModel, level: str) -> list[dict]:
    result = next(n for n in compiled.graphs[level].graph.nodes if n.op == "output").args[0]
    value = val(result[0] if isinstance(result, (tuple, list)) else result)
    name, rows = ("encoder_states", "num_tokens") if level == "encoder" else ("logits", "num_logits")
    return [{"name": name, "dtype": dtype_name(value), "shape": [rows, int(value.shape[1])]}]


class _WeightPlaces:
    """Where each weight's bytes are, from the table of weights.json and the headers of the files it names."""

    def __init__(self, table: Mapping, folder: Path) -> None:
        self._table = table
        self._files = [Path(facts.get("absolute", folder / TENSORS)) for facts in table["files"]]
        self._headers: dict[int, tuple[dict, int]] = {}

    def of(self, level: str, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        record = self._table["tensors"][self._table["names"][level][name]]
        header, data_begins = self._header(record["file"])
        stored = header[record["name"]]
        place = {
            "file": record["file"],
            "offset_bytes": data_begins + stored["data_offsets"][0],
            "stored_dtype": STORED[stored["dtype"]],
            "stored_shape": stored["shape"],
        }
        if record.get("packed") == "coded":
            return place | {"coded_by": CODER, "plain_dtype": "bfloat16"}
        if record.get("packed"):
            return place | _packing(tensor)
        return place | ({"strides": record["strides"]} if "strides" in record else {})

    def _header(self, number: int) -> tuple[dict, int]:
        """The header of a safetensors file, and where its data begins."""
        if number not in self._headers:
            with open(self._files[number], "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                self._headers[number] = json.loads(file.read(length)), 8 + length
        return self._headers[number]
