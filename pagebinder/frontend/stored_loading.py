"""Models whose checkpoints keep weights in few bits, through transformers' own loader.

    from_pretrained
      build on meta        linear layers that are stored so -> LoadedFp8Linear, LoadedInts
                           ... in nf4 -> LoadedTables
                           experts that kernels read -> LoadedCodedExperts
                           experts with a scale for 32 columns -> LoadedExperts
      load                 names, shards and merges as for plain weights; other experts, which it merges, are expanded
    finish                 Loaded... -> QuantizedLinear, or the layer with a plain weight; experts; one at a time

transformers calls what takes part in that a quantizer, and finds it by the `quant_method` of the config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pagebinder.errors import CheckpointError
from pagebinder.frontend.bnb_weights import LoadedTables, StoredTables
from pagebinder.frontend.checkpoint_names import CheckpointNames
from pagebinder.frontend.checkpoint_tensors import counted
from pagebinder.frontend.coded_experts import (
    LoadedCodedExperts,
    QuantizedExperts,
    format_of_experts,
    format_of_fp8_experts,
    left_as_codes,
)
from pagebinder.frontend.experts_interface import experts_modules
from pagebinder.frontend.fp8_format import UNREAD, StoredFp8
from pagebinder.frontend.fp8_linear import LoadedFp8Linear
from pagebinder.frontend.gguf.weights import LoadedBlockExperts, LoadedBlocks, StoredBlocks
from pagebinder.frontend.int_format import Shapes, StoredInts
from pagebinder.frontend.int_linear import LoadedInts
from pagebinder.frontend.mx_experts import LoadedExperts
from pagebinder.frontend.quantized_module import QuantizedLinear
from pagebinder.frontend.stored_files import with_files
from pagebinder.frontend.stored_format import Stored
from pagebinder.frontend.stored_names import stack_of, tail
from pagebinder.frontend.stored_parts import Part, StoredParts
from pagebinder.report import Match, PassResult, Refusal

METHOD = "pagebinder_stored"
# Where a model keeps the layers whose weights become plain as they are loaded: path -> why.
IN_TABLES = "_pagebinder_in_tables"
PATTERN, EXPERTS = "quantized_linear", "quantized_moe_experts"
CODES = (torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32)
# What went wrong with weights that a loader merges: it keeps that to itself, and raises something else.
failures: list[CheckpointError] = []


def loading_options(stored: Stored, path: Path) -> dict[str, Any]:
    """What a transformers config must say as `quantization_config` for its model to be loaded by this file.

    Raises:
        CheckpointError: a file cannot be read, or holds weights in e5m2, which a loader would round to e4m3.
    """
    register()
    failures.clear()
    return {"quant_method": METHOD, "stored": with_files(stored, path)}


def register() -> None:
    """Make the method known to transformers."""
    import pagebinder.frontend.stored_quantizer  # noqa: F401


def check_names(stored: Stored, unexpected, missing, path: Path) -> None:
    """Raises CheckpointError: tensors beside codes are missing, or have no place in the model."""
    scales = (key for key in map(str, missing) if key.endswith(stored.endings))
    bare = sorted(key for key in scales if stored.codes_beside(key) not in missing)
    if bare:
        raise CheckpointError(
            f"{path} lacks {counted(bare)} that its config asks for, for example the scale {bare[0]}."
        )
    lost = sorted(key for key in map(str, unexpected) if key.endswith(stored.endings))
    if lost:
        import transformers

        if isinstance(stored, StoredInts | StoredParts):
            raise CheckpointError(
                f"{path} keeps {len({stored.codes_beside(key) for key in lost})} weights as codes that are of no "
                f"linear layer and no experts that the model has under these names, for example {lost[0]}: of other "
                f"modules (Conv1D, say) transformers {transformers.__version__} reads plain weights."
            )
        raise CheckpointError(
            f"{path} holds scales of {len({stored.codes_beside(key) for key in lost})} weights that its config says "
            f"are stored plain, for example {lost[0]}: its list of modules that are not quantised is wrong, or "
            f"transformers {transformers.__version__} does not expand these."
        )


def check_left_over(result: PassResult, left_over: Sequence[str], path: Path) -> tuple[str, ...]:
    """Tensors that are no part of the model, but for those that are never read.

    Raises:
        CheckpointError: one lies beside codes that are served, which it may change.
    """
    left_over = tuple(name for name in left_over if name.rpartition(".")[2] not in UNREAD)
    layers = {tail(match.module_path) for match in result.matches if match.pattern == PATTERN}
    experts = {stack_of(match.module_path) for match in result.matches if match.pattern == EXPERTS}
    for name in left_over:
        owner = name.rpartition(".")[0]
        if tail(owner) in layers or (".experts." in name and stack_of(owner) in experts):
            raise CheckpointError(
                f"{path} keeps {name} beside codes of that weight: nothing reads it, and it may change them."
            )
    return left_over


def finish(model: torch.nn.Module, stored: Stored | StoredBlocks) -> PassResult:
    """Put into place what is served, and say what became of each linear layer and mixture of experts.

    Raises:
        CheckpointError: tensors that are no such weights, or codes that are left without a kernel; names the module.
    """
    result, expanded_from = PassResult(name="stored_weights"), {}  # path -> format of experts

    def refuse(path: str, reason: str) -> None:
        result.refusals.append(Refusal(pattern=PATTERN, reason=reason, node="", module_path=path))

    in_tables = model.__dict__.pop(IN_TABLES, {})
    # no modules: those that are replaced are let go, with their words
    paths = [path for path, _ in model.named_modules()]
    for path in paths:
        module = model.get_submodule(path)
        if isinstance(module, LoadedFp8Linear | LoadedInts | LoadedTables | LoadedBlocks):
            served, what = module.finished(path)
            model.set_submodule(path, served)
            if isinstance(served, QuantizedLinear):
                result.matches.append(Match(pattern=PATTERN, node="", module_path=path, detail=what))
            else:
                refuse(path, what)
        elif isinstance(module, LoadedExperts | LoadedCodedExperts | LoadedBlockExperts):
            experts = module.finished(path)
            model.set_submodule(path, experts)
            if not isinstance(experts, QuantizedExperts):
                expanded_from[path] = stored.experts
                continue
            formats = ", ".join(dict.fromkeys(experts.formats.values()))
            said = f"{formats} as stored (quant_method {stored.method})"
            if num_rounded := getattr(module, "num_rounded", 0):
                said += f", {num_rounded} codes below 2^-6 rounded"
            result.matches.append(Match(pattern=EXPERTS, node="", module_path=path, detail=said))
        elif isinstance(module, torch.nn.Linear):
            refuse(path, _why_plain(path, module, stored, in_tables))
    _check_left(model)
    experts, names = dict.fromkeys(experts_modules(model)), CheckpointNames(model)
    if isinstance(stored, StoredBlocks):
        experts |= dict.fromkeys(stored.paths_of_experts)
    for path in experts:
        module = model.get_submodule(path)
        if not isinstance(module, QuantizedExperts):
            refuse(path, _of_experts(path, module, stored, expanded_from.get(path), names))
    for name in ("hf_quantizer", "quantization_method"):
        model.__dict__.pop(name, None)
    model.__dict__.pop("is_quantized", None)
    model.config.__dict__.pop("quantization_config", None)
    return result


def _check_left(model: torch.nn.Module) -> None:
    """Raises CheckpointError: codes are left where weights belong."""
    for path, module in model.named_modules():
        codes = [n for n, p in module.named_parameters(recurse=False) if p.dtype in CODES]
        if codes:
            raise left_as_codes(f"{path}.{codes[0]}")


def _why_plain(path: str, module: torch.nn.Module, stored: Stored | StoredBlocks, in_tables) -> str:
    if isinstance(stored, StoredBlocks):
        return stored.why_plain(path, module) or "it is stored plain"
    return in_tables.get(path, "it is stored plain")


def _of_experts(
    path: str,
    module: torch.nn.Module,
    stored: Stored | StoredBlocks,
    format: str | None,
    names: CheckpointNames,
) -> str:
    if isinstance(stored, StoredBlocks):
        return stored.why_plain_experts(path, module)
    if isinstance(stored, StoredTables):
        return f"no kernel reads codes of {stored.kind}: they are expanded where they are stored so"
    if format is not None:
        return f"no kernel reads their codes: they are stored in {format} and expanded"
    if stored.layers is None:
        is_plain = not _are_converted(path, names, list(stored.kept or ()))
    else:
        is_plain = all(said is None for _, said in stored.of_experts(path))
    if stored.experts is not None or is_plain:
        return "they are stored plain"
    return "no kernel reads these codes of experts: they are expanded where they are stored so"


def replaced_on_meta(model: torch.nn.Module, stored: Stored | StoredBlocks) -> PassResult:
    """The same for a model without weights."""
    from pagebinder.frontend.stored_quantizer import StoredConfig, StoredQuantizer

    if isinstance(stored, StoredParts):
        stored = stored.of_model(model, _tied_head(model))
    quantizer = StoredQuantizer(StoredConfig(stored=stored), pre_quantized=True)
    quantizer._process_model_before_weight_loading(model)
    return finish(model, stored)


def replace(model: torch.nn.Module, stored: Stored | StoredBlocks, kept: list[str]) -> None:
    """Raises CheckpointError: a method stores experts alone, and the model has none."""
    if isinstance(stored, StoredBlocks):
        stored.replace(model)
        return
    head = _tied_head(model)
    if isinstance(stored, StoredTables):
        _replace_tables(model, stored, kept, head)
        return
    if stored.layers is not None:
        for path, module in experts_modules(model).items():
            _check_count(path, module, stored)
    is_mixed = isinstance(stored, StoredParts)
    for part in stored.parts if is_mixed else (stored,):
        _replace_codes(model, part, kept, head, only_found=is_mixed or isinstance(stored, StoredInts))


def _tied_head(model: torch.nn.Module) -> torch.nn.Module | None:
    """A head that is tied to embeddings: it has no weight of its own in the files, but for odd ones."""
    return model.get_output_embeddings() if getattr(model.config, "tie_word_embeddings", False) else None


def _replace_codes(
    model: torch.nn.Module, stored: Part, kept: list[str], head: torch.nn.Module | None, only_found: bool
) -> None:
    """only_found: where the files are known, what they do not say is stored so stays as it is."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    modules, names = experts_modules(model), CheckpointNames(model)
    experts = modules if stored.experts else {}
    format_of = format_of_experts if isinstance(stored, StoredInts) else format_of_fp8_experts
    coded = {path: format for path, m in modules.items() if (format := format_of(path, m, stored))}
    is_known = stored.layers is not None
    if stored.granularity is None and not experts:
        raise CheckpointError(
            f"quant_method {stored.method!r} is about experts, and {type(model).__name__} has none that are known."
        )
    for path, module in list(model.named_modules()):
        if module is head and is_known and stored.found(path) is not None and not _may_be_tied(stored):
            raise CheckpointError(
                f"The config says that {path} is tied to the table of embeddings (tie_word_embeddings), and the "
                "files keep codes of a weight of its own: either is wrong."
            )
        if path in coded and (is_known or _are_converted(path, names, kept)):
            model.set_submodule(path, LoadedCodedExperts(module, stored, coded[path]))
        elif is_known and only_found:
            if isinstance(module, torch.nn.Linear) and (found := stored.found(path)):
                model.set_submodule(path, _loaded(module, stored, found))
        elif not should_convert_module(path, kept) or (
            module is head and not (is_known and stored.knows(path))
        ):
            continue
        elif path in experts:
            model.set_submodule(path, LoadedExperts(module, stored))
        elif isinstance(module, torch.nn.Linear) and stored.granularity is not None:
            model.set_submodule(path, _loaded(module, stored))


def _check_count(path: str, module: torch.nn.Module, stored: Part | StoredParts) -> None:
    """Raises CheckpointError: files that name experts one by one lack a projection of some, of which a loader would
    make a smaller stack."""
    count = next(p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3)
    for projection, found in Counter(name for name, _ in stored.of_experts(path)).items():
        if found < count:
            raise CheckpointError(
                f"The files hold {projection} of {found} experts of {path}, and the model has {count}."
            )


def _loaded(
    module: torch.nn.Linear, stored: Part, shapes: Shapes | None = None
) -> LoadedInts | LoadedFp8Linear:
    if isinstance(stored, StoredInts):
        return LoadedInts(module, stored, shapes)
    return LoadedFp8Linear(module, stored)


def _replace_tables(model: torch.nn.Module, stored: StoredTables, kept: list[str], head) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    expanded = model.__dict__[IN_TABLES] = {}
    for path, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear):
            continue
        if stored.layers is None:
            is_stored, num_blocks = should_convert_module(path, kept) and module is not head, None
        else:
            num_blocks = stored.found(path)
            is_stored = num_blocks is not None
        if not is_stored:
            continue
        if reason := stored.reason_against(path, module, num_blocks):
            expanded[path] = reason
        else:
            model.set_submodule(path, LoadedTables(module))


def _may_be_tied(stored: StoredInts | StoredFp8) -> bool:
    """Does a loader that ties leave codes alone? It takes `weight` for the weight, where that is one of floats."""
    return isinstance(stored, StoredInts) and "weight" in stored.tensors.names


def _are_converted(path: str, names: CheckpointNames, kept: list[str]) -> bool:
    """As a config alone says it: experts may be named in it one by one, as checkpoints or transformers name them."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    each = [name for kind in ("gate_up_proj", "down_proj") for name in names.of_experts(path, kind)]
    ours = (f"{path}.0.{name}_proj" for name in ("gate", "up", "down"))
    theirs = (name.replace("*", "0", 1) for name in each)
    return all(should_convert_module(name, kept) for name in (path, *ours, *theirs))
