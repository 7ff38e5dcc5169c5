"""Models whose checkpoints keep weights in 8 or 4 bits, through transformers' own loader.

    from_pretrained
      build on meta        linear layers that are stored in fp8 -> LoadedFp8Linear
                           experts with a scale for 32 columns -> LoadedExperts
      load                 names, shards and merges as for plain weights; other experts, which it merges, are expanded
    finish                 LoadedFp8Linear -> Fp8Linear, LoadedExperts -> experts, one at a time

transformers calls what takes part in that a quantizer, and finds it by the `quant_method` of the config.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from pagebinder.errors import CheckpointError
from pagebinder.frontend.checkpoint_tensors import counted
from pagebinder.frontend.experts_interface import experts_modules
from pagebinder.frontend.fp8_format import GROUPED, StoredFp8
from pagebinder.frontend.fp8_linear import Fp8Linear, LoadedFp8Linear, expanded
from pagebinder.frontend.mx_experts import LoadedExperts
from pagebinder.frontend.mx_numbers import scale_values, times_scale
from pagebinder.report import Match, PassResult, Refusal

METHOD = "pagebinder_fp8"
PATTERN = "quantized_linear"
CODES = (torch.float8_e4m3fn, torch.int8, torch.uint8)
# Scales for activations of fp8 kernels: here activations keep their dtype.
OF_ACTIVATIONS = ("activation_scale", "input_scale")


def loading_options(stored: StoredFp8, path: Path) -> dict[str, Any]:
    """What a transformers config must say as `quantization_config` for its model to be loaded by this file.

    Raises:
        CheckpointError: a file cannot be read, or holds weights in e5m2, which a loader would round to e4m3.
    """
    from safetensors import SafetensorError, safe_open

    _register()
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                dtypes = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if name := next((name for name, dtype in dtypes.items() if dtype == "F8_E5M2"), None):
            raise CheckpointError(f"{file}: {name} is stored in e5m2; e4m3 is served.")
    return {"quant_method": METHOD, "stored": stored}


def check_scales(stored: StoredFp8, unexpected, missing, path: Path) -> None:
    """Raises CheckpointError: a weight is without its scale, which is missing, or has no place in the model."""
    endings = (f".{stored.scale_name}",) + ((f"proj{stored.scale_suffix}",) if stored.experts else ())
    scales = (key for key in map(str, missing) if key.endswith(endings))
    bare = sorted(
        key for key in scales if key.removesuffix(stored.scale_suffix) + stored.codes_suffix not in missing
    )
    if bare:
        raise CheckpointError(
            f"{path} lacks {counted(bare)} that its config asks for, for example the scale {bare[0]}."
        )
    lost = sorted(key for key in map(str, unexpected) if key.endswith(endings))
    if lost:
        import transformers

        raise CheckpointError(
            f"{path} holds scales of {len(lost)} weights that its config says are stored plain, for example "
            f"{lost[0]}: its list of modules that are not quantised is wrong, or transformers "
            f"{transformers.__version__} does not expand these."
        )


def finish(model: torch.nn.Module, stored: StoredFp8) -> tuple[PassResult, dict[str, str]]:
    """Put into place what is served, and say what became of each linear layer and mixture of experts.

    Returns:
        That, and the microscaled format of what was stored in one and is expanded, by path of the module.
    Raises:
        CheckpointError: tensors that are no weights in fp8, or are left in it without a kernel; names the module.
    """
    result, formats = PassResult(name="stored_weights"), {}

    def refuse(path: str, reason: str) -> None:
        result.refusals.append(Refusal(pattern=PATTERN, reason=reason, node="", module_path=path))

    for path, module in list(model.named_modules()):
        if isinstance(module, LoadedFp8Linear):
            served, what = module.finished(path)
            model.set_submodule(path, served)
            if isinstance(served, Fp8Linear):
                result.matches.append(Match(pattern=PATTERN, node="", module_path=path, detail=what))
            else:
                refuse(path, what)
            if stored.granularity == GROUPED:
                formats[path] = "mxfp8"
        elif isinstance(module, LoadedExperts):
            model.set_submodule(path, module.finished(path))
            formats[path] = stored.experts
        elif isinstance(module, torch.nn.Linear):
            refuse(path, "it is stored plain")
    _check_left(model)
    for path in experts_modules(model):
        refuse(path, _of_experts(stored, formats.get(path)))
    for name in ("hf_quantizer", "quantization_method"):
        model.__dict__.pop(name, None)
    model.__dict__.pop("is_quantized", None)
    model.config.__dict__.pop("quantization_config", None)
    return result, formats


def _check_left(model: torch.nn.Module) -> None:
    """Raises CheckpointError: codes are left where weights belong."""
    for path, module in model.named_modules():
        codes = [n for n, p in module.named_parameters(recurse=False) if p.dtype in CODES]
        if codes and not isinstance(module, Fp8Linear):
            import transformers

            raise CheckpointError(
                f"{path}.{codes[0]} is stored in fp8 or fp4, and transformers {transformers.__version__} leaves it "
                "so, without its scales; transformers 5.23 expands what the config describes."
            )


def _of_experts(stored: StoredFp8, format: str | None) -> str:
    if format == "mxfp4":
        return "they are stored in mxfp4 and expanded; keep_stored_codes packs those that a kernel reads"
    if format is not None:
        return f"no kernel reads codes of experts: they are stored in {format} and expanded"
    if stored.experts is not None:
        return "they are stored plain"
    return "no kernel reads codes of experts: they are expanded where they are stored in fp8"


def replaced_on_meta(model: torch.nn.Module, stored: StoredFp8) -> tuple[PassResult, dict[str, str]]:
    """The same for a model without weights."""
    _, quantizer_class, config_class = _register()
    quantizer = quantizer_class(config_class(stored=stored), pre_quantized=True)
    quantizer._process_model_before_weight_loading(model)
    return finish(model, stored)


def _replace(model: torch.nn.Module, stored: StoredFp8, kept: list[str]) -> None:
    """Raises CheckpointError: a method stores experts alone, and the model has none."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    experts = experts_modules(model) if stored.experts else {}
    if stored.granularity is None and not experts:
        raise CheckpointError(
            f"quant_method {stored.method!r} is about experts, and {type(model).__name__} has none that are known."
        )
    for path, module in list(model.named_modules()):
        if not should_convert_module(path, kept):
            continue
        if path in experts:
            model.set_submodule(path, LoadedExperts(module, stored))
        elif isinstance(module, torch.nn.Linear) and stored.granularity is not None:
            model.set_submodule(path, LoadedFp8Linear(module, stored))


@functools.cache
def _register() -> tuple[type, type, type]:
    """Make the method known to transformers; (operation on merged weights, quantizer, config)."""
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(METHOD)
    class Fp8Config(QuantizationConfigMixin):
        dequantize = False

        def __init__(self, stored: StoredFp8, quant_method: str = METHOD):
            self.quant_method, self.stored = quant_method, stored
            self.modules_to_not_convert = None if stored.kept is None else list(stored.kept)

    class Expand(ConversionOps):
        """Weights and their scales -> plain weights, before experts are merged to one tensor."""

        def __init__(self, hf_quantizer):
            self.hf_quantizer = hf_quantizer

        def convert(self, input_dict, model=None, full_layer_name=None, **kwargs):
            stored = self.hf_quantizer.quantization_config.stored
            dtype, plain = model.get_parameter_or_buffer(full_layer_name).dtype, {}
            for name, weights in input_dict.items():
                if name.endswith((stored.scale_name, *OF_ACTIVATIONS)):
                    continue
                scales = input_dict.get(name + stored.scale_suffix)
                plain[name] = (
                    weights if scales is None else _all_expanded(name, weights, scales, stored, dtype)
                )
            return plain

    @register_quantizer(METHOD)
    class Fp8Quantizer(FineGrainedFP8HfQuantizer):
        def __init__(self, quantization_config, **kwargs):
            super().__init__(quantization_config, **kwargs)
            scale = quantization_config.stored.scale_name
            self.serialized_names = {"weight": ["weight", scale, *OF_ACTIVATIONS]}

        def validate_environment(self, *args, **kwargs):
            """No GPU is needed."""

        def param_needs_quantization(self, model, param_name, **kwargs):
            return False

        def get_load_operations(self):
            return {"dequantize": Expand}

        def update_weight_conversions(self, weight_conversions, *model):  # none in transformers 5.17
            is_deepseek = self.quantization_config.stored.scale_name == "weight_scale_inv"
            owner = FineGrainedFP8HfQuantizer if is_deepseek else HfQuantizer
            return owner.update_weight_conversions(self, weight_conversions, *model)

        def _process_model_before_weight_loading(self, model, **kwargs):
            self._normalize_modules_to_not_convert(model)
            names = self.quantization_config.modules_to_not_convert
            kept = self.get_modules_to_not_convert(model, names, model._keep_in_fp32_modules)
            _replace(model, self.quantization_config.stored, kept)

        def _process_model_after_weight_loading(self, model, **kwargs):
            return model

    return Expand, Fp8Quantizer, Fp8Config


def _all_expanded(name: str, weights, scales, stored: StoredFp8, dtype: torch.dtype) -> list[torch.Tensor]:
    if len(weights) != len(scales):
        raise CheckpointError(f"{name}: {len(weights)} weights in fp8 have {len(scales)} scales.")
    return [_expanded(name, w, s, stored, dtype) for w, s in zip(weights, scales, strict=True)]


def _expanded(name: str, weight, scale, stored: StoredFp8, dtype: torch.dtype) -> torch.Tensor:
    if stored.experts is not None:  # of modules that do not call transformers' experts interface
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
    return expanded(weight, scale if stored.granularity == "block" else scale.reshape(-1), dtype)
