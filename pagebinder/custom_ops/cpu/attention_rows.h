// What a job works on: its scratch memory, its query rows, and the cache rows of its keys.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention.h"
#include "attention_scores.h"
#include "simd.h"

namespace pagebinder {

constexpr int BLOCK_KEYS = 64;
constexpr int ROW_BUFFER = BLOCK_KEYS + MAX_KEYS_AT_ONCE;
constexpr int MAX_TILE_ROWS = 64;

template <class T>
constexpr bool PAIRED = PAGEBINDER_BF16_DOT && std::is_same<T, bf16>::value;

// Where a worker keeps its intermediate data, in one buffer; `query` and `out` exist once per head of a job.
// `weights` is for those who cannot keep them in place of the scores.
struct Scratch {
  Buffer buffer;
  size_t query_floats, out_floats;
  float *query, *out, *scores, *weights, *staged_k, *staged_v;
  float *key_scales, *value_scales, *decoded;  // of quantised rows: factors of scores and of weights, per key

  // `decoded_row`: floats that a decoded row takes, 0 where rows are read as they are stored.
  void reserve(int heads, int stride, int width_padded, int width_v_padded, int block_keys, size_t decoded_row) {
    const int row_buffer = block_keys + MAX_KEYS_AT_ONCE;
    query_floats = round_up(static_cast<size_t>(stride) * width_padded);
    out_floats = round_up(static_cast<size_t>(stride) * width_v_padded);
    const size_t score_floats = round_up(static_cast<size_t>(stride) * row_buffer + W);
    const size_t k_floats = round_up(static_cast<size_t>(row_buffer) * width_padded);
    const size_t v_floats = static_cast<size_t>(row_buffer) * width_v_padded;
    const size_t scale_floats = round_up(row_buffer + W), decoded_floats = block_keys * decoded_row;
    query = buffer.at_least<float>(heads * (query_floats + out_floats) + 2 * score_floats + k_floats + v_floats +
                                   2 * scale_floats + decoded_floats);
    out = query + heads * query_floats;
    scores = out + heads * out_floats;
    weights = scores + score_floats;
    staged_k = weights + score_floats;
    staged_v = staged_k + k_floats;
    key_scales = staged_v + v_floats;
    value_scales = key_scales + scale_floats;
    decoded = value_scales + scale_floats;
  }
  static size_t round_up(size_t floats) { return (floats + 15) / 16 * 16; }
};

// What every step of a job needs to know. T: of q and the output.
template <class T>
struct TileContext {
  const AttentionArgs& args;
  const Tile& tile;
  int width, width_v, vectors_v;  // vectors_v: vectors of an output row
  Scratch& scratch;
  int kv_head;                    // at hand
  float* query;                   // its packed queries

  const T* query_row(int row) const {
    return static_cast<const T*>(args.q) + token_of(row) * args.q_token_stride + head_of(row) * args.q_head_stride;
  }
  int64_t query_of(int row) const {
    return args.query_start_loc[tile.request] + (tile.row_begin + row) / args.group();
  }
  int64_t token_of(int row) const {
    const int64_t query = query_of(row);
    return args.row_tokens == nullptr ? query : args.row_tokens[query];
  }
  int64_t head_of(int row) const { return kv_head * args.group() + (tile.row_begin + row) % args.group(); }
  int64_t position_of(int row) const { return args.position_of(tile.request, query_of(row)); }
};

// The keys at hand, too. R: of their rows, as the arithmetic reads them.
template <class T, class R = T>
struct BlockContext : TileContext<T> {
  Rows<R> rows;         // of these keys: K, then V
  AheadLines<R> ahead;  // of those read after them
  int64_t row_stride;   // of rows that are neighbours
};

// Keys [begin, end) of a block, widened to [from, to) so that they fill whole vectors or pairs.
struct BlockKeys { int begin, end, from, to; };

// Cache rows of positions [from, to); those outside [begin, end) repeat the nearest inside. False: the block
// table has a bad entry. Score forms compute some keys beyond the last, and a longer block asks for the rows of a
// shorter next one: the last row fills the buffer up to its capacity.
template <class T>
bool find_rows(const AttentionArgs& a, const Tile& tile, int kv_head, const BlockKeys& keys, const T** rows,
               int capacity = ROW_BUFFER) {
  const auto [begin, end, from, to] = keys;
  const int32_t* table = a.block_table + tile.request * a.block_table_stride;
  const T* cache = static_cast<const T*>(a.cache) + kv_head * a.cache_head_stride;
  const uint32_t block_size = static_cast<uint32_t>(a.block_size);
  int k = begin - from;
  for (uint32_t position = begin; position < static_cast<uint32_t>(end);) {
    const uint32_t block = position / block_size, offset = position - block * block_size;
    const int count = std::min<uint32_t>(block_size - offset, end - position);
    const int64_t id = table[block];
    if (id < 0 || id >= a.num_blocks) return false;
    const T* row = cache + id * a.cache_block_stride + offset * a.cache_slot_stride;
    for (int i = 0; i < count; ++i, ++k, row += a.cache_slot_stride) rows[k] = row;
    position += count;
  }
  for (int i = 0; i < begin - from; ++i) rows[i] = rows[begin - from];
  for (; k < to - from; ++k) rows[k] = rows[end - from - 1];
  for (; k < capacity; ++k) rows[k] = rows[k - 1];
  return true;
}

// Rows converted to float32 in contiguous scratch, padded with zeros to whole vectors.
template <class T>
void stage_rows(Rows<T> rows, int num_rows, int width, float* staged, const float** staged_rows) {
  const int full = width / W * W, padded = (width + W - 1) / W * W;
  for (int k = 0; k < num_rows; ++k) {
    const T* from = rows[k];
    float* to = staged + k * padded;
    for (int d = 0; d < full; d += W) store(to + d, load_float(from + d));
    if (full < width) store(to + full, load_float_part(from + full, width - full));
    staged_rows[k] = to;
  }
}

}  // namespace pagebinder
