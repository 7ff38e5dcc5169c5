// Registers the CPU kernels under `pagebinder_cpu` through torch's stable ABI (small headers: fast to compile).
// The schemas are defined from Python, next to the references.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "binding_elements.h"
#include "checks.h"
#include "direct_calls.h"
#include "num_threads.h"
#include "recorder.h"

namespace {

using namespace pagebinder;

#define ATTENTION_PARAMETERS                                                                                      \
  const Tensor &q, const Tensor &kv_cache, const Tensor &block_table, const Tensor &seq_lens,                     \
      const Tensor &query_start_loc, std::optional<Tensor> sinks, std::optional<Tensor> alibi_slopes,             \
      int64_t head_dim_v, double scale, std::optional<int64_t> window, std::optional<int64_t> chunk,              \
      std::optional<double> soft_cap, bool causal
#define ATTENTION_ARGUMENTS                                                                                       \
  q, kv_cache, block_table, seq_lens, query_start_loc, sinks, alibi_slopes, head_dim_v, scale, window, chunk,     \
      soft_cap, causal

std::tuple<Tensor, std::optional<Tensor>> attention(ATTENTION_PARAMETERS, bool with_lse) {
  AttentionArgs a = attention_args(ATTENTION_ARGUMENTS);
  check_plain_rows(q, kv_cache, head_dim_v);
  Tensor out = new_tensor({a.num_tokens, a.num_heads, head_dim_v}, q.scalar_type());
  a.out = data(out);
  std::optional<Tensor> lse;
  if (with_lse) {
    lse = new_tensor({a.num_heads, a.num_tokens}, ScalarType::Float);
    a.lse = data<float>(*lse);
  }
  launch([a, type = q.scalar_type()] { attend_or_throw(type, a, "paged_attention"); });
  return {out, lse};
}

Tensor paged_attention(ATTENTION_PARAMETERS) { return std::get<0>(attention(ATTENTION_ARGUMENTS, false)); }

std::tuple<Tensor, Tensor> paged_attention_lse(ATTENTION_PARAMETERS) {
  auto [out, lse] = attention(ATTENTION_ARGUMENTS, true);
  return {out, *lse};
}

void write_cache(const Tensor& k, const Tensor& v, const Tensor& kv_cache, const Tensor& slot_mapping) {
  const CacheWriteArgs a = cache_write_args(k, v, kv_cache, slot_mapping);
  PB_CHECK(k.scalar_type() == kv_cache.scalar_type(), "k, v and kv_cache must have the same dtype");
  PB_CHECK(kv_cache.size(3) == a.head_dim + a.head_dim_v, "a kv_cache row must hold one K and one V row");
  launch([a] {
    const char* error = kv_cache_write(a);
    PB_CHECK(error == nullptr, "kv_cache_write: ", error);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "kv_cache_write", TORCH_BOX(&write_cache));
  pagebinder::implement(m, "paged_attention", TORCH_BOX(&paged_attention));
  pagebinder::implement(m, "paged_attention_lse", TORCH_BOX(&paged_attention_lse));
}
