// Paged attention on the CPU: arguments, work plan and scratch, shared by the binding and the kernels.
//
// A request's query rows are (token, head of the group) pairs, token first: all query heads of a KV head share its
// K and V rows, so they are handled together. Rows are cut into tiles and the keys a tile sees into parts:
//
//            keys of the request ->      part 0      part 1      part 2
//     rows of KV head g   tile 0      [    .....|...........|......     ]   one job = one (tile, part) for
//     (token, head)       tile 1      [         |     ......|.......... ]   some of the KV heads
//
// How a request is cut depends on that request alone, so its result has the same bits whatever else is in the
// batch and however many threads run. Each thread begins with a run of the list of jobs, so that it knows what it reads
// next, and helps others one job at a time (work_ranges.h). The list keeps neighbours in memory together.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

namespace pagebinder {

// Runs body(context, worker) for every worker in [0, num_workers), possibly at the same time.
using ParallelRun = void (*)(int num_workers, void (*body)(void* context, int worker), void* context);

constexpr int64_t NO_WINDOW = int64_t{1} << 40;

struct AttentionArgs {
  int64_t num_tokens, num_requests, num_heads, num_kv_heads, head_dim, head_dim_v;
  int64_t num_blocks, block_size, max_blocks;
  const void* q;                  // [T, H, D]
  int64_t q_token_stride, q_head_stride;
  const void* cache;              // [N, G, B, D+Dv]
  const float* kv_scales;         // [2, G] of K and V of quantised rows, null where each row has its own
  int64_t cache_block_stride, cache_head_stride, cache_slot_stride;
  int64_t value_offset;           // of V in a cache row: D behind K, 0 where the leading part of K is also V
  const int32_t* block_table;     // [R, M]
  int64_t block_table_stride;
  const int32_t* seq_lens;        // [R]
  const int32_t* query_start_loc; // [R+1]
  const float* sinks;             // [H], or a row of H for each token; or null
  int64_t sinks_token_stride;     // 0: the same for all tokens
  const float* alibi_slopes;      // [H] or null
  const void* bias;               // by distance: [H, bias_columns], for each token or once, or null
  bool wide_bias;                 // it is float32, else of q's type
  int64_t bias_columns, num_behind;  // num_behind: the column of distance 0
  int64_t bias_token_stride, bias_head_stride;  // in elements; token 0: the same for all tokens
  void* out;                      // [T, H, Dv] contiguous
  float* lse;                     // [H, T] or null
  float scale;
  float soft_cap;                 // 0 = none
  int64_t window;                 // NO_WINDOW = none
  int64_t chunk;                  // 0 = none
  const int32_t* lookahead;       // [T] keys behind its own position that a token sees though it is causal, or null
  bool causal;
  int num_threads;
  ParallelRun run;

  // Attention in several calls over disjoint keys, see unified/unified_attention.h; all null for a call over all keys.
  const int32_t* key_begins;      // [R], of the keys that count here, or null
  const int32_t* key_ends;        // [R], or null
  const int32_t* row_tokens;      // where the queries of query_start_loc stand in q, or null: in that order
  const int32_t* row_positions;   // their positions, with row_tokens
  float* carried;                 // rows (attention_partials.h) by carried row and head, or null
  const int32_t* carried_rows;    // [T] rows of `carried`, -1: nothing is carried for a token
  bool carries_on;                // results stay in `carried`, instead of being written

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t position_of(int64_t request, int64_t query) const {
    if (row_positions != nullptr) return row_positions[query];
    return seq_lens[request] - query_start_loc[request + 1] + query;
  }
};

// Keys that a query sees: [begin, end), empty as [0, 0). Every mask is such an interval.
struct KeyRange { int32_t begin, end; };
inline int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }
inline KeyRange visible_keys(const AttentionArgs& args, int64_t request, int64_t query) {
  const int64_t p = args.position_of(request, query);
  int64_t begin = std::max<int64_t>(0, p - args.window + 1), end = args.seq_lens[request];
  if (args.causal) end = std::min(end, p + 1 + (args.lookahead == nullptr ? 0 : args.lookahead[query]));
  else end = std::min(end, p + args.window);
  if (args.chunk > 0) {
    const int64_t chunk_begin = floor_div(p, args.chunk) * args.chunk;
    begin = std::max(begin, chunk_begin);
    end = std::min(end, chunk_begin + args.chunk);
  }
  if (args.key_begins != nullptr) begin = std::max<int64_t>(begin, args.key_begins[request]);
  if (args.key_ends != nullptr) end = std::min<int64_t>(end, args.key_ends[request]);
  if (begin >= end) return {0, 0};
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

constexpr int DOT_ROWS = 8;        // up to here rows are dotted one by one, beyond they become vector lanes
constexpr int MAX_JOB_HEADS = 16;
constexpr int MAX_JOB_TILES = 4;

// `rows` query rows of one request that are computed together, for each KV head.
struct Tile {
  int32_t request, row_begin, rows;
  int32_t stride;                 // lanes that the kernel gives the rows: 1, 2, 4, 8 or whole vectors
  KeyRange keys;                  // union over the rows
  int32_t parts, part_keys;       // part i covers [i, i+1) * part_keys counted from an absolute multiple
  int64_t first_partial;          // of this tile, in floats; meaningful if parts > 1
  int64_t first_counter;
};

// KV heads [kv_head, kv_head + num_heads) of one part of a tile; or one KV head of `num_tiles` whole tiles of a
// request, which may read their keys together.
struct Job { int32_t tile, part, kv_head, num_heads, num_tiles; };

// Keys of one part of a tile.
inline KeyRange part_keys(const Tile& tile, int part) {
  if (tile.parts == 1) return tile.keys;
  const int64_t begin = (tile.keys.begin / tile.part_keys + int64_t{part}) * tile.part_keys;
  const int64_t end = begin + tile.part_keys;
  return {begin > tile.keys.begin ? static_cast<int32_t>(begin) : tile.keys.begin,
          end < tile.keys.end ? static_cast<int32_t>(end) : tile.keys.end};
}

// Memory that grows to the largest need and stays.
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  template <class T>
  T* at_least(size_t count) {
    size_t bytes = (count * sizeof(T) + 4095) / 4096 * 4096;
    if (bytes > capacity_) {
      std::free(data_);
      capacity_ = 0;
      data_ = std::aligned_alloc(4096, bytes);
      if (data_ == nullptr) throw std::bad_alloc();
      capacity_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t capacity_ = 0;
};

struct Plan {
  std::vector<Tile> tiles;
  std::vector<Job> jobs;
  int64_t partial_floats = 0, num_counters = 0, work_bytes = 0;
  Buffer partial_buffer, counter_buffer;
  float* partials = nullptr;      // per part and row: maximum, sum, then the row of unnormalised output
  std::atomic<int>* counters = nullptr;  // finished parts of a (tile, KV head)
  std::atomic<bool> bad_block{false};
};

// The whole op: plans, runs `kernel` over all jobs, zeroes padding; returns null or what is wrong with the arguments.
// `next` is the job that the same thread will run afterwards, or null if that is not known.
using JobKernel = void (*)(const AttentionArgs& args, Plan& plan, const Job& job, const Job* next);
const char* run_attention(const AttentionArgs& args, size_t element_bytes, JobKernel kernel);

struct CacheWriteArgs {
  int64_t num_tokens, num_kv_heads, head_dim, head_dim_v, num_blocks, block_size;
  const char *k, *v;              // all strides in bytes; rows are contiguous
  int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  char* cache;
  int64_t cache_block_stride, cache_head_stride, cache_slot_stride;
  const int32_t* slot_mapping;
  int64_t element_bytes;          // of k and v
  int num_threads;
  ParallelRun run;
};
// Writes one token's rows of all heads; `to` is its slot in head 0.
using TokenWriter = void (*)(const CacheWriteArgs& args, int64_t token, char* to);
const char* write_tokens(const CacheWriteArgs& args, TokenWriter writer);
const char* kv_cache_write(const CacheWriteArgs& args);  // rows as they are

}  // namespace pagebinder
