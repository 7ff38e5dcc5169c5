"""What a checkpoint holds, beside what its model has: tensors that are missing, left over, or of another shape.

A tensor that nothing reads may be missing: of a multimodal model whose text is served, those of its other parts.
Which these are is known once the graph is there (`check_absent`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import GraphModule

from pagebinder.errors import CheckpointError
from pagebinder.frontend.model_kinds import is_encoder_only, parts_beside_text

SHOWN = 3
WHOLE_NUMBERS = ("I", "U")  # how safetensors' names of dtypes begin; masks and positions are kept so, too


@dataclass(frozen=True)
class CheckpointTensors:
    """`absent`: parameters that the checkpoint lacks, by name. `left_over`: its tensors that the model has not."""

    absent: frozenset[str] = frozenset()
    left_over: tuple[str, ...] = ()

    def note(self) -> str | None:
        """What the report says of them."""
        if not self.left_over:
            return None
        return (
            f"{len(self.left_over)} tensors of the checkpoint are no part of the model that its config describes, "
            f"for example {', '.join(self.left_over[:SHOWN])}."
        )


def compared(
    module: torch.nn.Module, info: Mapping[str, Collection], path: Path, other_parts: Collection[str] = ()
) -> CheckpointTensors:
    """From what transformers says of a checkpoint that it has loaded.

    Args:
        other_parts: configs of parts that the checkpoint holds beside the model: their tensors are not left over.
    Raises:
        CheckpointError: a tensor has another shape than the model's, or is missing where all are read.
    """
    if wrong := sorted(map(tuple, info.get("mismatched_keys", ()))):
        name, found, wanted = wrong[0]
        raise CheckpointError(
            f"{path}: {name} has the shape {tuple(found)}, and the model of config.json {tuple(wanted)} "
            f"({len(wrong)} such tensors): the weights and the config do not belong together."
        )
    missing = sorted(str(key) for key in info.get("missing_keys", ()) if not _is_unused(module, str(key)))
    if missing and not parts_beside_text(module.config):
        _raise_missing(path, missing)
    of_others = tuple(f"{part.removesuffix('_config')}." for part in other_parts)
    left_over = (str(key) for key in info.get("unexpected_keys", ()))
    return CheckpointTensors(
        frozenset(missing), tuple(sorted(key for key in left_over if not key.startswith(of_others)))
    )


def refuse_unsaid_words(unexpected: Collection[str], path: Path) -> None:
    """Of a checkpoint whose config says nothing of quantisation. Raises CheckpointError: it keeps words of codes."""
    if name := next(
        (key for key in map(str, unexpected) if key.endswith((".qweight", ".weight_packed"))), None
    ):
        raise CheckpointError(
            f"{path} keeps codes of weights ({name}), but its config.json has no quantization_config that says how "
            "to read them; where a tool has written a quantize_config.json, that belongs there, with a quant_method."
        )


def refuse_unsaid_codes(module: torch.nn.Module, tensors: CheckpointTensors, path: Path) -> None:
    """Of a checkpoint whose config says nothing of quantisation: transformers takes codes for plain weights.

    Raises:
        CheckpointError: it keeps a weight in whole numbers, or in float8 with a scale that nothing reads.
    """
    from safetensors import safe_open

    weights = {name for name, parameter in module.named_parameters() if parameter.is_floating_point()}
    scales = [name for name in tensors.left_over if "scale" in name.rpartition(".")[2]]
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                dtype = opened.get_slice(name).get_dtype()
                is_whole = dtype.startswith(WHOLE_NUMBERS) and name in weights
                if not is_whole and not dtype.startswith("F8"):
                    continue
                owner = name.rpartition(".")[0]
                unread = scales or [other for other in tensors.left_over if other.rpartition(".")[0] == owner]
                if is_whole or unread:
                    raise CheckpointError(
                        f"{path} keeps codes of weights ({name} in {dtype}"
                        + (f", and {unread[0]}, which nothing reads" if unread else "")
                        + "), but its config.json has no quantization_config that says how to read them."
                    )


def check_absent(absent: Collection[str], gm: GraphModule, path: Path | None) -> None:
    """Raises CheckpointError: the graph reads a tensor that the checkpoint lacks."""
    read = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    if missing := sorted(read & set(absent)):
        _raise_missing(path, missing)


def _raise_missing(path: Path | None, missing: list[str]) -> None:
    raise CheckpointError(
        f"{path} lacks {counted(missing)} that its config asks for, for example {missing[:SHOWN]}."
    )


def counted(tensors: Collection[str]) -> str:
    return "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"


def _is_unused(module: torch.nn.Module, key: str) -> bool:
    """A bare encoder's pooler works on the hidden states that we return; many checkpoints come without one."""
    return key.split(".")[0] == "pooler" and is_encoder_only(module)
