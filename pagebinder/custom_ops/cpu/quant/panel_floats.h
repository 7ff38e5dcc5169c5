// One panel of a quantised weight meets all rows of x, in float32 with vectors of any width.
//
// Codes become floats, some steps at a time, and meet the rows a few at a time. An element is summed in the same order
// whatever the number of rows.
#pragma once

#include <algorithm>

#include "decode.h"

namespace pagebinder {

constexpr int FLOAT_BLOCK_STEPS = 4;
constexpr int FLOAT_ROWS = W / 2;                    // that are summed at once
constexpr int TILE_VECTORS = TILE_COLUMNS / W;

// sums [rows][32] += scale * (x [rows][k] codes [k][16]) for one half of a panel, the k from `step` on.
template <int COUNT>
PB_INLINE void add_rows(const QuantizedLinearArgs& a, int64_t row, int step, const float* codes, int inner,
                        const float* scales, float* sums) {
  const float* x = static_cast<const float*>(a.x) + row * a.x_stride + step * QUANT_STEP;
  sums += row * QUANT_PANEL;
  VF sum[COUNT][TILE_VECTORS] = {};
  for (int k = 0; k < inner; ++k)
    PB_UNROLL
    for (int v = 0; v < TILE_VECTORS; ++v) {
      const VF code = load<VF>(codes + k * TILE_COLUMNS + v * W);
      PB_UNROLL
      for (int r = 0; r < COUNT; ++r) sum[r][v] += splat(x[r * a.x_stride + k]) * code;
    }
  for (int r = 0; r < COUNT; ++r) {
    const float of_row = a.x_scale_at(row + r, step);
    for (int v = 0; v < TILE_VECTORS; ++v) {
      float* at = sums + r * QUANT_PANEL + v * W;
      store(at, load<VF>(at) + sum[r][v] * of_row * load<VF>(scales + v * W));
    }
  }
}

// sums [rows][32] = x times a panel of columns, scaled.
template <Code CODE>
void panel_in_floats(const QuantizedLinearArgs& a, int64_t panel, float* sums) {
  alignas(64) float codes[2][FLOAT_BLOCK_STEPS * QUANT_STEP * TILE_COLUMNS];
  alignas(64) float scales[QUANT_PANEL];
  const uint8_t* from = a.weight + panel * a.panel_bytes();
  const int steps = static_cast<int>(a.inner / QUANT_STEP);
  const int block = static_cast<int>(std::min<int64_t>(FLOAT_BLOCK_STEPS, a.scaled_steps()));
  std::fill(sums, sums + a.rows * QUANT_PANEL, 0.0f);
  for (int step = 0; step < steps; step += block) {
    const int count = std::min(block, steps - step);
    for (int i = 0; i < 2 * count; ++i, from += a.tile_bytes())
      decode_tile_to_floats<CODE>(from, codes[i % 2] + i / 2 * QUANT_STEP * TILE_COLUMNS);
    scales_of(a, panel, step, scales);
    for (int half = 0; half < 2; ++half) {
      const float* half_scales = scales + half * TILE_COLUMNS;
      float* half_sums = sums + half * TILE_COLUMNS;
      int64_t row = 0;
      for (; row + FLOAT_ROWS <= a.rows; row += FLOAT_ROWS)
        add_rows<FLOAT_ROWS>(a, row, step, codes[half], count * QUANT_STEP, half_scales, half_sums);
      for (; row < a.rows; ++row)
        add_rows<1>(a, row, step, codes[half], count * QUANT_STEP, half_scales, half_sums);
    }
  }
}

using PanelSums = void (*)(const QuantizedLinearArgs&, int64_t panel, float* sums);

inline PanelSums panel_in_floats_of(Code code) {
  return code == Code::FP8 ? panel_in_floats<Code::FP8>
         : code == Code::INT8 ? panel_in_floats<Code::INT8>
                              : panel_in_floats<Code::INT4>;
}

}  // namespace pagebinder
