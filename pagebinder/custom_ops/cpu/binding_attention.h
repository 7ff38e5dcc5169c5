// What bindings of paged ops share: tensors checked and described as the kernels want them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <type_traits>

#include "attention.h"
#include "checks.h"
#include "new_tensor.h"
#include "num_threads.h"
#include "thread_pool.h"

namespace pagebinder {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T = void>
T* data(const Tensor& t) {
  if constexpr (std::is_const<T>::value) return static_cast<T*>(t.const_data_ptr());
  else return static_cast<T*>(t.mutable_data_ptr());
}

inline const int32_t* index_data(const Tensor& t, int64_t dim, const char* name) {
  PB_CHECK(t.scalar_type() == ScalarType::Int && t.dim() == dim, name, " must be int32 with ", dim, " dims");
  PB_CHECK(t.numel() == 0 || t.size(dim - 1) == 1 || t.stride(dim - 1) == 1, name, " must have last stride 1");
  return data<const int32_t>(t);
}

inline const float* head_data(const std::optional<Tensor>& t, int64_t num_heads, const char* name) {
  if (!t.has_value()) return nullptr;
  PB_CHECK(t->scalar_type() == ScalarType::Float && t->dim() == 1 && t->size(0) == num_heads &&
               (num_heads == 1 || t->stride(0) == 1),
           name, " must be float32 [H], contiguous");
  return data<const float>(*t);
}

// As `head_data`, or a row of its own for every token.
inline const float* head_or_token_data(const std::optional<Tensor>& t, int64_t num_tokens, int64_t num_heads,
                                       int64_t& token_stride, const char* name) {
  token_stride = 0;
  if (!t.has_value() || t->dim() == 1) return head_data(t, num_heads, name);
  PB_CHECK(t->scalar_type() == ScalarType::Float && t->dim() == 2 && t->size(0) == num_tokens &&
               t->size(1) == num_heads && (num_heads == 1 || t->stride(1) == 1),
           name, " must be float32 [H] or [T, H], with last stride 1");
  token_stride = t->stride(0);
  return data<const float>(*t);
}

inline bool last_is_dense(const Tensor& t) {
  return t.numel() == 0 || t.size(t.dim() - 1) == 1 || t.stride(t.dim() - 1) == 1;
}

// The operands and options of paged attention; `out` and `lse` are left to the caller, as is the width of cache rows.
inline AttentionArgs attention_args(const Tensor& q, const Tensor& kv_cache, const Tensor& block_table,
                                    const Tensor& seq_lens, const Tensor& query_start_loc,
                                    const std::optional<Tensor>& sinks, const std::optional<Tensor>& alibi_slopes,
                                    int64_t head_dim_v, double scale, std::optional<int64_t> window,
                                    std::optional<int64_t> chunk, std::optional<double> soft_cap, bool causal) {
  PB_CHECK(q.dim() == 3 && kv_cache.dim() == 4, "q must be [T, H, D] and kv_cache [N, G, B, row]");
  PB_CHECK(kv_cache.size(1) > 0 && q.size(1) % kv_cache.size(1) == 0,
           "query heads must be a multiple of KV heads: ", q.size(1), " and ", kv_cache.size(1));
  PB_CHECK(head_dim_v > 0 && q.size(2) > 0, "heads must have a width");
  PB_CHECK(kv_cache.stride(3) == 1 && (q.size(2) == 1 || q.stride(2) == 1),
           "the last strides of q and kv_cache must be 1");
  AttentionArgs a{};
  a.num_tokens = q.size(0), a.num_heads = q.size(1), a.head_dim = q.size(2), a.head_dim_v = head_dim_v;
  a.num_blocks = kv_cache.size(0), a.num_kv_heads = kv_cache.size(1), a.block_size = kv_cache.size(2);
  a.block_table = index_data(block_table, 2, "block_table");
  a.seq_lens = index_data(seq_lens, 1, "seq_lens");
  a.query_start_loc = index_data(query_start_loc, 1, "query_start_loc");
  a.num_requests = seq_lens.size(0), a.max_blocks = block_table.size(1);
  PB_CHECK(block_table.size(0) >= a.num_requests && query_start_loc.size(0) == a.num_requests + 1,
           "block_table, seq_lens and query_start_loc must have at least R, R and R + 1 rows");
  PB_CHECK(!window || *window > 0, "window must be positive");
  PB_CHECK(!chunk || *chunk > 0, "chunk must be positive");
  PB_CHECK(!soft_cap || *soft_cap > 0, "soft_cap must be positive");
  a.q = data<const void>(q), a.q_token_stride = q.stride(0), a.q_head_stride = q.stride(1);
  a.cache = data<const void>(kv_cache), a.block_table_stride = block_table.stride(0);
  a.cache_block_stride = kv_cache.stride(0), a.cache_head_stride = kv_cache.stride(1);
  a.cache_slot_stride = kv_cache.stride(2), a.value_offset = a.head_dim;
  a.sinks = head_data(sinks, a.num_heads, "sinks");
  a.alibi_slopes = head_data(alibi_slopes, a.num_heads, "alibi_slopes");
  a.scale = static_cast<float>(scale), a.soft_cap = static_cast<float>(soft_cap.value_or(0.0));
  a.window = window.value_or(NO_WINDOW), a.chunk = chunk.value_or(0), a.causal = causal;
  a.num_threads = pagebinder::num_threads(), a.run = run_parallel;
  return a;
}

// Rows of K and V of q's dtype, as they are.
inline void check_plain_rows(const Tensor& q, const Tensor& kv_cache, int64_t head_dim_v) {
  PB_CHECK(q.scalar_type() == kv_cache.scalar_type(), "q and kv_cache must have the same dtype");
  PB_CHECK(kv_cache.size(3) == q.size(2) + head_dim_v, "a kv_cache row must be D + head_dim_v wide: ",
           kv_cache.size(3), " is not ", q.size(2), " + ", head_dim_v);
}

// The operands of a cache write, with strides in bytes; the width of cache rows is left to the caller.
inline CacheWriteArgs cache_write_args(const Tensor& k, const Tensor& v, const Tensor& kv_cache,
                                       const Tensor& slot_mapping) {
  PB_CHECK(k.dim() == 3 && v.dim() == 3 && kv_cache.dim() == 4, "k, v must be [T, G, width], kv_cache 4-D");
  PB_CHECK(k.scalar_type() == v.scalar_type(), "k and v must have the same dtype");
  CacheWriteArgs a{};
  a.num_tokens = k.size(0), a.num_kv_heads = k.size(1), a.head_dim = k.size(2), a.head_dim_v = v.size(2);
  a.num_blocks = kv_cache.size(0), a.block_size = kv_cache.size(2);
  PB_CHECK(v.size(0) == a.num_tokens && v.size(1) == a.num_kv_heads && kv_cache.size(1) == a.num_kv_heads,
           "k, v and kv_cache must agree in tokens and KV heads");
  PB_CHECK(kv_cache.stride(3) == 1, "the last stride of kv_cache must be 1");
  PB_CHECK(k.numel() == 0 || (k.size(2) == 1 || k.stride(2) == 1), "the last stride of k must be 1");
  PB_CHECK(v.numel() == 0 || (v.size(2) == 1 || v.stride(2) == 1), "the last stride of v must be 1");
  a.slot_mapping = index_data(slot_mapping, 1, "slot_mapping");
  PB_CHECK(slot_mapping.size(0) == a.num_tokens, "slot_mapping must have one slot a token");
  const int64_t bytes = static_cast<int64_t>(k.element_size()), cache_bytes = kv_cache.element_size();
  a.k = data<const char>(k), a.v = data<const char>(v), a.cache = data<char>(kv_cache);
  a.k_token_stride = k.stride(0) * bytes, a.k_head_stride = k.stride(1) * bytes;
  a.v_token_stride = v.stride(0) * bytes, a.v_head_stride = v.stride(1) * bytes;
  a.element_bytes = bytes;
  a.cache_block_stride = kv_cache.stride(0) * cache_bytes, a.cache_head_stride = kv_cache.stride(1) * cache_bytes;
  a.cache_slot_stride = kv_cache.stride(2) * cache_bytes;
  a.num_threads = pagebinder::num_threads(), a.run = run_parallel;
  return a;
}

}  // namespace pagebinder
