"""`pagebinder.load`: an artefact as what was compiled, without transformers, tracing or inductor where it fits.

    check files -> register kernels -> map weights -> run the kept program's definitions    the same machine, versions
                                                      (a library, if compiled ahead of time)
                   build kernels                   -> compile the saved fused graph again   others, with a warning

Graphs are read when somebody asks for them: serving needs none of them.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from pagebinder.ambient import alone
from pagebinder.artefacts.files import FORMAT, MANIFEST, WEIGHTS, check_files, read_json
from pagebinder.artefacts.kinds import DECODER, KINDS, Compiled
from pagebinder.artefacts.machine import differences, kernel_fits
from pagebinder.artefacts.values import from_json
from pagebinder.artefacts.weights import checkpoint_of, find_files, load_weights
from pagebinder.config import CompileConfig
from pagebinder.custom_ops.cpu import build as cpu_build
from pagebinder.custom_ops.cpu import compiler
from pagebinder.custom_ops.cpu.huge_pages import move_to_huge_pages, read_whole
from pagebinder.custom_ops.cpu.parts import ELEMENT_PARTS
from pagebinder.custom_ops.linear.packed_weights import is_plain
from pagebinder.custom_ops.prompt_rows import PromptTables
from pagebinder.custom_ops.providers import registered_providers
from pagebinder.errors import ArtefactError, CompilerNotFoundError
from pagebinder.forks import use_threads
from pagebinder.frontend.source import ModelSource
from pagebinder.graph_tools import TORCHS
from pagebinder.paths import user_path
from pagebinder.report import CompileReport
from pagebinder.runtime.executables import (
    AOTExecutable,
    EagerExecutable,
    Executable,
    InductorExecutable,
    NativeExecutable,
    ProgramExecutable,
)
from pagebinder.runtime.executables.aot import called_ops
from pagebinder.runtime.executables.aot_ops import ADAPTERS_FOLDER, load_adapters
from pagebinder.runtime.executables.program import Program
from pagebinder.runtime.prompt_rows import PromptRows
from pagebinder.runtime.saved_tokenizer import FILE_NAME, SavedTokenizer
from pagebinder.sampling_defaults import SaidOfSampling

logger = logging.getLogger("pagebinder")


@alone
def load(
    path: str | Path, *, checkpoint: str | Path | None = None, verify: bool = False, recompile: bool = False
) -> Compiled:
    """Load what `save` of a CompiledModel or CompiledEncoder wrote; returns one like it.

    An artefact holds machine code: load only one whose writer you trust, or say `recompile=True`, which runs no code
    of it. Another version of Pagebinder, torch or Python, another CPU or compiler than at saving: a warning, and the
    executable is compiled again from the saved graph.

    Args:
        path: the directory. checkpoint: where the checkpoint's weights are now, if they were moved.
        verify: read and hash all weights; else a file is trusted if its size, its time of change and a sample of
            every tensor are as they were.
        recompile: leave the saved code alone, and compile the saved graph.
    Raises:
        ArtefactError: no artefact, a file is damaged or missing, the graphs do not fit this version; says what to do.
        CompilerNotFoundError, ProviderError: the code has to be made again, and cannot be.
        ForkedProcessError: in a process made by fork(), it would hang.
    """
    use_threads("load")
    path = Path(os.path.realpath(user_path(path, ArtefactError)))
    checkpoint = None if checkpoint is None else user_path(checkpoint, ArtefactError)
    check_files(path)
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise ArtefactError(
            f"{path} has format {manifest.get('format')}, and this version of Pagebinder reads {FORMAT}: compile and "
            "save again."
        )
    stale = ["recompile=True"] if recompile else _differences(path, manifest)
    try:
        return _load(path, manifest, stale, checkpoint, verify)
    except KeyError as error:
        raise ArtefactError(f"{path}: {error} is missing: compile and save again.") from error


def _differences(path: Path, manifest: Mapping) -> list[str]:
    """What makes the saved code useless here; said in the log, with what is only worth telling."""
    stale, told = differences(manifest["made_with"])
    if told:
        logger.warning("%s: %s; the saved graphs are used as they are", path, "; ".join(told))
    if stale:
        logger.warning(
            "%s was saved elsewhere (%s): compiling its graphs again; save it again to keep the result",
            path, "; ".join(stale),
        )  # fmt: skip
    return stale


def _load(path: Path, manifest: Mapping, stale: list[str], checkpoint: Path | None, verify: bool) -> Compiled:
    kind = KINDS.get(manifest.get("kind", DECODER.name))
    if kind is None:
        raise ArtefactError(
            f"{path} holds a {manifest['kind']}, which this version of Pagebinder does not know."
        )
    table = read_json(path / WEIGHTS)
    files = find_files(table, path, checkpoint=checkpoint, verify=verify)
    parts = {} if stale else _kernels(path, manifest)
    for facts in manifest["executables"].values():
        _prepare(facts["ops"], parts)
    for part in ELEMENT_PARTS:
        if part in manifest["kernels"]:
            cpu_build.load(part, built=parts.get(part))
    weights = load_weights(table, files)
    prompt_rows = _prompt_rows(weights)
    config = _value(path, manifest, "config")
    if not config.map_weights:
        executed = (
            (weights[level], facts.get("looked_up", ())) for level, facts in manifest["executables"].items()
        )
        move_to_huge_pages(w for w in read_whole(executed) if is_plain(w))
    graphs = SavedGraphs(path, weights)
    report: CompileReport = _value(path, manifest, "report")
    if kind is DECODER:
        report._describe_blocks = functools.partial(_layer_view, graphs)
    if stale:
        report.notes.append(f"loaded from {path}, compiled again: {'; '.join(stale)}")
    executables = {}
    for level, facts in manifest["executables"].items():
        executables[level] = _executable(
            path, level, facts, graphs, weights[level], config, report, reuse=not stale
        )
        executables[level].limits_torch = facts.get("limits_torch", False)
    if executables[kind.main].name != report.executable:
        report.executable, report.executable_why = (
            executables[kind.main].name,
            "what was saved does not fit here",
        )
    value = functools.partial(_value, path, manifest)
    common = {
        "source": _source(path, manifest, weights["captured"], checkpoint_of(files)),
        "config": config,
        "graphs": graphs,
        "states": value("states"),
        "report": report,
        "device": torch.device("cpu"),
        "_refused": manifest["refused"],
    }
    if kind is DECODER:
        common["prompt_rows"] = prompt_rows
    return kind.restore(manifest, value, common, executables)


def _prompt_rows(weights: Mapping[str, dict[str, torch.Tensor]]) -> PromptRows | None:
    """What graphs read of prompts' embeddings: memory of its own, which is written, for all levels."""
    tables = PromptTables.found_in(weights.get(DECODER.main, {}))
    if tables is None:
        return None
    for tensors in weights.values():
        tensors.update(tables.by_name)
    return PromptRows(tables)


class SavedGraphs(Mapping[str, GraphModule]):
    """The graphs of an artefact by level, each made when it is asked for, all with the same weights.

    The files are read at once: the directory may be replaced while its model is in use.
    """

    def __init__(self, path: Path, weights: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._weights = weights
        self._files = {level: path / "graphs" / f"{level}.json" for level in weights}
        self._texts = {level: file.read_bytes() for level, file in self._files.items()}
        self._made: dict[str, GraphModule] = {}

    def __getitem__(self, level: str) -> GraphModule:
        if level not in self._made:
            self._made[level] = self._make(level)
        return self._made[level]

    def to_run(self, level: str) -> GraphModule:
        """A graph that says nothing of shapes, for who only runs it."""
        return self._make(level, to_run=True)

    def _make(self, level: str, *, to_run: bool = False) -> GraphModule:
        from pagebinder.artefacts.graphs import graph_from_json

        data, weights, name = json.loads(self._texts[level]), self._weights[level], level.capitalize()
        return _named(self._files[level], lambda: graph_from_json(data, weights, name, to_run=to_run))

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _named(file: Path, make: Callable[[], Any]) -> Any:
    """What `make` returns; its ArtefactError names the file and says what to do."""
    try:
        return make()
    except ArtefactError as error:
        raise ArtefactError(
            f"{file} does not fit this version of Pagebinder: {error}. Compile and save again."
        ) from error


def _value(path: Path, manifest: Mapping, name: str) -> Any:
    return _named(path / MANIFEST, lambda: from_json(manifest[name]))


def _layer_view(graphs: Mapping[str, GraphModule], report: CompileReport) -> list[dict]:
    from pagebinder.passes.layer_view import layer_view

    return layer_view(graphs, report)


def _kernels(path: Path, manifest: Mapping) -> dict[str, Path]:
    """Libraries of the artefact that would do as well as those here (or in whose place nothing can be had)."""
    fitting = {}
    for part, key in manifest["kernels"].items():
        if kernel_fits(part, key):
            fitting[part] = path / "kernels" / f"{part}.so"
        else:
            logger.warning(
                "%s: its %s kernels were made otherwise than those here: taking the latter", path, part
            )
    return fitting


def _prepare(ops: list[str], kernels: Mapping[str, Path]) -> None:
    """Make the ops of a graph callable: register kernels that were kept, build the others.

    Raises:
        ProviderError: they cannot be built. ArtefactError: an op of the user's own is not registered.
    """
    for part, library in kernels.items():
        cpu_build.load(part, built=library)
    providers = registered_providers()
    for op in ops:
        namespace, _, name = op.partition("::")
        provider = providers.get(namespace.removeprefix("pagebinder_"))
        if namespace.startswith("pagebinder_") and provider is not None:
            provider.prepare(name.partition(".")[0])
        elif namespace not in (*TORCHS, "pagebinder"):
            from pagebinder.artefacts.graphs import find_function

            find_function(op)


def _executable(
    path: Path, level: str, facts: Mapping, graphs: SavedGraphs, weights: Mapping, config: CompileConfig,
    report: CompileReport, *, reuse: bool,
) -> Executable:  # fmt: skip
    if facts["kind"] == EagerExecutable.name:
        return _eager(graphs, level, config, report)
    if facts["kind"] == NativeExecutable.name:
        return NativeExecutable(graphs.to_run(level))
    if reuse and facts["program"]:
        folder = path / "program" / level
        try:
            tensors = [weights[name] for name in facts["weights"]]
            if facts["kind"] == AOTExecutable.name:
                load_adapters(called_ops(folder), path / ADAPTERS_FOLDER)
                return AOTExecutable(folder, facts["inputs"], tensors)
            return ProgramExecutable(Program.read(folder), facts["inputs"], tensors)
        except (ImportError, OSError, RuntimeError) as error:
            logger.warning("%s cannot be used here (%s): compiling the graph again", folder, error)
    try:
        compiler.find_compiler()
    except CompilerNotFoundError as error:
        raise CompilerNotFoundError(f"{path} has to be compiled again for this machine: {error}.") from error
    return InductorExecutable(graphs[level])


def _eager(graphs: SavedGraphs, level: str, config: CompileConfig, report: CompileReport) -> Executable:
    if config.streams != "on":  # here is a CPU
        return EagerExecutable(graphs.to_run(level))
    from pagebinder.compiler.streams import eager_executable  # which needs formulas of costs

    return eager_executable(graphs[level], config, report)


def _source(
    path: Path, manifest: Mapping, weights: Mapping[str, torch.Tensor], checkpoint: Path | None
) -> ModelSource:
    """The facts of the source model, and its parameters in place of it: its own code is not needed any more."""
    facts = {
        key: _named(path / MANIFEST, lambda v=value: from_json(v))
        for key, value in manifest["source"].items()
    }
    sampling = SaidOfSampling(facts.pop("sampling_defaults", {}))
    tokenizer = path / "tokenizer" / FILE_NAME
    return ModelSource(
        module=torch.nn.ParameterList(t for t in weights.values() if isinstance(t, torch.nn.Parameter)),
        path=checkpoint,
        is_transformers=False,
        sampling=sampling,
        _tokenizer=SavedTokenizer(tokenizer, manifest.get("truncation_side", "right"))
        if tokenizer.exists()
        else None,
        **facts,
    )
