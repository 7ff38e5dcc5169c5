// `pagebinder_cpu::paged_relative_attention`: paged attention with a bias by distance.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <limits>
#include <optional>

#include "binding_elements.h"
#include "checks.h"
#include "direct_calls.h"

namespace {

using namespace pagebinder;

constexpr float LOG2_E = 1.44269504088896340736f;

template <class T>
void scale_rows(const Tensor& from, float* to) {
  const T* rows = static_cast<const T*>(from.const_data_ptr());
  for (int64_t row = 0; row < from.size(0); ++row)
    for (int64_t column = 0; column < from.size(1); ++column)
      *to++ = static_cast<float>(rows[row * from.stride(0) + column * from.stride(1)]) * LOG2_E;
}

// A bias [H, N] in log2 units, in memory of this thread that the next call writes again.
const float* log2_bias(const Tensor& bias) {
  static thread_local Buffer buffer;
  float* to = buffer.at_least<float>(bias.size(0) * bias.size(1));
  switch (bias.scalar_type()) {
    case ScalarType::Float: scale_rows<float>(bias, to); break;
    case ScalarType::BFloat16: scale_rows<c10::BFloat16>(bias, to); break;
    case ScalarType::Half: scale_rows<c10::Half>(bias, to); break;
    default: PB_CHECK(false, "bias must be float32, bfloat16 or float16");
  }
  return to;
}

Tensor paged_relative_attention(const Tensor& q, const Tensor& kv_cache, const Tensor& block_table,
                                const Tensor& seq_lens, const Tensor& query_start_loc, const Tensor& bias,
                                int64_t head_dim_v, double scale, int64_t num_behind, bool causal) {
  AttentionArgs a = attention_args(q, kv_cache, block_table, seq_lens, query_start_loc, std::nullopt, std::nullopt,
                                   head_dim_v, scale, std::nullopt, std::nullopt, std::nullopt, causal);
  check_plain_rows(q, kv_cache, head_dim_v);
  PB_CHECK(bias.dim() == 2 && bias.size(0) == a.num_heads && num_behind >= 0 && num_behind < bias.size(1),
           "bias must be [H, N] with num_behind one of its columns");
  PB_CHECK(bias.size(0) * bias.size(1) <= std::numeric_limits<int32_t>::max(), "bias is too large");
  a.bias = log2_bias(bias), a.bias_columns = bias.size(1), a.num_behind = num_behind;
  Tensor out = new_tensor({a.num_tokens, a.num_heads, head_dim_v}, q.scalar_type());
  a.out = data(out);
  attend_or_throw(q.scalar_type(), a, "paged_relative_attention");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "paged_relative_attention", TORCH_BOX(&paged_relative_attention));
}
