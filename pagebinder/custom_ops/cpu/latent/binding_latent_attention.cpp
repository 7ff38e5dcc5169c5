// `pagebinder_cpu::latent_attention`: paged attention whose values are the leading part of its keys.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "binding_elements.h"
#include "checks.h"
#include "direct_calls.h"
#include "num_threads.h"

namespace {

using namespace pagebinder;

// Attention of all heads to the same rows [N, B, D], whose leading part is the value: q [T, H, D] -> out [T, H, Dv].
void latent_attention(const Tensor& q, const Tensor& cache, const Tensor& table, const Tensor& seq_lens,
                      const Tensor& query_start_loc, std::optional<Tensor> sinks, const Tensor& out, double scale,
                      std::optional<int64_t> window) {
  PB_CHECK(q.dim() == 3 && cache.dim() == 3 && out.dim() == 3 && q.size(2) == cache.size(2),
           "q must be [T, H, D], cache [N, B, D] and out [T, H, Dv]");
  PB_CHECK(q.scalar_type() == cache.scalar_type() && out.scalar_type() == q.scalar_type(),
           "q, cache and out must have the same dtype");
  PB_CHECK(last_is_dense(q) && last_is_dense(cache), "the last strides of q and cache must be 1");
  PB_CHECK(out.size(0) == q.size(0) && out.size(1) == q.size(1) && out.size(2) <= q.size(2) &&
               last_is_dense(out) && out.stride(1) == out.size(2) &&
               (out.size(0) <= 1 || out.stride(0) == out.size(1) * out.size(2)),
           "out must be contiguous [T, H, Dv] with Dv <= D");
  AttentionArgs a{};
  a.num_tokens = q.size(0), a.num_heads = q.size(1), a.head_dim = q.size(2), a.head_dim_v = out.size(2);
  a.num_blocks = cache.size(0), a.num_kv_heads = 1, a.block_size = cache.size(1), a.value_offset = 0;
  a.q = q.const_data_ptr(), a.q_token_stride = q.stride(0), a.q_head_stride = q.stride(1);
  a.cache = cache.const_data_ptr(), a.cache_block_stride = cache.stride(0), a.cache_slot_stride = cache.stride(1);
  a.block_table = index_data(table, 2, "table"), a.block_table_stride = table.stride(0), a.max_blocks = table.size(1);
  a.seq_lens = index_data(seq_lens, 1, "seq_lens"), a.num_requests = seq_lens.size(0);
  a.query_start_loc = index_data(query_start_loc, 1, "query_start_loc");
  PB_CHECK(table.size(0) >= a.num_requests && query_start_loc.size(0) == a.num_requests + 1,
           "table, seq_lens and query_start_loc must have at least R, R and R + 1 rows");
  PB_CHECK(!window || *window > 0, "window must be positive");
  a.sinks = head_data(sinks, a.num_heads, "sinks");
  a.scale = static_cast<float>(scale), a.causal = true, a.window = window.value_or(NO_WINDOW);
  a.num_threads = pagebinder::num_threads(), a.run = run_parallel;
  a.out = out.mutable_data_ptr();
  attend_or_throw(q.scalar_type(), a, "paged_mla_attention");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pagebinder_cpu, m) {  // a part of paged_mla_attention, see mla.py
  m.def("latent_attention(Tensor q, Tensor cache, Tensor table, Tensor seq_lens, Tensor query_start_loc, "
        "Tensor? sinks, Tensor(a!) out, *, float scale, int? window) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "latent_attention", TORCH_BOX(&latent_attention));
}
