// Jobs of quantised linear layers (quantized_linear.h): a panel of one of the layers of a call, gated ones two, one of each,
// against all rows of x.
#pragma once

#include <algorithm>
#include <type_traits>

#include "next_weights.h"
#include "quantized_linear.h"
#include "work_ranges.h"

namespace pagebinder {

constexpr int64_t QUANT_SERIAL_FLOPS = 1 << 19;
constexpr int QUANT_JOBS_OF_A_THREAD = 4;  // at least, before jobs get more panels

struct QuantizedJob {
  const QuantizedLinearArgs* layer;  // of gated ones, this and the next
  int64_t panel;
  int64_t panels;  // of a layer, from `panel` on
};

struct QuantizedRun {
  const QuantizedLayers& call;
  const QuantizedLinearArgs& args = call.first();  // of x
  const int parts = call.gate == Activation::NONE ? 1 : 2;  // layers of a job
  const int64_t group;                                      // panels of a job and layer, at most
  const int num_jobs = static_cast<int>(call.num_jobs(group));
  const int num_workers = args.rows * call.num_jobs(1) * QUANT_PANEL * args.inner < QUANT_SERIAL_FLOPS
                              ? 1
                              : std::min(args.num_threads, num_jobs);
  WorkRanges work{num_jobs, num_workers};

  // Jobs have at most `most_panels` panels, fewer where threads would have few jobs.
  explicit QuantizedRun(const QuantizedLayers& c, int64_t most_panels = 1)
      : call(c), group(std::clamp<int64_t>(c.num_jobs(1) / (c.first().num_threads * QUANT_JOBS_OF_A_THREAD), 1,
                                           std::max<int64_t>(most_panels / parts, 1))) {}

  QuantizedJob job(int index) const {
    const QuantizedLinearArgs* layer = call.layers;
    int64_t at = index;
    for (; at >= layer->jobs(group); ++layer) at -= layer->jobs(group);
    return {layer, at * group, std::min(group, layer->panels() - at * group)};
  }

  // body(run, worker): once, or by all workers.
  void in_workers(bool alone, void (*body)(void*, int)) {
    if (alone || num_workers <= 1) body(this, 0);
    else args.run(num_workers, body, this);
  }
};

// A run begins whose workers take jobs.
inline void tell_next_weights(const QuantizedRun& run) {
  static thread_local NextWeights next;
  if (run.args.rows > NEXT_WEIGHTS_ROWS) return;
  next.told_of(run.args.weight, run.num_workers, [&](int worker) -> Reading {
    const auto [layer, panel, count] = run.job(static_cast<int>(int64_t{run.num_jobs} * worker / run.num_workers));
    const auto begin = [&, at = panel](const QuantizedLinearArgs& a) {
      return reinterpret_cast<const char*>(a.weight + at * a.panel_bytes());
    };
    return {{begin(*layer), run.parts > 1 ? begin(layer[1]) : nullptr}, (layer->panels() - panel) * layer->panel_bytes()};
  });
}

// to [rows][inner / group]: the sums of rows of x over groups of k.
template <class T>
void sum_groups(const T* x, int64_t x_stride, int64_t rows, int64_t inner, int64_t group, float* to) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t begin = 0; begin < inner; begin += group, ++to) {
      VF total{};
      for (int64_t k = begin; k < begin + group; k += W) total += load_float(x + row * x_stride + k);
      *to = sum_of_lanes(total);
    }
}

// sums [row][32] += of each of `count` groups from `begin` on, its sum of x times its shifts.
inline void add_shifts_of(const QuantizedLinearArgs& a, int64_t first_row, int64_t rows, int64_t begin, int64_t count,
                          const PanelScales* shifts, float* sums) {
  for (int64_t r = 0; r < rows; ++r, sums += QUANT_PANEL) {
    const float* x = a.x_sums + (first_row + r) * (a.inner / a.scale_group) + begin;
    PanelScales total{};
    for (int64_t g = 0; g < count; ++g)
      PB_UNROLL
      for (int v = 0; v < QUANT_PANEL / W; ++v) total.of[v] += splat(x[g]) * shifts[g].of[v];
    PB_UNROLL
    for (int v = 0; v < QUANT_PANEL / W; ++v) store(sums + v * W, load<VF>(sums + v * W) + total.of[v]);
  }
}

// What shifts of two levels add: LEVEL_OFFSET d s - m t times sums of x. Kernels whose codes are larger by the offset have
// counted the first of these.
enum class LevelParts { BOTH, SECOND, FIRST };

// integers [group of 256 k][32] += of each of `rows` rows, times its sums of x.
template <int ROWS>
PB_INLINE void sum_levels(const float* const* x, const PanelScales* integers, int64_t count, PanelScales (&sums)[ROWS]) {
  for (int64_t g = 0; g < count; ++g)
    PB_UNROLL
    for (int r = 0; r < ROWS; ++r)
      PB_UNROLL
      for (int v = 0; v < QUANT_PANEL / W; ++v) sums[r].of[v] += splat(x[r][g]) * integers[g].of[v];
}

// sums [row][32] += what the shifts of 256 k from k on add: integers are summed first.
inline void add_level_shifts(const QuantizedLinearArgs& a, int64_t panel, int64_t k, int64_t first_row, int64_t rows,
                             float* sums, LevelParts parts) {
  constexpr int MOST_GROUPS = LEVEL_SPAN / QUANT_HALF_STEP, VECTORS = QUANT_PANEL / W;
  constexpr int64_t AT_ONCE = 2;
  const int64_t count = LEVEL_SPAN >> a.scale_group_bits, row_groups = a.inner / a.scale_group;
  const float offset = level_offset(has_4_bits(a.code) ? 4 : 8);
  for (const bool first : {true, false}) {
    if (parts == (first ? LevelParts::SECOND : LevelParts::FIRST)) continue;
    Levels levels(a, panel, k);
    const int begin = first ? 0 : QUANT_PANEL;
    PanelScales integers[MOST_GROUPS], number;
    PB_UNROLL
    for (int v = 0; v < VECTORS; ++v) number.of[v] = levels.upper(begin + v * W) * splat(first ? offset : -1.0f);
    for (int64_t g = 0; g < count; ++g, levels.narrow += a.scale_group_stride)
      PB_UNROLL
      for (int v = 0; v < VECTORS; ++v) integers[g].of[v] = levels.lower(begin + v * W);
    const auto add = [&](auto constant, int64_t row) {
      constexpr int ROWS = decltype(constant)::value;
      const float* x[ROWS];
      for (int r = 0; r < ROWS; ++r) x[r] = a.x_sums + (first_row + row + r) * row_groups + (k >> a.scale_group_bits);
      PanelScales total[ROWS] = {};
      sum_levels<ROWS>(x, integers, count, total);
      for (int r = 0; r < ROWS; ++r)
        PB_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
          float* to = sums + (row + r) * QUANT_PANEL + v * W;
          store(to, load<VF>(to) + number.of[v] * total[r].of[v]);
        }
    };
    int64_t row = 0;
    for (; row + AT_ONCE <= rows; row += AT_ONCE) add(std::integral_constant<int, AT_ONCE>(), row);
    for (; row < rows; ++row) add(std::integral_constant<int, 1>(), row);
  }
}

// sums [row][32] of a panel += what shifts add; of two levels, those parts.
inline void add_shifts(const QuantizedLinearArgs& a, int64_t panel, int64_t first_row, int64_t rows, float* sums,
                       LevelParts parts = LevelParts::BOTH) {
  if (a.scale_kind == ScaleKind::LEVELS) {
    for (int64_t k = 0; k < a.inner; k += LEVEL_SPAN) add_level_shifts(a, panel, k, first_row, rows, sums, parts);
    return;
  }
  constexpr int64_t AT_ONCE = 32;  // groups, whose shifts all rows meet
  const int64_t groups = a.inner / a.scale_group;
  PanelScales shifts[AT_ONCE];
  for (int64_t begin = 0; begin < groups; begin += AT_ONCE) {
    const int64_t count = std::min(AT_ONCE, groups - begin);
    for (int64_t g = 0; g < count; ++g) shifts[g] = load_shifts(a, panel, (begin + g) * a.scale_group);
    add_shifts_of(a, first_row, rows, begin, count, shifts, sums);
  }
}

// Rows of a job's sums [row][32], of gated layers of both, with shifts -> rows of out from `first_row` on.
template <class Out>
void write_panel(const QuantizedRun& run, const QuantizedJob& job, float* const* sums, int64_t first_row, int64_t rows,
                 LevelParts parts = LevelParts::BOTH) {
  for (int part = 0; part < run.parts; ++part)
    if (job.layer[part].is_shifted) add_shifts(job.layer[part], job.panel, first_row, rows, sums[part], parts);
  const Activation gate = run.call.gate;
  const bool rounds = std::is_same_v<Out, bf16> || run.call.rounds;
  const auto rounded = [rounds](VF value) { return rounds ? bit_cast<VF>(round_to_bf16(value)) : value; };
  for (int half = 0; half < QUANT_PANEL; half += W) {
    const int64_t column = job.panel * QUANT_PANEL + half;
    const auto bias_of = [column](const QuantizedLinearArgs& layer) {
      return layer.bias == nullptr ? VF{} : load_float(static_cast<const Out*>(layer.bias) + column);
    };
    const VF bias = bias_of(*job.layer), other = run.parts > 1 ? bias_of(job.layer[1]) : VF{};
    Out* out = static_cast<Out*>(job.layer->out) + first_row * job.layer->columns + column;
    for (int64_t r = 0; r < rows; ++r, out += job.layer->columns) {
      const auto sum_of = [&](int part) { return load<VF>(sums[part] + r * QUANT_PANEL + half); };
      VF value = sum_of(0) + bias;
      if (run.parts > 1) {
        const VF up = rounded(sum_of(1) + other);
        value = rounded(activate(gate, rounded(value))) * up;
      }
      store_float(out, value);
    }
  }
}

// A job of at most two panels, of gated layers one of each: add(panels, totals [panel][ROWS][half]) of both side by side, or
// of one after the other; then their rows of out from `first_row` on.
template <int ROWS, class Add>
void meet_panels(const QuantizedRun& run, const QuantizedJob& job, int64_t first_row, bool side_by_side, const Add& add) {
  const PanelOf panels[] = {{job.layer, job.panel}, {job.layer + run.parts - 1, job.panel + job.panels - 1}};
  const int count = static_cast<int>(run.parts * job.panels);
  VF totals[2][ROWS][2] = {};
  bool done = false;
  if constexpr (ROWS <= QUANT_MOST_DOT_ROWS)
    if ((done = count == 2 && side_by_side)) add(panels, totals);
  for (int i = 0; i < count && !done; ++i) {
    const PanelOf panel[] = {panels[i]};
    VF total[1][ROWS][2] = {};
    add(panel, total);
    std::copy_n(&total[0][0][0], 2 * ROWS, &totals[i][0][0]);
  }
  float* const sums[] = {reinterpret_cast<float*>(totals[0]), reinterpret_cast<float*>(totals[1])};
  for (int p = 0; p < job.panels; ++p) write_panel<bf16>(run, {job.layer, job.panel + p, 1}, sums + p, first_row, ROWS);
}

}  // namespace pagebinder
