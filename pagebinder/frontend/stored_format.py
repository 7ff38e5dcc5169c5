"""How a checkpoint keeps its weights: `quantization_config` of config.json -> one of `Stored`, or None: plain.

fp8_format.py, int_format.py and bnb_weights.py read the methods; any other is refused by name. A checkpoint may have
several formats for its layers: stored_parts.py. Older checkpoints of ModelOpt say it in a file of their own,
hf_quant_config.json. A cache of keys and values that is said to be quantised is not: it has the dtype that
`compile_model` is asked for.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from pagebinder.errors import CheckpointError
from pagebinder.frontend import fp8_format, int_format
from pagebinder.frontend.bnb_weights import StoredTables, tables
from pagebinder.frontend.fp8_format import FP8_READERS, StoredFp8
from pagebinder.frontend.int_format import INT_READERS, StoredInts
from pagebinder.frontend.not_served import NotServedError, kept_by_wildcards, names_of, require
from pagebinder.frontend.stored_parts import ALL, EXPRESSION, StoredParts, compiled

Stored = StoredFp8 | StoredInts | StoredTables | StoredParts
MIXED = "MIXED_PRECISION"
SERVED = (
    "'fp8' (e4m3 in blocks of 128 x 128 or 1 x 32 or whole tensors; experts in fp8 or fp4), 'mxfp8' (1 x 32), "
    "'mxfp4', 'fbgemm_fp8', 'compressed-tensors' (e4m3 by tensor, channel or block of 128 x 128; integers of 3, "
    "4 and 8 bits; nvfp4, mxfp4), 'modelopt' (FP8 by tensor, channel or block, MXFP8, NVFP4, MXFP4), 'gptq' "
    "(2, 3, 4 and 8 bits), 'awq' (gemm, gemv), 'auto-round' and 'bitsandbytes' (int8, nf4, fp4)"
)


def stored_weights(config: dict[str, Any], where: str) -> Stored | None:
    """What a config.json says; None: its weights are plain.

    Args:
        config: the options of config.json. where: its path, for messages.
    Raises:
        CheckpointError: a method, or a variant of one, that is not served; names it.
    """
    of_text = config.get("text_config")
    of_text = of_text if isinstance(of_text, dict) else {}
    options = config.get("quantization_config") or of_text.get("quantization_config")
    if not options:
        return None
    if not isinstance(options, dict) or not isinstance(options.get("quant_method"), str):
        raise CheckpointError(f"{where}: its quantization_config has no quant_method that is a name.")
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
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{where}: its quantization_config cannot be read: {error!r}") from error
    except NotServedError as reason:
        raise CheckpointError(
            f"{where}: quant_method {method!r} with {reason} is not served; served are {SERVED}."
        ) from reason


def with_modelopt_options(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The options of a config.json, and as its quantization_config what a hf_quant_config.json beside it says.

    Raises:
        CheckpointError: that file cannot be read.
    """
    file = path / "hf_quant_config.json"
    if config.get("quantization_config") or not file.exists():
        return config
    try:
        said = json.loads(file.read_text())
        options = dict(said.get("quantization") or said)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return config | {"quantization_config": {"quant_method": "modelopt"} | options}


def _compressed_tensors(options: dict) -> Stored:
    groups = list((options.get("config_groups") or {}).values())
    require(
        bool(groups) and all(group.get("weights") for group in groups),
        f"{len(groups)} config_groups of weights",
    )
    require(not options.get("sparsity_config"), "a sparsity_config")
    require(not options.get("transform_config"), "a transform_config")
    kept = tuple(map(_pattern, names_of(options.get("ignore"), "ignore")))
    parts, targets = [], []
    for group in groups:
        weights, form = group["weights"], group.get("format") or options.get("format")
        is_fp8 = weights.get("type") == "float" and weights.get("num_bits") == 8
        parts.append(
            fp8_format.compressed(weights, kept) if is_fp8 else int_format.compressed(form, weights, kept)
        )
        targets.append(tuple(names_of(group.get("targets") or ALL, "targets")))
    return _of_parts("compressed-tensors", parts, targets, kept)


def _of_parts(method: str, parts: list, targets: list[tuple[str, ...]], kept: tuple[str, ...]) -> Stored:
    """Groups that keep weights alike, and differ in activations only, are one part."""
    for name in itertools.chain.from_iterable(targets):
        if name.startswith(EXPRESSION):
            compiled(name)  # now, while the config is read
    merged: list[tuple[Any, tuple[str, ...]]] = []
    for part, names in zip(parts, targets):
        same = next((i for i, (other, _) in enumerate(merged) if other == part), None)
        if same is None:
            merged.append((part, names))
        else:
            merged[same] = part, merged[same][1] + names
    if len(merged) == 1 and merged[0][1] == (ALL,):
        return merged[0][0]
    parts, targets = zip(*merged)
    return StoredParts(method=method, parts=parts, targets=targets, kept=kept)


def _modelopt(options: dict) -> Stored | None:
    if options.get("quant_algo") is None and (
        options.get("kv_cache_scheme") or options.get("kv_cache_quant_algo")
    ):
        return None  # of keys and values alone
    kept = kept_by_wildcards(options)
    if str(options.get("quant_algo")).upper() != MIXED:
        return _modelopt_part(options, kept)
    layers: dict[tuple, list[str]] = {}
    for name, said in (options.get("quantized_layers") or {}).items():
        layers.setdefault(tuple(sorted(said.items())), []).append(name)
    require(bool(layers), f"quant_algo {MIXED} without quantized_layers")
    parts = [_modelopt_part(dict(said), kept) for said in layers]
    return _of_parts("modelopt", parts, list(map(tuple, layers.values())), kept)


def _modelopt_part(said: dict, kept: tuple[str, ...]) -> StoredFp8 | StoredInts:
    algorithm = str(said.get("quant_algo") or "").upper()
    require(algorithm in _MODELOPT, f"quant_algo {said.get('quant_algo')!r}")
    return _MODELOPT[algorithm](said, kept)


def _bitsandbytes(options: dict) -> Stored:
    return int_format.bnb_int8(options) if options.get("load_in_8bit") else tables(options)


def _pattern(name: str) -> str:
    """compressed-tensors marks regular expressions."""
    if not name.startswith(EXPRESSION):
        return re.escape(name)
    return compiled(name).pattern


_MODELOPT = dict.fromkeys(fp8_format.MODELOPT_ALGORITHMS, fp8_format.modelopt) | dict.fromkeys(
    int_format.MODELOPT_ALGORITHMS, int_format.modelopt
)
_READERS = {
    **FP8_READERS,
    **INT_READERS,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "bitsandbytes": _bitsandbytes,
}
