// `pagebinder_cpu::paged_lookahead_attention`: causal attention in which some queries see keys behind their own.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "binding_elements.h"
#include "checks.h"
#include "direct_calls.h"

namespace {

using namespace pagebinder;

Tensor paged_lookahead_attention(const Tensor& q, const Tensor& kv_cache, const Tensor& block_table,
                                 const Tensor& seq_lens, const Tensor& query_start_loc, const Tensor& lookahead,
                                 std::optional<Tensor> sinks, int64_t head_dim_v, double scale,
                                 std::optional<int64_t> window, std::optional<double> soft_cap) {
  AttentionArgs a = attention_args(q, kv_cache, block_table, seq_lens, query_start_loc, sinks, std::nullopt,
                                   head_dim_v, scale, window, std::nullopt, soft_cap, true);
  check_plain_rows(q, kv_cache, head_dim_v);
  a.lookahead = index_data(lookahead, 1, "lookahead");
  PB_CHECK(lookahead.size(0) == a.num_tokens, "lookahead must be int32 [T]");
  Tensor out = new_tensor({a.num_tokens, a.num_heads, head_dim_v}, q.scalar_type());
  a.out = data(out);
  attend_or_throw(q.scalar_type(), a, "paged_lookahead_attention");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "paged_lookahead_attention", TORCH_BOX(&paged_lookahead_attention));
}
