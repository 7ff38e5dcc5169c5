// The quantised linear layer in float32 with vectors of any width; layout and formats: quantized_linear.h.
//
// One job = one panel of columns. Its codes become floats, some steps at a time, and meet all rows of x, a few at a
// time. An element of y is summed in the same order whatever the number of rows and threads.
#include "quantized_linear.h"

#include <algorithm>

#include "decode.h"

namespace pagebinder {
namespace {

constexpr int BLOCK_STEPS = 4;
constexpr int ROWS = W / 2;                    // that are summed at once
constexpr int VECTORS = TILE_COLUMNS / W;
constexpr int64_t SERIAL_FLOPS = 1 << 19;

struct Run {
  const QuantizedLinearArgs& args;
  int num_panels, num_workers;
  std::atomic<int> next_panel{0};
};

// sums [rows][32] += scale * (x [rows][k] codes [k][16]) for one half of a panel.
template <int COUNT>
PB_INLINE void add_rows(const float* x, int64_t x_stride, const float* codes, int inner, const float* scales,
                        float* sums) {
  VF sum[COUNT][VECTORS] = {};
  for (int k = 0; k < inner; ++k)
    PB_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
      const VF code = load<VF>(codes + k * TILE_COLUMNS + v * W);
      PB_UNROLL
      for (int r = 0; r < COUNT; ++r) sum[r][v] += splat(x[r * x_stride + k]) * code;
    }
  for (int r = 0; r < COUNT; ++r)
    for (int v = 0; v < VECTORS; ++v) {
      float* at = sums + r * QUANT_PANEL + v * W;
      store(at, load<VF>(at) + sum[r][v] * load<VF>(scales + v * W));
    }
}

template <Code CODE>
void run_panel(const QuantizedLinearArgs& a, int64_t panel, float* sums) {
  alignas(64) float codes[2][BLOCK_STEPS * QUANT_STEP * TILE_COLUMNS];
  alignas(64) float scales[QUANT_PANEL];
  const uint8_t* from = a.weight + panel * a.panel_bytes();
  const int steps = static_cast<int>(a.inner / QUANT_STEP);
  const int block = static_cast<int>(std::min<int64_t>(BLOCK_STEPS, a.scale_group / QUANT_STEP));
  std::fill(sums, sums + a.rows * QUANT_PANEL, 0.0f);
  for (int step = 0; step < steps; step += block) {
    const int count = std::min(block, steps - step);
    for (int i = 0; i < 2 * count; ++i, from += a.tile_bytes())
      decode_tile_to_floats<CODE>(from, codes[i % 2] + i / 2 * QUANT_STEP * TILE_COLUMNS);
    scales_of(a, panel, step, scales);
    const float* x = static_cast<const float*>(a.x) + step * QUANT_STEP;
    for (int half = 0; half < 2; ++half) {
      const float* half_scales = scales + half * TILE_COLUMNS;
      float* half_sums = sums + half * TILE_COLUMNS;
      int64_t row = 0;
      for (; row + ROWS <= a.rows; row += ROWS)
        add_rows<ROWS>(x + row * a.x_stride, a.x_stride, codes[half], count * QUANT_STEP, half_scales,
                       half_sums + row * QUANT_PANEL);
      for (; row < a.rows; ++row)
        add_rows<1>(x + row * a.x_stride, a.x_stride, codes[half], count * QUANT_STEP, half_scales,
                    half_sums + row * QUANT_PANEL);
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
void worker(void* context, int) {
  static thread_local Buffer buffer;
  Run& run = *static_cast<Run*>(context);
  float* sums = buffer.at_least<float>(static_cast<size_t>(run.args.rows) * QUANT_PANEL);
  for (int panel; (panel = run.next_panel.fetch_add(1, std::memory_order_relaxed)) < run.num_panels;)
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
