// Quantised linear layers on BF16 dots, see quantized_linear.h.
//
//     sum[row][16 columns]  +=  line of pairs [16 columns]  .  pair of x, in every lane
//
// One job = one panel of columns (panel_dots.h). One or two rows meet codes in registers, which is faster than matrix
// tiles while memory is the limit. Without tiles more rows are taken in strips of up to 14.
//
// An element of y is summed in one order for up to two rows, in another for any number of more.
#include "quantized_linear.h"

#include "panel_dots.h"
#include "work_ranges.h"

namespace pagebinder {
#if PAGEBINDER_BF16_DOT
namespace {

constexpr int64_t SERIAL_FLOPS = 1 << 19;

struct Run {
  const QuantizedLinearArgs& args;
  int num_panels, num_workers;
  WorkRanges work{num_panels, num_workers};
};

// ---- one or two rows -------------------------------------------------------------------------------------------

template <Code CODE, int ROWS>
void worker(void* context, int index) {
  Run& run = *static_cast<Run*>(context);
  const QuantizedLinearArgs& a = run.args;
  const bf16* bias = static_cast<const bf16*>(a.bias);
  const uint32_t* x[ROWS];
  for (int r = 0; r < ROWS; ++r)
    x[r] = reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(a.x) + r * a.x_stride);
  for (int panel; (panel = run.work.take(index)) < run.num_panels;) {
    VF sums[ROWS][2] = {};
    add_panel<CODE, ROWS>(a, panel, x, sums);
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

constexpr int64_t SERIAL_COPY = 1 << 15;    // elements of x

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

template <Code CODE>
void strip_worker(void* context, int index) {
  static thread_local Buffer kept;
  StripRun& run = *static_cast<StripRun*>(context);
  const QuantizedLinearArgs& a = run.args;
  float* totals = kept.at_least<float>(static_cast<size_t>(a.rows) * QUANT_PANEL);
  const auto strip_of = [&](int i) -> DotStrip {
    return {run.x + run.strips.offset(i), run.strips.first_row(i), run.strips.rows_of(i)};
  };
  for (int panel; (panel = run.work.take(index)) < run.num_panels;) {
    panel_of_strips<CODE>(a, panel, run.strips.count, strip_of, totals);
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
