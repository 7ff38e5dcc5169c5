// Attention to latent rows on the CPU (`sparse_mla_attention`): arguments and work plan.
//
// All heads read the same rows, so the query rows of a request are (token, head) pairs, token first, and a tile of
// them meets every row once. What a tile attends to is one line of keys, which parts cut for short requests:
//
//     keys       | rows of tokens (window) |  gap  | entries: all that are visible, or those of a list |
//     position   0                         |   entry_begin                                      num_keys
//     parts      [        part 0        |        part 1        |  ...                                  ]
//
// A tile of several tokens has one set of keys but two kinds of limits per token, so its entries begin at a new
// block of keys; with one token every key is visible and there is no gap. A list belongs to one token: then tiles
// are cut at tokens. How a request is cut depends on that request alone, so its result has the same bits whatever
// else is in the batch and however many threads run.
#pragma once

#include <atomic>
#include <vector>

#include "attention.h"
#include "sparse_rows.h"

namespace pagebinder {

struct SparseMlaArgs {
  int64_t num_tokens, num_requests, num_heads, width, width_v;
  const void* q;                   // [T, H, D], strides in elements
  int64_t q_token_stride, q_head_stride;
  PagedRows window_rows, entry_rows;
  const int32_t* indices;          // [T, K] or null
  int64_t indices_stride, num_indices;
  const int32_t* seq_lens;         // [R]
  const int32_t* query_start_loc;  // [R+1]
  const float* sinks;              // [H] or null
  void* out;                       // [T, H, Dv] contiguous
  float scale;
  int64_t window, ratio;
  int num_threads;
  ParallelRun run;
};

constexpr int SPARSE_BLOCK_KEYS = 128;  // keys that pass through scores, softmax and values at once
constexpr int SPARSE_GROUP_ROWS = 4 * W;
constexpr int SPARSE_MAX_GROUPS = 4;    // groups of rows that share what is gathered

struct SparseTile {
  int32_t request, row_begin, rows;
  int32_t window_begin, num_window;  // rows of tokens
  int32_t entry_begin, num_keys;     // see the picture
  bool single;                       // one token
  int32_t parts, part_keys;
  int64_t first_partial, counter;
};

struct SparseJob { int32_t tile, part; };

struct SparsePlan {
  std::vector<SparseTile> tiles;
  std::vector<SparseJob> jobs;
  int64_t partial_floats = 0, num_counters = 0, work = 0;
  Buffer partial_buffer, counter_buffer;
  float* partials = nullptr;  // per part and row: maximum, sum, then the row of unnormalised output
  std::atomic<int>* counters = nullptr;
  std::atomic<int> next_job{0};
  std::atomic<bool> bad_row{false};
};

// The whole op for q and out of one type; returns null or what is wrong with the arguments.
const char* sparse_mla_f32(const SparseMlaArgs& args);
const char* sparse_mla_bf16(const SparseMlaArgs& args);
const char* sparse_mla_f16(const SparseMlaArgs& args);

using SparseKernel = void (*)(const SparseMlaArgs& args, SparsePlan& plan, const SparseJob& job);

}  // namespace pagebinder
