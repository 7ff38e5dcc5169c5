// Registers the op between projections and attention under `pagebinder_cpu`.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "qk_write.h"

namespace {

using pagebinder::NormTail;
using pagebinder::QkWriteArgs;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void run_parallel(int num_workers, void (*body)(void*, int), void* context) {
  torch::stable::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(context, static_cast<int>(i));
  });
}

NormTail tail_named(const std::string& name) {
  constexpr std::pair<const char*, NormTail> NAMES[] = {{"", NormTail::ABSENT},
                                                        {"cast_scale", NormTail::CAST_SCALE},
                                                        {"scale_cast", NormTail::SCALE_CAST},
                                                        {"offset", NormTail::OFFSET},
                                                        {"none", NormTail::PLAIN}};
  for (const auto& [known, tail] : NAMES)
    if (name == known) return tail;
  STD_TORCH_CHECK(false, "unknown RMSNorm tail \"", name, "\"");
  return NormTail::ABSENT;
}

bool last_is_dense(const Tensor& t) { return t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1; }

template <class T>
const T* weight_data(const std::optional<Tensor>& weight, const Tensor& q, bool wanted) {
  STD_TORCH_CHECK(weight.has_value() == wanted, "a norm whose tail has a weight needs one, and no other");
  if (!weight) return nullptr;
  STD_TORCH_CHECK(weight->dim() == 1 && weight->size(0) == q.size(2) && weight->scalar_type() == q.scalar_type() &&
                      last_is_dense(*weight),
                  "the norms' weights must be [D] in q's dtype");
  return static_cast<const T*>(weight->const_data_ptr());
}

template <class T>
Tensor run(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
           const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight, const Tensor& kv_cache,
           const Tensor& slot_mapping, double eps, NormTail tail, bool column_per_pair) {
  const bool weighted = tail != NormTail::ABSENT && tail != NormTail::PLAIN;
  QkWriteArgs<T> a{};
  a.num_tokens = q.size(0), a.num_heads = q.size(1), a.head_dim = q.size(2);
  a.num_kv_heads = k.size(1), a.head_dim_v = v.size(2);
  a.q = static_cast<const T*>(q.const_data_ptr()), a.q_token_stride = q.stride(0), a.q_head_stride = q.stride(1);
  a.k = static_cast<const T*>(k.const_data_ptr()), a.k_token_stride = k.stride(0), a.k_head_stride = k.stride(1);
  a.v = static_cast<const T*>(v.const_data_ptr()), a.v_token_stride = v.stride(0), a.v_head_stride = v.stride(1);
  a.cos = cos.const_data_ptr(), a.sin = sin.const_data_ptr();
  a.cos_stride = cos.stride(0), a.sin_stride = sin.stride(0);
  a.wide_angles = cos.scalar_type() == ScalarType::Float, a.column_per_pair = column_per_pair;
  a.tail = tail, a.eps = static_cast<float>(eps);
  a.q_weight = weight_data<T>(q_weight, q, weighted), a.k_weight = weight_data<T>(k_weight, q, weighted);
  Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)});
  a.out = static_cast<T*>(out.mutable_data_ptr()), a.cache = static_cast<T*>(kv_cache.mutable_data_ptr());
  a.num_blocks = kv_cache.size(0), a.block_size = kv_cache.size(2);
  a.cache_block_stride = kv_cache.stride(0), a.cache_head_stride = kv_cache.stride(1);
  a.cache_slot_stride = kv_cache.stride(2);
  a.slot_mapping = static_cast<const int32_t*>(slot_mapping.const_data_ptr());
  a.num_threads = static_cast<int>(torch::stable::get_num_threads()), a.run = run_parallel;
  const char* error = pagebinder::qk_norm_rope_write(a);
  STD_TORCH_CHECK(error == nullptr, "qk_norm_rope_write: ", error);
  return out;
}

Tensor qk_norm_rope_write(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                          std::optional<Tensor> q_weight, std::optional<Tensor> k_weight, const Tensor& kv_cache,
                          const Tensor& slot_mapping, double eps, std::string tail, std::string style) {
  const ScalarType type = q.scalar_type();
  const int64_t T = q.size(0), D = q.size(q.dim() - 1), columns = style == "half" ? D : D / 2;
  STD_TORCH_CHECK(style == "half" || style == "chunked", "style must be half or chunked, not ", style);
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && kv_cache.dim() == 4 && D % 2 == 0,
                  "q, k, v must be [T, heads, width], the width of q even, and kv_cache 4-D");
  STD_TORCH_CHECK(k.scalar_type() == type && v.scalar_type() == type && kv_cache.scalar_type() == type,
                  "q, k, v and kv_cache must have the same dtype");
  STD_TORCH_CHECK(k.size(0) == T && v.size(0) == T && k.size(2) == D && v.size(1) == k.size(1) &&
                      kv_cache.size(1) == k.size(1) && kv_cache.size(3) == D + v.size(2),
                  "q, k, v and kv_cache must agree in tokens, heads and widths");
  STD_TORCH_CHECK(last_is_dense(q) && last_is_dense(k) && last_is_dense(v) && kv_cache.stride(3) == 1,
                  "the last strides of q, k, v and kv_cache must be 1");
  STD_TORCH_CHECK(cos.dim() == 2 && sin.dim() == 2 && cos.size(0) == T && sin.size(0) == T &&
                      cos.size(1) == columns && sin.size(1) == columns && last_is_dense(cos) && last_is_dense(sin),
                  "cos and sin must be [T, ", columns, "], their last stride 1");
  STD_TORCH_CHECK(cos.scalar_type() == sin.scalar_type() &&
                      (cos.scalar_type() == type || cos.scalar_type() == ScalarType::Float),
                  "cos and sin must have q's dtype or float32");
  STD_TORCH_CHECK(slot_mapping.dim() == 1 && slot_mapping.size(0) == T &&
                      slot_mapping.scalar_type() == ScalarType::Int && last_is_dense(slot_mapping),
                  "slot_mapping must be [T] int32");
  const auto serve = type == ScalarType::Float      ? run<float>
                     : type == ScalarType::BFloat16 ? run<pagebinder::bf16>
                                                    : run<pagebinder::f16>;
  STD_TORCH_CHECK(serve != run<pagebinder::f16> || type == ScalarType::Half, "q must be float32, bfloat16 or float16");
  return serve(q, k, v, cos, sin, q_weight, k_weight, kv_cache, slot_mapping, eps, tail_named(tail),
               style == "chunked");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) { m.impl("qk_norm_rope_write", TORCH_BOX(&qk_norm_rope_write)); }
