"""Constants that a trace leaves without a value: the weight whose `.data` it is, or a refusal with its place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder import CaptureError
from pagebinder.frontend.capture import capture
from pagebinder.frontend.source import source_from_module

VOCAB_SIZE, WIDTH = 32, 8


class Data(nn.Module):
    """Reads a weight, or a value, behind the back of torch.export."""

    def __init__(self, of_weight: bool):
        super().__init__()
        self.linear, self.of_weight = nn.Linear(WIDTH, WIDTH), of_weight

    def forward(self, x):
        if self.of_weight:
            return x @ torch.mm(self.linear.weight.data, torch.eye(WIDTH))
        return x @ (2 * self.linear.weight).data


class Decoder(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(VOCAB_SIZE, WIDTH), body, nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, input_ids, position_ids):
        return self.head(self.body(self.embed(input_ids)))


def test_the_data_of_a_weight_is_the_weight():
    model, ids = Decoder(Data(of_weight=True)).eval(), torch.arange(5)
    gm, _ = capture(source_from_module(model))
    with torch.no_grad():
        torch.testing.assert_close(gm(ids, torch.arange(5)), model(ids[None], torch.arange(5)[None])[0])
    assert gm.body.linear.weight.data_ptr() == model.body.linear.weight.data_ptr()


def test_the_data_of_another_value_is_a_capture_error_with_its_place():
    with pytest.raises(
        CaptureError, match=r"read in body \(.*\) has lost its value in the trace: .*`\.data`"
    ):
        capture(source_from_module(Decoder(Data(of_weight=False))))


class Seeded(nn.Module):
    def forward(self, x):
        return x * torch.rand(WIDTH, generator=torch.Generator().manual_seed(0))


def test_an_object_that_a_graph_cannot_hold_is_refused():
    with pytest.raises(CaptureError, match="A Generator is used"):
        capture(source_from_module(Decoder(Seeded()).eval()))
