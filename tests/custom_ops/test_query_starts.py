"""`query_starts`: what rises from 0 to at most T, and what does not."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.query_starts import query_starts


@pytest.mark.parametrize("starts", [[0], [0, 0], [0, 5], [0, 2, 2, 4]], ids=str)
def test_starts_of_requests_and_padding(starts):
    assert query_starts(torch.tensor(starts, dtype=torch.int32), 5) == starts


@pytest.mark.parametrize("starts", [[1, 5], [-1, 5], [0, 6], [0, 3, 2, 5], [0, -1]], ids=str)
def test_others_are_refused(starts):
    with pytest.raises(ValueError, match="query_start_loc must rise from 0 to at most T"):
        query_starts(torch.tensor(starts, dtype=torch.int32), 5)
