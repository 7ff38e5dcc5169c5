// Scores of the indexer: a part of the keys of a request for a tile of its tokens. See indexer.h for the picture.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention_amx.h"
#include "indexer.h"
#include "indexer_select.h"

namespace pagebinder {

constexpr int INDEX_TILE_TOKENS = 4;
constexpr int INDEX_BLOCK_KEYS = 128;      // decoded at once
constexpr int INDEX_PART_KEYS = 2048;      // of a job
constexpr int INDEX_GROUP_HEADS = 4 * W;   // scored at once
constexpr int INDEX_ROW_BUFFER = INDEX_BLOCK_KEYS + MAX_KEYS_AT_ONCE;
constexpr int MAX_INDEX_WIDTH = 1024;      // of quantised keys

// Neighbouring tokens of a request; `num_keys` entries are visible to the last of them.
struct IndexTile {
  int32_t request, tokens;
  int64_t first_token, first_p, num_keys, scores;
  int32_t parts, counter;
};
struct IndexJob { int32_t tile, part; };

struct IndexRun {
  const IndexerArgs& args;
  std::vector<IndexTile> tiles;
  std::vector<IndexJob> jobs;
  uint32_t* scores;
  std::atomic<int>* counters;
  std::atomic<int> next_job{0};
  std::atomic<bool> bad_row{false};
};

// ---- scores ----------------------------------------------------------------------------------------------------

struct IndexScratch {
  Buffer buffer;
  size_t query_floats;
  float *query, *weights, *products, *staged;  // weights [token][heads, padded]

  void reserve(int heads_padded, int pitch) {
    query_floats = static_cast<size_t>(heads_padded) * pitch;
    const size_t weight_floats = static_cast<size_t>(heads_padded) * INDEX_TILE_TOKENS;
    const size_t block_floats = static_cast<size_t>(INDEX_ROW_BUFFER) * (INDEX_GROUP_HEADS + pitch);
    query = buffer.at_least<float>(INDEX_TILE_TOKENS * query_floats + weight_floats + block_floats);
    weights = query + INDEX_TILE_TOKENS * query_floats;
    products = weights + weight_floats;
    staged = products + INDEX_ROW_BUFFER * INDEX_GROUP_HEADS;
  }
  float* query_of(int token, int head, int pitch) const {
    return query + token * query_floats + static_cast<size_t>(head) * pitch;
  }
};

// Products q.k of a group of heads, [key][STRIDE heads], on vectors or on matrix tiles.
template <int STRIDE>
struct FloatProducts {
  using Element = float;
  struct Setup {};
  static constexpr int GRAIN = W;
  static int pitch(int width) { return (width + W - 1) / W * W; }
  static void pack(const float* const* q, int heads, int width, float* query) {
    pack_lane_queries<FloatElements<float>>(q, heads, width, STRIDE, query);
  }
  static void multiply(const float* const* rows, int num_keys, const float* query, int width, float* products) {
    lane_scores<FloatElements<float>, STRIDE / W>(Rows<float>{rows, 0}, num_keys, query, width, products);
  }
};

#if PAGEBINDER_AMX
template <int STRIDE>
struct TileProducts {
  using Element = bf16;
  using Setup = FullTiles;
  static constexpr int GRAIN = 2 * TILE_LINES;
  static constexpr int COLUMNS = STRIDE > TILE_LINES ? 2 : 1;
  static int padded(int width) { return (width + TILE_STEP - 1) / TILE_STEP * TILE_STEP; }
  static int pitch(int width) { return padded(width) + TILE_STEP; }  // so that rows start in many sets of a cache
  static void pack(const bf16* const* q, int heads, int width, float* query) {
    pack_lane_queries<PairElements>(q, heads, padded(width), STRIDE, reinterpret_cast<bf16*>(query));
  }
  static void multiply(const bf16* const* rows, int num_keys, const float* query, int width, float* products) {
    const uint32_t* q = reinterpret_cast<const uint32_t*>(query);
    const int64_t stride = (rows[1] - rows[0]) * 2;
    tiles_meet_memory();
    for (int k = 0; k < num_keys; k += GRAIN) {
      const KeyTile keys[2] = {{rows[k], stride}, {rows[k + TILE_LINES], stride}};
      for (int head = 0; head < STRIDE; head += COLUMNS * TILE_LINES)
        score_tiles<STRIDE, COLUMNS>(keys, q + head, padded(width) / TILE_STEP, products + k * STRIDE + head);
    }
    tiles_meet_memory();
  }
};
#endif

// Adds the share of a group of heads to the scores of W keys: sum over heads of weight * relu(scale * product).
template <int STRIDE>
PB_INLINE VF weigh(const float* products, const float* weights, float scale) {
  VF sum[W];
  for (int k = 0; k < W; ++k) {
    sum[k] = VF{};
    PB_UNROLL
    for (int v = 0; v < STRIDE; v += W) {
      const VF product = load<VF>(products + k * STRIDE + v) * scale;
      sum[k] += max(VF{}, product) * load<VF>(weights + v);  // a NaN is the second operand and passes through
    }
  }
  return sum_lanes(sum);
}

// A head's query as an engine wants it: quantised like the keys, zeros up to `pitch`.
template <class T, class Element>
void put_query(const IndexerArgs& a, const T* from, int pitch, Element* to) {
  const int width = static_cast<int>(a.width);
  std::memset(to, 0, pitch * sizeof(Element));
  if (a.keys.pages.rows.is_plain()) return convert_elements(from, width, to);
  float row[MAX_INDEX_WIDTH];
  convert_elements(from, width, row);
  requantised(a.keys.pages.rows, row);
  convert_elements(row, width, to);
}

template <class T>
void put_weights(const IndexerArgs& a, int64_t token, float* to) {
  for (int64_t h = 0; h < a.num_heads; ++h) {
    const int64_t at = token * a.weight_token_stride + h * a.weight_head_stride;
    to[h] = a.float_weights ? static_cast<const float*>(a.weights)[at]
                            : load_float_part(static_cast<const T*>(a.weights) + at, 1)[0];
  }
}

// Queries and weights of a tile's tokens, heads beyond the last with weight zero.
template <class T, class Products, int STRIDE>
void prepare_queries(const IndexerArgs& a, const IndexTile& tile, int heads_padded, int pitch, IndexScratch& s) {
  using Element = typename Products::Element;
  const int num_heads = static_cast<int>(a.num_heads);
  Element* copies = reinterpret_cast<Element*>(s.staged);  // INDEX_GROUP_HEADS rows are less than a block of keys
  std::fill(s.weights, s.weights + tile.tokens * heads_padded, 0.0f);
  for (int t = 0; t < tile.tokens; ++t) {
    const int64_t token = tile.first_token + t;
    const T* q = static_cast<const T*>(a.q) + token * a.q_token_stride;
    put_weights<T>(a, token, s.weights + t * heads_padded);
    for (int first = 0; first < num_heads; first += STRIDE) {
      const int heads = std::min(STRIDE, num_heads - first);
      const Element* rows[STRIDE];
      for (int h = 0; h < heads; ++h) {
        put_query(a, q + (first + h) * a.q_head_stride, pitch, copies + h * pitch);
        rows[h] = copies + h * pitch;
      }
      Products::pack(rows, heads, static_cast<int>(a.width), s.query_of(t, first, pitch));
    }
  }
}

// Keys [at, at + count) -> scratch. False: the table has a bad entry.
template <class Element>
bool decode_keys(const IndexerArgs& a, int64_t request, int64_t at, int count, int pitch, Element* to) {
  RowPlace place;
  for (int k = 0; k < count; ++k, to += pitch) {
    if (!a.keys.find(request, static_cast<uint32_t>(at + k), place)) return false;
    decode_place(a.keys.pages.rows, place, to);
    std::memset(to + a.width, 0, (pitch - a.width) * sizeof(Element));
  }
  return true;
}

template <class T, template <int> class Products, int STRIDE>
bool score_part(IndexRun& run, const IndexTile& tile, int part) {
  using P = Products<STRIDE>;
  using Element = typename P::Element;
  static thread_local IndexScratch s;
  const IndexerArgs& a = run.args;
  const int width = static_cast<int>(a.width), pitch = P::pitch(width);
  const int heads_padded = static_cast<int>((a.num_heads + STRIDE - 1) / STRIDE * STRIDE);
  s.reserve(heads_padded, pitch);
  [[maybe_unused]] const typename P::Setup setup{};
  prepare_queries<T, P, STRIDE>(a, tile, heads_padded, pitch, s);
  Element* staged = reinterpret_cast<Element*>(s.staged);
  const Element* rows[INDEX_ROW_BUFFER];
  for (int k = 0; k < INDEX_ROW_BUFFER; ++k) rows[k] = staged + k * pitch;
  const int64_t begin = int64_t{part} * INDEX_PART_KEYS;
  const int64_t end = std::min<int64_t>(begin + INDEX_PART_KEYS, tile.num_keys);
  for (int64_t at = begin; at < end; at += INDEX_BLOCK_KEYS) {
    const int count = static_cast<int>(std::min<int64_t>(INDEX_BLOCK_KEYS, end - at));
    const int num_keys = (count + P::GRAIN - 1) / P::GRAIN * P::GRAIN;  // what is too much is not looked at
    if (!decode_keys(a, tile.request, at, count, pitch, staged)) return false;
    for (int t = 0; t < tile.tokens; ++t) {
      uint32_t* scores = run.scores + tile.scores + t * tile.num_keys + at;
      float sums[INDEX_BLOCK_KEYS] = {};
      for (int head = 0; head < heads_padded; head += STRIDE) {
        P::multiply(rows, num_keys, s.query_of(t, head, pitch), width, s.products);
        for (int k = 0; k < num_keys; k += W)
          store(sums + k, load<VF>(sums + k) +
                              weigh<STRIDE>(s.products + k * STRIDE, s.weights + t * heads_padded + head, a.scale));
      }
      uint32_t sorted[INDEX_BLOCK_KEYS];
      for (int k = 0; k < num_keys; k += W) store(sorted + k, sortable(load<VF>(sums + k)));
      std::memcpy(scores, sorted, count * sizeof(uint32_t));
    }
  }
  return true;
}

template <class T, template <int> class Products>
bool score_part(IndexRun& run, const IndexTile& tile, int part) {
  if (run.args.num_heads <= W) return score_part<T, Products, W>(run, tile, part);
  if (run.args.num_heads <= 2 * W) return score_part<T, Products, 2 * W>(run, tile, part);
  return score_part<T, Products, INDEX_GROUP_HEADS>(run, tile, part);
}

}  // namespace pagebinder
