// One job of paged attention on matrix tiles: many query rows of one KV head, bf16.
//
// The steps are those of attention_tile.h (scores -> online softmax -> weighted values, block by block); only the
// two products differ. Every operand is used as it lies, or packed once for all rows of a job:
//
//     scores [key][row]    = K [key][D]        x  Q pairs [D/2][row]       K straight from the cache
//     out    [row][column] += weights [row][key] x V pairs [key/2][column]  weights transposed after the softmax
//
// A job may hold several tiles of a request: what a block of keys needs, decoding and packing V, is done once for
// all of them.
//
// K is copied where a tile of keys is not evenly spaced in memory (tiny blocks, the ends of a range) or where the
// head width leaves an incomplete step, which is filled up with zeros.
#pragma once

#include "amx.h"
#include "attention_tile.h"

#if PAGEBINDER_AMX
namespace pagebinder {

constexpr int TILE_BLOCK_KEYS = 128;
constexpr int WEIGHT_PITCH = TILE_BLOCK_KEYS / 2 + 16;  // words of a row of weights, so that rows start in many sets

// Sixteen keys as operand A.
struct KeyTile {
  const bf16* first;
  int64_t stride_bytes;
};

inline bool evenly_spaced(const bf16* const* rows, int64_t stride) {
  for (int i = 1; i < TILE_LINES; ++i)
    if (rows[i] != rows[0] + i * stride) return false;
  return true;
}

inline KeyTile key_tile(const BlockContext<bf16>& c, const bf16* const* rows, int padded, bf16* staged) {
  if (c.width == padded && evenly_spaced(rows, c.row_stride)) return {rows[0], c.row_stride * 2};
  for (int i = 0; i < TILE_LINES; ++i) {
    std::memcpy(staged + i * padded, rows[i], c.width * sizeof(bf16));
    std::memset(staged + i * padded + c.width, 0, (padded - c.width) * sizeof(bf16));
  }
  return {staged, padded * 2};
}

// ---- scores ----------------------------------------------------------------------------------------------------

// 32 keys against 16 * COLUMNS rows.
template <int STRIDE, int COLUMNS>
PB_INLINE void score_tiles(const KeyTile (&keys)[2], const uint32_t* query, int steps, float* scores) {
  constexpr int PITCH = STRIDE * sizeof(float);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < steps; ++i, query += TILE_LINES * STRIDE) {
    _tile_loadd(4, keys[0].first + i * TILE_STEP, keys[0].stride_bytes);
    _tile_loadd(6, query, PITCH);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, keys[1].first + i * TILE_STEP, keys[1].stride_bytes);
    _tile_dpbf16ps(1, 5, 6);
    if (COLUMNS == 1) continue;
    _tile_loadd(7, query + TILE_LINES, PITCH);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, scores, PITCH);
  _tile_stored(1, scores + TILE_LINES * STRIDE, PITCH);
  if (COLUMNS == 1) return;
  _tile_stored(2, scores + TILE_LINES, PITCH);
  _tile_stored(3, scores + TILE_LINES * STRIDE + TILE_LINES, PITCH);
}

template <int STRIDE>
void tile_scores(const BlockContext<bf16>& c, int num_keys, int padded) {
  constexpr int COLUMNS = STRIDE > TILE_LINES ? 2 : 1;
  const uint32_t* query = reinterpret_cast<const uint32_t*>(c.query);
  bf16* staged = reinterpret_cast<bf16*>(c.scratch.staged_k);
  for (int k = 0; k < num_keys; k += 2 * TILE_LINES) {
    const KeyTile keys[2] = {key_tile(c, c.rows.rows + k, padded, staged),
                             key_tile(c, c.rows.rows + k + TILE_LINES, padded, staged + TILE_LINES * padded)};
    tiles_meet_memory();
    for (int row = 0; row < STRIDE; row += COLUMNS * TILE_LINES)
      score_tiles<STRIDE, COLUMNS>(keys, query + row, padded / TILE_STEP, c.scratch.scores + k * STRIDE + row);
  }
  tiles_meet_memory();
}

// ---- values ----------------------------------------------------------------------------------------------------

// Pairs of weights [key/2][row] -> [row][key/2].
template <int STRIDE>
void transpose_weights(const float* pairs, int num_keys, float* weights) {
  for (int row = 0; row < STRIDE; row += W)
    for (int k = 0; k < num_keys / 2; k += W) {
      VF x[W];
      for (int i = 0; i < W; ++i) x[i] = load<VF>(pairs + (k + i) * STRIDE + row);
      transpose(x);
      for (int i = 0; i < W; ++i) store(weights + (row + i) * WEIGHT_PITCH + k, x[i]);
    }
}

// Earlier output of the rows whose maximum has grown.
inline void correct_rows(const ValueBlock& b, int rows) {
  for (int r = 0; r < rows; ++r) {
    if (b.correction[r] == 1.0f) continue;
    float* out = b.out + r * b.out_stride;
    for (int d = 0; d < b.out_stride; d += W) store(out + d, load<VF>(out + d) * b.correction[r]);
  }
}

// 16 * ROWS rows and vectors [column, column + COLUMNS).
template <int ROWS, int COLUMNS>
PB_INLINE void value_tiles(const ValueBlock& b, const uint32_t* packed, int row, int column) {
  constexpr int NEXT_COLUMN = TILE_BLOCK_KEYS / 2 * W;
  const int64_t out_pitch = b.out_stride * 4, below = TILE_LINES * b.out_stride;
  float* out = b.out + row * b.out_stride + column * W;
  const float* weights = b.weights + row * WEIGHT_PITCH;
  if (b.first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, out, out_pitch);
    if (COLUMNS == 2) _tile_loadd(1, out + W, out_pitch);
    if (ROWS == 2) _tile_loadd(2, out + below, out_pitch);
    if (ROWS * COLUMNS == 4) _tile_loadd(3, out + below + W, out_pitch);
  }
  packed += column * NEXT_COLUMN;
  for (int k = 0; k < b.num_keys; k += TILE_STEP, packed += TILE_LINES * W, weights += TILE_LINES) {
    _tile_loadd(4, weights, WEIGHT_PITCH * 4);
    _tile_loadd(6, packed, W * 4);
    _tile_dpbf16ps(0, 4, 6);
    if (COLUMNS == 2) _tile_loadd(7, packed + NEXT_COLUMN, W * 4);
    if (COLUMNS == 2) _tile_dpbf16ps(1, 4, 7);
    if (ROWS == 2) _tile_loadd(5, weights + TILE_LINES * WEIGHT_PITCH, WEIGHT_PITCH * 4);
    if (ROWS == 2) _tile_dpbf16ps(2, 5, 6);
    if (ROWS * COLUMNS == 4) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, out_pitch);
  if (COLUMNS == 2) _tile_stored(1, out + W, out_pitch);
  if (ROWS == 2) _tile_stored(2, out + below, out_pitch);
  if (ROWS * COLUMNS == 4) _tile_stored(3, out + below + W, out_pitch);
}

template <int STRIDE>
void tile_values(const BlockContext<bf16>& c, const ValueBlock& block, const uint32_t* packed) {
  constexpr int ROWS = STRIDE > TILE_LINES ? 2 : 1;
  if (!block.first) correct_rows(block, c.tile.rows);
  tiles_meet_memory();
  for (int column = 0; column < c.vectors_v; column += 2)
    for (int row = 0; row < c.tile.rows; row += ROWS * TILE_LINES)
      if (column + 1 < c.vectors_v) value_tiles<ROWS, 2>(block, packed, row, column);
      else value_tiles<ROWS, 1>(block, packed, row, column);
  tiles_meet_memory();
}

// ---- one job ---------------------------------------------------------------------------------------------------

// Queries as pairs [padded / 2][STRIDE], zero beyond the head width and the rows.
template <int STRIDE>
void pack_tile_queries(const TileContext<bf16>& c, int padded) {
  bf16* copies = reinterpret_cast<bf16*>(c.scratch.staged_k);
  const bf16* rows[MAX_TILE_ROWS];
  for (int r = 0; r < c.tile.rows; ++r) {
    bf16* to = copies + r * padded;
    std::memcpy(to, c.query_row(r), c.width * sizeof(bf16));
    std::memset(to + c.width, 0, (padded - c.width) * sizeof(bf16));
    rows[r] = to;
  }
  pack_lane_queries<PairElements>(rows, c.tile.rows, padded, STRIDE, reinterpret_cast<bf16*>(c.query));
}

// A tile of a job, with its queries, sums and running softmax.
struct TileRun {
  const Tile* tile;
  KeyRange part;
  float *query, *out;
  bool first;
  union {
    SoftmaxState<16> state16;
    SoftmaxState<32> state32;
    SoftmaxState<64> state64;
  };

  TileRun() {}
  template <int STRIDE>
  SoftmaxState<STRIDE>& state() {
    if constexpr (STRIDE == 16) return state16;
    else if constexpr (STRIDE == 32) return state32;
    else return state64;
  }
};

template <class Body>
PB_INLINE void with_stride(int stride, Body body) {
  if (stride == 16) body(std::integral_constant<int, 16>());
  else if (stride == 32) body(std::integral_constant<int, 32>());
  else body(std::integral_constant<int, 64>());
}

// One tile against a block, whose V is `packed`. All tiles begin with the same key, whether they see it or not.
template <bool SCALED, int STRIDE>
void attend_tile_block(BlockContext<bf16>& c, BlockKeys keys, const uint32_t* packed, int padded, TileRun& run) {
  SoftmaxState<STRIDE>& state = run.template state<STRIDE>();
  keys.end = std::min(keys.end, run.part.end);
  keys.to = (keys.end + TILE_STEP - 1) / TILE_STEP * TILE_STEP;
  const int num_keys = keys.to - keys.from;
  float correction[STRIDE];
  tile_scores<STRIDE>(c, num_keys, padded);
  softmax_keys<true, SCALED>(c, state, keys);
  transpose_weights<STRIDE>(c.scratch.scores, num_keys, c.scratch.weights);
  for (int v = 0; v < STRIDE / W; ++v) store(correction + v * W, state.correction[v]);
  tile_values<STRIDE>(c, {c.scratch.weights, num_keys, correction, run.out, c.vectors_v * W, run.first}, packed);
  run.first = false;
}

// The context of a tile of a job; `rows` are those of the block at hand.
inline BlockContext<bf16> context_of(const BlockContext<bf16>& job, const TileRun& run) {
  return {{job.args, *run.tile, job.width, job.width_v, job.vectors_v, job.scratch, job.kv_head, run.query},
          job.rows, job.ahead, job.row_stride};
}

// Several tiles of a request against all of their keys: a block of keys is found, decoded and packed once for all.
// False: the block table has a bad entry.
template <class S>
bool attend_with_tiles(BlockContext<bf16>& c, int padded, TileRun* runs, int num_runs) {
  const FullTiles tiles;
  const S* rows[TILE_BLOCK_KEYS];
  const bf16* decoded_rows[TILE_BLOCK_KEYS];
  KeyRange all{0, 0};
  for (int i = 0; i < num_runs; ++i) {
    BlockContext<bf16> one = context_of(c, runs[i]);
    with_stride(runs[i].tile->stride, [&](auto stride) {
      start_state(one, runs[i].template state<stride>());
      pack_tile_queries<stride>(one, padded);
    });
    const KeyRange part = runs[i].part;
    if (part.begin == part.end) continue;
    all = all.end == 0 ? part : KeyRange{std::min(all.begin, part.begin), std::max(all.end, part.end)};
  }
  for (int at = all.begin / TILE_BLOCK_KEYS * TILE_BLOCK_KEYS; at < all.end; at += TILE_BLOCK_KEYS) {
    const BlockKeys keys = block_keys(all, at, TILE_BLOCK_KEYS, TILE_STEP);
    const int num_keys = keys.to - keys.from;
    if (!find_rows(c.args, c.tile, c.kv_head, keys, rows, TILE_BLOCK_KEYS)) return false;
    take_rows(c, Rows<S>{rows, 0}, Rows<S>{}, 0, num_keys, decoded_rows, TILE_BLOCK_KEYS);
    const uint32_t* packed = pack_values(c, num_keys, W, TILE_BLOCK_KEYS / 2 * W);
    for (int i = 0; i < num_runs; ++i) {
      if (runs[i].part.end <= keys.begin || runs[i].part.begin >= keys.end) continue;
      BlockContext<bf16> one = context_of(c, runs[i]);
      with_stride(runs[i].tile->stride,
                  [&](auto stride) { attend_tile_block<QUANTISED<S>, stride>(one, keys, packed, padded, runs[i]); });
    }
  }
  return true;
}

template <class S>
void run_tile_job(const AttentionArgs& args, Plan& plan, const Job& job) {
  static thread_local Scratch scratch;
  const int width = static_cast<int>(args.head_dim), padded = (width + TILE_STEP - 1) / TILE_STEP * TILE_STEP;
  const int vectors_v = (static_cast<int>(args.head_dim_v) + W - 1) / W;
  const int width_v = static_cast<int>(args.head_dim_v), decoded = QUANTISED<S> ? width + width_v : 0;
  scratch.reserve(job.num_tiles, MAX_TILE_ROWS, padded, vectors_v * W, TILE_BLOCK_KEYS, decoded);
  TileRun runs[MAX_JOB_TILES];
  for (int i = 0; i < job.num_tiles; ++i) {
    const Tile& tile = plan.tiles[job.tile + i];
    runs[i].tile = &tile;
    runs[i].part = part_keys(tile, job.part);
    runs[i].query = scratch.query + i * scratch.query_floats;
    runs[i].out = scratch.out + i * scratch.out_floats;
    runs[i].first = true;
  }
  BlockContext<bf16> c{{args, *runs[0].tile, width, width_v, vectors_v, scratch, job.kv_head, scratch.query}, {}, {},
                       QUANTISED<S> ? decoded : args.cache_slot_stride};
  if (!attend_with_tiles<S>(c, padded, runs, job.num_tiles)) {
    plan.bad_block = true;
    return;
  }
  for (int i = 0; i < job.num_tiles; ++i) {
    const BlockContext<bf16> one = context_of(c, runs[i]);
    with_stride(runs[i].tile->stride, [&](auto stride) {
      finish_head(one, plan, job, runs[i].template state<stride>(), runs[i].out, c.width_v >= W);
    });
  }
}

// Few rows are bound by memory and stay with vectors.
template <class S = bf16>
void attention_job_with_tiles(const AttentionArgs& args, Plan& plan, const Job& job, const Job* next) {
  if (plan.tiles[job.tile].stride <= DOT_ROWS) attention_job<bf16, S>(args, plan, job, next);
  else run_tile_job<S>(args, plan, job);
}

}  // namespace pagebinder
#endif
