// K/V caches of one byte a value: what the binding gives the kernels. Rows and codes: ../quantized_rows.h.
#pragma once

#include "attention.h"
#include "qk_write.h"

namespace pagebinder {

enum class Codes { E4M3, E5M2, INT8 };

// Attention over rows of codes. q and the output of one type; returns null or what is wrong with the arguments.
const char* quantized_attention_f32(const AttentionArgs& args, Codes codes);
const char* quantized_attention_bf16(const AttentionArgs& args, Codes codes);
const char* quantized_attention_f16(const AttentionArgs& args, Codes codes);

struct QuantizedWriteArgs : CacheWriteArgs {
  Codes codes;
  Element type;            // of k and v
  const float* kv_scales;  // [2, G] of K and V, or null: each row gets its own
};
const char* quantized_kv_cache_write(const QuantizedWriteArgs& args);

// The same rows of k and v, where k is normed and turned before; `encode` is filled in here.
template <class T>
struct QuantizedQkWriteArgs : QkWriteArgs<T> {
  const float* kv_scales;  // as above
};
template <class T> const char* qk_norm_rope_quantized_write(QuantizedQkWriteArgs<T>& args, Codes codes);

}  // namespace pagebinder
