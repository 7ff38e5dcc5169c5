"""`compile_model`: source model -> captured -> semantic -> paged -> fused -> executable.

The only file, with the command line, that knows all rooms. Each stage is a few lines here and a room elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from pagebinder.config import CompileConfig, EngineConfig
from pagebinder.custom_ops.attention.cross import CROSS_ATTENTION
from pagebinder.custom_ops.attention.relative import RELATIVE_ATTENTION
from pagebinder.custom_ops.attention.semantic import ATTENTION
from pagebinder.custom_ops.cpu import build as cpu_build
from pagebinder.custom_ops.library import OpInfo
from pagebinder.describe import fill_report
from pagebinder.errors import CaptureError, CompilerNotFoundError, ConfigError
from pagebinder.explain import explain_text
from pagebinder.frontend.attention_interface import hooked_attention
from pagebinder.frontend.audit import audit
from pagebinder.frontend.capture import capture
from pagebinder.frontend.encoder_decoder import capture_decoder, capture_encoder, states_of
from pagebinder.frontend.leaves import LEAVES, captured_leaves
from pagebinder.frontend.recognise import recognise_rms_norm, recognise_rope, recognise_sdpa
from pagebinder.frontend.source import ModelSource, source_from_config, source_from_dir, source_from_module
from pagebinder.graph_tools import calls, module_path, num_ops
from pagebinder.passes.fuse_add_rms_norm import fuse_add_rms_norm
from pagebinder.passes.gather_logits import gather_logits
from pagebinder.passes.layer_states import Paging, encoder_layer_states, layer_states
from pagebinder.passes.manager import run_passes
from pagebinder.passes.page_attention import page_attention
from pagebinder.passes.page_cross_attention import page_cross_attention
from pagebinder.passes.page_recurrent import PAGED as RECURRENT_OPS
from pagebinder.passes.page_recurrent import page_recurrent
from pagebinder.passes.select_providers import select_providers
from pagebinder.passes.simplify import simplify
from pagebinder.report import CompileReport, PassResult
from pagebinder.runtime.engine import Engine, EngineModel
from pagebinder.runtime.engine_setup import EncoderModel
from pagebinder.runtime.executables import EagerExecutable, Executable, InductorExecutable
from pagebinder.runtime.kv import KVPlan, plan_kv_cache
from pagebinder.runtime.single_sequence import single_sequence_inputs

MAX_PROBLEMS_SHOWN = 8
LEVELS = ("captured", "semantic", "paged", "fused")
RECOGNISERS = (recognise_rms_norm, recognise_rope, recognise_sdpa, simplify)
PAGE_PASSES = (page_attention, page_cross_attention, page_recurrent)


@dataclass(kw_only=True)
class CompiledModel:
    """A compiled decoder. `graphs` holds the four levels, each a runnable GraphModule; `kv_spec` the cache plan.

    Of an encoder-decoder they are the levels of its decoder, and `graphs["encoder"]` is its encoder, which
    `encoder_executable` runs.
    """

    source: ModelSource
    config: CompileConfig
    graphs: dict[str, GraphModule]
    kv_spec: KVPlan
    states: tuple
    report: CompileReport
    device: torch.device
    max_model_len: int
    executable: Executable | None
    encoder_executable: Executable | None = None
    _refused: str | None = field(default=None, repr=False)

    def explain(self) -> str:
        """What was matched and refused, the KV plan, providers and times, as text."""
        return explain_text(self.report)

    def engine(self, config: EngineConfig | None = None) -> Engine:
        """A continuous-batching engine with its own KV cache. Engines share the weights and the executable."""
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"engine() takes an EngineConfig, not {type(config).__name__}.")
        if self._refused:
            raise CaptureError(
                f"This model was compiled with strict=False and cannot be served: {self._refused}"
            )
        if self.executable is None:
            raise ConfigError(
                "This model was compiled for explain() only (meta device): it has no weights to run."
            )
        model = EngineModel(
            executable=self.executable,
            kv_plan=self.kv_spec,
            states=self.states,
            device=self.device,
            vocab_size=self.source.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.source.eos_token_ids,
            tokenizer=self.source.tokenizer(),
            encoder=self._encoder_model(),
        )
        return Engine(model, config)

    def _encoder_model(self) -> EncoderModel | None:
        if self.source.encoder is None:
            return None
        states = states_of(self.graphs["encoder"])
        return EncoderModel(
            executable=self.encoder_executable,
            width=int(states.shape[1]),
            dtype=states.dtype,
            vocab_size=self.source.encoder.vocab_size,
            max_len=self.source.encoder.max_len,
            decoder_start_token_id=self.source.encoder.decoder_start_token_id,
        )

    def run_level(
        self, level: str, input_ids: torch.Tensor, encoder_input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one graph on one sequence: input_ids [T] int64 -> logits [T, V]. Paged levels get a scratch cache.

        An encoder-decoder takes its encoder's prompt as well: encoder_input_ids [E] int64.

        Raises:
            ConfigError: `level` is none of "captured", "semantic", "paged", "fused"; bad or missing token ids.
        """
        if level not in LEVELS:
            raise ConfigError(f"level={level!r}: use one of {', '.join(LEVELS)}.")
        self._check_ids("run_level", input_ids, self.max_model_len, self.source.vocab_size)
        if (encoder_input_ids is None) != (self.source.encoder is None):
            kind = "a decoder alone" if self.source.encoder is None else "an encoder-decoder"
            need = "takes no" if self.source.encoder is None else "needs its"
            raise ConfigError(f"{self.report.model_class} is {kind}: run_level {need} encoder_input_ids.")
        encoder_states = None if encoder_input_ids is None else self.encode(encoder_input_ids)
        gm = self.graphs[level]
        with torch.inference_mode():
            if level in ("captured", "semantic"):
                positions = torch.arange(len(input_ids), device=input_ids.device)
                return gm(input_ids, positions, *(() if encoder_states is None else (encoder_states,)))
            inputs = single_sequence_inputs(
                self.kv_spec, self.states, input_ids, encoder_states=encoder_states
            )
            return EagerExecutable(gm).run(inputs)

    def encode(self, encoder_input_ids: torch.Tensor) -> torch.Tensor:
        """Run the encoder of an encoder-decoder on one prompt: [E] int64 -> encoder states [E, C].

        Raises:
            ConfigError: the model has no encoder; bad token ids.
        """
        if self.source.encoder is None:
            raise ConfigError(f"{self.report.model_class} has no encoder.")
        facts = self.source.encoder
        self._check_ids("encode", encoder_input_ids, facts.max_len, facts.vocab_size)
        positions = torch.arange(len(encoder_input_ids), device=encoder_input_ids.device)
        with torch.inference_mode():
            return self.graphs["encoder"](encoder_input_ids, positions)

    @staticmethod
    def _check_ids(what: str, ids: torch.Tensor, max_len: int, vocab_size: int) -> None:
        if not (isinstance(ids, torch.Tensor) and ids.dtype == torch.int64 and ids.dim() == 1):
            raise ConfigError(f"{what} takes the token ids of one sequence as an int64 tensor [T].")
        if not 1 <= len(ids) <= max_len:
            raise ConfigError(f"{what} takes 1 to {max_len} tokens, not {len(ids)}.")
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise ConfigError(f"A token id is outside the vocabulary of {vocab_size}.")


def compile_model(
    model: Any, config: CompileConfig | None = None, *, on_stage: Callable[[str], None] | None = None
) -> CompiledModel:
    """Compile a decoder for paged, continuously batched inference.

    Args:
        model: an unmodified transformers decoder or text encoder-decoder, any torch.nn.Module called as
            `model(input_ids [1, T], position_ids [1, T]) -> logits [1, T, V]`, or the path of a local checkpoint
            directory. The model is not changed, and its weights are shared, not copied (unless `dtype` differs).
            A model on the meta device is compiled for `explain()` only.
        on_stage: called with each stage's name as it begins, for progress displays: "load", "capture",
            "recognise", "audit", "plan", "page", "fuse", "executable".
    Raises:
        CaptureError: the model cannot be traced, or an attention layer cannot be explained (strict).
        CheckpointError, ConfigError, ProviderError: see their messages.
    """
    config = config or CompileConfig()
    if not isinstance(config, CompileConfig):
        raise ConfigError(f"compile_model takes a CompileConfig, not {type(config).__name__}.")
    report = CompileReport()
    stage = _StageTimer(report.stage_seconds, on_stage)
    with stage("load"):
        source = load_source(model, config)
        source.tokenizer()  # a broken one is told now, not after the compilation
    return compile_source(source, config, report, stage)


def explain_model(
    model: Any, config: CompileConfig | None = None, *, on_stage: Callable[[str], None] | None = None
) -> CompiledModel:
    """Compile a config alone, on the meta device: graphs, report and KV plan, no weights and nothing to run.

    Args:
        model: a checkpoint directory (only its config.json is read) or a transformers config object.
    Raises:
        as `compile_model`.
    """
    config = config or CompileConfig()
    report = CompileReport()
    stage = _StageTimer(report.stage_seconds, on_stage)
    with stage("load"):
        if isinstance(model, (str, Path)):
            source = source_from_dir(model, dtype=config.dtype, weights=False)
        else:
            source = source_from_config(model, dtype=config.dtype)
    return compile_source(source, config, report, stage)


def load_source(model: Any, config: CompileConfig) -> ModelSource:
    """A ModelSource from whatever `compile_model` accepts, on the device that the config asks for."""
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError('device="cuda": no CUDA GPU is available here; use device="cpu".')
    if isinstance(model, (str, Path)):
        source = source_from_dir(model, dtype=config.dtype)
        if config.device != "auto":
            source.module.to(config.device)
        return source
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"compile_model takes a torch.nn.Module or a checkpoint directory, not {type(model).__name__}."
        )
    source = source_from_module(model, dtype=config.dtype)
    if config.device != "auto" and source.device.type not in ("meta", torch.device(config.device).type):
        raise ConfigError(
            f"The model is on {source.device} and device={config.device!r} was asked for: move it yourself "
            f"(model.to({config.device!r})), as compiling does not change the model it is given."
        )
    return source


def compile_source(source: ModelSource, config: CompileConfig, report: CompileReport, stage) -> CompiledModel:
    """The stages after loading."""
    max_model_len = _max_model_len(source, config)
    if config.executable == "inductor" and (problem := cpu_build.problem()) is not None:
        raise CompilerNotFoundError(f'executable="inductor" needs a C++ compiler: {problem}. Or use "eager".')
    if source.device.type == "cpu":
        cpu_build.start_build()  # on first use: it takes seconds, and so does the capture
    with stage("capture"):
        captured, encoder = _capture(source, report)
        report.passes.append(captured_leaves(LEAVES, source.module, captured))
    with stage("recognise"):
        semantic = clone(captured, "semantic")
        report.passes += run_passes(semantic, RECOGNISERS)
        if encoder is not None:
            report.passes += [_of_encoder(result) for result in run_passes(encoder, RECOGNISERS)]
    with stage("audit"):
        refused = _audit(semantic, encoder, source, config, report)
    with stage("plan"):
        states = tuple(layer_states(semantic, max_model_len=max_model_len))
        plan = plan_kv_cache(
            states, block_size=config.block_size, max_model_len=max_model_len,
            max_encoder_tokens=source.encoder.max_len if source.encoder else None, workload=config.workload,
        )  # fmt: skip
    with stage("page"):
        paged = clone(semantic, "paged")
        paging = Paging(
            states=states,
            group_of=[page.group for page in plan.layers],
            block_sizes=[g.block_size for g in plan.groups],
            bytes_per_block=plan.bytes_per_block,
        )
        page_passes = tuple(functools.partial(page, paging=paging) for page in PAGE_PASSES)
        report.passes += run_passes(paged, (*page_passes, gather_logits))
    with stage("fuse"):
        fused = clone(paged, "fused")
        report.passes += run_passes(fused, (fuse_add_rms_norm, simplify) if config.fusions else ())
        device = torch.device("cpu") if source.device.type == "meta" else source.device
        prepare = source.device.type != "meta"
        report.providers = select_providers(fused, device=device, requested=config.providers, prepare=prepare)
    graphs = {"captured": captured, "semantic": semantic, "paged": paged, "fused": fused}
    if encoder is not None:
        graphs["encoder"] = encoder
    executable = encoder_executable = None
    with stage("executable"):
        if source.device.type != "meta":
            executable = _executable(fused, config, report)
            encoder_executable = None if encoder is None else _executable(encoder, config, report)
    encoder_layers = [] if encoder is None else encoder_layer_states(encoder)
    fill_report(report, source, graphs, states, plan, device, encoder_layers=encoder_layers)
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
        _refused=refused,
    )


def _capture(source: ModelSource, report: CompileReport) -> tuple[GraphModule, GraphModule | None]:
    """The captured graph of a decoder, and that of its encoder if it has one."""
    encoder = None
    if source.encoder is None:
        captured, report.capture_route = capture(source)
    else:
        encoder, _ = capture_encoder(source)
        captured, report.capture_route = capture_decoder(source, states_of(encoder))
        report.passes.append(_of_encoder(hooked_attention(encoder)))
    report.passes.append(hooked_attention(captured))
    return captured, encoder


def _of_encoder(result: PassResult) -> PassResult:
    """The same result under a name that says whose graph it is about."""
    return dataclasses.replace(result, name=f"encoder.{result.name}")


def clone(gm: GraphModule, level: str) -> GraphModule:
    """The start of the next level: a GraphModule with a graph of its own and the same weights."""
    return GraphModule(gm, copy.deepcopy(gm.graph), class_name=level.capitalize())


def _max_model_len(source: ModelSource, config: CompileConfig) -> int:
    if config.max_model_len is None:
        return source.max_model_len
    if config.max_model_len > source.max_model_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the {source.max_model_len} tokens that the "
            "model was made for; lower it."
        )
    return config.max_model_len


def _audit(
    semantic: GraphModule,
    encoder: GraphModule | None,
    source: ModelSource,
    config: CompileConfig,
    report: CompileReport,
) -> str | None:
    """Prove that attention was found everywhere and nothing else mixes tokens; strict: raise if not."""
    violations = audit(semantic) + ([] if encoder is None else audit(encoder, bidirectional=True))
    size = num_ops(semantic)
    report.passes.append(
        PassResult(
            name="audit",
            refusals=[v.as_refusal() for v in violations],
            num_ops_before=size,
            num_ops_after=size,
        )
    )
    problems = [str(v) for v in violations]
    problems += [
        f"attention refused in {r.module_path or r.node}: {r.reason} ({r.source_line})"
        for r in report.refusals
        if r.pattern == "attention"
    ]
    problems += _miscounted(semantic, encoder, source)
    if not problems:
        return None
    shown = "\n".join(f"  - {p}" for p in problems[:MAX_PROBLEMS_SHOWN])
    more = len(problems) - MAX_PROBLEMS_SHOWN
    message = (
        f"{type(source.module).__name__} relates tokens in {len(problems)} way(s) that are not explained, so paging "
        f"it could change its results:\n{shown}" + (f"\n  ... and {more} more" if more > 0 else "")
    )
    if config.strict:
        raise CaptureError(message)
    return message


def _miscounted(semantic: GraphModule, encoder: GraphModule | None, source: ModelSource) -> list[str]:
    """Kinds of layers of which the graph has more or fewer than the config says."""
    problems = []
    attention = _count(semantic, ATTENTION, RELATIVE_ATTENTION)
    recurrent = len({module_path(node) for node in calls(semantic.graph, *RECURRENT_OPS)})
    counts = [
        ("attention", attention, source.num_attention_layers),
        ("recurrent", recurrent, source.num_recurrent_layers),
    ]
    if encoder is not None:
        counts += [
            ("cross attention", _count(semantic, CROSS_ATTENTION), source.num_attention_layers),
            (
                "encoder attention",
                _count(encoder, ATTENTION, RELATIVE_ATTENTION),
                source.encoder.num_attention_layers,
            ),
        ]
    for kind, found, expected in counts:
        if expected is not None and found != expected:
            problems.append(f"{found} {kind} layers were found, but the config says {expected}")
    if not attention and source.num_attention_layers is None:
        problems.append("0 attention layers were found, but a decoder needs some")
    return problems


def _count(gm: GraphModule, *ops: OpInfo) -> int:
    return sum(1 for _ in calls(gm.graph, *(op.overload for op in ops)))


def _executable(graph: GraphModule, config: CompileConfig, report: CompileReport) -> Executable:
    """Build what `config.executable` asks for; "auto" is inductor where a C++ compiler works."""
    wanted, why = config.executable, "requested"
    if wanted == "auto":
        problem = cpu_build.problem()
        wanted = "inductor" if problem is None else "eager"
        why = "a C++ compiler is here" if problem is None else f"inductor cannot be used: {problem}"
    report.executable, report.executable_why = wanted, why
    return InductorExecutable(graph) if wanted == "inductor" else EagerExecutable(graph)


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
