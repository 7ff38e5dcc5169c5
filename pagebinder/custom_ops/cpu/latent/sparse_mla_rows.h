// What a job of sparse_mla_attention works on: its scratch memory, the rows of its keys, and which of them it sees.
#pragma once

#include <algorithm>

#include "attention_softmax.h"
#include "attention_scores.h"
#include "sparse_mla.h"

namespace pagebinder {

constexpr int SPARSE_ROW_BUFFER = SPARSE_BLOCK_KEYS + MAX_KEYS_AT_ONCE;
constexpr int ROWS_AHEAD = 6;  // rows that are asked for while one is decoded

// Where a worker keeps its intermediate data, in one buffer.
struct SparseScratch {
  Buffer buffer, list_buffer;
  size_t query_floats, out_floats;
  float *query, *out, *scores, *weights, *staged;
  uint32_t* packed;   // values as pairs of keys
  int32_t* list;      // entries of the token at hand

  void reserve(int groups, int stride, int pitch, int vectors_v) {
    query_floats = static_cast<size_t>(stride) * pitch;
    out_floats = static_cast<size_t>(stride) * vectors_v * W;
    const size_t score_floats = static_cast<size_t>(stride) * SPARSE_ROW_BUFFER;
    const size_t weight_floats = static_cast<size_t>(stride) * (SPARSE_BLOCK_KEYS / 2 + 16);
    const size_t staged_floats = static_cast<size_t>(SPARSE_ROW_BUFFER) * pitch;
    const size_t packed_floats = static_cast<size_t>(SPARSE_BLOCK_KEYS / 2) * vectors_v * W;
    query = buffer.at_least<float>(groups * (query_floats + out_floats) + score_floats + weight_floats +
                                   staged_floats + packed_floats);
    out = query + groups * query_floats;
    scores = out + groups * out_floats;
    weights = scores + score_floats;
    staged = weights + weight_floats;
    packed = reinterpret_cast<uint32_t*>(staged + staged_floats);
  }
};

struct SparseContext {
  const SparseMlaArgs& args;
  const SparseTile& tile;
  SparseScratch& scratch;
  int width, vectors_v, pitch;  // pitch: elements from one decoded row to the next

  int64_t token_of(int row) const {
    return args.query_start_loc[tile.request] + (tile.row_begin + row) / args.num_heads;
  }
  int64_t head_of(int row) const { return (tile.row_begin + row) % args.num_heads; }
  int64_t position_of(int row) const {
    return args.seq_lens[tile.request] - args.query_start_loc[tile.request + 1] + token_of(row);
  }
  template <class T>
  const T* query_row(int row) const {
    return static_cast<const T*>(args.q) + token_of(row) * args.q_token_stride + head_of(row) * args.q_head_stride;
  }
};

// ---- rows ------------------------------------------------------------------------------------------------------

// The entries of a token's list that it sees, packed; returns how many. `to` null: only counts.
inline int32_t listed_entries(const SparseMlaArgs& a, int64_t token, int64_t num_visible, int32_t* to) {
  const int32_t* list = a.indices + token * a.indices_stride;
  int32_t count = 0;
  for (int64_t i = 0; i < a.num_indices; ++i) {
    const bool seen = list[i] >= 0 && list[i] < num_visible;
    if (to != nullptr && seen) to[count] = list[i];
    count += seen;
  }
  return count;
}

struct FoundRow {
  const PagedRows* cache;
  RowPlace place;
};

// Rows at positions [at, at + count) of a tile's line of keys. False: a table has a bad entry.
inline bool find_rows(const SparseContext& c, int at, int count, FoundRow* found) {
  for (int k = 0; k < count; ++k) {
    const int position = at + k;
    const bool recent = position < c.tile.num_window;
    const PagedRows& cache = recent ? c.args.window_rows : c.args.entry_rows;
    const int32_t entry = position - c.tile.entry_begin;
    const int32_t row = recent ? c.tile.window_begin + position
                               : c.args.indices == nullptr ? entry : c.scratch.list[entry];
    found[k].cache = &cache;
    if (!cache.find(c.tile.request, static_cast<uint32_t>(row), found[k].place)) return false;
  }
  return true;
}

// Decodes rows into scratch, zeros behind their width, and whole rows of zeros up to `num_keys`.
template <class Element>
void decode_rows(const SparseContext& c, const FoundRow* found, int count, int num_keys) {
  Element* to = reinterpret_cast<Element*>(c.scratch.staged);
  for (int k = 0; k < count; ++k, to += c.pitch) {
    if (k + ROWS_AHEAD < count) found[k + ROWS_AHEAD].cache->ask_for(found[k + ROWS_AHEAD].place);
    decode_place(found[k].cache->pages.rows, found[k].place, to);
    std::memset(to + c.width, 0, (c.pitch - c.width) * sizeof(Element));
  }
  std::memset(to, 0, static_cast<size_t>(num_keys - count) * c.pitch * sizeof(Element));
}

// ---- which keys a row sees -------------------------------------------------------------------------------------

// Positions that each lane's row sees, separately among rows of tokens (0) and entries (1).
template <int STRIDE>
struct RowLimits {
  VI begin[2][STRIDE / W], end[2][STRIDE / W];
  KeyRange common[2];  // what all rows see
};

inline KeyRange seen_positions(const SparseContext& c, int row, int kind) {
  const SparseTile& tile = c.tile;
  if (tile.single) return {0, tile.num_keys};
  const int64_t p = c.position_of(row);
  if (kind == 1) {
    const int64_t end = tile.entry_begin + visible_entries(p, c.args.ratio);
    return {tile.entry_begin, static_cast<int32_t>(end)};
  }
  const int64_t begin = std::max<int64_t>(p - c.args.window + 1 - tile.window_begin, 0);
  const int64_t end = std::max<int64_t>(p + 1 - tile.window_begin, 0);
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

template <int STRIDE>
void find_limits(const SparseContext& c, int first_row, int rows, RowLimits<STRIDE>& limits) {
  for (int kind = 0; kind < 2; ++kind) {
    int32_t begin[STRIDE] = {}, end[STRIDE] = {};
    KeyRange& common = limits.common[kind] = {0, INT32_MAX};
    for (int r = 0; r < rows; ++r) {
      const KeyRange seen = seen_positions(c, first_row + r, kind);
      begin[r] = seen.begin;
      end[r] = seen.end;
      common = {std::max(common.begin, seen.begin), std::min(common.end, seen.end)};
    }
    for (int v = 0; v < STRIDE / W; ++v) {
      limits.begin[kind][v] = load<VI>(begin + v * W);
      limits.end[kind][v] = load<VI>(end + v * W);
    }
  }
}

template <int STRIDE>
void start_state(SoftmaxState<STRIDE>& state) {
  state.lane_key = VI{};
  for (int v = 0; v < STRIDE / W; ++v) {
    state.top[v] = splat(MINUS_INFINITY);
    state.slope[v] = VF{};
    for (int i = 0; i < SoftmaxState<STRIDE>::SUMS; ++i) state.sum[i * (STRIDE / W) + v] = VF{};
    state.position[v] = VI{};
  }
}

}  // namespace pagebinder
