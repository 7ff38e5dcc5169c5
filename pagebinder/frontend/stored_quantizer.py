"""What transformers' loader calls for checkpoints of codes: a quantizer, as it names what takes part in loading.

It is found by the `quant_method` of the config, once this file is imported.
"""

from __future__ import annotations

from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from pagebinder.errors import CheckpointError
from pagebinder.frontend import stored_merging
from pagebinder.frontend.bnb_weights import LoadedTables, StoredTables
from pagebinder.frontend.fp8_format import UNREAD, StoredFp8
from pagebinder.frontend.stored_format import Stored
from pagebinder.frontend.stored_loading import METHOD, failures, replace
from pagebinder.frontend.stored_parts import StoredParts


@register_quantization_config(METHOD)
class StoredConfig(QuantizationConfigMixin):
    dequantize = False

    def __init__(self, stored: Stored, quant_method: str = METHOD):
        self.quant_method, self.stored = quant_method, stored
        self.modules_to_not_convert = None if stored.kept is None else list(stored.kept)


class Expand(ConversionOps):
    """Weights and their scales -> plain weights, or bytes of codes, before experts are merged to one tensor."""

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
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        owner = model.get_submodule(full_layer_name.rpartition(".")[0])
        if isinstance(stored, StoredTables):
            shape = owner.replaced.weight.shape if isinstance(owner, LoadedTables) else None
            return stored_merging.of_tables(input_dict, stored, dtype, shape, full_layer_name)
        if isinstance(stored, StoredParts):
            return stored_merging.of_parts(input_dict, stored, dtype, owner, full_layer_name)
        return stored_merging.of_codes(input_dict, stored, dtype, owner)


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
        stored = self.quantization_config.stored
        self._normalize_modules_to_not_convert(
            model
        )  # to the model's names, but not all expressions stay what they are
        names = self.quantization_config.modules_to_not_convert
        kept = self.get_modules_to_not_convert(model, names, model._keep_in_fp32_modules)
        replace(model, stored, [*kept, *(stored.kept or ())])
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, *(rf"\.{name}$" for name in UNREAD)}

    def _process_model_after_weight_loading(self, model, **kwargs):
        return model


def _with_words(converter, expand):
    """A converter of transformers 5.17 that merges experts, with what lies beside words, which are expanded first."""
    sources = list(converter.source_patterns)
    if not isinstance(converter, WeightConverter) or not all(name.endswith(".weight") for name in sources):
        return converter
    names = expand.hf_quantizer.serialized_names["weight"]
    all_sources = [f"{source.removesuffix('weight')}{name}$" for source in sources for name in names]
    return WeightConverter(all_sources, list(converter.target_patterns), [expand, *converter.operations])
