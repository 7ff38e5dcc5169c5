// One panel of a quantised weight meets all rows of x, in float32 with vectors of any width.
//
// Of few rows codes become floats in registers and are used there: codes are read once and in order. More rows meet
// blocks of steps that were decoded into the nearest cache, some rows at a time. An element is summed in the same order
// whatever the number of rows: those of even k of a block from zero on, those of odd k, as a sum waits for the one
// before, and then the blocks.
#pragma once

#include <algorithm>

#include "by_count.h"
#include "decode.h"
#include "lifted_rows.h"

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

// Do codes meet rows that were lifted?
inline bool meets_lifted_rows(Code code, int64_t rows) { return code == Code::FP8 && rows <= FLOAT_FEW_ROWS; }

// Rows that are `stride` apart, lifted where codes meet such rows. lowering: [FLOAT_FEW_ROWS], of those
// (QuantizedLinearArgs).
template <class T>
void rows_for_codes(Code code, const T* x, int64_t x_stride, int64_t rows, int64_t inner, int64_t stride, float* to,
                    float* lowering) {
  for (int64_t r = 0; r < rows; ++r, x += x_stride, to += stride) {
    if (meets_lifted_rows(code, rows)) lowering[r] = lift_row(x, inner, to) / FLOAT_UNIT<Code::FP8>;
    else for (int64_t k = 0; k < inner; k += W) store(to + k, load_float(x + k));
  }
}

// Sums of half a panel: of even k, of odd k.
template <int ROWS>
struct TileSums { VF of[2][ROWS][TILE_VECTORS]; };

// sums += x [row][k] times LINES lines of a tile of 16 columns.
template <Code CODE, int ROWS, int LINES>
PB_INLINE void add_lines(const uint8_t* tile, const float* x, int64_t x_stride, TileSums<ROWS>& sums) {
  TileSums<ROWS> own = sums;  // in registers
  for (int line = 0; line < LINES; ++line, x += IN_LANE<CODE>) {
    __builtin_prefetch(tile + line_at<CODE>(line) + FLOAT_AHEAD);
    PB_UNROLL
    for (int v = 0; v < TILE_VECTORS; ++v) {
      VF codes[IN_LANE<CODE>];
      place_line<CODE>(tile, line, v, codes);
      PB_UNROLL
      for (int i = 0; i < IN_LANE<CODE>; ++i)
        PB_UNROLL
        for (int r = 0; r < ROWS; ++r) own.of[i % 2][r][v] += splat(x[r * x_stride + i]) * codes[i];
    }
  }
  sums = own;
}

// PARTS: of a step, that have scales of their own; where these are two, a block is one step.
template <Code CODE, int ROWS, int PARTS>
void few_rows_in_floats(const QuantizedLinearArgs& a, int64_t panel, int block, float* sums) {
  constexpr int LINES = TILE_LINES_OF<CODE> / PARTS, PART = QUANT_STEP / PARTS;
  alignas(64) float scales[QUANT_PANEL];
  const uint8_t* tiles = a.weight + panel * a.panel_bytes();
  const int steps = static_cast<int>(a.inner / QUANT_STEP);
  for (int step = 0; step < steps; step += block, tiles += block * 2 * a.tile_bytes())
    for (int part = 0; part < PARTS; ++part) {
      TileSums<ROWS> halves[2] = {};
      const uint8_t* tile = tiles + part * (tile_bytes_of(CODE) / PARTS);
      const float* x = static_cast<const float*>(a.x) + part * PART;
      for (int i = step; i < std::min(step + block, steps); ++i)
        for (TileSums<ROWS>& half : halves) {
          add_lines<CODE, ROWS, LINES>(tile, x + i * QUANT_STEP, a.x_stride, half);
          tile += a.tile_bytes();
        }
      scales_at(a, panel, int64_t{step} * QUANT_STEP + part * PART, scales);
      for (int half = 0; half < 2; ++half) {
        auto& [sum, odd] = halves[half].of;
        for (int r = 0; r < ROWS; ++r)
          for (int v = 0; v < TILE_VECTORS; ++v) {
            sum[r][v] += odd[r][v];
            if (CODE == Code::FP8) sum[r][v] *= a.lowering[r];
          }
        add_scaled<CODE, ROWS>(a, 0, step, scales + half * TILE_COLUMNS, sum, sums + half * TILE_COLUMNS);
      }
    }
}

// ---- more rows -------------------------------------------------------------------------------------------------

// sum [row][16 columns] = x [row][k] times codes [k][16], of every second k.
template <int ROWS>
PB_INLINE void every_second(const float* x, int64_t x_stride, const float* codes, int inner,
                            VF (&sum)[ROWS][TILE_VECTORS]) {
  PB_UNROLL  // or sums would have to be in memory all the time, here and below
  for (int r = 0; r < ROWS; ++r)
    PB_UNROLL
    for (int v = 0; v < TILE_VECTORS; ++v) sum[r][v] = VF{};
  for (int k = 0; k < inner; k += 2, codes += 2 * TILE_COLUMNS) {
    VF code[TILE_VECTORS];
    PB_UNROLL
    for (int v = 0; v < TILE_VECTORS; ++v) code[v] = load<VF>(codes + v * W);
    PB_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const VF value = splat(x[r * x_stride + k]);
      PB_UNROLL
      for (int v = 0; v < TILE_VECTORS; ++v) add_product(sum[r][v], value, code[v]);
    }
  }
}

// sums [rows][16 of 32] += scale * (x [rows][k] codes [k][16]) for one half of a panel, `inner` from k on.
template <Code CODE, int ROWS>
void add_rows(const QuantizedLinearArgs& a, int64_t row, int64_t k, const float* codes, int inner, const float* scales,
              float* sums) {
  const float* x = static_cast<const float*>(a.x) + row * a.x_stride + k;
  alignas(64) float even[ROWS][TILE_COLUMNS];
  VF sum[ROWS][TILE_VECTORS];
  every_second<ROWS>(x, a.x_stride, codes, inner, sum);
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r)
    PB_UNROLL
    for (int v = 0; v < TILE_VECTORS; ++v) store(even[r] + v * W, sum[r][v]);
  every_second<ROWS>(x + 1, a.x_stride, codes + TILE_COLUMNS, inner, sum);
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r)
    PB_UNROLL
    for (int v = 0; v < TILE_VECTORS; ++v) sum[r][v] = load<VF>(even[r] + v * W) + sum[r][v];
  add_scaled<CODE, ROWS>(a, row, static_cast<int>(k / QUANT_STEP), scales, sum, sums);
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
    const bool in_halves = CODE == Code::INT6 || a.has_half_steps();  // as few rows are summed
    const int span = in_halves ? QUANT_HALF_STEP : count * QUANT_STEP;
    for (int at = 0; at < count * QUANT_STEP; at += span) {
      const int64_t k = int64_t{step} * QUANT_STEP + at;
      scales_at(a, panel, k, scales);
      for (int half = 0; half < 2; ++half)
        for (int64_t row = 0; row < a.rows; row += FLOAT_ROWS) {
          const int rows = static_cast<int>(std::min<int64_t>(FLOAT_ROWS, a.rows - row));
          const auto add = by_count<FLOAT_ROWS>(rows, [](auto number) { return add_rows<CODE, decltype(number)::value>; });
          add(a, row, k, codes[half] + at * TILE_COLUMNS, span, scales + half * TILE_COLUMNS, sums + half * TILE_COLUMNS);
        }
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
  const auto meet = [&](auto parts) {
    const auto few = by_count<FLOAT_FEW_ROWS>(
        static_cast<int>(a.rows),
        [](auto rows) { return few_rows_in_floats<CODE, decltype(rows)::value, decltype(parts)::value>; });
    few(a, panel, block, sums);
  };
  if constexpr (CODE == Code::INT6) return meet(std::integral_constant<int, 2>());
  if constexpr (CODE == Code::INT8 || CODE == Code::INT4 || CODE == Code::FP4)
    if (a.has_half_steps()) return meet(std::integral_constant<int, 2>());
  if constexpr (CODE != Code::INT6) meet(std::integral_constant<int, 1>());
}

using PanelSums = void (*)(const QuantizedLinearArgs&, int64_t panel, float* sums);

inline PanelSums panel_in_floats_of(Code code) {
  return with_any_code(code, [](auto constant) -> PanelSums { return panel_in_floats<decltype(constant)::value>; });
}

}  // namespace pagebinder
