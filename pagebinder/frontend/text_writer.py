"""Models that are only holders of parts, of which one writes text: it is what is served.

    Qwen2.5-Omni, Qwen3-Omni        thinker      text from text, images, video and audio: a decoder like others
                                    talker       codes of speech from what the thinker computed
                                    token2wav, code2wav

The holder has no forward. A checkpoint names the thinker's tensors "thinker.*", and transformers' class for the
thinker reads them without the other parts, which are never built.
"""

from __future__ import annotations

import torch

WRITER = "thinker"
# For `from_pretrained`: the writer's tensors under the names of its own class.
KEY_MAPPING = {rf"^{WRITER}\.": ""}


def writer_of(module: torch.nn.Module) -> torch.nn.Module:
    """The part of a transformers model that writes text: the model itself, unless it is a holder of parts."""
    if type(module).forward is not torch.nn.Module.forward:
        return module
    part = getattr(module, WRITER, None)
    return part if getattr(part, "config", None) is not None else module


def writer_config(config):
    """The same for its config."""
    return getattr(config, f"{WRITER}_config", None) or config


def other_parts(config) -> tuple[str, ...]:
    """Of a holder's config, the configs of the parts that are not served; of any other config nothing."""
    if writer_config(config) is config:
        return ()
    parts = (name for name in getattr(config, "sub_configs", ()) if name != f"{WRITER}_config")
    return tuple(name for name in parts if getattr(config, name, None) is not None)
