// Registers the likeliest tokens of rows of logits under `pagebinder_cpu`; the schema comes from Python.
#include <torch/csrc/stable/library.h>

#include "argmax.h"
#include "direct_calls.h"
#include "logit_tensors.h"
#include "new_tensor.h"

namespace {

using namespace pagebinder;

constexpr int64_t COMPARED_AT_ONCE = 1 << 18;  // tokens that are worth a thread of their own

Tensor argmax_tokens(const Tensor& logits) {
  check_logits(logits);
  const int64_t rows = logits.size(0), vocab = logits.size(1), stride = logits.stride(0);
  Tensor tokens = new_tensor({rows}, ScalarType::Long);
  int64_t* out = static_cast<int64_t*>(tokens.mutable_data_ptr());
  with_data(logits, [&](const auto* data) {
    parallel_rows(rows, vocab, COMPARED_AT_ONCE, [&](int64_t r) { out[r] = first_largest(data + r * stride, vocab); });
  });
  return tokens;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "argmax_tokens", TORCH_BOX(&argmax_tokens));
}
