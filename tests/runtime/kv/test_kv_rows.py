"""Rows stay dense, and every array's data follows its request."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagebinder.runtime.kv.rows import RequestRows


@given(st.lists(st.integers(0, 11), max_size=80), st.sampled_from([None, 3]), st.sampled_from([0, -1]))
def test_arrays_follow_their_requests(ids, width, fill):
    rows = RequestRows(num_rows=1)
    array, expected = rows.add_array(np.int32, width, fill), {}
    for n, i in enumerate(ids):
        name = f"r{i}"
        if name in rows:
            rows.release(name)
            del expected[name]
        else:
            row = rows.assign(name)
            assert (array.data[row] == fill).all()
            array.data[row] = expected[name] = n
        assert sorted(rows.row_of.values()) == list(range(len(expected))) and len(rows) == len(expected)
        for name, value in expected.items():
            assert (array.data[rows.row_of[name]] == value).all()
            assert rows.ids[rows.row_of[name]] == name
        assert (array.data[len(rows) :] == fill).all()


def test_release_says_what_moved():
    rows = RequestRows()
    for name in "abc":
        rows.assign(name)
    assert rows.release("a") == (2, 0)
    assert rows.release("b") == (1, 1)
    with pytest.raises(KeyError):
        rows.release("b")
