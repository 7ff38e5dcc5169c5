"""The stages of `compile_model` for an encoder alone: captured -> semantic -> packed -> executable.

Nothing is cached, so there is nothing to plan and to page: attention becomes attention over many sequences at once.
At the end the packed graph is run against the source model itself, since what this promises is its embeddings.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import GraphModule

from pagebinder.compiled_encoder import CompiledEncoder
from pagebinder.compiler.checks import bounded, unexplained
from pagebinder.compiler.executable import check_executable, executable_of
from pagebinder.compiler.pipeline import RECOGNISERS, fuse_loops
from pagebinder.compiler.verify_encoder import verify_encoder
from pagebinder.config import CompileConfig
from pagebinder.custom_ops.cpu import build as cpu_build
from pagebinder.custom_ops.cpu.parts import PARTS
from pagebinder.describe import fill_encoder_report
from pagebinder.errors import CaptureError, ConfigError
from pagebinder.frontend.attention_interface import hooked_attention
from pagebinder.frontend.encoder_only import capture_encoder_only, returns_logits, source_rows
from pagebinder.frontend.experts_interface import hooked_experts
from pagebinder.frontend.leaves import LEAVES, captured_leaves
from pagebinder.frontend.numbering import numbering
from pagebinder.frontend.sentence_dir import sentence_recipe
from pagebinder.frontend.source import ModelSource
from pagebinder.graph_tools import clone
from pagebinder.passes.layer_states import encoder_layer_states
from pagebinder.passes.manager import run_passes
from pagebinder.passes.own_passes import may_change, run_own_passes
from pagebinder.passes.pack_attention import pack_attention
from pagebinder.passes.select_providers import select_providers, unused_requests
from pagebinder.passes.simplify import simplify
from pagebinder.passes.trail import ENCODER, Trail
from pagebinder.report import CompileReport
from pagebinder.runtime.encoder_batches import batches
from pagebinder.runtime.executables import EagerExecutable

# Options that say how a decoder is cached and served; here they would be ignored.
DECODER_OPTIONS = (
    "block_size",
    "workload",
    "lock",
    "locked",
    "kv_dtype",
    "index_dtype",
    "cascade",
    "prompt_embeds",
    "streams",
)
# Largest difference to the source model, relative to its largest value: rounding, far below any real difference.
AGREEMENT = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
CHECK_TOKENS = (5, 12)
BEYOND_WINDOW = 9
MAX_CHECK_TOKENS = 1024


def compile_encoder(
    source: ModelSource, config: CompileConfig, report: CompileReport, stage, trail: Trail
) -> CompiledEncoder:
    """The stages after loading. `trail`: where to keep the steps.

    Raises:
        CaptureError: the model cannot be traced, relates tokens in a way that is not explained, or computes something
            else than its packed graph.
        ConfigError, CompilerNotFoundError, ProviderError, CheckpointError: see their messages.
    """
    recipe = sentence_recipe(source.path)
    max_tokens = _max_tokens(source, config, recipe)
    check_executable(source, config)
    if source.device.type == "cpu":
        for part in (str(source.dtype).removeprefix("torch."), "core"):
            if part in PARTS:
                cpu_build.start_build(part)
    with stage("capture"):
        captured, report.capture_route = capture_encoder_only(source)
        max_tokens = bounded(max_tokens, captured, config, report)
        report.passes += [hooked_attention(captured), hooked_experts(source.module, captured)]
        report.passes.append(captured_leaves(LEAVES, source.module, captured))
        trail.add("captured", "capture", captured, chain=ENCODER)
    with stage("recognise"):
        semantic = clone(captured, "semantic")
        report.passes += run_passes(semantic, RECOGNISERS, after=trail.after("semantic", chain=ENCODER))
        report.passes += run_own_passes(semantic, "semantic", config.passes, report, trail, chain=ENCODER)
    with stage("audit"):
        refused = unexplained(semantic, None, source, config, report, max_tokens)
    on_meta = source.device.type == "meta"
    device = torch.device("cpu") if on_meta else source.device
    with stage("pack"):
        packed = clone(semantic, "packed")
        passes = (pack_attention, simplify)
        report.passes += run_passes(packed, passes, after=trail.after("packed", chain=ENCODER))
        report.passes += run_own_passes(packed, "packed", config.passes, report, trail, chain=ENCODER)
        results, compiled = fuse_loops(packed, device, config, trail.after("packed", chain=ENCODER))
        report.passes += results
        report.providers = select_providers(
            packed,
            device=device,
            requested=config.providers,
            prepare=not on_meta,
            is_compiled=compiled,
        )
        report.notes += unused_requests(config.providers, report.providers)
        trail.add("packed", "select_providers", packed, chain=ENCODER)
    graphs = {"captured": captured, "semantic": semantic, "packed": packed}
    states = tuple(encoder_layer_states(semantic))
    with stage("verify"):
        if not on_meta and refused is None:
            if not any(result.changes_numbers for result in report.passes):
                _prove(source, packed, max_tokens, report, may_change(config.passes, "semantic", "packed"))
            if config.verify != "off":
                verify_encoder(trail, source, max_tokens, config, report)
    fill_encoder_report(report, source, graphs, states, device)
    with stage("executable"):
        executable = None if on_meta else executable_of(packed, config, report)
    return CompiledEncoder(
        source=source,
        config=config,
        graphs=graphs,
        states=states,
        report=report,
        device=device,
        max_tokens=max_tokens,
        numbering=numbering(source.module),
        recipe=recipe,
        has_head=returns_logits(source.module),
        executable=executable,
        _refused=refused,
    )


def _max_tokens(source: ModelSource, config: CompileConfig, recipe) -> int:
    """Of one sequence: what the position table holds, less where it begins, and what the recipe allows."""
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    unread = [name for name in DECODER_OPTIONS if getattr(config, name) not in (None, defaults[name], "off")]
    if unread:
        raise ConfigError(
            f"{', '.join(unread)}: these options are about a decoder's cache and steps, and "
            f"{type(source.module).__name__} is an encoder; leave them out."
        )
    if config.pack_weights:
        raise ConfigError(f"pack_weights={config.pack_weights!r} is for decoders (yet); leave it out.")
    if config.quantization is not None:
        raise ConfigError(f"quantization={config.quantization!r} is for decoders (yet); leave it None.")
    if levels := {"paged", "fused"} & config.passes.keys():
        raise ConfigError(
            f'passes: an encoder has no {" or ".join(sorted(levels))} graph; use "semantic" or "packed".'
        )
    limit = source.max_model_len - numbering(source.module).offset
    wanted = config.max_model_len
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"max_model_len={wanted} is more than the {limit} tokens that the model was made for; lower it."
        )
    told = recipe.max_tokens if recipe is not None and recipe.max_tokens else limit
    return wanted or min(limit, told)


def _prove(
    source: ModelSource, packed: GraphModule, max_tokens: int, report: CompileReport, also: str
) -> None:
    """Two short sequences and one beyond every window, packed, against the source model with each alone."""
    options = [n.kwargs for n in packed.graph.nodes if n.op == "call_function"]
    reaches = [o.get("window") or o.get("chunk") or o.get("num_behind") or 0 for o in options]
    longest = min(max(*reaches, *CHECK_TOKENS) + BEYOND_WINDOW, max_tokens, MAX_CHECK_TOKENS)
    generator = torch.Generator().manual_seed(0)
    counted = numbering(source.module).counted
    sequences = []
    for num_tokens in (min(n, max_tokens) for n in (*CHECK_TOKENS, longest)):
        ids = torch.randint(0, source.vocab_size, (num_tokens,), generator=generator, device="cpu")
        sequences.append(counted(ids).tolist())
    worst = 0.0
    (batch,) = batches(sequences, 1 << 30, source.device)
    rows = EagerExecutable(packed).run(batch.inputs)
    for ids, start in zip(sequences, batch.starts.tolist()):
        expected = source_rows(source, torch.tensor(ids, device=source.device)).double()
        error = (rows[start : start + len(ids)].double() - expected).abs().max() / expected.abs().max()
        worst = max(worst, float(error)) if error.isfinite() else float("inf")
    report.notes.append(f"packed sequences against the source model: largest relative difference {worst:.1e}")
    if not worst <= AGREEMENT.get(source.dtype, 1e-4):
        raise CaptureError(
            f"{type(source.module).__name__}: the packed graph differs from the source model by {worst:.2g} of its "
            "largest value, so something that the model does with its ids or positions is not captured"
            f"{also}."
        )
