// Attention of one step in parts, see attention/unified.py: causal (the step's own K and V), shared (cached keys that
// several requests have in common, read once for all of them) and unique (the rest of each request's cached keys).
//
//     phase    what the attention kernel sees                                      where a row's result goes
//     causal   requests over this step's rows of K and V                           carried
//     shared   one request per group of sharers: its queries are their tokens      added to what is carried
//     unique   the requests, keys from the shared ones on                          added, normalised, written
//
// In the shared phase the tokens of all sharers are the rows of common tiles, so a block of keys is multiplied with many
// queries while it is in the cache. A row's running softmax (maximum, sum, output) is carried from phase to phase.
#pragma once

#include <functional>

#include "attention.h"

namespace pagebinder {

struct UnifiedArgs {
  AttentionArgs attention;        // as for paged attention
  const int32_t* shared_lens;     // [R] leading tokens that are shared, 0 = none
  const int32_t* shared_leaders;  // [R] whose table they are read through
  const int32_t* shared_tokens;   // [T] tokens of sharers, leader by leader, then -1
  const char *k, *v;              // [T, G, D] and [T, G, Dv] of this step, strides in bytes; for the causal phase
  int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride, element_bytes;
  bool has_causal, has_shared, has_unique;  // of the phases
  char only;                      // 0, or the one phase that runs: its state is given back in float32
  float* part_out;                // [T, H, Dv] and [H, T], if only one runs
  float* part_lse;
};

using Attend = std::function<const char*(const AttentionArgs& args)>;
const char* unified_attention(const UnifiedArgs& args, const Attend& attend);

// outs [P][T, H, Dv] float32, lses [P][H, T] -> their softmax over all, with the sink; lse without.
struct MergeArgs {
  int64_t num_parts, num_tokens, num_heads, head_dim_v;
  const float* const* outs;       // contiguous
  const float* const* lses;
  const float* sinks;             // [H] or null
  float *out, *lse;
};
void merge_states(const MergeArgs& args, int64_t begin, int64_t end);  // some of the T * H rows

}  // namespace pagebinder
