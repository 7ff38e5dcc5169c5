// Weighted sum of V rows: out[row] = out[row] * correction[row] + sum over keys of weight[key][row] * v[key].
//
// `out` is [row][columns], columns padded to whole vectors. Vector i holds columns i*W..i*W+W-1, except that the
// last one ends at the width of V and may overlap the one before, so that no load leaves a V row.
#pragma once

#include <type_traits>

#include "attention_scores.h"
#include "simd.h"

namespace pagebinder {

struct ValueBlock {
  const float* weights;     // [key][STRIDE], or pairs
  int num_keys;
  const float* correction;  // [row]
  float* out;
  int out_stride;
  bool first;               // nothing accumulated yet: `out` is not read
};

// bf16 in pairs of vectors become floats by one instruction each if even columns are in one and odd ones in the other;
// their sums are brought in order once for each block.
template <class T, int COUNT>
constexpr bool APART = std::is_same_v<T, bf16> && COUNT % 2 == 0;

template <class T, int COUNT>
PB_INLINE void load_floats(const T* p, VF (&x)[COUNT]) {
  PB_UNROLL
  for (int i = 0; i < COUNT; ++i) {
    if constexpr (!APART<T, COUNT>) {
      x[i] = load_float(p + i * W);
    } else if (i % 2 == 0) {
      const Pair both = apart(load<VU>(p + i * W));
      x[i] = both.first, x[i + 1] = both.second;
    }
  }
}

// How the columns of two neighbouring sums lie while keys are added up.
enum class Columns { IN_ORDER, APART, IN_FOURS };

template <Columns ORDER, int ROWS, int COLUMNS>
PB_INLINE void begin_block(const ValueBlock& b, int row, int column, VF (&sum)[ROWS][COLUMNS]) {
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    PB_UNROLL
    for (int c = 0; c < COLUMNS; ++c) {
      const float* at = b.out + (row + r) * b.out_stride + (column + c) * W;
      sum[r][c] = b.first ? VF{} : load<VF>(at) * b.correction[row + r];
    }
    if constexpr (ORDER == Columns::APART)
      for (int c = 0; c < COLUMNS; c += 2) take_apart(sum[r][c], sum[r][c + 1]);
#if PAGEBINDER_BF16_DOT
    if constexpr (ORDER == Columns::IN_FOURS)
      for (int c = 0; c < COLUMNS; c += 2) split_fours(sum[r][c], sum[r][c + 1]);
#endif
  }
}

template <Columns ORDER, int ROWS, int COLUMNS>
PB_INLINE void end_block(const ValueBlock& b, int row, int column, VF (&sum)[ROWS][COLUMNS]) {
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    if constexpr (ORDER == Columns::APART)
      for (int c = 0; c < COLUMNS; c += 2) put_together(sum[r][c], sum[r][c + 1]);
#if PAGEBINDER_BF16_DOT
    if constexpr (ORDER == Columns::IN_FOURS)
      for (int c = 0; c < COLUMNS; c += 2) join_fours(sum[r][c], sum[r][c + 1]);
#endif
    PB_UNROLL
    for (int c = 0; c < COLUMNS; ++c) store(b.out + (row + r) * b.out_stride + (column + c) * W, sum[r][c]);
  }
}

// Rows [row, row + ROWS) and vectors [column, column + COLUMNS), which start at element `offset` of a V row. The first
// of few rows asks for lines `ahead`, and for V some keys further on.
template <int STRIDE, int ROWS, int COLUMNS, class T>
PB_INLINE void value_block(const ValueBlock& b, Rows<T> v_rows, AheadLines<T>& ahead, int row, int column, int offset) {
  constexpr int LINES = (COLUMNS * W * static_cast<int>(sizeof(T)) + 63) / 64;
  constexpr Columns ORDER = APART<T, COLUMNS> ? Columns::APART : Columns::IN_ORDER;
  VF sum[ROWS][COLUMNS];
  begin_block<ORDER>(b, row, column, sum);
  const float* weight = b.weights + row;
  v_rows = v_rows.after(offset);
  const bool from_memory = STRIDE <= 8 && row == 0 && ahead.any();
  AheadLines<T> asking = ahead;
  for (int k = 0; k < b.num_keys; ++k, weight += STRIDE) {
    const T* from = v_rows[k];
    if (from_memory) {
      asking.template ask<LINES>();
      prefetch(v_rows[k + NEAR_KEYS], COLUMNS * W);
    }
    VF v[COLUMNS];
    load_floats(from, v);
    PB_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      VF w = splat(weight[r]);
      PB_UNROLL
      for (int c = 0; c < COLUMNS; ++c) sum[r][c] += w * v[c];
    }
  }
  end_block<ORDER>(b, row, column, sum);
  if (from_memory) ahead = asking;
}

// All columns of some rows: as many vectors at a time as registers allow, then halves of that.
template <int STRIDE, int ROWS, int COLUMNS, class T>
PB_INLINE void value_columns(const ValueBlock& b, Rows<T> v_rows, AheadLines<T>& ahead, int row, int column, int width) {
  const int full = width / W;
  for (; column + COLUMNS <= full; column += COLUMNS)
    value_block<STRIDE, ROWS, COLUMNS>(b, v_rows, ahead, row, column, column * W);
  if constexpr (COLUMNS > 1) value_columns<STRIDE, ROWS, COLUMNS / 2>(b, v_rows, ahead, row, column, width);
  else if (full * W < width) value_block<STRIDE, ROWS, 1>(b, v_rows, ahead, row, full, width - W);
}

template <int STRIDE, class T>
void add_values(const ValueBlock& block, Rows<T> v_rows, AheadLines<T>& ahead, int rows, int width) {
  constexpr int ROWS = STRIDE < 8 ? STRIDE : W == 16 ? 8 : 4;
  constexpr int SUMS = W == 16 ? 16 : 8;
  constexpr int COLUMNS = SUMS / ROWS < 8 ? SUMS / ROWS : 8;
  for (int row = 0; row < rows; row += ROWS)
    value_columns<STRIDE, ROWS, COLUMNS>(block, v_rows, ahead, row, 0, width);
}

#if PAGEBINDER_BF16_DOT
// V of two keys side by side: a word is a column of (key 2i, key 2i+1). Vectors of pairs and of columns lie
// `pair_stride` and `column_stride` words apart.
inline void pack_value_pairs(Rows<bf16> rows, int num_keys, int width, int pair_stride, int column_stride,
                             uint32_t* packed) {
  const int vectors = (width + W - 1) / W;
  for (int k = 0; k < num_keys; k += 2) {
    const bf16 *even = rows[k], *odd = rows[k + 1];
    for (int i = 0; i < vectors; ++i) {
      const int offset = i * W + W <= width ? i * W : width - W;
      store(packed + k / 2 * pair_stride + i * column_stride,
            pair_lanes(load<VH>(even + offset), load<VH>(odd + offset)));
    }
  }
}

// COLUMNS vectors of two keys that are side by side.
template <int ROWS, int COLUMNS>
PB_INLINE void add_pair(const float* weight, const VU (&v)[COLUMNS], VF (&sum)[ROWS][COLUMNS]) {
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const __m512bh w = bit_cast<__m512bh>(_mm512_set1_epi32(bit_cast<int32_t>(weight[r])));
    PB_UNROLL
    for (int c = 0; c < COLUMNS; ++c)
      sum[r][c] = bit_cast<VF>(_mm512_dpbf16_ps(bit_cast<__m512>(sum[r][c]), w, bit_cast<__m512bh>(v[c])));
  }
}

template <int STRIDE, int ROWS, int COLUMNS>
PB_INLINE void packed_pair_columns(const ValueBlock& b, const uint32_t* packed, int vectors, int row, int column) {
  for (; column + COLUMNS <= vectors; column += COLUMNS) {
    VF sum[ROWS][COLUMNS];
    begin_block<Columns::IN_ORDER>(b, row, column, sum);
    const float* weight = b.weights + row;
    const uint32_t* from = packed + column * W;
    for (int k = 0; k < b.num_keys; k += 2, weight += STRIDE, from += vectors * W) {
      VU v[COLUMNS];
      PB_UNROLL
      for (int c = 0; c < COLUMNS; ++c) v[c] = load<VU>(from + c * W);
      add_pair(weight, v, sum);
    }
    end_block<Columns::IN_ORDER>(b, row, column, sum);
  }
  if constexpr (COLUMNS > 1) packed_pair_columns<STRIDE, ROWS, COLUMNS / 2>(b, packed, vectors, row, column);
}

// V packed once for many rows.
template <int STRIDE>
void add_packed_pairs(const ValueBlock& block, const uint32_t* packed, int rows, int vectors) {
  constexpr int ROWS = STRIDE < 4 ? STRIDE : 4;
  for (int row = 0; row < rows; row += ROWS)
    packed_pair_columns<STRIDE, ROWS, 4>(block, packed, vectors, row, 0);
}

template <int STRIDE, int ROWS, int COLUMNS>
PB_INLINE void value_pair_block(const ValueBlock& b, Rows<bf16> v_rows, AheadLines<bf16>& ahead, int row, int column,
                                int offset) {
  constexpr Columns ORDER = COLUMNS % 2 == 0 ? Columns::IN_FOURS : Columns::IN_ORDER;
  constexpr int LINES = (COLUMNS * W * static_cast<int>(sizeof(bf16)) + 63) / 64;
  VF sum[ROWS][COLUMNS];
  begin_block<ORDER>(b, row, column, sum);
  const float* weight = b.weights + row;
  v_rows = v_rows.after(offset);
  const bool from_memory = row == 0 && ahead.any();
  AheadLines<bf16> asking = ahead;
  for (int k = 0; k < b.num_keys; k += 2, weight += STRIDE) {
    const bf16 *even = v_rows[k], *odd = v_rows[k + 1];
    if (from_memory) {
      asking.template ask<2 * LINES>();
      prefetch(v_rows[k + NEAR_KEYS], COLUMNS * W);
      prefetch(v_rows[k + 1 + NEAR_KEYS], COLUMNS * W);
    }
    VU v[COLUMNS];
    if constexpr (COLUMNS == 1) {
      v[0] = pair_lanes(load<VH>(even), load<VH>(odd));
    } else {
      PB_UNROLL
      for (int c = 0; c < COLUMNS; c += 2) {
        const ColumnPairs both = pair_columns(load<VU>(even + c * W), load<VU>(odd + c * W));
        v[c] = both.first, v[c + 1] = both.second;
      }
    }
    add_pair(weight, v, sum);
  }
  end_block<ORDER>(b, row, column, sum);
  if (from_memory) ahead = asking;
}

// As value_columns.
template <int STRIDE, int ROWS, int COLUMNS>
PB_INLINE void value_pair_columns(const ValueBlock& b, Rows<bf16> v_rows, AheadLines<bf16>& ahead, int row, int column,
                                  int width) {
  const int full = width / W;
  for (; column + COLUMNS <= full; column += COLUMNS)
    value_pair_block<STRIDE, ROWS, COLUMNS>(b, v_rows, ahead, row, column, column * W);
  if constexpr (COLUMNS > 1) value_pair_columns<STRIDE, ROWS, COLUMNS / 2>(b, v_rows, ahead, row, column, width);
  else if (full * W < width) value_pair_block<STRIDE, ROWS, 1>(b, v_rows, ahead, row, full, width - W);
}

// V of few rows, paired as it is read: half the multiplications of add_values.
template <int STRIDE>
void add_value_pairs(const ValueBlock& block, Rows<bf16> v_rows, AheadLines<bf16>& ahead, int width) {
  constexpr int COLUMNS = 16 / STRIDE < 8 ? 16 / STRIDE : 8;
  value_pair_columns<STRIDE, STRIDE, COLUMNS>(block, v_rows, ahead, 0, 0, width);
}
#endif

}  // namespace pagebinder
