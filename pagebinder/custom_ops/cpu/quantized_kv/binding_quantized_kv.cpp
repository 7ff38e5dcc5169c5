// Registers the ops over quantised K/V caches under `pagebinder_cpu`; their schemas come from Python.
#include <torch/csrc/stable/library.h>

#include <string>

#include "binding_qk_write.h"
#include "checks.h"
#include "direct_calls.h"
#include "quantized_kv.h"
#include "recorder.h"

namespace {

using namespace pagebinder;

Codes codes_named(const std::string& name) {
  if (name == "fp8_e4m3") return Codes::E4M3;
  if (name == "fp8_e5m2") return Codes::E5M2;
  PB_CHECK(name == "int8", "codes must be fp8_e4m3, fp8_e5m2 or int8, not ", name);
  return Codes::INT8;
}

// [2, G] or null where rows have their own; checks that a cache row [.., D + Dv (+ two floats)] is that of the codes.
const float* scale_data(const std::optional<Tensor>& scales, const Tensor& kv_cache, int64_t row_values) {
  PB_CHECK(kv_cache.scalar_type() == ScalarType::Byte, "a quantised kv_cache must be uint8");
  const int64_t row_bytes = row_values + (scales ? 0 : 2 * static_cast<int64_t>(sizeof(float)));
  PB_CHECK(kv_cache.size(3) == row_bytes, "a kv_cache row must have ", row_bytes, " bytes, not ",
           kv_cache.size(3));
  if (!scales) return nullptr;
  PB_CHECK(scales->scalar_type() == ScalarType::Float && scales->dim() == 2 && scales->size(0) == 2 &&
               scales->size(1) == kv_cache.size(1) && scales->is_contiguous(),
           "scales must be float32 [2, G], contiguous");
  return data<const float>(*scales);
}

void write_cache(const Tensor& k, const Tensor& v, const Tensor& kv_cache, const Tensor& slot_mapping,
                 std::optional<Tensor> scales, std::string codes) {
  const CacheWriteArgs plain = cache_write_args(k, v, kv_cache, slot_mapping);
  QuantizedWriteArgs a{plain, codes_named(codes), element_of(k, "k"), nullptr};
  a.kv_scales = scale_data(scales, kv_cache, a.head_dim + a.head_dim_v);
  launch([a] {
    const char* error = quantized_kv_cache_write(a);
    PB_CHECK(error == nullptr, "quantized_kv_cache_write: ", error);
  });
}

Tensor qk_write(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                std::optional<Tensor> q_weight, std::optional<Tensor> k_weight, const Tensor& kv_cache,
                const Tensor& slot_mapping, std::optional<Tensor> scales, std::string codes, double eps,
                std::string tail, std::string style, bool in_float32) {
  const QkOperands operands{q, k, v, cos, sin, q_weight, k_weight, kv_cache, slot_mapping, eps,
                            tail, style, in_float32};
  check_qk_operands(operands);
  const Codes code = codes_named(codes);
  return with_element(element_of(q, "q"), [&](auto element) {
    QuantizedQkWriteArgs<decltype(element)> args{};
    Tensor out = set_qk_operands(operands, args);
    args.kv_scales = scale_data(scales, kv_cache, args.head_dim + args.head_dim_v);
    launch([args, code]() mutable {
      const char* error = qk_norm_rope_quantized_write(args, code);
      PB_CHECK(error == nullptr, "qk_norm_rope_quantized_write: ", error);
    });
    return out;
  });
}

Tensor paged_attention(const Tensor& q, const Tensor& kv_cache, const Tensor& block_table, const Tensor& seq_lens,
                       const Tensor& query_start_loc, std::optional<Tensor> sinks, std::optional<Tensor> alibi_slopes,
                       std::optional<Tensor> scales, std::string codes, int64_t head_dim_v, double scale,
                       std::optional<int64_t> window, std::optional<int64_t> chunk, std::optional<double> soft_cap,
                       bool causal) {
  AttentionArgs a = attention_args(q, kv_cache, block_table, seq_lens, query_start_loc, sinks, alibi_slopes,
                                   head_dim_v, scale, window, chunk, soft_cap, causal);
  a.kv_scales = scale_data(scales, kv_cache, a.head_dim + a.head_dim_v);
  Tensor out = new_tensor({a.num_tokens, a.num_heads, head_dim_v}, q.scalar_type());
  a.out = data(out);
  const Codes code = codes_named(codes);
  const Element type = element_of(q, "q");
  const auto attend = type == Element::F32    ? quantized_attention_f32
                      : type == Element::BF16 ? quantized_attention_bf16
                                              : quantized_attention_f16;
  launch([a, code, attend] {
    const char* error = attend(a, code);
    PB_CHECK(error == nullptr, "quantized_paged_attention: ", error);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "quantized_kv_cache_write", TORCH_BOX(&write_cache));
  pagebinder::implement(m, "quantized_paged_attention", TORCH_BOX(&paged_attention));
  pagebinder::implement(m, "qk_norm_rope_quantized_write", TORCH_BOX(&qk_write));
}
