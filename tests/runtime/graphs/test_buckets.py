"""Which bucket a step falls into."""

import pytest

from pagebinder.errors import ConfigError
from pagebinder.runtime.graphs.buckets import (
    DECODE,
    MIXED,
    Bucket,
    BucketTable,
    default_decode_sizes,
    default_token_sizes,
)


def table(**sizes) -> BucketTable:
    return BucketTable.of(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **sizes})


def test_a_step_falls_into_the_smallest_bucket_that_holds_it():
    buckets = table(decode_sizes=[1, 4, 8], token_sizes=[16, 64])
    found = [buckets.find(n, n, is_decode=True).num_reqs for n in range(1, 9)]
    assert found == [1, 4, 4, 4, 8, 8, 8, 8]
    assert [buckets.find(n, 3, is_decode=False).num_tokens for n in (1, 16, 17, 64)] == [16, 16, 64, 64]
    assert buckets.find(65, 3, is_decode=False) is None
    assert buckets.find(4, 3, is_decode=False) == Bucket(MIXED, 16, 8, 8)


def test_decodes_beyond_the_largest_bucket_take_a_mixed_one():
    buckets = table(decode_sizes=[2], token_sizes=[16])
    assert buckets.find(2, 2, is_decode=True) == Bucket(DECODE, 2, 2, 2)
    assert buckets.find(5, 5, is_decode=True) == Bucket(MIXED, 16, 8, 8)
    assert table(decode_sizes=[2], token_sizes=()).find(5, 5, is_decode=True) is None
    assert table(decode_sizes=[2], token_sizes=()).find(5, 2, is_decode=False) is None
    assert table(decode_sizes=(), token_sizes=[4]).find(6, 6, is_decode=True) is None


def test_captures_go_from_the_largest_to_the_smallest():
    sizes = [b.num_tokens for b in table(decode_sizes=[8, 1, 4], token_sizes=[64, 16]).buckets]
    assert sizes == [64, 16, 8, 4, 1]


def test_default_sizes():
    assert default_decode_sizes(1) == (1,)
    assert default_decode_sizes(6) == (1, 2, 4, 6)
    assert default_decode_sizes(64) == (1, 2, 4, 8, 16, 32, 48, 64)
    assert default_token_sizes(8) == (8,)
    assert default_token_sizes(2048) == (16, 32, 64, 128, 256, 512)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"decode_sizes": [9]}, "9 is not a whole number from 1 to max_num_seqs=8"),
        ({"decode_sizes": [0]}, "0 is not"),
        ({"token_sizes": [65]}, "max_num_batched_tokens=64"),
        ({"token_sizes": "16"}, "use a list"),
        ({"decode_sizes": [True]}, "True is not"),
        ({"decode_sizes": (), "token_sizes": ()}, "No sizes"),
    ],
)
def test_bad_sizes(sizes, message):
    with pytest.raises(ConfigError, match=message):
        table(**sizes)
