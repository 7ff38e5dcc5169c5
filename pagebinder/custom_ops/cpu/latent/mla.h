// The products of multi-head latent attention with its per-head weights, for few tokens.
//
//     absorb    q_nope [T, H, N] . w_k [H, N, L]  -> [T, H, L]       rows of the weight are added up
//     project   x [T, H, L] . w_v [H, V, L]^T     -> [T, H, V]       rows of the weight are dotted
//
// Both read every weight row once for up to 8 tokens, as it lies in memory: a decode is bound by exactly that. With
// many tokens a matrix product of the library is faster (mla.py says from how many).
#pragma once

#include "attention.h"
#include "elements.h"

namespace pagebinder {

constexpr int MLA_TOKENS_AT_ONCE = 8;

// Strides in elements; rows of x, weight and out are contiguous.
struct HeadProductArgs {
  int64_t num_tokens, num_heads, width_in, width_out;
  const void* x;       // [T, H, width_in]
  int64_t x_token_stride, x_head_stride;
  const void* weight;  // [H, width_in, width_out], or [H, width_out, width_in] if dotted
  int64_t weight_head_stride, weight_row_stride;
  void* out;           // [T, H, width_out]
  int64_t out_token_stride, out_head_stride;
  bool dotted;
  int num_threads;
  ParallelRun run;
};

// Null, or why the sizes are not served.
const char* head_product(const HeadProductArgs& args, Element element);

}  // namespace pagebinder
