// Products of sparse_mla_attention: scores of a block of keys and weighted values, for a group of rows.
//
//     FloatEngine   lanes are query rows, keys are broadcast; rows are float32, read in place where they are so
//     TileEngine    matrix tiles (Intel AMX), rows are bfloat16
//
// An engine packs queries once (`pack`), brings the rows of a block into its form for all groups (`load_block`), and
// works with scores laid out [key][row], like attention_tile.h.
#pragma once

#include "attention_amx.h"
#include "sparse_mla_rows.h"

namespace pagebinder {

template <class T, int STRIDE>
struct FloatEngine {
  using Element = float;
  struct Setup {};
  static constexpr int GRAIN = 1;            // keys of a block come in multiples of this
  static constexpr bool PAIRS = false;       // weights of two keys side by side
  static int pitch(int width) { return (width + W - 1) / W * W; }

  static bool in_place(const PagedRows& rows, int width) {
    return rows.table == nullptr || (rows.pages.rows.kind == RowKind::F32 && width % W == 0);
  }

  static void pack(const SparseContext& c, int first_row, int rows, float* query) {
    const T* q[STRIDE];
    for (int r = 0; r < rows; ++r) q[r] = c.query_row<T>(first_row + r);
    pack_lane_queries<FloatElements<float>>(q, rows, c.width, STRIDE, query);
  }

  static void load_block(const SparseContext& c, const FoundRow* found, int count, const float** rows) {
    if (in_place(c.args.window_rows, c.width) && in_place(c.args.entry_rows, c.width)) {
      for (int k = 0; k < count; ++k)
        rows[k] = reinterpret_cast<const float*>(found[k].place.page +
                                                 found[k].cache->pages.rows.row_at(found[k].place.entry));
    } else {
      decode_rows<float>(c, found, count, count);
      for (int k = 0; k < count; ++k) rows[k] = c.scratch.staged + k * c.pitch;
    }
    for (int k = count; k < SPARSE_ROW_BUFFER; ++k) rows[k] = rows[count - 1];
  }

  static void scores(const SparseContext& c, const float* const* rows, int num_keys, const float* query) {
    lane_scores<FloatElements<float>, STRIDE / W>(Rows<float>{rows, 0}, num_keys, query, c.width, c.scratch.scores);
  }

  static void values(const SparseContext& c, const float* const* v_rows, int rows, ValueBlock block) {
    const Rows<float> v{v_rows, 0};
    AheadLines<float> nothing;
    add_values<STRIDE>(block, v, nothing, rows, c.vectors_v * W);
  }
};

#if PAGEBINDER_AMX
template <class, int STRIDE>
struct TileEngine {
  using Element = bf16;
  using Setup = FullTiles;
  static constexpr int GRAIN = TILE_STEP;
  static constexpr bool PAIRS = true;
  static constexpr int COLUMNS = STRIDE > TILE_LINES ? 2 : 1;
  static int padded(int width) { return (width + TILE_STEP - 1) / TILE_STEP * TILE_STEP; }
  static int pitch(int width) { return padded(width) + TILE_STEP; }  // so that rows start in many sets of a cache

  static void pack(const SparseContext& c, int first_row, int rows, float* query) {
    bf16* copies = reinterpret_cast<bf16*>(c.scratch.staged);
    const bf16* q[STRIDE];
    for (int r = 0; r < rows; ++r) {
      bf16* to = copies + r * c.pitch;
      std::memcpy(to, c.query_row<bf16>(first_row + r), c.width * sizeof(bf16));
      std::memset(to + c.width, 0, (c.pitch - c.width) * sizeof(bf16));
      q[r] = to;
    }
    pack_lane_queries<PairElements>(q, rows, padded(c.width), STRIDE, reinterpret_cast<bf16*>(query));
  }

  static void load_block(const SparseContext& c, const FoundRow* found, int count, const bf16** rows) {
    const int num_keys = (count + GRAIN - 1) / GRAIN * GRAIN;
    decode_rows<bf16>(c, found, count, num_keys);
    for (int k = 0; k < num_keys; ++k) rows[k] = reinterpret_cast<const bf16*>(c.scratch.staged) + k * c.pitch;
    pack_value_pairs(Rows<bf16>{rows, 0}, num_keys, c.vectors_v * W, W, TILE_BLOCK_KEYS / 2 * W, c.scratch.packed);
  }

  static void scores(const SparseContext& c, const bf16* const* rows, int num_keys, const float* query) {
    const uint32_t* q = reinterpret_cast<const uint32_t*>(query);
    const int64_t stride = c.pitch * 2;
    tiles_meet_memory();
    for (int k = 0; k < num_keys; k += 2 * TILE_LINES) {
      const KeyTile keys[2] = {{rows[k], stride}, {rows[k + TILE_LINES], stride}};
      for (int row = 0; row < STRIDE; row += COLUMNS * TILE_LINES)
        score_tiles<STRIDE, COLUMNS>(keys, q + row, padded(c.width) / TILE_STEP, c.scratch.scores + k * STRIDE + row);
    }
    tiles_meet_memory();
  }

  static void values(const SparseContext& c, const bf16* const*, int rows, ValueBlock block) {
    transpose_weights<STRIDE>(c.scratch.scores, block.num_keys, c.scratch.weights);
    block.weights = c.scratch.weights;
    if (!block.first) correct_rows(block, rows);
    tiles_meet_memory();
    for (int column = 0; column < c.vectors_v; column += 2)
      for (int row = 0; row < rows; row += COLUMNS * TILE_LINES)
        if (column + 1 < c.vectors_v) value_tiles<COLUMNS, 2>(block, c.scratch.packed, row, column);
        else value_tiles<COLUMNS, 1>(block, c.scratch.packed, row, column);
    tiles_meet_memory();
  }
};
static_assert(SPARSE_BLOCK_KEYS == TILE_BLOCK_KEYS, "packed values and weights have the pitches of attention_amx.h");
#endif

}  // namespace pagebinder
