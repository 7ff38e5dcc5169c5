// Arguments of the ops that fill latent caches, see latent/write.py and compress/paged_compress.py. All strides in
// elements; each op returns null or what is wrong with its metadata.
#pragma once

#include "attention.h"
#include "latent_rows.h"

namespace pagebinder {

struct LatentWriteArgs {
  int64_t num_tokens;
  FloatData rows;                 // [T, width]
  int64_t row_stride;
  FloatData cos, sin;             // [T, pairs]
  int64_t cos_stride, sin_stride;
  int pairs;                     // 0 = no rotation
  LatentPages cache;
  const int32_t* slot_mapping;   // [T]
  int num_threads;
  ParallelRun run;
};
const char* latent_cache_write(const LatentWriteArgs& args);

struct CompressArgs {
  int64_t num_tokens, num_requests;
  int width, slots, ratio;       // d; c = 2 with overlap, else 1; tokens per entry
  RowKind type;                  // of kv and gate
  const void *kv, *gate;         // [T, c * d]
  int64_t kv_stride, gate_stride;
  FloatData position_bias;        // [ratio, c * d], float32 or of kv's type
  int64_t bias_stride;
  FloatData norm_weight;          // [d]; base null: no norm
  const float* inv_freq;         // [pairs]
  int pairs;
  float eps, rope_scale;
  float* state;                  // [N, c, 3, d]
  int64_t state_block_stride, state_slot_stride, state_part_stride, num_state_blocks;
  const int32_t* state_table;    // [R, M]
  int64_t state_table_stride, max_state_blocks, block_size;
  LatentPages entries;
  const int32_t* entry_table;    // [R, M']
  int64_t entry_table_stride, max_entry_blocks;
  const int32_t *seq_lens, *query_start_loc;
  int num_threads;
  ParallelRun run;
};
const char* compress_norm_rope_store(const CompressArgs& args);

}  // namespace pagebinder
