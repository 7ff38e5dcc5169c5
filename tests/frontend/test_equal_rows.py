"""Rows of a value that are the same are one; what differs is left as it is."""

from __future__ import annotations

import pytest
import torch

from pagebinder.graph_tools import aten
from tests.graphs import Embedded, captured_model, count
from tests.zoo.architectures import architectures
from tests.zoo.tiny_configs import tiny_model

SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default, aten.copy.default)


def angles(positions, width):
    return positions[..., None].float() * torch.arange(1.0, width + 1)


def equal_rows(x, positions):
    rows = angles(positions.expand(3, -1, -1), x.shape[-1]).cos()
    rows[0][..., 1::3] = rows[1][..., 1::3]
    rows[0][..., 2:9:3] = rows[2][..., 2:9:3]
    return x * rows[0]


def by_a_product(x, positions):
    """As Qwen2-VL writes it: a batch of products along the first dimension."""
    frequencies = torch.arange(1.0, x.shape[-1] + 1)[None, None, :, None].expand(3, 1, -1, 1)
    at = positions.expand(3, -1, -1)[:, :, None].float()
    rows = (frequencies @ at).transpose(2, 3).sin()
    rows[0][..., 1::3] = rows[1][..., 1::3]
    return x * rows[0]


def by_sections(x, positions):
    """As Qwen2-VL takes a section of each row."""
    rows = angles(positions.expand(3, -1, -1), x.shape[-1]).cos()
    joined = torch.cat([part[i % 3] for i, part in enumerate(rows.split([4, 6, 2, 4], dim=-1))], dim=-1)
    return x * joined.unsqueeze(1).squeeze(1)


def other_order(x, positions):
    rows = angles(positions.expand(3, -1, -1), x.shape[-1]).cos()
    return x * torch.cat([part[0] for part in rows.split([8, 8], dim=-1)][::-1], dim=-1)


def other_rows(x, positions):
    rows = angles(torch.stack([positions, positions + 1, positions]), x.shape[-1]).cos()
    rows[0][..., 1::3] = rows[1][..., 1::3]
    return x * rows[0]


def another_place(x, positions):
    rows = angles(positions.expand(3, -1, -1), x.shape[-1]).cos()
    rows[0][..., 0:8] = rows[1][..., 8:16]
    return x * rows[0]


def another_value(x, positions):
    rows = angles(positions.expand(3, -1, -1), x.shape[-1]).cos()
    rows[0] = rows[1] + 1
    return x * rows[0]


def scaled_by_row(x, positions):
    rows = (
        angles(positions.expand(3, -1, -1), x.shape[-1]) * torch.tensor([1.0, 2.0, 3.0])[:, None, None, None]
    )
    rows[0][..., 1::3] = rows[1][..., 1::3]
    return x * rows[0]


def into_another_row(x, positions):
    """Row 1 is read at another place after the write."""
    rows = angles(positions.expand(3, -1, -1), x.shape[-1]).cos()
    rows[1][..., 0:4] = rows[0][..., 4:8]
    return x * rows[0] + rows[1]


@pytest.mark.parametrize(
    ("body", "merged"),
    [
        (equal_rows, True),
        (by_a_product, True),
        (by_sections, True),
        (other_order, False),
        (other_rows, False),
        (another_place, False),
        (another_value, False),
        (scaled_by_row, False),
        (into_another_row, False),
    ],
)
def test_only_equal_rows_are_merged_and_no_number_changes(body, merged):
    model = Embedded(body).eval()
    gm = captured_model(model)
    assert (count(gm, *SCATTERS, aten.cat.default) == 0) == merged
    ids = torch.arange(11)
    with torch.no_grad():
        assert torch.equal(gm(ids, torch.arange(11)), model(ids[None], torch.arange(11)[None])[0])


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen4_exp_text"])
def test_rope_of_multimodal_models_is_recognised(name):
    from pagebinder.frontend.recognise import recognise_rope

    architecture = next((a for a in architectures("causal") if a.name == name), None)
    if architecture is None:
        pytest.skip(f"this release of transformers has no {name}")
    gm = captured_model(tiny_model(architecture))
    assert not count(gm, *SCATTERS)
    result = recognise_rope(gm)
    assert result.matches and not result.refusals
