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

constexpr int64_t MIN_SHARED = 1 << 15;  // numbers that are worth waking threads for

// A bias [H, N], or [T, H, N], whose columns do not lie side by side.
struct Widening {
  const Tensor& bias;
  float* to;
  int num_workers;
};

template <class T>
void widen(const Widening& w, int worker) {
  const bool by_token = w.bias.dim() == 3;
  const int64_t heads = w.bias.size(by_token), columns = w.bias.size(by_token + 1);
  const int64_t rows = (by_token ? w.bias.size(0) : 1) * heads;
  const int64_t token_stride = by_token ? w.bias.stride(0) : 0, head_stride = w.bias.stride(by_token);
  const int64_t stride = w.bias.stride(by_token + 1);
  const T* from = static_cast<const T*>(w.bias.const_data_ptr());
  for (int64_t row = rows * worker / w.num_workers; row < rows * (worker + 1) / w.num_workers; ++row) {
    const T* at = from + row / heads * token_stride + row % heads * head_stride;
    float* to = w.to + row * columns;
    for (int64_t i = 0; i < columns; ++i) to[i] = static_cast<float>(at[i * stride]);
  }
}

void widen_part(void* context, int worker) {
  const Widening& w = *static_cast<const Widening*>(context);
  switch (w.bias.scalar_type()) {
    case ScalarType::Float: return widen<float>(w, worker);
    case ScalarType::BFloat16: return widen<c10::BFloat16>(w, worker);
    default: return widen<c10::Half>(w, worker);
  }
}

// Describes the bias as the kernels want it: as it lies if it is float32 or of q's type, or else as floats in memory of
// this thread that the next call writes again.
void take_bias(const Tensor& bias, ScalarType q_type, AttentionArgs& a) {
  static thread_local Buffer buffer;
  const ScalarType type = bias.scalar_type();
  PB_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
           "bias must be float32, bfloat16 or float16");
  const bool by_token = bias.dim() == 3;
  a.bias_columns = bias.size(by_token + 1);
  int64_t end = bias.numel();
  const bool is_dense = a.bias_columns == 1 || bias.stride(by_token + 1) == 1;
  const bool as_it_lies = is_dense && (type == ScalarType::Float || type == q_type);
  a.wide_bias = type == ScalarType::Float || !as_it_lies;
  if (as_it_lies) {
    a.bias = data<const void>(bias);
    a.bias_token_stride = by_token ? bias.stride(0) : 0, a.bias_head_stride = bias.stride(by_token);
    end = std::max<int64_t>(a.num_tokens - 1, 0) * a.bias_token_stride + a.num_heads * a.bias_head_stride;
  } else {
    const bool alone = bias.numel() < MIN_SHARED;
    Widening w{bias, buffer.at_least<float>(bias.numel()), alone ? 1 : a.num_threads};
    if (alone) widen_part(&w, 0);
    else a.run(w.num_workers, widen_part, &w);
    a.bias = w.to;
    a.bias_token_stride = by_token ? a.num_heads * a.bias_columns : 0, a.bias_head_stride = a.bias_columns;
  }
  PB_CHECK(end <= std::numeric_limits<int32_t>::max(), "bias is too large");
}

Tensor paged_relative_attention(const Tensor& q, const Tensor& kv_cache, const Tensor& block_table,
                                const Tensor& seq_lens, const Tensor& query_start_loc, const Tensor& bias,
                                std::optional<Tensor> sinks, int64_t head_dim_v, double scale, int64_t num_behind,
                                std::optional<int64_t> window, bool causal) {
  AttentionArgs a = attention_args(q, kv_cache, block_table, seq_lens, query_start_loc, std::nullopt, std::nullopt,
                                   head_dim_v, scale, window, std::nullopt, std::nullopt, causal);
  check_plain_rows(q, kv_cache, head_dim_v);
  const bool by_token = bias.dim() == 3;
  PB_CHECK((bias.dim() == 2 || (by_token && bias.size(0) == a.num_tokens)) && bias.size(by_token) == a.num_heads &&
               num_behind >= 0 && num_behind < bias.size(by_token + 1),
           "bias must be [H, N] or [T, H, N] with num_behind one of its columns");
  a.sinks = head_or_token_data(sinks, a.num_tokens, a.num_heads, a.sinks_token_stride, "sinks");
  take_bias(bias, q.scalar_type(), a), a.num_behind = num_behind;
  Tensor out = new_tensor({a.num_tokens, a.num_heads, head_dim_v}, q.scalar_type());
  a.out = data(out);
  attend_or_throw(q.scalar_type(), a, "paged_relative_attention");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "paged_relative_attention", TORCH_BOX(&paged_relative_attention));
}
