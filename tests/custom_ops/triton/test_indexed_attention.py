"""Attention to chosen groups of keys in Triton: the cases of the other providers."""

from tests.custom_ops.test_indexed_attention import (  # noqa: F401  (run here with the provider of this folder)
    test_groups_and_blocks_of_any_size,
    test_lists_in_any_order_with_what_is_not_seen,
    test_no_requests,
    test_operands_that_do_not_fit_are_refused,
    test_requests_that_list_all_they_see,
    test_the_kernel_is_the_reference,
)
