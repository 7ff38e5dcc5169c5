"""The encoder's part of a step: it runs for requests whose cross-attention blocks are still to be written.

    row            0      1      2      3            rows 1 and 3 are new; 3's encoder prompt was cached
    encoder        -     |====|  -      -            one request at a time: an encoder has no mask between requests
    encoder_states       [E, C]                      what the step's graph makes keys and values of, and writes

Equal prompts of one step are encoded once. A step in which no encoder runs has one row, which is written nowhere
(slot -1), so that the graph's sizes are never 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagebinder.runtime.engine_setup import EncoderModel
from pagebinder.runtime.kv import KVCacheManager
from pagebinder.runtime.request import Request
from pagebinder.runtime.scheduler_output import SchedulerOutput


class EncoderStage:
    """Runs a model's encoder. `num_runs`, `num_tokens`: how often, and over how many tokens in all."""

    def __init__(self, model: EncoderModel, kv: KVCacheManager, device: torch.device) -> None:
        self.model = model
        self.kv = kv
        self.device = device
        self.num_runs = 0
        self.num_tokens = 0
        self._nothing = torch.zeros(1, model.width, dtype=model.dtype, device=device)

    def rows(self, output: SchedulerOutput) -> list[int]:
        """Rows of a step that was just scheduled whose encoder must run, in ascending order."""
        row_of = self.kv.rows.row_of
        rows = (row_of[request_id] for request_id in self.kv.awaiting_encoder)
        return sorted(row for row in rows if output.counts[row])

    def run(self, requests: Sequence[Request]) -> torch.Tensor:
        """Encoder states [E, C], one request after the other; E = 1 if there are no requests."""
        done: dict[tuple[int, ...], torch.Tensor] = {}
        for request in requests:
            if request.encoder_token_ids not in done:
                done[request.encoder_token_ids] = self._encode(request.encoder_token_ids)
        if len(requests) <= 1:
            return next(iter(done.values()), self._nothing)
        return torch.cat([done[request.encoder_token_ids] for request in requests])

    def _encode(self, token_ids: Sequence[int]) -> torch.Tensor:
        self.num_runs += 1
        self.num_tokens += len(token_ids)
        inputs = {
            "input_ids": torch.tensor(token_ids, dtype=torch.int64, device=self.device),
            "positions": torch.arange(len(token_ids), device=self.device),
        }
        return self.model.executable.run(inputs)
