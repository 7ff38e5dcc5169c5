// Quantised linear layers on BF16 dots, see quantized_linear.h.
//
//     sum[row][16 columns]  +=  line of pairs [16 columns]  .  pair of x, in every lane
//
// One job = one panel of columns (panel_dots.h), of one or two rows two panels. Those rows meet codes in registers, which
// is faster than matrix tiles while memory is the limit. Without tiles more rows are taken in strips of up to 14. Rows for
// codes of FP8 are lifted, so that the codes need only be placed.
//
// An element of y is summed in one order for up to two rows, in another for any number of more.
#include <vector>

#include "lifted_rows.h"
#include "memory_streams.h"
#include "panel_dots.h"
#include "quantized_jobs.h"

namespace pagebinder {
#if PAGEBINDER_BF16_DOT
namespace {

// ---- one or two rows -------------------------------------------------------------------------------------------

struct FewRows : QuantizedRun {
  const bf16* x = static_cast<const bf16*>(args.x);
  int64_t x_stride = args.x_stride;
  float factors[QUANT_MOST_DOT_ROWS] = {1.0f, 1.0f};  // that sums are times
  const bool side_by_side = !prefetcher_follows_rising_lines();  // two panels, as two runs of lines

  explicit FewRows(const QuantizedLayers& c) : QuantizedRun(c, 2) {}

  // For codes of FP8 that are only placed. to: [rows, inner]
  void lift(bf16* to) {
    for (int64_t row = 0; row < args.rows; ++row)
      factors[row] = lift_row(x + row * x_stride, args.inner, to + row * args.inner);
    x = to, x_stride = args.inner;
  }
};

template <Code CODE, int ROWS>
void worker(void* context, int index) {
  FewRows& run = static_cast<FewRows&>(*static_cast<QuantizedRun*>(context));
  const uint32_t* x[ROWS];
  for (int r = 0; r < ROWS; ++r) x[r] = reinterpret_cast<const uint32_t*>(run.x + r * run.x_stride);
  const auto add = [&](const auto& panels, auto& sums) {
    constexpr int PANELS = static_cast<int>(std::extent_v<std::remove_reference_t<decltype(panels)>>);
    add_panels<CODE, ROWS, PANELS, 1, CODE == Code::FP8>(panels, x, sums);
    for (auto& panel : sums)
      for (int r = 0; r < ROWS; ++r)
        for (VF& sum : panel[r]) sum *= run.factors[r];
  };
  for (int i; (i = run.work.take(index)) < run.num_jobs;) meet_panels<ROWS>(run, run.job(i), 0, run.side_by_side, add);
}

using Worker = void (*)(void*, int);

// ---- strips of rows --------------------------------------------------------------------------------------------

constexpr int64_t SERIAL_COPY = 1 << 15;    // elements of x

struct StripRun : QuantizedRun {
  const DotStrips strips{args.rows, args.inner};
  DotPair* const x;       // in strips
  bf16* const lifted;     // [rows, inner], or null
  float* const lowering;  // [rows], of lifted ones
  std::atomic<int> next_strip{0};

  StripRun(const QuantizedLayers& c, DotPair* memory, bf16* rows, float* factors)
      : QuantizedRun(c), x(memory), lifted(rows), lowering(factors) {}

  void copy(int strip) {
    if (lifted == nullptr) return strips.copy(args.x, args.x_stride, strip, x);
    for (int64_t row = strips.first_row(strip); row < strips.first_row(strip) + strips.rows_of(strip); ++row)
      lowering[row] = lift_row(static_cast<const bf16*>(args.x) + row * args.x_stride, args.inner, lifted + row * args.inner);
    strips.copy(lifted, args.inner, strip, x);
  }
};

void copy_worker(void* context, int) {
  StripRun& run = static_cast<StripRun&>(*static_cast<QuantizedRun*>(context));
  for (int strip; (strip = run.next_strip.fetch_add(1, std::memory_order_relaxed)) < run.strips.count;) run.copy(strip);
}

template <Code CODE>
void strip_worker(void* context, int index) {
  static thread_local Buffer kept;
  StripRun& run = static_cast<StripRun&>(*static_cast<QuantizedRun*>(context));
  const size_t size = static_cast<size_t>(run.args.rows) * QUANT_PANEL;
  float* memory = kept.at_least<float>(size * run.parts);
  float* const totals[2] = {memory, memory + (run.parts - 1) * size};
  const auto strip_of = [&](int i) -> DotStrip {
    return {run.x + run.strips.offset(i), run.strips.first_row(i), run.strips.rows_of(i)};
  };
  constexpr int IN_REGISTERS = CODE == Code::FP8 || CODE == Code::FP4 ? DOT_MOST_ROWS : 0;  // integers rarely come here
  const auto write = run.args.wide_out ? write_panel<float> : write_panel<bf16>;
  for (int i; (i = run.work.take(index)) < run.num_jobs;) {
    const QuantizedJob job = run.job(i);
    for (int part = 0; part < run.parts; ++part)
      panel_of_strips<CODE, IN_REGISTERS, CODE == Code::FP8>(job.layer[part], job.panel, run.strips.count, strip_of,
                                                              totals[part]);
    write(run, job, totals, 0, run.args.rows, LevelParts::BOTH);
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
  return with_code(code, [rows](auto constant) { return worker_of<decltype(constant)::value>(rows); });
}

void run_strips(const QuantizedLayers& call) {
  static thread_local Buffer memory, lifted_memory, lowering_memory;
  static thread_local std::vector<QuantizedLinearArgs> layers;
  const QuantizedLinearArgs& a = call.first();
  QuantizedLayers lowered = call;
  bf16* lifted = nullptr;
  float* lowering = nullptr;
  if (a.code == Code::FP8) {
    lifted = lifted_memory.at_least<bf16>(static_cast<size_t>(a.rows * a.inner));
    lowering = lowering_memory.at_least<float>(static_cast<size_t>(a.rows));
    layers.assign(call.layers, call.layers + call.num_layers);
    for (QuantizedLinearArgs& layer : layers) layer.lowering = lowering;
    lowered.layers = layers.data();
  }
  StripRun run(lowered, memory.at_least<DotPair>(static_cast<size_t>(a.rows * a.inner / 2)), lifted, lowering);
  tell_next_weights(run);
  run.in_workers(a.rows * a.inner < SERIAL_COPY, copy_worker);
  run.in_workers(false, worker_of(a.code, 0));
}

}  // namespace

bool quantized_linear_with_dots(const QuantizedLayers& call) {
  const QuantizedLinearArgs& a = call.first();
  const bool few = a.rows <= QUANT_MOST_DOT_ROWS && a.x_scale == nullptr && !a.wide_out;
  if (!few && quantized_linear_has_tiles()) return false;
  if (!few) {
    run_strips(call);
    return true;
  }
  static thread_local Buffer lifted;
  FewRows run(call);
  if (a.code == Code::FP8) run.lift(lifted.at_least<bf16>(static_cast<size_t>(a.rows * a.inner)));
  tell_next_weights(run);
  run.in_workers(false, worker_of(a.code, a.rows));
  return true;
}

#else

bool quantized_linear_with_dots(const QuantizedLayers&) { return false; }

#endif
}  // namespace pagebinder
