"""How checkpoints name what transformers gives other names, or merges, as it loads them."""

from __future__ import annotations

import re

import torch

CANONICAL = {
    "gate_up_proj": ("gate_proj", "up_proj")
}  # of experts whose checkpoints have one tensor for all of them
PLAIN = re.compile(r"[\w.]+")  # a pattern that is a name


class CheckpointNames:
    """Of the checkpoints of a model on which its family's loader is applied."""

    def __init__(self, model: torch.nn.Module):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        kind = getattr(getattr(model, "config", None), "model_type", None)
        conversions = get_checkpoint_conversion_mapping(kind) or [] if kind else []
        self._merged: dict[str, list[str]] = {}  # end of a parameter's name -> those of its tensors
        self._renamed: list[tuple[str, str]] = []  # in the model, in the checkpoint
        for conversion in conversions:
            sources, targets = conversion.source_patterns, conversion.target_patterns
            if len(targets) != 1:
                continue
            if isinstance(conversion, WeightConverter):
                self._merged[targets[0]] = list(sources)
            elif len(sources) == 1 and PLAIN.fullmatch(sources[0]) and PLAIN.fullmatch(targets[0]):
                self._renamed.append((targets[0], sources[0]))

    def of_layer(self, path: str) -> str:
        for ours, theirs in self._renamed:
            path = path.replace(ours, theirs, 1)
        return path

    def of_experts(self, path: str, parameter: str) -> list[str]:
        """The layers whose weights a parameter of experts is merged from, "*" for the number of each."""
        whole = f"{path}.{parameter}"
        for end, sources in self._merged.items():
            if whole.endswith(end):
                base = whole.removesuffix(end)
                return [self.of_layer(base + source.removesuffix(".weight")) for source in sources]
        return [f"{path}.*.{name}" for name in CANONICAL.get(parameter, (parameter,))]
