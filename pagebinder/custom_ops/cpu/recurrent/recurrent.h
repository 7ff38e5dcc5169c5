// Arguments of the recurrences over requests whose states lie in blocks of a cache, see recurrent/checkpoints.py.
//
// T tokens, R requests, N blocks, M blocks of a request at most. Strides count elements. Every op returns null or
// what is wrong with the step's metadata. All of them add tokens one after the other, by the same operations in the
// same order, from the state that the cache holds in full: neither cuts between steps, nor other requests, nor the
// number of threads change a bit.
#pragma once

#include "attention.h"
#include "simd.h"

namespace pagebinder {

// A tensor that is read in rows of adjacent values; row i, j begins at i * strides[0] + j * strides[1].
struct Operand {
  const void* base;               // null: not given
  Element type;
  int64_t strides[2];
};

// The output, dense: [T, rows of a token, width of a row].
struct Result {
  void* base;
  Element type;
  int64_t rows, width;
};

// [N, ...] with up to three dimensions of any strides behind the blocks.
struct StateCache {
  void* base;
  Element type;
  int64_t num_blocks, block_stride, strides[3];
};

struct Step {
  int64_t num_tokens, num_requests, max_blocks, block_size;
  const int32_t* block_table;     // [R, M]
  int64_t table_stride;
  const int32_t* seq_lens;        // [R], with the new tokens
  const int32_t* query_start_loc; // [R + 1]
  int num_threads;
  ParallelRun run;
};

struct ShortConvArgs {
  Step step;
  StateCache cache;               // [N, C, K - 1]
  Operand x, weight, bias;        // [T, C], [C, K], [C]
  Result out;                     // [T, C]
  int64_t channels, taps;
  bool silu;
};
const char* short_conv(const ShortConvArgs& args);

struct LinearRecurrenceArgs {
  Step step;
  StateCache cache;               // [N, W]
  Operand x, decay;               // [T, W]
  Result out;                     // [T, W]
  int64_t channels;
};
const char* linear_recurrence(const LinearRecurrenceArgs& args);

struct SelectiveScanArgs {
  Step step;
  StateCache cache;               // [N, W, S]
  Operand x, dt, b, c;            // [T, W], [T, W], [T, S], [T, S]
  Operand a, d, dt_bias;          // [W, S], [W], [W]
  Result out;                     // [T, W]
  int64_t channels, width;
  bool dt_softplus;
};
const char* selective_scan(const SelectiveScanArgs& args);

struct WkvArgs {
  Step step;
  StateCache cache;               // [N, 3, W]
  Operand k, v, decay, first;     // [T, W], [T, W], [W], [W]
  Result out;                     // [T, W]
  int64_t channels;
};
const char* wkv(const WkvArgs& args);

struct GatedDeltaRuleArgs {
  Step step;
  StateCache cache;               // [N, H, Dk, Dv]
  Operand q, k, v, g, beta;       // [T, G, Dk], [T, G, Dk], [T, H, Dv], [T, H, 1 or Dk], [T, H, 1]
  Result out;                     // [T, H, Dv]
  int64_t heads, group, key_width, value_width;
  bool row_decay, normalise;
  float scale, norm_eps;
};
const char* gated_delta_rule(const GatedDeltaRuleArgs& args);

struct MlstmArgs {
  Step step;
  StateCache cache;               // [N, H, Dk + 1, Dv + 1]
  Operand q, k, v;                // [T, H, Dk], [T, H, Dk], [T, H, Dv]
  Operand igate, fgate;           // [T, H, 1]
  Result out;                     // [T, H, Dv]
  int64_t heads, key_width, value_width;
  float scale, eps;
};
const char* mlstm(const MlstmArgs& args);

struct SsdArgs {
  Step step;
  StateCache cache;               // [N, H, P, S]
  Operand x, dt, b, c;            // [T, H, P], [T, H, 1], [T, G, S], [T, G, S]
  Operand a, d, dt_bias;          // [H, 1]
  Result out;                     // [T, H, P]
  int64_t heads, group, head_width, width;
  bool dt_softplus;
  float dt_min, dt_max;
};
const char* ssd(const SsdArgs& args);

}  // namespace pagebinder
