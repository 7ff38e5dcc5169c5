// The quantised linear layer in float32 with vectors of any width; layout and formats: quantized_linear.h.
//
// One job = one panel of columns. Its codes become floats, some steps at a time, and meet all rows of x, a few at a
// time. An element of y is summed in the same order whatever the number of rows and threads.
#include "quantized_linear.h"

#include <algorithm>

#include "decode.h"
#include "work_ranges.h"

namespace pagebinder {
namespace {

constexpr int BLOCK_STEPS = 4;
constexpr int ROWS = W / 2;                    // that are summed at once
constexpr int VECTORS = TILE_COLUMNS / W;
constexpr int64_t SERIAL_FLOPS = 1 << 19;

struct Run {
  const QuantizedLinearArgs& args;
  int num_panels, num_workers;
  WorkRanges work{num_panels, num_workers};
};

// sums [rows][32] += scale * (x [rows][k] codes [k][16]) for one half of a panel, the k from `step` on.
template <int COUNT>
PB_INLINE void add_rows(const QuantizedLinearArgs& a, int64_t row, int step, const float* codes, int inner,
                        const float* scales, float* sums) {
  const float* x = static_cast<const float*>(a.x) + row * a.x_stride + step * QUANT_STEP;
  sums += row * QUANT_PANEL;
  VF sum[COUNT][VECTORS] = {};
  for (int k = 0; k < inner; ++k)
    PB_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
      const VF code = load<VF>(codes + k * TILE_COLUMNS + v * W);
      PB_UNROLL
      for (int r = 0; r < COUNT; ++r) sum[r][v] += splat(x[r * a.x_stride + k]) * code;
    }
  for (int r = 0; r < COUNT; ++r) {
    const float of_row = a.x_scale_at(row + r, step);
    for (int v = 0; v < VECTORS; ++v) {
      float* at = sums + r * QUANT_PANEL + v * W;
      store(at, load<VF>(at) + sum[r][v] * of_row * load<VF>(scales + v * W));
    }
  }
}

template <Code CODE>
void run_panel(const QuantizedLinearArgs& a, int64_t panel, float* sums) {
  alignas(64) float codes[2][BLOCK_STEPS * QUANT_STEP * TILE_COLUMNS];
  alignas(64) float scales[QUANT_PANEL];
  const uint8_t* from = a.weight + panel * a.panel_bytes();
  const int steps = static_cast<int>(a.inner / QUANT_STEP);
  const int block = static_cast<int>(std::min<int64_t>(BLOCK_STEPS, a.scaled_steps()));
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
      for (; row + ROWS <= a.rows; row += ROWS)
        add_rows<ROWS>(a, row, step, codes[half], count * QUANT_STEP, half_scales, half_sums);
      for (; row < a.rows; ++row)
        add_rows<1>(a, row, step, codes[half], count * QUANT_STEP, half_scales, half_sums);
    }
  }
  const float* bias = static_cast<const float*>(a.bias);
  for (int64_t row = 0; row < a.rows; ++row)
    for (int i = 0; i < QUANT_PANEL; i += W) {
      const int64_t column = panel * QUANT_PANEL + i;
      const VF added = bias == nullptr ? VF{} : load<VF>(bias + column);
      store(static_cast<float*>(a.out) + row * a.columns + column, load<VF>(sums + row * QUANT_PANEL + i) + added);
    }
}

template <Code CODE>
void worker(void* context, int index) {
  static thread_local Buffer buffer;
  Run& run = *static_cast<Run*>(context);
  float* sums = buffer.at_least<float>(static_cast<size_t>(run.args.rows) * QUANT_PANEL);
  for (int panel; (panel = run.work.take(index)) < run.num_panels;)
    run_panel<CODE>(run.args, panel, sums);
}

}  // namespace

bool quantized_linear_with_vectors(const QuantizedLinearArgs& args) {
  const auto body = args.code == Code::FP8 ? worker<Code::FP8>
                    : args.code == Code::INT8 ? worker<Code::INT8>
                                              : worker<Code::INT4>;
  const int num_panels = static_cast<int>(args.columns / QUANT_PANEL);
  const bool serial = args.rows * args.columns * args.inner < SERIAL_FLOPS;
  Run run{args, num_panels, serial ? 1 : std::min(args.num_threads, num_panels)};
  if (run.num_workers <= 1) body(&run, 0);
  else args.run(run.num_workers, body, &run);
  return true;
}

}  // namespace pagebinder
