// Registers sampling under `pagebinder_cpu`; the schemas come from Python.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "checks.h"
#include "direct_calls.h"
#include "logit_tensors.h"
#include "new_tensor.h"
#include "sampling.h"

namespace {

using namespace pagebinder;

constexpr int64_t DRAWN_AT_ONCE = 1 << 16;  // tokens that are worth a thread of their own
constexpr int64_t NUM_OPTIONS = 5;

const int64_t* whole_numbers(const Tensor& t, const char* name) {
  PB_CHECK(t.scalar_type() == ScalarType::Long && t.is_contiguous(), name, " must be int64, contiguous");
  return static_cast<const int64_t*>(t.const_data_ptr());
}

Tensor sample_tokens(const Tensor& logits, const Tensor& rows, const Tensor& streams, const Tensor& options,
                     const Tensor& seen, const Tensor& seen_starts) {
  check_logits(logits);
  PB_CHECK(rows.dim() == 1, "rows must be [R]");
  const int64_t draws = rows.size(0), vocab = logits.size(1);
  PB_CHECK(streams.dim() == 2 && streams.size(0) == draws && streams.size(1) == 2, "streams must be [R, 2]");
  PB_CHECK(options.dim() == 2 && options.size(0) == draws && options.size(1) == NUM_OPTIONS &&
               options.scalar_type() == ScalarType::Double && options.is_contiguous(),
           "options must be [R, ", NUM_OPTIONS, "] float64, contiguous");
  PB_CHECK(seen.dim() == 1 && seen_starts.dim() == 1 && seen_starts.size(0) == draws + 1,
           "seen is [S], seen_starts [R + 1]");
  const int64_t *row = whole_numbers(rows, "rows"), *stream = whole_numbers(streams, "streams");
  const int64_t *tokens = whole_numbers(seen, "seen"), *starts = whole_numbers(seen_starts, "seen_starts");
  const double* option = static_cast<const double*>(options.const_data_ptr());
  const auto within = [](const int64_t* numbers, int64_t count, int64_t stop) {
    return std::all_of(numbers, numbers + count, [=](int64_t n) { return n >= 0 && n < stop; });
  };
  PB_CHECK(within(row, draws, logits.size(0)), "a row in `rows` is not in logits");
  PB_CHECK(within(tokens, seen.size(0), vocab), "a token in `seen` is not in the vocabulary");
  PB_CHECK(within(starts, draws + 1, seen.size(0) + 1) && std::is_sorted(starts, starts + draws + 1),
           "seen_starts must rise from 0 to at most the length of seen");
  Tensor result = new_tensor({draws}, rows.scalar_type());
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
  pagebinder::implement(m, "sample_tokens", TORCH_BOX(&sample_tokens));
}
