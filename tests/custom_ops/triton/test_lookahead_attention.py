"""Attention in which some queries see on, in Triton: the cases of the other providers."""

from tests.custom_ops.test_lookahead_attention import (  # noqa: F401  (run here with the provider of this folder)
    test_a_lookahead_that_does_not_fit_is_refused,
    test_the_paged_kernel_is_the_reference,
)
