"""A step's metadata at fixed addresses: one buffer on the device for all buckets, filled by one copy.

    static   | input_ids | positions | logits_rows | query_start_loc | seq_lens | slots ... | tables ... |   decode 64
             | input_ids |pos|...|                                                                            decode 8

Each bucket lays out its fields from the buffer's start, every one at a multiple of 64 bytes, so the bytes of a
bucket are one run. What a step leaves of its bucket is padding:

    tokens    id 0 at position 0, slot -1: nothing is written        requests   no token, length 0, null blocks
    logits    rows of token 0 again
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagebinder.runtime.graphs.backend import GraphBackend, Staging
from pagebinder.runtime.graphs.buckets import Bucket
from pagebinder.runtime.kv import KVCacheGroup
from pagebinder.runtime.step_plan import NOWHERE, TORCH_DTYPES, Place, place_fields, slot_groups, step_fields

NUM_STAGINGS = 2  # the host fills one while the copy from the other may still run


class StaticInputs:
    """Static metadata of all buckets. `widths`: columns of each group's block table."""

    def __init__(
        self, backend: GraphBackend, groups: Sequence[KVCacheGroup], widths: Sequence[int], buckets: Sequence[Bucket]
    ) -> None:  # fmt: skip
        self.groups, self.widths = tuple(groups), tuple(widths)
        self._backend = backend
        self._places = {bucket: self._place(bucket) for bucket in buckets}
        self.num_bytes = max(num_bytes for _, num_bytes in self._places.values())
        self.memory = backend.static(self.num_bytes)
        self._stagings = [backend.staging(self.num_bytes) for _ in range(NUM_STAGINGS)]
        self._arrays: dict[tuple[int, Bucket], dict[str, np.ndarray]] = {}

    def _place(self, bucket: Bucket) -> tuple[list[Place], int]:
        fields = step_fields(
            slot_groups(self.groups), bucket.num_tokens, bucket.num_reqs, bucket.num_logits, self.widths
        )
        return place_fields(fields)

    def tensors(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """The bucket's static views by name of the graph's input."""
        return {
            p.name: self.memory[p.start : p.start + p.num_bytes].view(TORCH_DTYPES[p.dtype]).view(p.shape)
            for p in self._places[bucket][0]
        }

    def begin(self, bucket: Bucket) -> tuple[Staging, dict[str, np.ndarray]]:
        """Host arrays of the bucket's fields to fill, when the copy that read them last is done."""
        self._stagings.append(self._stagings.pop(0))
        staging = self._stagings[-1]
        staging.wait()
        key = (id(staging), bucket)
        if key not in self._arrays:
            self._arrays[key] = {
                p.name: staging.array[p.start : p.start + p.num_bytes].view(p.dtype).reshape(p.shape)
                for p in self._places[bucket][0]
            }
        return staging, self._arrays[key]

    def upload(self, bucket: Bucket, staging: Staging) -> None:
        """One copy to the device, in the order of its work."""
        self._backend.upload(staging, self.memory, self._places[bucket][1])

    def reset(self, bucket: Bucket) -> None:
        """Nothing but padding: what a capture runs on, so that it writes to no cache."""
        staging, arrays = self.begin(bucket)
        pad(arrays, 0, 0, 0)
        self.upload(bucket, staging)


def real_part(
    arrays: dict[str, np.ndarray], num_tokens: int, num_reqs: int, num_logits: int
) -> dict[str, np.ndarray]:
    """The parts of a bucket's arrays that a smaller step fills."""
    sizes = {"input_ids": num_tokens, "positions": num_tokens, "logits_rows": num_logits}
    sizes |= {"query_start_loc": num_reqs + 1, "seq_lens": num_reqs}
    return {
        name: array[: sizes[name] if name in sizes else num_tokens if name.startswith("slot") else num_reqs]
        for name, array in arrays.items()
    }


def pad(arrays: dict[str, np.ndarray], num_tokens: int, num_reqs: int, num_logits: int) -> None:
    """Fill what lies behind the real part."""
    for name, array in arrays.items():
        if name == "query_start_loc":
            array[num_reqs + 1 :] = num_tokens
            array[0] = 0
        elif name.startswith("slot_mapping"):
            array[num_tokens:] = NOWHERE
        elif name in ("input_ids", "positions"):
            array[num_tokens:] = 0
        elif name == "logits_rows":
            array[num_logits:] = 0
        else:  # seq_lens, block tables
            array[num_reqs:] = 0
