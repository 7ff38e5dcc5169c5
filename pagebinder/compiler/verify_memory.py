"""Is there memory for one more copy of a model's weights?"""

from __future__ import annotations

import psutil
import torch

# A copy of the weights is made only if this much more than it is free.
MEMORY_MARGIN = 1.3


def room_for_copy(module: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Of its parameters in this dtype, on the device that they are on."""
    parameters = list(module.parameters())
    needed = sum(p.numel() for p in parameters) * dtype.itemsize * MEMORY_MARGIN
    device = parameters[0].device if parameters else torch.device("cpu")
    if device.type == "cuda":
        return needed < torch.cuda.mem_get_info(device)[0]
    return needed < psutil.virtual_memory().available
