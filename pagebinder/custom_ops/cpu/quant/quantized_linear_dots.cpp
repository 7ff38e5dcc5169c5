// Quantised linear layers on BF16 dots, see quantized_linear.h.
//
//     sum[row][16 columns]  +=  line of pairs [16 columns]  .  pair of x, in every lane
//
// Of one or two rows codes become pairs in registers and are used there: codes are read once and in order, which is
// faster than matrix tiles while memory is the limit. Without tiles more rows, in strips of up to 14, meet blocks of
// steps that were decoded into the nearest cache (dots.h); the first strip asks for the next block's codes.
//
// An element of y is summed in one order for up to two rows, in another for any number of more.
#include "quantized_linear.h"

#include "decode.h"
#include "dots.h"
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

// ---- one or two rows -------------------------------------------------------------------------------------------

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

// ---- strips of rows --------------------------------------------------------------------------------------------

constexpr int BLOCK_STEPS = 16;             // whose pairs are in the nearest cache
constexpr int64_t SERIAL_COPY = 1 << 15;    // elements of x
static_assert(QUANT_PANEL == DOT_PANEL && QUANT_STEP == DOT_PANEL);

struct StripRun : Run {
  const DotStrips strips{args.rows, args.inner};
  uint32_t* x;  // in strips
  std::atomic<int> next_strip{0};

  StripRun(const QuantizedLinearArgs& a, int panels, int workers, uint32_t* memory) : Run{a, panels, workers}, x(memory) {}
};

void copy_worker(void* context, int) {
  StripRun& run = *static_cast<StripRun*>(context);
  for (int strip; (strip = run.next_strip.fetch_add(1, std::memory_order_relaxed)) < run.strips.count;)
    run.strips.copy(run.args.x, run.args.x_stride, strip, run.x);
}

// totals [rows][32] += sums [rows][32] times the scales of columns and of rows.
void add_scaled(const QuantizedLinearArgs& a, int64_t row, int rows, int64_t step, const float* scales, const float* sums,
                float* totals) {
  for (int r = 0; r < rows; ++r) {
    const float of_row = a.x_scale_at(row + r, step);
    for (int i = r * QUANT_PANEL; i < (r + 1) * QUANT_PANEL; i += W) {
      const VF scale = load<VF>(scales + i % QUANT_PANEL) * of_row;
      store(totals + i, load<VF>(totals + i) + scale * load<VF>(sums + i));
    }
  }
}

template <class Out>
void write_panel(const QuantizedLinearArgs& a, int64_t panel, const float* totals) {
  const Out* bias = static_cast<const Out*>(a.bias);
  for (int half = 0; half < QUANT_PANEL; half += W) {
    const int64_t column = panel * QUANT_PANEL + half;
    const VF added = bias == nullptr ? VF{} : load_float(bias + column);
    Out* out = static_cast<Out*>(a.out) + column;
    for (int64_t r = 0; r < a.rows; ++r, out += a.columns) store_float(out, load<VF>(totals + r * QUANT_PANEL + half) + added);
  }
}

// A decoded block of steps meets a strip, span by span of what shares its scales.
void meet_strip(const StripRun& run, int64_t panel, int strip, int step, int count, const char* pairs, float factor,
                DotAhead ahead, float* totals) {
  const QuantizedLinearArgs& a = run.args;
  const int rows = run.strips.rows_of(strip), span = static_cast<int>(std::min<int64_t>(a.scaled_steps(), BLOCK_STEPS));
  const int64_t row = run.strips.first_row(strip);
  alignas(64) float sums[DOT_MOST_ROWS * QUANT_PANEL], scales[QUANT_PANEL];
  for (int i = 0; i < count; i += span) {
    const int steps = std::min(span, count - i);
    const uint32_t* x = run.x + run.strips.offset(strip) + int64_t{step + i} * DOT_PAIRS * rows;
    multiply_dots_of(rows)(x, pairs + int64_t{i} * DOT_STEP_BYTES, steps, true, ahead, sums);
    ahead.first += steps * DOT_PAIRS * 64;
    scales_of(a, panel, step + i, scales);
    for (int c = 0; c < QUANT_PANEL; c += W) store(scales + c, load<VF>(scales + c) * factor);
    add_scaled(a, row, rows, step + i, scales, sums, totals + row * QUANT_PANEL);
  }
}

template <Code CODE>
void strip_worker(void* context, int index) {
  static thread_local Buffer kept;
  StripRun& run = *static_cast<StripRun*>(context);
  const QuantizedLinearArgs& a = run.args;
  const int steps = static_cast<int>(a.inner / QUANT_STEP);
  alignas(64) char pairs[BLOCK_STEPS * DOT_STEP_BYTES];
  float* totals = kept.at_least<float>(static_cast<size_t>(a.rows) * QUANT_PANEL);
  for (int panel; (panel = run.work.take(index)) < run.num_panels;) {
    const uint8_t* codes = a.weight + panel * a.panel_bytes();
    std::fill(totals, totals + a.rows * QUANT_PANEL, 0.0f);
    for (int step = 0; step < steps; step += BLOCK_STEPS) {
      const int count = std::min(BLOCK_STEPS, steps - step);
      for (int tile = 0; tile < 2 * count; ++tile, codes += a.tile_bytes())
        decode_tile_to_pairs<CODE, 0>(codes, pairs + tile * (DOT_STEP_BYTES / 2));
      for (int strip = 0; strip < run.strips.count; ++strip) {
        const DotAhead ahead{reinterpret_cast<const char*>(codes), strip == 0};
        meet_strip(run, panel, strip, step, count, pairs, 1.0f / PAIR_FACTOR<CODE>, ahead, totals);
      }
    }
    (a.wide_out ? write_panel<float> : write_panel<bf16>)(a, panel, totals);
  }
}

template <Code CODE>
Worker worker_of(int64_t rows) {
  constexpr Worker WORKERS[] = {worker<CODE, 1>, worker<CODE, 2>};
  static_assert(std::size(WORKERS) == QUANT_MOST_DOT_ROWS);
  return rows == 0 ? strip_worker<CODE> : WORKERS[rows - 1];
}

// rows: 0 for strips of any number.
Worker worker_of(Code code, int64_t rows) {
  switch (code) {
    case Code::FP8: return worker_of<Code::FP8>(rows);
    case Code::INT8: return worker_of<Code::INT8>(rows);
    default: return worker_of<Code::INT4>(rows);
  }
}

bool run_strips(const QuantizedLinearArgs& args, int num_panels, int num_workers) {
  static thread_local Buffer memory;
  uint32_t* x = memory.at_least<uint32_t>(static_cast<size_t>(args.rows * args.inner / 2));
  StripRun run(args, num_panels, num_workers, x);
  if (num_workers <= 1 || args.rows * args.inner < SERIAL_COPY) copy_worker(&run, 0);
  else args.run(num_workers, copy_worker, &run);
  if (num_workers <= 1) worker_of(args.code, 0)(&run, 0);
  else args.run(num_workers, worker_of(args.code, 0), &run);
  return true;
}

}  // namespace

bool quantized_linear_with_dots(const QuantizedLinearArgs& args) {
  const bool few = args.rows <= QUANT_MOST_DOT_ROWS && args.x_scale == nullptr && !args.wide_out;
  if (!few && quantized_linear_has_tiles()) return false;
  const int num_panels = static_cast<int>(args.columns / QUANT_PANEL);
  const bool serial = args.rows * args.columns * args.inner < SERIAL_FLOPS;
  Run run{args, num_panels, serial ? 1 : std::min(args.num_threads, num_panels)};
  tell_next_weights(args, run.num_workers);
  if (!few) return run_strips(args, num_panels, run.num_workers);
  const Worker body = worker_of(args.code, args.rows);
  if (run.num_workers <= 1) body(&run, 0);
  else args.run(run.num_workers, body, &run);
  return true;
}

#else

bool quantized_linear_with_dots(const QuantizedLinearArgs&) { return false; }

#endif
}  // namespace pagebinder
