// Registers attention in parts, and the merge of parts that were computed apart.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "binding_elements.h"
#include "checks.h"
#include "direct_calls.h"
#include "num_threads.h"
#include "unified_attention.h"

namespace {

using namespace pagebinder;

#define UNIFIED_PARAMETERS                                                                                         \
  const Tensor &q, const Tensor &kv_cache, const Tensor &block_table, const Tensor &seq_lens,                      \
      const Tensor &query_start_loc, const Tensor &shared_lens, const Tensor &shared_leaders,                      \
      const Tensor &shared_tokens, std::optional<Tensor> sinks, std::optional<Tensor> alibi_slopes,                \
      std::optional<Tensor> k, std::optional<Tensor> v
#define UNIFIED_OPTIONS                                                                                            \
  std::string phases, int64_t head_dim_v, double scale, std::optional<int64_t> window, std::optional<double> soft_cap
#define UNIFIED_ARGUMENTS                                                                                          \
  q, kv_cache, block_table, seq_lens, query_start_loc, shared_lens, shared_leaders, shared_tokens, sinks,          \
      alibi_slopes, k, v, phases, head_dim_v, scale, window, soft_cap

bool runs(const std::string& phases, int place) {
  const char letter = "csu"[place], here = phases.size() == 3 ? phases[place] : '?';
  PB_CHECK((here == letter || here == '-') && phases != "---", "phases \"", phases,
           "\": use \"csu\" with \"-\" in the place of parts that do not run, at least one");
  return here == letter;
}

UnifiedArgs unified_args(UNIFIED_PARAMETERS, UNIFIED_OPTIONS) {
  UnifiedArgs u{};
  u.attention = attention_args(q, kv_cache, block_table, seq_lens, query_start_loc, sinks, alibi_slopes, head_dim_v,
                               scale, window, std::nullopt, soft_cap, true);
  PB_CHECK(q.scalar_type() == kv_cache.scalar_type(), "q and kv_cache must have the same dtype");
  PB_CHECK(kv_cache.size(3) == q.size(2) + head_dim_v, "a kv_cache row must be D + head_dim_v wide: ",
           kv_cache.size(3), " is not ", q.size(2), " + ", head_dim_v);
  u.has_causal = runs(phases, 0), u.has_shared = runs(phases, 1), u.has_unique = runs(phases, 2);
  u.shared_lens = index_data(shared_lens, 1, "shared_lens");
  u.shared_leaders = index_data(shared_leaders, 1, "shared_leaders");
  u.shared_tokens = index_data(shared_tokens, 1, "shared_tokens");
  PB_CHECK(shared_lens.size(0) == seq_lens.size(0), "shared_lens must be int32 [R]");
  PB_CHECK(shared_leaders.size(0) == seq_lens.size(0), "shared_leaders must be int32 [R]");
  PB_CHECK(shared_tokens.size(0) == q.size(0), "shared_tokens must be int32 [T]");
  if (!u.has_causal) return u;
  PB_CHECK(k && v, "phases \"", phases, "\" need this step's k and v");
  PB_CHECK(k->dim() == 3 && v->dim() == 3 && k->size(0) == q.size(0) && v->size(0) == q.size(0) &&
               k->size(1) == kv_cache.size(1) && v->size(1) == kv_cache.size(1) && k->size(2) == q.size(2) &&
               v->size(2) == head_dim_v,
           "k is [T, G, D] and v is [T, G, Dv]");
  PB_CHECK(k->scalar_type() == q.scalar_type() && v->scalar_type() == q.scalar_type(),
           "q, k and v must have the same dtype");
  PB_CHECK(last_is_dense(*k) && last_is_dense(*v), "the last strides of k and v must be 1");
  const int64_t bytes = static_cast<int64_t>(k->element_size());
  u.k = data<const char>(*k), u.v = data<const char>(*v), u.element_bytes = bytes;
  u.k_token_stride = k->stride(0) * bytes, u.k_head_stride = k->stride(1) * bytes;
  u.v_token_stride = v->stride(0) * bytes, u.v_head_stride = v->stride(1) * bytes;
  return u;
}

Attend attention_of(const Tensor& q) {
  return [type = q.scalar_type()](const AttentionArgs& args) { return attend(type, args); };
}

Tensor unified(UNIFIED_PARAMETERS, UNIFIED_OPTIONS) {
  UnifiedArgs u = unified_args(UNIFIED_ARGUMENTS);
  Tensor out = new_tensor({q.size(0), q.size(1), head_dim_v}, q.scalar_type());
  u.attention.out = data(out);
  const char* error = unified_attention(u, attention_of(q));
  PB_CHECK(error == nullptr, "unified_attention: ", error);
  return out;
}

std::tuple<Tensor, Tensor> part_of(UNIFIED_PARAMETERS, std::string part, UNIFIED_OPTIONS) {
  UnifiedArgs u = unified_args(UNIFIED_ARGUMENTS);
  PB_CHECK(part.size() == 1 && part != "-" && phases.find(part) != std::string::npos, "part \"", part,
           "\" is none of phases \"", phases, "\"");
  Tensor out = new_tensor({q.size(0), q.size(1), head_dim_v}, ScalarType::Float);
  Tensor lse = new_tensor({q.size(1), q.size(0)}, ScalarType::Float);
  u.only = part[0], u.part_out = data<float>(out), u.part_lse = data<float>(lse);
  const char* error = unified_attention(u, attention_of(q));
  PB_CHECK(error == nullptr, "attention_part: ", error);
  return {out, lse};
}

Tensor as_float(const Tensor& t) {
  const Tensor wide = t.scalar_type() == ScalarType::Float ? t : torch::stable::to(t, ScalarType::Float);
  return torch::stable::contiguous(wide);
}

std::tuple<Tensor, Tensor> merge(std::vector<Tensor> outs, std::vector<Tensor> lses, std::optional<Tensor> sinks) {
  PB_CHECK(!outs.empty() && outs.size() == lses.size(),
           "outs and lses: give one of each for every part, at least one");
  const Tensor& first = outs[0];
  const ScalarType dtype = first.scalar_type();
  PB_CHECK(first.dim() == 3, "outs must be [T, H, Dv], of one shape and float dtype");
  PB_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
           "outs must be float32, bfloat16 or float16");
  const int64_t num_tokens = first.size(0), num_heads = first.size(1), width = first.size(2);
  std::vector<Tensor> kept;
  std::vector<const float*> out_data, lse_data;
  for (size_t i = 0; i < outs.size(); ++i) {
    const Tensor &out = outs[i], &lse = lses[i];
    PB_CHECK(out.dim() == 3 && out.size(0) == num_tokens && out.size(1) == num_heads && out.size(2) == width &&
                 out.scalar_type() == dtype,
             "outs must be [T, H, Dv], of one shape and float dtype");
    PB_CHECK(lse.dim() == 2 && lse.size(0) == num_heads && lse.size(1) == num_tokens &&
                 lse.scalar_type() == ScalarType::Float,
             "lses must be float32 [H, T]");
    kept.push_back(as_float(out));
    out_data.push_back(data<const float>(kept.back()));
    kept.push_back(as_float(lse));
    lse_data.push_back(data<const float>(kept.back()));
  }
  Tensor out = new_tensor({num_tokens, num_heads, width}, ScalarType::Float);
  Tensor lse = new_tensor({num_heads, num_tokens}, ScalarType::Float);
  const MergeArgs m{static_cast<int64_t>(outs.size()), num_tokens, num_heads, width, out_data.data(), lse_data.data(),
                    head_data(sinks, num_heads, "sinks"), data<float>(out), data<float>(lse)};
  constexpr int64_t GRAIN = 64;
  for_ranges(num_tokens * num_heads, GRAIN, pagebinder::num_threads(),
             [&](int64_t begin, int64_t end) { merge_states(m, begin, end); });
  return {dtype == ScalarType::Float ? out : torch::stable::to(out, dtype), lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "unified_attention", TORCH_BOX(&unified));
  pagebinder::implement(m, "attention_part", TORCH_BOX(&part_of));
  pagebinder::implement(m, "merge_attention_states", TORCH_BOX(&merge));
}
