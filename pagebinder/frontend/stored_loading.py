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

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pagebinder.errors import CheckpointError
from pagebinder.frontend import bnb_weights
from pagebinder.frontend.bnb_weights import LoadedTables, StoredTables
from pagebinder.frontend.checkpoint_tensors import counted
from pagebinder.frontend.coded_experts import (
    LoadedCodedExperts,
    QuantizedExperts,
    format_of_experts,
    format_of_fp8_experts,
    fp8_panel_bytes,
    left_as_codes,
    panel_bytes,
)
from pagebinder.frontend.experts_interface import experts_modules
from pagebinder.frontend.fp8_format import GROUPED, OF_ACTIVATIONS, UNREAD, StoredFp8
from pagebinder.frontend.fp8_linear import LoadedFp8Linear, expanded
from pagebinder.frontend.gguf.weights import LoadedBlockExperts, LoadedBlocks, StoredBlocks
from pagebinder.frontend.int_format import StoredInts
from pagebinder.frontend.int_linear import LoadedInts
from pagebinder.frontend.mx_experts import LoadedExperts
from pagebinder.frontend.mx_numbers import scale_values, times_scale
from pagebinder.frontend.quantized_module import QuantizedLinear
from pagebinder.frontend.stored_files import with_files
from pagebinder.frontend.stored_format import Stored
from pagebinder.frontend.stored_names import stack_of, tail
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

        if isinstance(stored, StoredInts):
            raise CheckpointError(
                f"{path} keeps {len({stored.codes_beside(key) for key in lost})} weights as integers that are of no "
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
    experts = dict.fromkeys(experts_modules(model))
    if isinstance(stored, StoredBlocks):
        experts |= dict.fromkeys(stored.paths_of_experts)
    for path in experts:
        module = model.get_submodule(path)
        if not isinstance(module, QuantizedExperts):
            refuse(path, _of_experts(path, module, stored, expanded_from.get(path)))
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


def _of_experts(path: str, module: torch.nn.Module, stored: Stored | StoredBlocks, format: str | None) -> str:
    if isinstance(stored, StoredBlocks):
        return stored.why_plain_experts(path, module)
    if isinstance(stored, StoredTables):
        return f"no kernel reads codes of {stored.kind}: they are expanded where they are stored so"
    if format is not None:
        return f"no kernel reads their codes: they are stored in {format} and expanded"
    if stored.layers is None:
        is_plain = not _are_converted(path, list(stored.kept or ()))
    else:
        is_plain = stack_of(path) not in stored.experts_of
    if stored.experts is not None or is_plain:
        return "they are stored plain"
    return "no kernel reads these codes of experts: they are expanded where they are stored so"


def replaced_on_meta(model: torch.nn.Module, stored: Stored | StoredBlocks) -> PassResult:
    """The same for a model without weights."""
    _, quantizer_class, config_class = register()
    quantizer = quantizer_class(config_class(stored=stored), pre_quantized=True)
    quantizer._process_model_before_weight_loading(model)
    return finish(model, stored)


def _replace(model: torch.nn.Module, stored: Stored | StoredBlocks, kept: list[str]) -> None:
    """Raises CheckpointError: a method stores experts alone, and the model has none."""
    if isinstance(stored, StoredBlocks):
        stored.replace(model)
        return
    from transformers.quantizers.quantizers_utils import should_convert_module

    # One that is tied has no weight of its own in the files, but for odd ones.
    head = model.get_output_embeddings() if getattr(model.config, "tie_word_embeddings", False) else None
    if isinstance(stored, StoredTables):
        _replace_tables(model, stored, kept, head)
        return
    found = experts_modules(model)
    experts = found if stored.experts else {}
    format_of = format_of_experts if isinstance(stored, StoredInts) else format_of_fp8_experts
    coded = {path: format for path, m in found.items() if (format := format_of(path, m, stored))}
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
        if path in coded and (is_known or _are_converted(path, kept)):
            model.set_submodule(path, LoadedCodedExperts(module, stored, coded[path]))
        elif is_known and isinstance(stored, StoredInts):
            if isinstance(module, torch.nn.Linear) and (shapes := stored.found(path)):
                model.set_submodule(path, LoadedInts(module, stored, shapes))
        elif not should_convert_module(path, kept) or (
            module is head and not (is_known and stored.knows(path))
        ):
            continue
        elif path in experts:
            model.set_submodule(path, LoadedExperts(module, stored))
        elif isinstance(module, torch.nn.Linear) and stored.granularity is not None:
            loaded = LoadedInts if isinstance(stored, StoredInts) else LoadedFp8Linear
            model.set_submodule(path, loaded(module, stored))


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


def _are_converted(path: str, kept: list[str]) -> bool:
    """As a config alone says it: experts may be named in it one by one."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    names = (path, *(f"{path}.0.{name}_proj" for name in ("gate", "up", "down")))
    return all(should_convert_module(name, kept) for name in names)


@functools.cache
def register() -> tuple[type, type, type]:
    """Make the method known to transformers; (operation on merged weights, quantizer, config)."""
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(METHOD)
    class StoredConfig(QuantizationConfigMixin):
        dequantize = False

        def __init__(self, stored: Stored, quant_method: str = METHOD):
            self.quant_method, self.stored = quant_method, stored
            self.modules_to_not_convert = None if stored.kept is None else list(stored.kept)

    class Expand(ConversionOps):
        """Weights and their scales -> plain weights, before experts are merged to one tensor."""

        def __init__(self, hf_quantizer):
            self.hf_quantizer = hf_quantizer

        def convert(self, input_dict, model=None, full_layer_name=None, **kwargs):
            try:
                return self._converted(input_dict, model, full_layer_name)
            except CheckpointError as error:
                failures.append(error)
                raise

        def _converted(self, input_dict, model, full_layer_name):
            stored = self.hf_quantizer.quantization_config.stored
            dtype, plain = model.get_parameter_or_buffer(full_layer_name).dtype, {}
            owner = model.get_submodule(full_layer_name.rpartition(".")[0])
            if isinstance(stored, StoredTables):
                shape = owner.replaced.weight.shape if isinstance(owner, LoadedTables) else None
                return _of_tables(input_dict, stored, dtype, shape, full_layer_name)
            if isinstance(stored, StoredInts):
                return _of_ints(input_dict, stored, dtype, getattr(owner, "format", None))
            for name, weights in input_dict.items():
                if name.endswith((stored.scale_name, *OF_ACTIVATIONS)):
                    continue
                scales = input_dict.get(name + stored.scale_suffix)
                if scales is not None and len(weights) != len(scales):
                    raise CheckpointError(f"{name}: {len(weights)} weights in fp8 have {len(scales)} scales.")
                if isinstance(owner, LoadedCodedExperts):
                    plain[name] = _fp8_bytes(name, weights, scales, owner)
                    continue
                plain[name] = (
                    weights if scales is None else _all_expanded(name, weights, scales, stored, dtype)
                )
            return plain

    @register_quantizer(METHOD)
    class StoredQuantizer(FineGrainedFP8HfQuantizer):
        def __init__(self, quantization_config, **kwargs):
            super().__init__(quantization_config, **kwargs)
            stored = quantization_config.stored
            self.serialized_names = {"weight": list(stored.names)}

        def validate_environment(self, *args, **kwargs):
            """No GPU is needed."""

        def param_needs_quantization(self, model, param_name, **kwargs):
            return False

        def get_load_operations(self):
            return {"dequantize": Expand}

        def get_weight_conversions(self):
            if not isinstance(self.quantization_config.stored, StoredTables):
                return super().get_weight_conversions()
            return [WeightConverter(self.serialized_names["weight"], "weight", [Expand(self)])]

        def update_weight_conversions(self, weight_conversions, *model):  # none in transformers 5.17
            stored = self.quantization_config.stored
            if not hasattr(HfQuantizer, "get_load_operations") and not isinstance(stored, StoredFp8):
                merged = [_with_words(converter, Expand(self)) for converter in weight_conversions]
                return merged + (self.get_weight_conversions() if isinstance(stored, StoredTables) else [])
            is_deepseek = isinstance(stored, StoredFp8) and stored.scale_name == "weight_scale_inv"
            owner = FineGrainedFP8HfQuantizer if is_deepseek else HfQuantizer
            return owner.update_weight_conversions(self, weight_conversions, *model)

        def _process_model_before_weight_loading(self, model, **kwargs):
            self._normalize_modules_to_not_convert(model)
            names = self.quantization_config.modules_to_not_convert
            kept = self.get_modules_to_not_convert(model, names, model._keep_in_fp32_modules)
            _replace(model, self.quantization_config.stored, kept)
            ignored = model._keys_to_ignore_on_load_unexpected or ()
            model._keys_to_ignore_on_load_unexpected = {*ignored, *(rf"\.{name}$" for name in UNREAD)}

        def _process_model_after_weight_loading(self, model, **kwargs):
            return model

    return Expand, StoredQuantizer, StoredConfig


def _with_words(converter, expand):
    """A converter of transformers 5.17 that merges experts, with what lies beside words, which are expanded first."""
    from transformers.core_model_loading import WeightConverter

    sources = list(converter.source_patterns)
    if not isinstance(converter, WeightConverter) or not all(name.endswith(".weight") for name in sources):
        return converter
    names = expand.hf_quantizer.serialized_names["weight"]
    all_sources = [f"{source.removesuffix('weight')}{name}$" for source in sources for name in names]
    return WeightConverter(all_sources, list(converter.target_patterns), [expand, *converter.operations])


def _by_owner(found: dict[str, list], names) -> Iterator[tuple[str, dict[str, list], str]]:
    """What a loader collected, by the patterns of its names: of each owner of weights its name and a dot behind it,
    its tensors by `names`, and the pattern of its weight."""
    owners: dict[str, dict[str, list]] = {}
    for pattern, tensors in found.items():
        name = pattern.removesuffix("$")
        kind = max(filter(name.endswith, names), key=len)
        owners.setdefault(name.removesuffix(kind), {})[kind] = tensors
    end = "$" if any(pattern.endswith("$") for pattern in found) else ""  # of transformers 5.17
    for owner, kinds in owners.items():
        yield owner, kinds, f"{owner}weight{end}"


def _of_tables(
    found: dict[str, list], stored: StoredTables, dtype: torch.dtype, shape: tuple[int, int] | None, name: str
) -> dict[str, list]:
    """Tensors of bitsandbytes, or plain weights, by name and of each -> plain weights; of a layer that keeps its
    codes, and whose weight has that shape, what LoadedTables keeps."""
    made = {}
    for _, kinds, weights in _by_owner(found, stored.names):
        made[weights] = plain = []
        for i in range(max(map(len, kinds.values()))):
            tensors = {kind: of_each[i] for kind, of_each in kinds.items() if i < len(of_each)}
            try:
                if shape is not None:
                    plain.append(bnb_weights.panel_bytes(tensors, shape))
                    continue
                is_plain = tensors.keys() == {"weight"}
                plain.append(
                    tensors["weight"].to(dtype) if is_plain else bnb_weights.expanded(tensors, dtype)
                )
            except CheckpointError as error:
                raise CheckpointError(f"{name} cannot be read: {error}") from error
    return made


def _of_ints(
    found: dict[str, list], stored: StoredInts, dtype: torch.dtype, format: str | None
) -> dict[str, list]:
    """Tensors of experts, as integers or plain, by name and of each -> plain weights, or bytes in `format`."""
    made = {}
    for owner, kinds, weights in _by_owner(found, stored.names):
        if stored.tensors.marker not in kinds:
            made[weights] = (
                [weight.to(dtype) for weight in kinds["weight"]] if format is None else kinds["weight"]
            )
            continue
        if len(counts := {len(tensors) for tensors in kinds.values()}) != 1:
            raise CheckpointError(
                f"{owner[:-1]}: some of its {max(counts)} weights lack one of {', '.join(kinds)}."
            )
        each = ({kind: tensors[i] for kind, tensors in kinds.items()} for i in range(counts.pop()))
        try:
            if format is None:
                made[weights] = [stored.read(tensors).weight(dtype) for tensors in each]
            else:
                made[weights] = [panel_bytes(stored.read(tensors), format, stored) for tensors in each]
        except (CheckpointError, KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{owner[:-1]} cannot be read: {error}") from error
    return made


def _fp8_bytes(name: str, weights, scales, owner: LoadedCodedExperts) -> list[torch.Tensor]:
    """Weights of experts and their scales -> bytes in the owner's format."""
    scales = [None] * len(weights) if scales is None else scales
    made = []
    for weight, scale in zip(weights, scales, strict=True):
        try:
            packed, num_rounded = fp8_panel_bytes(weight, scale, owner.format, owner.stored)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
        made.append(packed)
        owner.num_rounded += num_rounded
    return made


def _all_expanded(name: str, weights, scales, stored: StoredFp8, dtype: torch.dtype) -> list[torch.Tensor]:
    return [_expanded(name, w, s, stored, dtype) for w, s in zip(weights, scales, strict=True)]


def _expanded(name: str, weight, scale, stored: StoredFp8, dtype: torch.dtype) -> torch.Tensor:
    if stored.experts is not None or stored.granularity == GROUPED:
        return times_scale(weight, scale, dtype)
    expected = stored.scale_shape(*weight.shape) if weight.dim() == 2 else None
    if weight.dtype is not torch.float8_e4m3fn or tuple(scale.shape) != expected:
        raise CheckpointError(
            f"{name}: a weight {list(weight.shape)} is stored as {weight.dtype} with a scale {list(scale.shape)}; "
            f"e4m3 with {expected} is what the config says."
        )
    scale = scale_values(scale)
    if not scale.isfinite().all():
        raise CheckpointError(f"{name}: a scale is NaN or infinity.")
    return expanded(weight, stored.scale_of_kernels(scale), dtype)
