// K/V caches of one byte a value: what the binding gives the kernels. Rows and codes: ../quantized_rows.h.
#pragma once

#include "attention.h"

namespace pagebinder {

enum class Codes { E4M3, E5M2, INT8 };
enum class FloatType { F32, BF16, F16 };

// Attention over rows of codes. q and the output of one type; returns null or what is wrong with the arguments.
const char* quantized_attention_f32(const AttentionArgs& args, Codes codes);
const char* quantized_attention_bf16(const AttentionArgs& args, Codes codes);
const char* quantized_attention_f16(const AttentionArgs& args, Codes codes);

struct QuantizedWriteArgs : CacheWriteArgs {
  Codes codes;
  FloatType type;          // of k and v
  const float* kv_scales;  // [2, G] of K and V, or null: each row gets its own
};
const char* quantized_kv_cache_write(const QuantizedWriteArgs& args);

}  // namespace pagebinder
