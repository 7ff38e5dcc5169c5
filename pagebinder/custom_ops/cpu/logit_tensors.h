// Tensors of logits for bindings.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "checks.h"
#include "element_of.h"
#include "num_threads.h"
#include "thread_pool.h"

namespace pagebinder {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class Body>
void parallel_rows(int64_t rows, int64_t vocab, int64_t tokens_at_once, Body body) {
  const int64_t grain = std::max<int64_t>(1, tokens_at_once / std::max<int64_t>(vocab, 1));
  for_ranges(rows, grain, pagebinder::num_threads(), [&](int64_t row, int64_t end) {
    for (; row < end; ++row) body(row);
  });
}

inline void check_logits(const Tensor& logits) {
  PB_CHECK(logits.dim() == 2 && logits.size(1) > 0 && (logits.size(1) == 1 || logits.stride(1) == 1),
           "logits must be [L, V], their last stride 1");
  PB_CHECK(logits.size(1) < INT32_MAX, "a vocabulary has less than 2^31 tokens");
}

// body(data) with the logits' type.
template <class Body>
void with_data(const Tensor& logits, Body body) {
  const void* data = logits.const_data_ptr();
  with_element(element_of(logits, "logits"), [&](auto x) { body(static_cast<const decltype(x)*>(data)); });
}

}  // namespace pagebinder
