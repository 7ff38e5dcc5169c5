"""What a sentence-transformers directory says about turning hidden states into one vector.

    modules.json                       the chain: Transformer -> Pooling [-> Normalize]
    1_Pooling/config.json              the pooling
    sentence_bert_config.json          the longest text in tokens, and whether it is lower-cased; older directories
                                       name other models (sentence_roberta_config.json, ...)

A chain or a pooling that is not known here is an error as soon as its embeddings are asked for, not a guess.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pagebinder.config_checks import short_repr
from pagebinder.errors import CheckpointError
from pagebinder.frontend.model_kinds import SENTENCE_MODULES

POOLINGS = ("mean", "cls", "max", "lasttoken")
_OPTIONS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_LEGACY_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, kw_only=True)
class SentenceRecipe:
    """`problem`: why the directory's own recipe cannot be followed; then `pooling` means nothing."""

    pooling: str = "mean"
    normalize: bool = False
    max_tokens: int | None = None
    lower_case: bool = False
    problem: str | None = None


def sentence_recipe(path: Path | None) -> SentenceRecipe | None:
    """The recipe of a checkpoint directory, or None if it is not one of sentence-transformers.

    Raises:
        CheckpointError: a file of it is not valid JSON, is missing, or names no pooling as it should.
    """
    if path is None or not (path / SENTENCE_MODULES).exists():
        return None
    modules = _read(path / SENTENCE_MODULES, list)
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        return SentenceRecipe(problem=f"its modules are {' -> '.join(kinds)}")
    pooling = path / modules[1].get("path", "1_Pooling") / "config.json"
    options = next((_read(path / name, dict) for name in _OPTIONS if (path / name).exists()), {})
    modes = _modes(pooling, _read(pooling, dict))
    problem = None
    if len(modes) != 1 or modes[0] not in POOLINGS:
        problem = f"its pooling is {' + '.join(modes)}"
    elif _optional(path / "config_sentence_transformers.json").get("default_prompt_name"):
        problem = "it puts a prompt before every text (default_prompt_name)"
    return SentenceRecipe(
        pooling=modes[0],
        normalize=kinds[-1] == "Normalize",
        max_tokens=options.get("max_seq_length"),
        lower_case=bool(options.get("do_lower_case", False)),
        problem=problem,
    )


def _modes(file: Path, pooling: dict) -> list[str]:
    """The present key names the mode or modes; older files have a flag for each."""
    mode = pooling.get("pooling_mode")
    if mode is not None:
        modes = [mode] if isinstance(mode, str) else mode
        if not isinstance(modes, list) or not modes or not all(isinstance(m, str) for m in modes):
            raise CheckpointError(
                f"{file}: pooling_mode is a name, or a list of names, not {short_repr(mode)}."
            )
        return modes
    flags = {key: pooling[key] for key in _LEGACY_KEYS if key in pooling}
    for key, flag in flags.items():
        if not isinstance(flag, bool):
            raise CheckpointError(f"{file}: {key} is true or false, not {short_repr(flag)}.")
    return [name for key, name in _LEGACY_KEYS.items() if flags.get(key)] or ["mean"]


def _optional(file: Path) -> dict:
    return _read(file, dict) if file.exists() else {}


def _read(file: Path, kind: type):
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, kind):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not a {kind.__name__}.")
    return content
