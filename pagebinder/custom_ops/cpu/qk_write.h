// Norm of query and key heads, RoPE and the write to the KV cache: attention/qk_norm_rope_write.py.
#pragma once

#include "attention.h"
#include "elements.h"

namespace pagebinder {

enum class NormTail { ABSENT, CAST_SCALE, SCALE_CAST, OFFSET, PLAIN };  // PLAIN: a norm without a weight

// Heads in, heads out; strides in elements, a head's channels lie next to each other.
template <class T>
struct QkWriteArgs {
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, head_dim_v;
  const T *q, *k, *v;
  int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  int64_t turned;                 // leading channels of a head that turn
  bool neighbours;                // pairs are of channels 2 i and 2 i + 1, else of i and i + turned / 2
  const void *cos, *sin;          // [T, turned], or [T, turned / 2] if `column_per_pair`
  bool wide_angles;               // they are float32, else T
  bool in_float32;                // products are not rounded to T
  bool column_per_pair;
  int64_t cos_stride, sin_stride;
  NormTail tail;
  float eps;
  const T *q_weight, *k_weight;   // [head_dim] or null
  T* out;                         // [T, H, D] contiguous
  char* cache;                    // [N, G, B, row], strides in bytes
  int64_t num_blocks, block_size, cache_block_stride, cache_head_stride, cache_slot_stride;
  // Makes KV head g's row of its k and v; null: they are the row, one after the other.
  void (*encode)(const QkWriteArgs& args, int64_t g, const T* k, const T* v, char* row);
  const int32_t* slot_mapping;    // [T]
  int num_threads;
  ParallelRun run;
};

// Null, or what is wrong with the slots. One of each element type, see qk_write_heads.h.
template <class T> using QkWriteKernel = const char* (*)(const QkWriteArgs<T>& args);

}  // namespace pagebinder
