"""How a checkpoint keeps its weights: `quantization_config` of config.json -> one of `Stored`, or None: plain.

fp8_format.py, int_format.py and bnb_weights.py read the methods; any other is refused by name.
"""

from __future__ import annotations

from typing import Any

from pagebinder.errors import CheckpointError
from pagebinder.frontend import fp8_format, int_format
from pagebinder.frontend.bnb_weights import StoredTables, tables
from pagebinder.frontend.fp8_format import FP8_READERS, StoredFp8
from pagebinder.frontend.int_format import INT_READERS, StoredInts
from pagebinder.frontend.not_served import NotServedError, require

Stored = StoredFp8 | StoredInts | StoredTables
SERVED = (
    "'fp8' (e4m3 in blocks of 128 x 128 or 1 x 32 or whole tensors; experts in fp8 or fp4), 'mxfp8' (1 x 32), "
    "'mxfp4', 'fbgemm_fp8', 'compressed-tensors' (e4m3 by tensor, channel or block of 128 x 128; integers of 3, "
    "4 and 8 bits), 'gptq' (2, 3, 4 and 8 bits), 'awq' (gemm, gemv), 'auto-round' and 'bitsandbytes' (int8, nf4, fp4)"
)


def stored_weights(config: dict[str, Any], where: str) -> Stored | None:
    """What a config.json says; None: its weights are plain.

    Args:
        config: the options of config.json. where: its path, for messages.
    Raises:
        CheckpointError: a method, or a variant of one, that is not served; names it.
    """
    of_text = config.get("text_config") or {}
    options = config.get("quantization_config") or of_text.get("quantization_config")
    if not options:
        return None
    # DeepSeek-V4 says it beside its quantization_config
    of_experts = config.get("expert_dtype") or of_text.get("expert_dtype")
    options = ({"expert_dtype": of_experts} if of_experts else {}) | options
    method = options.get("quant_method")
    reader = _READERS.get(method)
    if reader is None:
        raise CheckpointError(
            f"{where}: weights are quantised by {method!r}, which is not served; served are {SERVED}. Or give the "
            "plain checkpoint and use CompileConfig(quantization=...)."
        )
    try:
        return reader(options)
    except NotServedError as reason:
        raise CheckpointError(
            f"{where}: quant_method {method!r} with {reason} is not served; served are {SERVED}."
        ) from reason


def _compressed_tensors(options: dict) -> Stored:
    groups = list((options.get("config_groups") or {}).values())
    require(
        bool(groups) and all(group.get("weights") for group in groups),
        f"{len(groups)} config_groups of weights",
    )
    require(not options.get("sparsity_config"), "a sparsity_config")
    require(not options.get("transform_config"), "a transform_config")
    require(not options.get("kv_cache_scheme"), "a kv_cache_scheme")
    kept = tuple(map(_pattern, options.get("ignore") or ()))
    are_ints = all(group["weights"].get("type", "int") == "int" for group in groups)
    return (int_format if are_ints else fp8_format).compressed(options, groups, kept)


def _bitsandbytes(options: dict) -> Stored:
    return int_format.bnb_int8(options) if options.get("load_in_8bit") else tables(options)


def _pattern(name: str) -> str:
    """compressed-tensors marks regular expressions; names are expressions for themselves."""
    return name.removeprefix("re:")


_READERS = {
    **FP8_READERS,
    **INT_READERS,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _bitsandbytes,
}
