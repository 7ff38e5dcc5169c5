// Scores and weighted values of a block of keys, each in the form that fits the rows and the types.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_rows.h"
#include "attention_scores.h"
#include "attention_values.h"
#include "quantized_rows.h"

namespace pagebinder {

// ---- queries and scores ----------------------------------------------------------------------------------------

// T: of q, R: of the rows.
template <class T, class R, int STRIDE>
struct Scores {
  static constexpr bool DOT = STRIDE <= 8;
#if PAGEBINDER_BF16_DOT
  using Plain = std::conditional_t<PAIRED<R>, PairElements, FloatElements<R>>;
#else
  using Plain = std::conditional_t<std::is_same_v<R, bf16>, ApartElements, FloatElements<R>>;
#endif
  using Direct = std::conditional_t<QUANTISED<R>, CodeElements<R>, Plain>;
  using Staged = FloatElements<float>;

  // Must K be converted first? Dots need a whole step; lanes broadcast what the hardware multiplies as it is.
  static bool staged(int width) {
    if (DOT) return width < Direct::STEP;
    return !(std::is_same<R, float>::value || (PAIRED<R> && width % 2 == 0));
  }
  static int padded(int width) { return (width + W - 1) / W * W; }

  template <class E>
  static typename E::Query* query(const TileContext<T>& c) {
    return reinterpret_cast<typename E::Query*>(c.query);
  }

  static void pack(const TileContext<T>& c) {
    const int rows = c.tile.rows;
    const T* q_in[MAX_TILE_ROWS];
    for (int r = 0; r < rows; ++r) q_in[r] = c.query_row(r);
    if (!staged(c.width)) {
      if constexpr (DOT) pack_dot_queries<Direct, STRIDE>(q_in, rows, c.width, query<Direct>(c));
      else if constexpr (std::is_same<R, float>::value || PAIRED<R>)
        pack_lane_queries<Direct>(q_in, rows, c.width, STRIDE, query<Direct>(c));
      return;
    }
    if constexpr (DOT) {
      float q[8 * 2 * W] = {};  // staged dots are narrower than one step
      const float* q_rows[STRIDE];
      for (int r = 0; r < rows; ++r) stage_rows(Rows<T>{&q_in[r], 0}, 1, c.width, q + r * 2 * W, &q_rows[r]);
      pack_dot_queries<Staged, STRIDE>(q_rows, rows, padded(c.width), query<Staged>(c));
    } else {
      pack_lane_queries<Staged>(q_in, rows, c.width, STRIDE, query<Staged>(c));
    }
  }

  static void compute(BlockContext<T, R>& c, int num_keys) {
    if (!staged(c.width)) {
      if constexpr (DOT)
        dot_scores<Direct, STRIDE>(c.rows, c.ahead, num_keys, query<Direct>(c), c.width, c.scratch.scores);
      else if constexpr (std::is_same<R, float>::value || PAIRED<R>)
        lane_scores<Direct, STRIDE / W>(c.rows, num_keys, query<Direct>(c), c.width, c.scratch.scores);
      return;
    }
    const float* k_rows[ROW_BUFFER];
    stage_rows(c.rows, num_keys, c.width, c.scratch.staged_k, k_rows);
    for (int k = num_keys; k < ROW_BUFFER; ++k) k_rows[k] = k_rows[num_keys - 1];
    const Rows<float> keys{k_rows, 0};
    AheadLines<float> nothing;
    if constexpr (DOT)
      dot_scores<Staged, STRIDE>(keys, nothing, num_keys, query<Staged>(c), padded(c.width), c.scratch.scores);
    else lane_scores<Staged, STRIDE / W>(keys, num_keys, query<Staged>(c), c.width, c.scratch.scores);
  }
};

// ---- values ------------------------------------------------------------------------------------------------

template <class T, int STRIDE>
constexpr bool PAIR_WEIGHTS = PAIRED<T>;

#if PAGEBINDER_BF16_DOT
// V of the block at hand as pairs of keys. Rows narrower than a vector are filled up with zeros.
inline const uint32_t* pack_values(const BlockContext<bf16>& c, int num_keys, int pair_stride, int column_stride) {
  const Rows<bf16> rows = c.rows.after(c.args.value_offset);
  uint32_t* packed = reinterpret_cast<uint32_t*>(c.scratch.staged_v);
  if (c.width_v >= W) {
    pack_value_pairs(rows, num_keys, c.width_v, pair_stride, column_stride, packed);
    return packed;
  }
  for (int k = 0; k < num_keys; k += 2) {
    bf16 even[W] = {}, odd[W] = {};
    const bf16* pair[2] = {even, odd};
    std::memcpy(even, rows[k], c.width_v * sizeof(bf16));
    std::memcpy(odd, rows[k + 1], c.width_v * sizeof(bf16));
    pack_value_pairs(Rows<bf16>{pair, 0}, 2, W, 0, 0, packed + k / 2 * pair_stride);
  }
  return packed;
}
#endif

template <class T, class R, int STRIDE>
void values(BlockContext<T, R>& c, const ValueBlock& block) {
#if PAGEBINDER_BF16_DOT
  if constexpr (PAIR_WEIGHTS<R, STRIDE>) {
    if constexpr (STRIDE <= DOT_ROWS) {
      if (c.width_v >= W)
        return add_value_pairs<STRIDE>(block, c.rows.after(c.args.value_offset), c.ahead, c.width_v);
    }
    const uint32_t* packed = pack_values(c, block.num_keys, c.vectors_v * W, W);
    add_packed_pairs<STRIDE>(block, packed, c.tile.rows, c.vectors_v);
    return;
  }
#endif
  const bool narrow = c.width_v < W;
  const Rows<R> rows = c.rows.after(c.args.value_offset);
  constexpr bool CONVERT_ONCE = STRIDE > 8 && !std::is_same<R, float>::value;
  if (CONVERT_ONCE || narrow) {
    const float* v_rows[ROW_BUFFER];
    stage_rows(rows, block.num_keys, c.width_v, c.scratch.staged_v, v_rows);
    AheadLines<float> nothing;
    add_values<STRIDE>(block, Rows<float>{v_rows, 0}, nothing, c.tile.rows, c.vectors_v * W);
  } else if constexpr (!CONVERT_ONCE) {
    add_values<STRIDE>(block, rows, c.ahead, c.tile.rows, c.width_v);
  }
}

}  // namespace pagebinder
