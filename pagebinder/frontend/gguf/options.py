"""What a GGUF file says of its model, by name, and what has been read of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pagebinder.errors import CheckpointError
from pagebinder.frontend.gguf.file import GgufFile

FREQUENCIES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
MOST = 1 << 27  # of layers, tokens, channels
# What says nothing of how a model computes.
SILENT = frozenset({"vocab_size", "rope.scaling.finetuned", "attention.causal"})


class Options:
    """The options of a file's architecture; what is read is remembered."""

    def __init__(self, file: GgufFile):
        self.file, self._prefix, self._read = file, f"{file.architecture}.", set()

    def get(self, name: str, default: Any = None) -> Any:
        """A list of equal values, one for each layer, is that value."""
        self._read.add(name)
        value = self.file.options.get(self._prefix + name, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            if len(value) != self.file.options.get(f"{self._prefix}block_count"):
                self.refuse(name)
            return value[0]
        if isinstance(value, list):
            raise CheckpointError(
                f"{self.file.path}: {self._prefix}{name} differs from layer to layer, which is not served."
            )
        return value

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise CheckpointError(f"{self.file.path} lacks {self._prefix}{name}.")
        return value

    def number(self, name: str, default: float | None = None) -> Any:
        """One that is positive, and finite. Raises CheckpointError: it is missing, or something else."""
        value = self[name] if default is None else self.get(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            self.refuse(name)
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """One that is whole, too, and no more than a model may have of anything."""
        value = self.number(name, default)
        if not isinstance(value, int) or value > MOST:
            self.refuse(name)
        return value

    @property
    def num_layers(self) -> int:
        """Without those behind them that guess tokens (multi-token prediction)."""
        layers, guessing = self.count("block_count"), self.get("nextn_predict_layers", 0)
        if type(guessing) is not int or not 0 <= guessing < layers:
            self.refuse("nextn_predict_layers")
        return layers - guessing

    def numbers(self, name: str) -> list[int]:
        """Several whole ones. Raises CheckpointError: they are missing, or something else."""
        self._read.add(name)
        value = self.file.options.get(self._prefix + name)
        if not isinstance(value, list) or not all(
            isinstance(each, int) and 0 <= each <= MOST for each in value
        ):
            self.refuse(name)
        return value

    def head_width(self) -> int:
        equal = max(self.count("embedding_length") // self.count("attention.head_count"), 1)
        return self.count("attention.key_length", equal)

    def of_layers(self, name: str) -> list | None:
        """A list with a value for each layer that is served; None: it is something else."""
        value = self.file.options.get(self._prefix + name)
        if not isinstance(value, list):
            return None
        self._read.add(name)
        if len(value) not in (self["block_count"], self.num_layers):
            self.refuse(name)
        return value[: self.num_layers]

    def ignore(self, *names: str) -> None:
        """What a file may say and llama.cpp does not use for its architecture."""
        self._read.update(names)

    def of_some_layers(self, name: str) -> tuple[int, list[bool]]:
        """A count that some layers have, and others have 0 of: (the count, which layers have it).

        Raises:
            CheckpointError: no layer has any, or they have different ones.
        """
        values = self.of_layers(name)
        if values is None:
            values = [self.count(name)] * self.num_layers
        counts = {value for value in values if value != 0}
        if len(counts) != 1 or not all(type(count) is int and 0 < count <= MOST for count in counts):
            self.refuse(name)
        return counts.pop(), [value != 0 for value in values]

    def factors(self, name: str, count: int) -> np.ndarray:
        """A tensor of factors of RoPE's frequencies, float32 [count].

        Raises:
            CheckpointError: there are others.
        """
        tensor = self.file.tensors[name]
        values = tensor.data.astype(np.float32) if tensor.kind in ("F32", "F16") else np.zeros(0)
        if values.shape != (count,) or not (np.isfinite(values) & (values > 0)).all():
            raise CheckpointError(
                f"{self.file.path}: {name} {list(tensor.shape)} in {tensor.kind} is not {count} positive factors."
            )
        return values

    def refuse(self, name: str) -> None:
        value = self.file.options.get(self._prefix + name)
        raise CheckpointError(f"{self.file.path}: {self._prefix}{name} = {value!r} is not served.")

    def require(self, *tensors: str) -> None:
        """Raises CheckpointError: one is missing."""
        if missing := [name for name in tensors if name not in self.file.tensors]:
            raise CheckpointError(f"{self.file.path} lacks {missing[0]}.")

    def check_all_read(self) -> None:
        """Raises CheckpointError: the file says something that nothing has read."""
        said = (
            name.removeprefix(self._prefix) for name in self.file.options if name.startswith(self._prefix)
        )
        if unread := [name for name in said if name not in self._read and name not in SILENT]:
            self.refuse(unread[0])

    def has(self, *tensors: str) -> bool:
        return any(name in self.file.tensors for name in tensors)

    def layers_with(self, part: str) -> list[int]:
        """Layers that have a tensor of that name."""
        return [layer for layer in range(self.num_layers) if self.has(f"blk.{layer}.{part}")]


def rope_of(options: Options, head: int, turns_parts: bool = False) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": options.number("rope.freq_base", 10_000.0)}
    if (turned := options.count("rope.dimension_count", head)) != head:
        if not turns_parts or turned > head or turned % 2:
            options.refuse("rope.dimension_count")
        rope["partial_rotary_factor"] = turned / head
    kind = options.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": options.number("rope.scaling.factor")}
    elif kind not in ("none", "longrope"):
        options.refuse("rope.scaling.type")
    elif kind == "none" and options.get("rope.scaling.factor", 1) != 1:
        options.refuse("rope.scaling.factor")
    original = options.count("rope.scaling.original_context_length", options.count("context_length"))
    if kind == "yarn":
        rope["original_max_position_embeddings"] = original
        for name, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if options.get(f"rope.scaling.{name}") is not None:
                rope[ours] = options.number(f"rope.scaling.{name}")
    if options.has(*FREQUENCIES[1:]):
        options.require(*FREQUENCIES[1:])
        if kind not in ("none", "longrope"):
            options.refuse("rope.scaling.type")
        factors = (options.factors(name, turned // 2).tolist() for name in FREQUENCIES[1:])
        rope |= dict(zip(("long_factor", "short_factor"), factors))
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        rope["attention_factor"] = options.number("rope.scaling.attn_factor", 1.0)
    elif kind == "longrope":
        options.refuse("rope.scaling.type")
    return rope


def heads_of_layers(options: Options) -> tuple[int, list[bool]]:
    """Layers without attention have no heads of keys and values: (how many the others have, which have some)."""
    heads, has_attention = options.of_some_layers("attention.head_count_kv")
    if heads > options.count("attention.head_count"):
        options.refuse("attention.head_count_kv")
    return heads, has_attention


def ignore_images(options: Options) -> None:
    """Of a model that sees images, what text has no use for: its positions are the same along all axes.

    Raises:
        CheckpointError: some frequencies belong to another axis, or to none.
    """
    sections = options.numbers("rope.dimension_sections")
    if 2 * sum(sections[:3]) != options.head_width() or any(sections[3:]):
        options.refuse("rope.dimension_sections")
    options.ignore("n_deepstack_layers")


def biases(options: Options) -> dict[str, Any]:
    return {
        "attention_bias": options.has("blk.0.attn_q.bias"),
        "mlp_bias": options.has("blk.0.ffn_up.bias"),
    }


def counts(options: Options) -> tuple[int, int]:
    """Of experts, and of those that a token goes to."""
    count, used = options.count("expert_count"), options.count("expert_used_count")
    if used > count:
        options.refuse("expert_used_count")
    return count, used


def by_group(options: Options, name: str, groups: Sequence[str]) -> dict[str, int]:
    """A count that layers of a group have alike; `groups` has that of each layer. Raises CheckpointError: not so."""
    values = options.of_layers(name)
    if values is None:
        return dict.fromkeys(groups, options.count(name))
    found = dict(zip(groups, values))
    known = all(type(value) is int and 0 < value <= MOST for value in found.values())
    if not known or any(found[group] != value for group, value in zip(groups, values)):
        options.refuse(name)
    return found


def alternating(options: Options, period: int) -> list[str]:
    """Every `period`th layer sees everything."""
    windows = options.of_layers("attention.sliding_window_pattern")
    if windows is None:
        period = options.count("attention.sliding_window_pattern", period)
        windows = [(layer + 1) % period for layer in range(options.num_layers)]
    return ["sliding_attention" if has_window else "full_attention" for has_window in windows]
