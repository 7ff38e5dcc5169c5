"""`save` of compiled models: a compilation as a directory of JSON, safetensors and shared libraries.

    compiled      --> facts, plan, states, report   artefact.json
                      graphs                        graphs/<level>.json
                      their weights                 by reference to the checkpoint, see artefacts/weights.py
                      executables                   program/<graph>: source and libraries, see executables/program.py
                        compiled ahead of time      program/<graph>, program/ops, step_plan.json: see artefacts/aot.py
                      kernels that they call        kernels/<part>.so
                      tokenizer                     tokenizer/

Before an executable's program is kept it is run once beside the executable: equal bits, or it is left out and made
anew when the artefact is loaded.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from pagebinder.artefacts.aot import save_compiled_ahead, write_step_plan
from pagebinder.artefacts.files import FORMAT, MANIFEST, WEIGHTS, check_target, write_json, written_whole
from pagebinder.artefacts.graphs import graph_to_json, weight_names
from pagebinder.artefacts.kinds import DECODER, Compiled, kind_of
from pagebinder.artefacts.machine import kernel_key, made_with
from pagebinder.artefacts.values import to_json
from pagebinder.artefacts.weights import save_weights
from pagebinder.compiler.lock import config_of
from pagebinder.custom_ops.cpu import build as cpu_build
from pagebinder.custom_ops.cpu.provider import NAMESPACE as CPU_NAMESPACE
from pagebinder.custom_ops.cpu.provider import parts_of
from pagebinder.errors import ArtefactError, ConfigError
from pagebinder.graph_tools import attribute, dtype_name, looked_up, val
from pagebinder.runtime.executables import AOTExecutable, Executable, InductorExecutable, ProgramExecutable
from pagebinder.runtime.executables.base import input_names
from pagebinder.runtime.executables.program import Program
from pagebinder.runtime.sampler import prepare as prepare_sampling
from pagebinder.runtime.saved_tokenizer import FILE_NAME, SavedTokenizer, save_tokenizer

if TYPE_CHECKING:
    from pagebinder.frontend.source import ModelSource

logger = logging.getLogger("pagebinder")

# What a directory says about its tokenizer and its special tokens, kept for people and other tools.
COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def save(compiled: Compiled, path: str | Path, *, executable: str | None = None) -> None:
    """Write an artefact to `path`: a new or empty directory, or an older artefact, which is replaced.

    A directory is replaced as a whole once the new artefact is complete, and until then stays as it was. A mount
    point cannot be, and the working directory would be pulled from under its users: both are refused, before any
    work. A link is followed.

    Args:
        executable: "aot" compiles the graphs ahead of time, for programs without Python, too (tens of seconds);
            None keeps what runs them here.
    Raises:
        ConfigError: another `executable`.
        ArtefactError: something else is at `path`, or no directory can be; the model has no weights, is not on the
            CPU, or holds something that has no form in an artefact. OSError: the files cannot be written.
        CompilerNotFoundError: "aot" without a C++ compiler.
    """
    if executable not in (None, AOTExecutable.name):
        raise ConfigError(
            f'save: executable={executable!r} is unknown; use "aot", or None for what runs the model here.'
        )
    kind = kind_of(compiled)
    if executable is not None and kind is not DECODER:
        raise ConfigError(
            f"{compiled.report.model_class} is an encoder: programs without Python run decoders."
        )
    if executable is not None and compiled.prompt_rows is not None:
        raise ConfigError(
            "A program without Python takes no embeddings: compile without prompt_embeds to save it."
        )
    path = check_target(path)
    if compiled.executable is None:
        raise ArtefactError(
            "This model was compiled for explain() only: it has no weights, and nothing to save."
        )
    if compiled.device.type != "cpu":
        raise ArtefactError(f"Only models on the CPU can be saved, and this one is on {compiled.device}.")
    with written_whole(path) as folder:
        ops = {}
        for level, gm in compiled.graphs.items():
            data = graph_to_json(gm)
            ops[level] = list(data["schemas"])
            write_json(folder / "graphs" / f"{level}.json", data)
        tensors = {
            level: {name: attribute(gm, name) for name in weight_names(gm)}
            for level, gm in compiled.graphs.items()
        }
        if kind is DECODER and compiled.prompt_rows is not None:
            # What prompts have written there is nobody's.
            tables = compiled.prompt_rows.tables.by_name.items()
            empty = {name: torch.zeros(1, dtype=t.dtype, device="cpu").expand(t.shape) for name, t in tables}
            tensors = {level: named | empty for level, named in tensors.items()}
        checkpoint = compiled.source.path if compiled.source.file is None else None
        table = save_weights(tensors, checkpoint, folder, path)
        write_json(folder / WEIGHTS, table)
        kept = {
            level: _compiled_ahead(running, compiled, level, folder, asked=executable is not None) or running
            for level, running in compiled.executables().items()
        }
        manifest = _facts(compiled, kept[kind.main])
        manifest["executables"] = {
            level: _save_executable(running, compiled, level, folder) | {"ops": ops[level]}
            for level, running in kept.items()
        }
        called = {op for names in ops.values() for op in names}
        if kind is DECODER:
            called.update(prepare_sampling(compiled.device))
        manifest["kernels"] = _save_kernels(called, _operand_types(compiled), folder)
        if isinstance(kept[kind.main], AOTExecutable):
            write_step_plan(compiled, kept, table, folder)
        save_tokenizer_files(compiled.source, folder / "tokenizer")
        write_json(folder / MANIFEST, manifest)


def _compiled_ahead(
    running: Executable, compiled: Compiled, level: str, folder: Path, *, asked: bool
) -> AOTExecutable | None:
    """What runs a graph without Python, if that was asked for, or is how it runs here; its files are in `folder`."""
    if not asked and not isinstance(running, AOTExecutable):
        return None
    inputs = functools.partial(kind_of(compiled).trial_inputs, compiled, level)
    return save_compiled_ahead(running, compiled, level, folder, inputs)


def _facts(compiled: Compiled, executable: Executable) -> dict[str, Any]:
    source, report, kind = compiled.source, compiled.report, kind_of(compiled)
    if executable is not compiled.executable:
        report = copy.copy(report)
        report.executable, report.executable_why = executable.name, "compiled when it was saved"
    facts = {
        "name": source.name,
        "vocab_size": source.vocab_size,
        "max_model_len": source.max_model_len,
        "num_attention_layers": source.num_attention_layers,
        "num_recurrent_layers": source.num_recurrent_layers,
        "encoder": source.encoder,
        "eos_token_ids": source.eos_token_ids,
        "bos_token_id": source.bos_token_id,
        "sampling_defaults": dict(source.sampling_defaults),
        "config": config_of(source),
    }
    return {
        "format": FORMAT,
        "kind": kind.name,
        "made_with": made_with(),
        "source": {key: to_json(value) for key, value in facts.items()},
        "config": to_json(dataclasses.replace(compiled.config, passes={})),  # functions; they have run
        "states": to_json(compiled.states),
        "report": to_json(report),
        "refused": compiled._refused,
        **kind.facts(compiled),
    }


def _save_executable(executable: Executable, compiled: Compiled, level: str, folder: Path) -> dict:
    """How a graph is run: the kind of executable, its inputs and weights in order, whether its program is kept."""
    gm = compiled.graphs[level]
    program = executable.program if isinstance(executable, ProgramExecutable) else None
    if isinstance(executable, InductorExecutable):
        program, why = _program_of(executable, compiled, level)
        if program is None:
            logger.warning(
                "the code of the %s graph is not kept, and is compiled at each load: %s", level, why
            )
    if program is not None:
        program.save(folder / "program" / level)
    return {
        "kind": executable.name,
        "inputs": input_names(gm),
        "weights": weight_names(gm),
        "looked_up": looked_up(gm),
        "program": program is not None or isinstance(executable, AOTExecutable),
        "limits_torch": executable.limits_torch,
    }


def _program_of(executable: InductorExecutable, compiled: Compiled, level: str) -> tuple[Program | None, str]:
    """The program to keep, or None and the reason."""
    gm = compiled.graphs[level]
    try:
        program = executable.program
        if program is None:
            return None, "inductor made more than one program, or one with constants"
        kept = ProgramExecutable(program, input_names(gm), [attribute(gm, name) for name in weight_names(gm)])
    except (ImportError, OSError) as error:
        return None, f"what inductor wrote cannot be read any more: {error}"
    if not _agree(executable, kept, functools.partial(kind_of(compiled).trial_inputs, compiled, level)):
        return None, "on its own it computes something else"
    return program, ""


def _agree(one: Executable, other: Executable, inputs) -> bool:
    results = [executable.run(inputs()) for executable in (one, other)]
    return torch.equal(*(r.reshape(-1).contiguous().view(torch.uint8) for r in results))


def _operand_types(compiled: Compiled) -> set[str]:
    """The dtypes of what our ops are called with first."""
    nodes = (n for gm in compiled.graphs.values() for n in gm.graph.nodes if n.op == "call_function")
    called = (n for n in nodes if getattr(n.target, "namespace", None) == CPU_NAMESPACE and n.args)
    first = (n.args[0] for n in called)
    return {dtype_name(val(a)) for a in first if isinstance(a, Node) and isinstance(val(a), torch.Tensor)}


def _save_kernels(ops: set[str], dtypes: set[str], folder: Path) -> dict[str, str | None]:
    """Copy the libraries of our kernels that these ops need for these dtypes; returns part -> key of its build."""
    names = {op.partition("::")[2].partition(".")[0] for op in ops if op.startswith(f"{CPU_NAMESPACE}::")}
    parts = sorted({part for name in names for dtype in (None, *dtypes) for part in parts_of(name, dtype)})
    kernels = folder / "kernels"
    if parts:
        kernels.mkdir()
    keys = {}
    for part in parts:
        library = cpu_build.load(part)
        keys[part] = kernel_key(part)
        shutil.copy(library, kernels / f"{part}.so")
    return keys


def save_tokenizer_files(source: ModelSource, folder: Path) -> None:
    """Write a model's tokenizer, if it has one, and what its directory says about it. Raises OSError."""
    tokenizer = source.tokenizer()
    if tokenizer is None:
        return
    folder.mkdir(exist_ok=True)
    if source.file is not None and not isinstance(tokenizer, SavedTokenizer):
        tokenizer.save_pretrained(str(folder))
        return
    save_tokenizer(tokenizer, folder / FILE_NAME)
    home = tokenizer.path.parent if isinstance(tokenizer, SavedTokenizer) else source.path
    for name in COMPANIONS:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(home / name, folder / name)
