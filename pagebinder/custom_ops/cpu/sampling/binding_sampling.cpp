// Registers sampling under `pagebinder_cpu`; the schemas come from Python.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "sampling.h"
#include "thread_pool.h"

namespace {

using namespace pagebinder;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Tokens that are worth a thread of their own.
constexpr int64_t COMPARED_AT_ONCE = 1 << 18, DRAWN_AT_ONCE = 1 << 16;
constexpr int64_t NUM_OPTIONS = 5;

template <class Body>
void parallel_rows(int64_t rows, int64_t vocab, int64_t tokens_at_once, Body body) {
  const int64_t grain = std::max<int64_t>(1, tokens_at_once / std::max<int64_t>(vocab, 1));
  for_ranges(rows, grain, static_cast<int>(torch::stable::get_num_threads()), [&](int64_t row, int64_t end) {
    for (; row < end; ++row) body(row);
  });
}

void check_logits(const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && (logits.size(1) == 1 || logits.stride(1) == 1),
                  "logits must be [L, V], their last stride 1");
  STD_TORCH_CHECK(logits.size(1) < INT32_MAX, "a vocabulary has less than 2^31 tokens");
}

// body(data) with the logits' type.
template <class Body>
void with_data(const Tensor& logits, Body body) {
  const void* data = logits.const_data_ptr();
  switch (logits.scalar_type()) {
    case ScalarType::Float: return body(static_cast<const float*>(data));
    case ScalarType::BFloat16: return body(static_cast<const bf16*>(data));
    case ScalarType::Half: return body(static_cast<const f16*>(data));
    default: STD_TORCH_CHECK(false, "logits must be float32, bfloat16 or float16");
  }
}

const int64_t* whole_numbers(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long && t.is_contiguous(), name, " must be int64, contiguous");
  return static_cast<const int64_t*>(t.const_data_ptr());
}

Tensor argmax_tokens(const Tensor& logits) {
  check_logits(logits);
  const int64_t rows = logits.size(0), vocab = logits.size(1), stride = logits.stride(0);
  Tensor tokens = torch::stable::new_empty(logits, {rows}, ScalarType::Long);
  int64_t* out = static_cast<int64_t*>(tokens.mutable_data_ptr());
  with_data(logits, [&](const auto* data) {
    parallel_rows(rows, vocab, COMPARED_AT_ONCE, [&](int64_t r) { out[r] = first_largest(data + r * stride, vocab); });
  });
  return tokens;
}

Tensor sample_tokens(const Tensor& logits, const Tensor& rows, const Tensor& streams, const Tensor& options,
                     const Tensor& seen, const Tensor& seen_starts) {
  check_logits(logits);
  STD_TORCH_CHECK(rows.dim() == 1, "rows must be [R]");
  const int64_t draws = rows.size(0), vocab = logits.size(1);
  STD_TORCH_CHECK(streams.dim() == 2 && streams.size(0) == draws && streams.size(1) == 2, "streams must be [R, 2]");
  STD_TORCH_CHECK(options.dim() == 2 && options.size(0) == draws && options.size(1) == NUM_OPTIONS &&
                      options.scalar_type() == ScalarType::Double && options.is_contiguous(),
                  "options must be [R, ", NUM_OPTIONS, "] float64, contiguous");
  STD_TORCH_CHECK(seen.dim() == 1 && seen_starts.dim() == 1 && seen_starts.size(0) == draws + 1,
                  "seen is [S], seen_starts [R + 1]");
  const int64_t *row = whole_numbers(rows, "rows"), *stream = whole_numbers(streams, "streams");
  const int64_t *tokens = whole_numbers(seen, "seen"), *starts = whole_numbers(seen_starts, "seen_starts");
  const double* option = static_cast<const double*>(options.const_data_ptr());
  const auto within = [](const int64_t* numbers, int64_t count, int64_t stop) {
    return std::all_of(numbers, numbers + count, [=](int64_t n) { return n >= 0 && n < stop; });
  };
  STD_TORCH_CHECK(within(row, draws, logits.size(0)), "a row in `rows` is not in logits");
  STD_TORCH_CHECK(within(tokens, seen.size(0), vocab), "a token in `seen` is not in the vocabulary");
  STD_TORCH_CHECK(within(starts, draws + 1, seen.size(0) + 1) && std::is_sorted(starts, starts + draws + 1),
                  "seen_starts must rise from 0 to at most the length of seen");
  Tensor result = torch::stable::new_empty(rows, {draws});
  int64_t* out = static_cast<int64_t*>(result.mutable_data_ptr());
  with_data(logits, [&](const auto* data) {
    parallel_rows(draws, vocab, DRAWN_AT_ONCE, [&](int64_t r) {
      const double* o = option + r * NUM_OPTIONS;
      const Stream source{static_cast<uint64_t>(stream[2 * r]), static_cast<uint32_t>(stream[2 * r + 1])};
      out[r] = sample_token(Draw<std::decay_t<decltype(*data)>>{
          data + row[r] * logits.stride(0), vocab, static_cast<float>(o[0]), o[1], o[2], static_cast<float>(o[3]),
          static_cast<float>(o[4]), tokens + starts[r], starts[r + 1] - starts[r], source});
    });
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  m.impl("argmax_tokens", TORCH_BOX(&argmax_tokens));
  m.impl("sample_tokens", TORCH_BOX(&sample_tokens));
}
