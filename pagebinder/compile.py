"""`compile_model`: source model -> captured -> semantic -> paged -> fused -> executable.

The only file, with the command line, that knows all rooms. Each stage is a few lines here and a room elsewhere.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from pagebinder.ambient import alone
from pagebinder.collector import collector_paused
from pagebinder.compiled_model import CompiledModel
from pagebinder.compiler.checks import bounded, longest, unexplained
from pagebinder.compiler.executable import check_executable, executable_of
from pagebinder.compiler.kernels import start_by_config, start_by_graph, start_by_source
from pagebinder.compiler.lock import expected_plan, settle_lock
from pagebinder.compiler.pipeline import (
    fuse,
    fuse_encoder,
    of_encoder,
    page,
    quantizes_kv,
    recognise,
    store_kv,
)
from pagebinder.compiler.probe import can_probe, probe
from pagebinder.compiler.tensorrt import check_can_build, note_partitions
from pagebinder.compiler.verify import check_can_verify, verify
from pagebinder.compiler.weights import place_weights, placed_bytes
from pagebinder.config import CompileConfig
from pagebinder.custom_ops.attention.quantized_cache import KV_FORMATS
from pagebinder.custom_ops.cpu.freed_memory import give_back_freed_memory
from pagebinder.custom_ops.cpu.huge_pages import MemoryAhead
from pagebinder.custom_ops.layer_state import CacheFormats, LayerState
from pagebinder.describe import fill_report
from pagebinder.errors import CheckpointError, ConfigError
from pagebinder.forks import use_threads
from pagebinder.frontend.attention_interface import hooked_attention
from pagebinder.frontend.capture import capture
from pagebinder.frontend.checkpoint_tensors import check_absent
from pagebinder.frontend.encoder_decoder import capture_decoder, capture_encoder, states_of
from pagebinder.frontend.experts_interface import hooked_experts
from pagebinder.frontend.leaves import LEAVES, captured_leaves
from pagebinder.frontend.model_kinds import parts_beside_text
from pagebinder.frontend.model_path import source_from_path
from pagebinder.frontend.numbering import numbering
from pagebinder.frontend.onnx_source import check_head
from pagebinder.frontend.plain_modules import with_vocabulary
from pagebinder.frontend.prompt_rows import add_prompt_rows, describe_prompt_rows, what_rows_bring
from pagebinder.frontend.small_groups import fit_for_gpu
from pagebinder.frontend.source import ModelSource, source_from_config, source_from_module
from pagebinder.frontend.weight_values import decisions_of, described_decisions
from pagebinder.graph_tools import calls
from pagebinder.passes.layer_states import Paging, encoder_layer_states, layer_states
from pagebinder.passes.quantize_kv import REFUSED
from pagebinder.passes.trail import ENCODER, Trail
from pagebinder.paths import user_path
from pagebinder.report import CompileReport
from pagebinder.runtime.executables import Executable
from pagebinder.runtime.kv import plan_kv_cache
from pagebinder.runtime.prompt_rows import PromptRows
from pagebinder.sampling_defaults import described

INDEX_LAYOUTS = {"fp8_index", "fp4_index"}


@alone
def compile_model(
    model: Any, config: CompileConfig | None = None, *, on_stage: Callable[[str], None] | None = None
) -> CompiledModel:
    """Compile a decoder for paged, continuously batched inference.

    Threads that compile take turns. `torch.autocast` around it changes nothing: dtypes are the model's.

    Args:
        model: an unmodified transformers decoder or text encoder-decoder, any torch.nn.Module called as
            `model(input_ids [1, T], position_ids [1, T]) -> logits [1, T, V]` (positions by name if there are other
            parameters; a tuple that begins with logits, or a dict with "logits"), or the path of a local checkpoint
            directory, or of an ONNX decoder (`model.onnx`, or the directory that holds it). The model is not changed,
            but for the seconds that it is compiled in, when no other thread may call it; its weights are shared, not
            copied (unless `dtype` differs). It is compiled as it is after `model.eval()`, in training mode, too. A
            model on the meta device is compiled for `explain()` only.
        on_stage: called with each stage's name as it begins, for progress displays: "load", "capture",
            "recognise", "audit", "plan", "page", "fuse", "verify" (if asked for), "executable".
    Raises:
        CaptureError: the model cannot be traced, or an attention layer cannot be explained (strict).
        VerificationError: with `verify`, a step of the compilation changes what the model computes.
        CheckpointError, ConfigError, ForkedProcessError, ProviderError, PlanLockError, PlanDriftError: see their
            messages.
    """
    config = config or CompileConfig()
    if not isinstance(config, CompileConfig):
        raise ConfigError(f"compile_model takes a CompileConfig, not {type(config).__name__}.")
    use_threads("compile_model")
    report = CompileReport()
    stage = _StageTimer(report.stage_seconds, on_stage)
    with stage("load"):
        if isinstance(model, (str, Path)):
            start_by_config(user_path(model, CheckpointError), config)
        source = load_source(model, config)
        source.tokenizer()  # a broken one is told now, not after the compilation
    return compile_source(source, config, report, stage)


@alone
def explain_model(
    model: Any, config: CompileConfig | None = None, *, on_stage: Callable[[str], None] | None = None
) -> CompiledModel:
    """Compile a config alone, on the meta device: graphs, report and KV plan, no weights and nothing to run.

    Args:
        model: a checkpoint directory (only its config.json is read), an ONNX file or a transformers config object.
    Raises:
        as `compile_model`.
    """
    config = config or CompileConfig()
    report = CompileReport()
    stage = _StageTimer(report.stage_seconds, on_stage)
    with stage("load"):
        if isinstance(model, (str, Path)):
            source = source_from_path(model, dtype=config.dtype, weights=False)
            if config.device.startswith("cuda") and source.stored_weights is not None:
                fit_for_gpu(source.module, source.dtype, source.stored_weights)
        else:
            source = source_from_config(model, dtype=config.dtype)
    compiled = compile_source(source, config, report, stage)
    if isinstance(compiled, CompiledModel):  # not an encoder alone
        compiled.predict_captured_steps()
        compiled.predict_streams()
    return compiled


def load_source(model: Any, config: CompileConfig) -> ModelSource:
    """A ModelSource from whatever `compile_model` accepts, on the device that the config asks for."""
    has_gpu = torch.cuda.is_available()
    if config.device.startswith("cuda"):
        if not has_gpu:
            raise ConfigError(f'device="{config.device}": no CUDA GPU is available here; use device="cpu".')
        if (torch.device(config.device).index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f'device="{config.device}": there are {torch.cuda.device_count()} GPUs here, counted from 0.'
            )
    if isinstance(model, (str, Path)):
        source = source_from_path(model, dtype=config.dtype)
        device = ("cuda" if has_gpu else "cpu") if config.device == "auto" else config.device
        if device.startswith("cuda") and source.stored_weights is not None:
            fit_for_gpu(source.module, source.dtype, source.stored_weights)
        source.module.to(device)
        return source
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            "compile_model takes a torch.nn.Module, a checkpoint directory or an ONNX file, "
            f"not {type(model).__name__}."
        )
    source = source_from_module(model, dtype=config.dtype)
    wanted = source.device if config.device == "auto" else torch.device(config.device)
    is_there = source.device.type == wanted.type and wanted.index in (None, source.device.index)
    if not is_there and source.device.type != "meta":
        raise ConfigError(
            f"The model is on {source.device} and device={config.device!r} was asked for: move it yourself "
            f"(model.to({config.device!r})), as compiling does not change the model it is given."
        )
    return source


def compile_source(
    source: ModelSource, config: CompileConfig, report: CompileReport, stage, trail: Trail | None = None
) -> CompiledModel:
    """The stages after loading. `trail`: where to keep the steps; None makes one as `config.verify` needs it."""
    check_can_verify(source, config)
    trail = trail or Trail(config.verify)
    if source.stored_weights is not None:
        report.passes.append(source.stored_weights)
    if source.is_transformers and (unread := [*parts_beside_text(source.config), *source.other_parts]):
        said = "Text alone is served; nothing reads what belongs to"
        said = "media_prompt() alone reads what belongs to" if config.prompt_embeds else said
        report.notes.append(f"{said} {', '.join(unread)}.")
    if note := source.tensors.note():
        report.notes.append(note)
    report.notes += source.sampling.notes
    if source.sampling_defaults:
        report.notes.append(
            f"Its makers sample with {described(source.sampling_defaults)}: what `compiled.sampling_params()`, "
            "`pagebinder generate` and `pagebinder serve` begin with."
        )
    if source.encoder_only:
        from pagebinder.compiler.encoder import compile_encoder

        return compile_encoder(source, config, report, stage, trail)
    max_model_len, expected = longest(source, config), expected_plan(config)
    _check_options(source, config)
    if source.device.type == "cpu":
        start_by_source(source, config)
    memory = MemoryAhead(placed_bytes(source, config))
    brought = what_rows_bring(source) if config.prompt_embeds else {}
    with stage("capture"), collector_paused():
        captured, encoder = _capture(source, report, **brought)
        prompt_rows = _add_prompt_rows(captured, source, config, report)
        check_head(source, captured)
        source = with_vocabulary(source, captured)
        check_absent(source.tensors.absent, captured, source.path)
        max_model_len = bounded(max_model_len, captured, config, report)
        report.notes += [
            described_decisions(d) for g in (encoder, captured) if g and (d := decisions_of(g.graph))
        ]
        report.passes.append(captured_leaves(LEAVES, source.module, captured))
        if encoder is not None:
            trail.add("encoder", "capture", encoder, chain=ENCODER)
        trail.add("captured", "capture", captured)
    with stage("recognise"):
        semantic = recognise(captured, encoder, config, report, trail)
        start_by_graph(semantic, source)
    with stage("audit"):
        refused = unexplained(semantic, encoder, source, config, report, max_model_len)
        as_written = not any(result.changes_numbers and result.changed for result in report.passes)
        if config.verify == "off" and encoder is None and not refused and as_written and can_probe(source):
            probe(source, semantic, max_model_len, config)
    with stage("plan"):
        stored = store_kv(semantic, config, report, trail)
        states = _states(stored, max_model_len, config)
        plan = plan_kv_cache(
            states, block_size=config.block_size, max_model_len=max_model_len,
            max_encoder_tokens=source.encoder.max_len if source.encoder else None, workload=config.workload,
        )  # fmt: skip
    with stage("page"):
        paged = page(stored, Paging.by_plan(states, plan), config, report, trail)
    device = torch.device("cpu") if source.device.type == "meta" else source.device
    with stage("fuse"):
        fused = fuse(paged, source, device, config, report, trail)
        if encoder is not None:
            fuse_encoder(encoder, source, device, config, report, trail)
    if config.verify != "off":
        with stage("verify"):
            verify(trail, source, plan, states, config, report, refused)
    graphs = {"captured": captured, "semantic": semantic, "paged": paged, "fused": fused}
    if encoder is not None:
        graphs["encoder"] = encoder
    encoder_layers = [] if encoder is None else encoder_layer_states(encoder)
    fill_report(report, source, graphs, states, plan, device, encoder_layers=encoder_layers)
    settle_lock(expected, source, config, plan, report, graphs)
    with stage("executable"):
        executable, encoder_executable = _executables(source, fused, encoder, config, report, memory)
    if executable is not None:
        give_back_freed_memory()  # of capturing, and of what weights were before they were packed
    return CompiledModel(
        source=source,
        config=config,
        graphs=graphs,
        kv_spec=plan,
        states=states,
        report=report,
        device=device,
        max_model_len=max_model_len,
        executable=executable,
        encoder_executable=encoder_executable,
        uncounted_id=numbering(source.module).uncounted_id,
        prompt_rows=prompt_rows,
        _refused=refused,
    )


def _check_options(source: ModelSource, config: CompileConfig) -> None:
    """What cannot be compiled so, said before the seconds of capturing. Raises ConfigError."""
    if "packed" in config.passes:
        raise ConfigError('passes: a decoder has no "packed" graph; use "semantic", "paged" or "fused".')
    if config.executable == "cuda_graph" and source.device.type == "cpu":
        raise ConfigError(
            'executable="cuda_graph" needs a CUDA GPU, and the model is on the CPU. There EngineConfig(capture="on") '
            "replays recorded steps."
        )
    if config.prompt_embeds and source.encoder is not None:
        raise ConfigError("prompt_embeds: only a decoder alone takes embeddings in the place of tokens.")
    if config.prompt_embeds and config.executable == "tensorrt":
        raise ConfigError(
            "prompt_embeds: TensorRT's engines keep what they were built with; use another executable."
        )
    check_executable(source, config)
    check_can_build(source, config)


def _executables(
    source: ModelSource, fused: GraphModule, encoder: GraphModule | None, config: CompileConfig,
    report: CompileReport, memory: MemoryAhead,
) -> tuple[Executable | None, Executable | None]:  # fmt: skip
    """What runs the fused graph and the encoder's, over weights where reading is fastest; none on the meta device."""
    if source.device.type == "meta":
        note_partitions(fused, config, report)
        return None, None
    place_weights(source, config, report, memory, *(g for g in (fused, encoder) if g is not None))
    executable = executable_of(fused, config, report)
    return executable, None if encoder is None else executable_of(encoder, config, report)


def _capture(
    source: ModelSource, report: CompileReport, **brought: int
) -> tuple[GraphModule, GraphModule | None]:
    """The captured graph of a decoder, and that of its encoder if it has one. `brought`: by rows of prompts."""
    encoder = None
    if source.encoder is None:
        captured, report.capture_route = capture(source, **brought)
    else:
        encoder, _ = capture_encoder(source)
        captured, report.capture_route = capture_decoder(source, states_of(encoder))
        report.passes.append(of_encoder(hooked_attention(encoder)))
    report.passes.append(hooked_attention(captured))
    report.passes.append(hooked_experts(source.module, *(g for g in (encoder, captured) if g is not None)))
    return captured, encoder


def _add_prompt_rows(
    captured: GraphModule, source: ModelSource, config: CompileConfig, report: CompileReport
) -> PromptRows | None:
    """What the captured graph takes in the place of tokens from now on, if that was asked for."""
    if not config.prompt_embeds:
        return None
    tables = add_prompt_rows(captured, source, config.prompt_embeds)
    report.notes.append(describe_prompt_rows(tables))
    return PromptRows(tables)


def _states(semantic: GraphModule, max_model_len: int, config: CompileConfig) -> tuple[LayerState, ...]:
    """What the layers keep, in the formats that the config asks for; ConfigError where nothing has such a format."""
    is_fp8 = config.kv_dtype == "fp8_ds_mla"
    index = {"auto": "fp8_index" if is_fp8 else "plain", "fp8": "fp8_index", "mxfp4": "fp4_index"}
    formats = CacheFormats(latent="fp8_ds_mla" if is_fp8 else "plain", index=index[config.index_dtype])
    states = tuple(layer_states(semantic, max_model_len=max_model_len, formats=formats))
    layouts = {getattr(state, "layout", "plain") for state in states} - {"plain"}
    quantized = quantizes_kv(config)
    what_of_kv = "attention whose K and V can be kept in codes" if quantized else "latent rows (MLA)"
    of_kv = layouts & KV_FORMATS.keys() if quantized else layouts - INDEX_LAYOUTS
    for option, wanted, kept, what in (
        ("kv_dtype", is_fp8 or quantized, of_kv, what_of_kv),
        ("index_dtype", config.index_dtype != "auto", layouts & INDEX_LAYOUTS, "indexer"),
    ):
        if wanted and not kept:
            kept_plain = {reason for name, reason in REFUSED.items() if list(calls(semantic.graph, name))}
            why = f" ({'; '.join(sorted(kept_plain))})" if quantized and kept_plain else ""
            raise ConfigError(
                f"{option}={getattr(config, option)!r}: this model has no {what}, which that is for{why}; use "
                '"auto".'
            )
    return states


class _StageTimer:
    """`with stage("capture"): ...` adds the seconds to the report."""

    def __init__(self, seconds: dict[str, float], on_stage: Callable[[str], None] | None = None) -> None:
        self.seconds = seconds
        self.on_stage = on_stage

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.on_stage is not None:
            self.on_stage(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
