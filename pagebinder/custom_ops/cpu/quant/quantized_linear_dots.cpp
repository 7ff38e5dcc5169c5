// Quantised linear layers of a few rows: codes become pairs in registers and are used there, see quantized_linear.h.
//
//     sum[row][16 columns]  +=  line of pairs [16 columns]  .  pair of x, in every lane        BF16 dot products
//
// Codes are read once and in order. That is faster than matrix tiles while memory is the limit, and needs none.
#include "quantized_linear.h"

#include "decode.h"
#include "work_ranges.h"

namespace pagebinder {
#if PAGEBINDER_BF16_DOT
namespace {

constexpr int PAIRS = QUANT_STEP / 2;       // of a step: the lines of a decoded tile
constexpr int AHEAD_BYTES = 4096;
constexpr int64_t SERIAL_FLOPS = 1 << 19;

struct Run {
  const QuantizedLinearArgs& args;
  int num_panels, num_workers;
  WorkRanges work{num_panels, num_workers};
};

// sums [row][half] of one panel. Of each, even and odd lines are summed apart: a sum waits for the one before.
template <Code CODE, int ROWS>
void add_panel(const QuantizedLinearArgs& a, int64_t panel, VF (&sums)[ROWS][2]) {
  const uint8_t* codes = a.weight + panel * a.panel_bytes();
  const int steps = static_cast<int>(a.inner / QUANT_STEP), span = static_cast<int>(a.scaled_steps());
  const uint32_t* x[ROWS];
  for (int r = 0; r < ROWS; ++r)
    x[r] = reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(a.x) + r * a.x_stride);
  for (int step = 0; step < steps; step += span) {
    __m512 sum[ROWS][2][2] = {};
    const int end = std::min(steps, step + span);
    for (int i = step; i < end; ++i)
      PB_UNROLL
      for (int half = 0; half < 2; ++half, codes += a.tile_bytes())
        decode_tile<CODE, AHEAD_BYTES>(codes, [&](int line, __m512i pairs) {
          PB_UNROLL
          for (int r = 0; r < ROWS; ++r) {
            const __m512i of_row = _mm512_set1_epi32(static_cast<int>(x[r][i * PAIRS + line]));
            __m512& to = sum[r][half][line % 2];
            to = _mm512_dpbf16_ps(to, bit_cast<__m512bh>(pairs), bit_cast<__m512bh>(of_row));
          }
        });
    alignas(64) float scales[QUANT_PANEL];
    scales_of(a, panel, step, scales);
    for (int r = 0; r < ROWS; ++r)
      for (int half = 0; half < 2; ++half) {
        const VF total = bit_cast<VF>(_mm512_add_ps(sum[r][half][0], sum[r][half][1]));
        sums[r][half] += load<VF>(scales + half * W) * (1.0f / PAIR_FACTOR<CODE>) * total;
      }
  }
}

template <Code CODE, int ROWS>
void worker(void* context, int index) {
  Run& run = *static_cast<Run*>(context);
  const QuantizedLinearArgs& a = run.args;
  const bf16* bias = static_cast<const bf16*>(a.bias);
  for (int panel; (panel = run.work.take(index)) < run.num_panels;) {
    VF sums[ROWS][2] = {};
    add_panel<CODE, ROWS>(a, panel, sums);
    for (int r = 0; r < ROWS; ++r)
      for (int half = 0; half < 2; ++half) {
        const int64_t column = panel * int64_t{QUANT_PANEL} + half * W;
        const VF added = bias == nullptr ? VF{} : load_float(bias + column);
        store_float(static_cast<bf16*>(a.out) + r * a.columns + column, sums[r][half] + added);
      }
  }
}

using Worker = void (*)(void*, int);

template <Code CODE>
Worker worker_of(int64_t rows) {
  constexpr Worker WORKERS[] = {worker<CODE, 1>, worker<CODE, 2>, worker<CODE, 3>, worker<CODE, 4>};
  return WORKERS[rows - 1];
}

}  // namespace

bool quantized_linear_with_dots(const QuantizedLinearArgs& args) {
  if (args.rows > QUANT_MOST_DOT_ROWS || args.x_scale != nullptr || args.wide_out) return false;
  const Worker body = args.code == Code::FP8 ? worker_of<Code::FP8>(args.rows)
                      : args.code == Code::INT8 ? worker_of<Code::INT8>(args.rows)
                                                : worker_of<Code::INT4>(args.rows);
  const int num_panels = static_cast<int>(args.columns / QUANT_PANEL);
  const bool serial = args.rows * args.columns * args.inner < SERIAL_FLOPS;
  Run run{args, num_panels, serial ? 1 : std::min(args.num_threads, num_panels)};
  tell_next_weights(args, run.num_workers);
  if (run.num_workers <= 1) body(&run, 0);
  else args.run(run.num_workers, body, &run);
  return true;
}

#else

bool quantized_linear_with_dots(const QuantizedLinearArgs&) { return false; }

#endif
}  // namespace pagebinder
