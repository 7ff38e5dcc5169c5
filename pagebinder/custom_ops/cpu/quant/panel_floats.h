// One panel of a quantised weight meets all rows of x, in float32 with vectors of any width.
//
// Of few rows codes become floats in registers and are used there: codes are read once and in order. More rows meet
// blocks of steps that were decoded into the nearest cache, some rows at a time. An element is summed in the same order
// whatever the number of rows: the k of a block from zero on, then the blocks.
#pragma once

#include <algorithm>

#include "by_count.h"
#include "decode.h"

namespace pagebinder {

constexpr int FLOAT_BLOCK_STEPS = 4;
constexpr int FLOAT_ROWS = W == 8 ? 6 : W / 2;       // that are summed at once
constexpr int FLOAT_FEW_ROWS = W == 16 ? 4 : W / 4;  // that meet codes in registers
constexpr int FLOAT_AHEAD = 4096;                    // bytes of codes that are asked for ahead
constexpr int TILE_VECTORS = TILE_COLUMNS / W;

// sums [row][16 of 32] += scale * sum.
template <Code CODE, int ROWS>
PB_INLINE void add_scaled(const QuantizedLinearArgs& a, int64_t row, int step, const float* scales,
                          const VF (&sum)[ROWS][TILE_VECTORS], float* sums) {
  float of_row[ROWS];
  for (int r = 0; r < ROWS; ++r) of_row[r] = a.x_scale_at(row + r, step) * FLOAT_UNIT<CODE>;
  PB_UNROLL  // or sums would have to be in memory all the time
  for (int r = 0; r < ROWS; ++r)
    PB_UNROLL
    for (int v = 0; v < TILE_VECTORS; ++v) {
      float* at = sums + (row + r) * QUANT_PANEL + v * W;
      store(at, load<VF>(at) + sum[r][v] * (of_row[r] * load<VF>(scales + v * W)));
    }
}

// ---- few rows --------------------------------------------------------------------------------------------------

// sum [row][16 columns] += x [row][32 k] times a tile.
template <Code CODE, int ROWS>
PB_INLINE void add_tile(const uint8_t* tile, const float* x, int64_t x_stride, VF (&sum)[ROWS][TILE_VECTORS]) {
  for (int line = 0; line < TILE_LINES_OF<CODE>; ++line, tile += 64, x += IN_LANE<CODE>) {
    __builtin_prefetch(tile + FLOAT_AHEAD);
    VU lanes[TILE_VECTORS];
    PB_UNROLL
    for (int v = 0; v < TILE_VECTORS; ++v) lanes[v] = load<VU>(tile + v * W * 4);
    PB_UNROLL
    for (int i = 0; i < IN_LANE<CODE>; ++i) {
      VF codes[TILE_VECTORS];
      PB_UNROLL
      for (int v = 0; v < TILE_VECTORS; ++v) codes[v] = decode_lanes<CODE>(lanes[v], i);
      PB_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const VF value = splat(x[r * x_stride + i]);
        PB_UNROLL
        for (int v = 0; v < TILE_VECTORS; ++v) add_product(sum[r][v], value, codes[v]);
      }
    }
  }
}

template <Code CODE, int ROWS>
void few_rows_in_floats(const QuantizedLinearArgs& a, int64_t panel, int block, float* sums) {
  alignas(64) float scales[QUANT_PANEL];
  const uint8_t* tile = a.weight + panel * a.panel_bytes();
  const int steps = static_cast<int>(a.inner / QUANT_STEP);
  for (int step = 0; step < steps; step += block) {
    VF low[ROWS][TILE_VECTORS] = {}, high[ROWS][TILE_VECTORS] = {};
    for (int i = step; i < std::min(step + block, steps); ++i, tile += 2 * a.tile_bytes()) {
      const float* x = static_cast<const float*>(a.x) + i * QUANT_STEP;
      add_tile<CODE, ROWS>(tile, x, a.x_stride, low);
      add_tile<CODE, ROWS>(tile + a.tile_bytes(), x, a.x_stride, high);
    }
    scales_of(a, panel, step, scales);
    add_scaled<CODE, ROWS>(a, 0, step, scales, low, sums);
    add_scaled<CODE, ROWS>(a, 0, step, scales + TILE_COLUMNS, high, sums + TILE_COLUMNS);
  }
}

// ---- more rows -------------------------------------------------------------------------------------------------

// sums [rows][16 of 32] += scale * (x [rows][k] codes [k][16]) for one half of a panel, the k from `step` on.
template <Code CODE, int ROWS>
void add_rows(const QuantizedLinearArgs& a, int64_t row, int step, const float* codes, int inner, const float* scales,
              float* sums) {
  const float* x = static_cast<const float*>(a.x) + row * a.x_stride + step * QUANT_STEP;
  VF sum[ROWS][TILE_VECTORS] = {};
  for (int k = 0; k < inner; ++k, codes += TILE_COLUMNS) {
    VF code[TILE_VECTORS];
    PB_UNROLL
    for (int v = 0; v < TILE_VECTORS; ++v) code[v] = load<VF>(codes + v * W);
    PB_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const VF value = splat(x[r * a.x_stride + k]);
      PB_UNROLL
      for (int v = 0; v < TILE_VECTORS; ++v) add_product(sum[r][v], value, code[v]);
    }
  }
  add_scaled<CODE, ROWS>(a, row, step, scales, sum, sums);
}

template <Code CODE>
void more_rows_in_floats(const QuantizedLinearArgs& a, int64_t panel, int block, float* sums) {
  alignas(64) float codes[2][FLOAT_BLOCK_STEPS * QUANT_STEP * TILE_COLUMNS];
  alignas(64) float scales[QUANT_PANEL];
  const uint8_t* from = a.weight + panel * a.panel_bytes();
  const int steps = static_cast<int>(a.inner / QUANT_STEP);
  for (int step = 0; step < steps; step += block) {
    const int count = std::min(block, steps - step);
    for (int i = 0; i < 2 * count; ++i, from += a.tile_bytes())
      decode_tile_to_floats<CODE>(from, codes[i % 2] + i / 2 * QUANT_STEP * TILE_COLUMNS);
    scales_of(a, panel, step, scales);
    for (int half = 0; half < 2; ++half)
      for (int64_t row = 0; row < a.rows; row += FLOAT_ROWS) {
        const int rows = static_cast<int>(std::min<int64_t>(FLOAT_ROWS, a.rows - row));
        const auto add = by_count<FLOAT_ROWS>(rows, [](auto number) { return add_rows<CODE, decltype(number)::value>; });
        add(a, row, step, codes[half], count * QUANT_STEP, scales + half * TILE_COLUMNS, sums + half * TILE_COLUMNS);
      }
  }
}

// sums [rows][32] = x times a panel of columns, scaled.
template <Code CODE>
void panel_in_floats(const QuantizedLinearArgs& a, int64_t panel, float* sums) {
  const int block = static_cast<int>(std::min<int64_t>(FLOAT_BLOCK_STEPS, a.scaled_steps()));
  std::fill(sums, sums + a.rows * QUANT_PANEL, 0.0f);
  if (a.rows == 0) return;
  if (a.rows > FLOAT_FEW_ROWS) return more_rows_in_floats<CODE>(a, panel, block, sums);
  const auto few = by_count<FLOAT_FEW_ROWS>(static_cast<int>(a.rows),
                                            [](auto number) { return few_rows_in_floats<CODE, decltype(number)::value>; });
  few(a, panel, block, sums);
}

using PanelSums = void (*)(const QuantizedLinearArgs&, int64_t panel, float* sums);

inline PanelSums panel_in_floats_of(Code code) {
  return code == Code::FP8 ? panel_in_floats<Code::FP8>
         : code == Code::INT8 ? panel_in_floats<Code::INT8>
                              : panel_in_floats<Code::INT4>;
}

}  // namespace pagebinder
