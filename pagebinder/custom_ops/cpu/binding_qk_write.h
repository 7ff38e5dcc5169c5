// The operands of the op between projections and attention, for caches of any rows: checks, and the kernel's arguments.
#pragma once

#include <string>

#include "binding_attention.h"
#include "checks.h"
#include "element_of.h"
#include "num_threads.h"
#include "qk_write.h"

namespace pagebinder {

struct QkOperands {
  const Tensor &q, &k, &v, &cos, &sin;
  const std::optional<Tensor>&q_weight, &k_weight;
  const Tensor &kv_cache, &slot_mapping;
  double eps;
  const std::string &tail, &style;
  bool in_float32;

  // Have tables a column for each channel? Are pairs neighbours?
  bool is_wide() const { return style == "half" || style == "every_two"; }
  bool has_neighbours() const { return style == "every_two" || style == "interleaved"; }
};

inline NormTail head_tail_named(const std::string& name) {
  constexpr std::pair<const char*, NormTail> NAMES[] = {{"", NormTail::ABSENT},
                                                        {"cast_scale", NormTail::CAST_SCALE},
                                                        {"scale_cast", NormTail::SCALE_CAST},
                                                        {"offset", NormTail::OFFSET},
                                                        {"none", NormTail::PLAIN}};
  for (const auto& [known, tail] : NAMES)
    if (name == known) return tail;
  PB_CHECK(false, "unknown RMSNorm tail \"", name, "\"");
  return NormTail::ABSENT;
}

// Leading channels of a head that turn.
inline int64_t turned_channels(const QkOperands& o) {
  return o.is_wide() ? o.cos.size(1) : 2 * o.cos.size(1);
}

// All but the cache's dtype and the width of its rows.
inline void check_qk_operands(const QkOperands& o) {
  const ScalarType type = o.q.scalar_type();
  const int64_t T = o.q.size(0), D = o.q.size(o.q.dim() - 1), columns = o.is_wide() ? D : D / 2;
  const bool has_rows = o.cos.dim() == 2 && o.sin.dim() == 2 && o.cos.size(0) == T && o.sin.size(0) == T;
  PB_CHECK(o.is_wide() || o.has_neighbours() || o.style == "chunked",
           "style must be half, every_two, chunked or interleaved, not ", o.style);
  PB_CHECK(o.q.dim() == 3 && o.k.dim() == 3 && o.v.dim() == 3 && o.kv_cache.dim() == 4 && D % 2 == 0,
           "q, k, v must be [T, heads, width], the width of q even, and kv_cache 4-D");
  PB_CHECK(o.k.scalar_type() == type && o.v.scalar_type() == type, "q, k and v must have the same dtype");
  PB_CHECK(o.k.size(0) == T && o.v.size(0) == T && o.k.size(2) == D && o.v.size(1) == o.k.size(1) &&
               o.kv_cache.size(1) == o.k.size(1),
           "q, k, v and kv_cache must agree in tokens, heads and widths");
  PB_CHECK(last_is_dense(o.q) && last_is_dense(o.k) && last_is_dense(o.v) && o.kv_cache.stride(3) == 1,
           "the last strides of q, k, v and kv_cache must be 1");
  PB_CHECK(has_rows && o.cos.size(1) == o.sin.size(1) && o.cos.size(1) > 0 && o.cos.size(1) <= columns &&
               turned_channels(o) % 2 == 0 && last_is_dense(o.cos) && last_is_dense(o.sin),
           "cos and sin must be [T, ", columns, "] or of fewer columns, for an even number of channels, their last "
           "stride 1");
  PB_CHECK(o.cos.scalar_type() == o.sin.scalar_type() &&
               (o.cos.scalar_type() == type || o.cos.scalar_type() == ScalarType::Float),
           "cos and sin must have q's dtype or float32");
  PB_CHECK(o.slot_mapping.dim() == 1 && o.slot_mapping.size(0) == T &&
               o.slot_mapping.scalar_type() == ScalarType::Int && last_is_dense(o.slot_mapping),
           "slot_mapping must be [T] int32");
}

template <class T>
const T* norm_weight(const std::optional<Tensor>& weight, const Tensor& q, NormTail tail) {
  const bool wanted = tail != NormTail::ABSENT && tail != NormTail::PLAIN;
  PB_CHECK(weight.has_value() == wanted, "a norm whose tail has a weight needs one, and no other");
  if (!weight) return nullptr;
  PB_CHECK(weight->dim() == 1 && weight->size(0) == q.size(2) && weight->scalar_type() == q.scalar_type() &&
               last_is_dense(*weight),
           "the norms' weights must be [D] in q's dtype");
  return data<const T>(*weight);
}

// Fills in all but `encode`, and returns the new queries.
template <class T>
Tensor set_qk_operands(const QkOperands& o, QkWriteArgs<T>& a) {
  a.num_tokens = o.q.size(0), a.num_heads = o.q.size(1), a.head_dim = o.q.size(2);
  a.num_kv_heads = o.k.size(1), a.head_dim_v = o.v.size(2);
  a.q = data<const T>(o.q), a.q_token_stride = o.q.stride(0), a.q_head_stride = o.q.stride(1);
  a.k = data<const T>(o.k), a.k_token_stride = o.k.stride(0), a.k_head_stride = o.k.stride(1);
  a.v = data<const T>(o.v), a.v_token_stride = o.v.stride(0), a.v_head_stride = o.v.stride(1);
  a.turned = turned_channels(o), a.cos = data<const void>(o.cos), a.sin = data<const void>(o.sin);
  a.cos_stride = o.cos.stride(0), a.sin_stride = o.sin.stride(0);
  a.wide_angles = o.cos.scalar_type() == ScalarType::Float, a.in_float32 = a.wide_angles || o.in_float32;
  a.neighbours = o.has_neighbours(), a.column_per_pair = !o.is_wide();
  a.tail = head_tail_named(o.tail), a.eps = static_cast<float>(o.eps);
  a.q_weight = norm_weight<T>(o.q_weight, o.q, a.tail), a.k_weight = norm_weight<T>(o.k_weight, o.q, a.tail);
  Tensor out = new_tensor({a.num_tokens, a.num_heads, a.head_dim}, o.q.scalar_type());
  const int64_t bytes = static_cast<int64_t>(o.kv_cache.element_size());
  a.out = data<T>(out), a.cache = data<char>(o.kv_cache);
  a.num_blocks = o.kv_cache.size(0), a.block_size = o.kv_cache.size(2);
  a.cache_block_stride = o.kv_cache.stride(0) * bytes, a.cache_head_stride = o.kv_cache.stride(1) * bytes;
  a.cache_slot_stride = o.kv_cache.stride(2) * bytes;
  a.slot_mapping = data<const int32_t>(o.slot_mapping);
  a.num_threads = pagebinder::num_threads(), a.run = run_parallel;
  return out;
}

}  // namespace pagebinder
