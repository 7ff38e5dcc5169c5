"""Do the layers of a transformers model stand where their config says of what kind they are?

transformers makes a mask for each kind of layer and gives it by the place in the list: `layer_types[place]`. Our hook
sees no mask, and takes windows and chunks from the attention module, which has them from `layer_types[layer_idx]` of
the config that it was made with. So where layers were dropped, repeated or put in another order, both must say the
same.
"""

from __future__ import annotations

import torch

from pagebinder.errors import CaptureError


def refuse_misplaced(model: torch.nn.Module) -> None:
    """Raises CaptureError: at some place stands a layer of another kind than the config says of that place."""
    for path, layers in model.named_modules():
        if isinstance(layers, torch.nn.ModuleList):
            for place, layer in enumerate(layers):
                if reason := _reason_against(layer, place, len(layers)):
                    raise CaptureError(f"{path}.{place} {reason}")


def _reason_against(layer: torch.nn.Module, place: int, num_layers: int) -> str | None:
    numbered = (m for m in layer.modules() if type(getattr(m, "layer_idx", None)) is int)
    attention = next((m for m in numbered if hasattr(m, "is_causal")), None)  # what calls the hook
    config = getattr(attention, "config", None)
    types = getattr(config, "layer_types", None)
    if (
        types is None
        or attention.layer_idx == place
        or getattr(config, "num_hidden_layers", None) != num_layers
    ):
        return None
    here, made_as = (types[i] if i < len(types) else "of no type" for i in (place, attention.layer_idx))
    if here == made_as:
        return None
    return (
        f"was made as layer {attention.layer_idx} (layer_idx), {made_as!r} by the config's layer_types; "
        f"transformers gives it the mask of its place, {here!r}. Give the config the layer_types of the layers that "
        "are there, and each attention module the layer_idx of its place."
    )
