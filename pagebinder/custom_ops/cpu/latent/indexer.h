// Index scores and their top-k on the CPU (`indexer_score_topk`).
//
//     entries of a request ->   part 0   part 1   part 2       one job = one (tile of tokens, part): keys are
//     tile of tokens          [ ....... | ....... | ..... ]     decoded once and scored for all tokens of the tile
//
// Whoever finishes the last part of a tile selects for its tokens. Scores become integers that sort alike. Tokens
// that see no more than topk entries are not scored. A score depends on its token and its entry alone.
#pragma once

#include "attention.h"
#include "sparse_rows.h"

namespace pagebinder {

struct IndexerArgs {
  int64_t num_tokens, num_requests, num_heads, width;
  const void* q;                   // [T, Hi, d], strides in elements
  int64_t q_token_stride, q_head_stride;
  const void* weights;             // [T, Hi] float32 or of q's type
  bool float_weights;
  int64_t weight_token_stride, weight_head_stride;
  PagedRows keys;
  const int32_t* seq_lens;         // [R]
  const int32_t* query_start_loc;  // [R+1]
  int32_t* out;                    // [T, topk] contiguous
  int64_t topk, ratio;
  float scale;
  int num_threads;
  ParallelRun run;
};

// The whole op for q of one type; returns null or what is wrong with the arguments.
const char* indexer_f32(const IndexerArgs& args);
const char* indexer_bf16(const IndexerArgs& args);
const char* indexer_f16(const IndexerArgs& args);

}  // namespace pagebinder
