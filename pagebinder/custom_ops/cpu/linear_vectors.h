// Linear layers of few rows on vectors, see linear.h: bf16, float32 and float16.
//
//     COLUMNS rows of W, read once   x   ROWS rows of x, in the nearest cache   ->   COLUMNS x ROWS sums in registers
//
// Vectors run along K. An element of y is summed in the same order whatever the number of rows and threads. With one or
// two rows W is read as one stream, which is as fast as this memory can be read; more rows need sums of two columns at
// a time, or loading x costs more than loading W. Where two streams cost more than that (memory_streams.h) it stays one,
// as long as x is in the nearest cache.
#pragma once

#include <algorithm>

#include "activations.h"
#include "attention_scores.h"
#include "leaving_loop.h"
#include "linear.h"
#include "memory_streams.h"
#include "work_ranges.h"

namespace pagebinder {
namespace vector_rows {

constexpr int PANEL = 16;                   // columns of one job
constexpr int MOST_ROWS = 4;                // of x whose sums are in registers at a time
constexpr int64_t AHEAD = 2048;             // bytes of W

// Columns whose sums are in registers at a time.
constexpr int columns_at_once(int rows) { return rows <= 2 ? 1 : 2; }

template <class T> struct ElementsOf { using type = FloatElements<T>; };
#if PAGEBINDER_BF16_DOT
template <> struct ElementsOf<bf16> { using type = PairElements; };
#endif

template <class T>
struct Run {
  using Elements = typename ElementsOf<T>::type;
  using Query = typename Elements::Query;

  const KeptLinearArgs args;
  const std::shared_ptr<Buffer> packed;
  const Query* x;  // [rows, inner], in `packed`
  const int num_workers;
  const LinearPanels panels{args, PANEL};
  WorkRanges work{panels.count(), num_workers};
  Claims results{panels.count()};

  Run(const LinearArgs& a, std::shared_ptr<Buffer> memory, const Query* packed_x, int workers)
      : args(a), packed(std::move(memory)), x(packed_x), num_workers(workers) {}
};

// Sums the lanes of COUNT vectors: lane i < COUNT of the result is the sum of x[i]. Destroys x.
template <int COUNT, int H = 1>
PB_INLINE VF sum_lanes_of(VF* x) {
  if constexpr (H >= W) return x[0];
  else if constexpr (H < COUNT) {
    for (int i = 0; i < COUNT / H / 2; ++i)
      x[i] = fold_pair<H>(x[2 * i], x[2 * i + 1], std::make_integer_sequence<int, W>{});
    return sum_lanes_of<COUNT, 2 * H>(x);
  } else {
    x[0] = x[0] + rotate<H>(x[0]);
    return sum_lanes_of<COUNT, 2 * H>(x);
  }
}

// sums[row * PANEL + column] of COLUMNS columns. ASKS: for W ahead.
template <class T, int ROWS, int COLUMNS, bool ASKS>
void add_columns(const Run<T>& run, const T* weight, int64_t stride, int64_t first_row, float* sums) {
  using E = typename Run<T>::Elements;
  const int64_t inner = run.args.inner;
  const typename E::Query* x = run.x + first_row * inner;
  VF sum[ROWS][COLUMNS] = {};
  for (int64_t k = 0; k < inner; k += E::STEP) {
    typename E::Vec w[COLUMNS];
    PB_UNROLL
    for (int c = 0; c < COLUMNS; ++c) {
      const T* at = weight + c * stride + k;
      if (ASKS) __builtin_prefetch(reinterpret_cast<const char*>(at) + AHEAD);
      w[c] = E::load_key(at);
    }
    PB_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const typename E::Vec row = E::load_query(x + r * inner + k);
      PB_UNROLL
      for (int c = 0; c < COLUMNS; ++c) sum[r][c] = E::madd(sum[r][c], w[c], row);
    }
  }
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const VF total = sum_lanes_of<COLUMNS>(sum[r]);
    for (int c = 0; c < COLUMNS; ++c) sums[(first_row + r) * PANEL + c] = total[c];
  }
}

// sums[row * PANEL + column] of all columns of a panel.
template <class T, int ROWS>
void add_rows(const Run<T>& run, const T* weight, int64_t stride, int64_t first_row, float* sums) {
  constexpr int COLUMNS = columns_at_once(ROWS);
  const int64_t x_bytes = ROWS * run.args.inner * static_cast<int64_t>(sizeof(typename Run<T>::Query));
  if (prefetcher_follows_rising_lines() && (COLUMNS == 1 || x_bytes <= NEAR_X_BYTES)) {
    for (int c = 0; c < PANEL; ++c) add_columns<T, ROWS, 1, false>(run, weight + c * stride, stride, first_row, sums + c);
    return;
  }
  for (int c = 0; c < PANEL; c += COLUMNS)
    add_columns<T, ROWS, COLUMNS, true>(run, weight + c * stride, stride, first_row, sums + c);
}

// sums[row * PANEL + column] of a panel of one layer, rounded to T.
template <class T>
void add_panel(const Run<T>& run, const LinearLayer& layer, int64_t column, float* sums) {
  const T* weight = static_cast<const T*>(layer.weight);
  const T* from = weight + column * layer.weight_stride;
  for (int64_t row = 0; row < run.args.rows; row += MOST_ROWS)
    switch (std::min<int64_t>(MOST_ROWS, run.args.rows - row)) {
      case 1: add_rows<T, 1>(run, from, layer.weight_stride, row, sums); break;
      case 2: add_rows<T, 2>(run, from, layer.weight_stride, row, sums); break;
      case 3: add_rows<T, 3>(run, from, layer.weight_stride, row, sums); break;
      default: add_rows<T, 4>(run, from, layer.weight_stride, row, sums);
    }
  for (int64_t r = 0; r < run.args.rows; ++r)
    for (int c = 0; c < PANEL; c += W) {
      const VF bias = layer.bias == nullptr ? VF{} : load_float(static_cast<const T*>(layer.bias) + column + c);
      T rounded[W];
      store_float(rounded, load<VF>(sums + r * PANEL + c) + bias);
      store(sums + r * PANEL + c, load_float(rounded));
    }
}

template <class T>
void run_panel(Run<T>& run, int panel, int worker) {
  const LinearArgs& a = run.args;
  alignas(64) float sums[2][LINEAR_MOST_VECTOR_ROWS * PANEL];
  const auto [result, column] = run.panels[panel];
  const LinearLayer& layer = a.layers[result];
  const int64_t first = column;
  const bool gated = a.gate != Activation::NONE;
  add_panel(run, layer, first, sums[0]);
  if (gated) add_panel(run, a.layers[1], first, sums[1]);
  stand_still(worker);
  run.results.write_once(panel, [&] {
    for (int64_t r = 0; r < a.rows; ++r)
      for (int c = 0; c < PANEL; c += W) {
        T* out = static_cast<T*>(layer.out) + r * layer.columns + first + c;
        const VF value = load<VF>(sums[0] + r * PANEL + c);
        if (gated) store_gated(a.gate, value, load<VF>(sums[1] + r * PANEL + c), out);
        else store_float(out, value);
      }
  });
}

template <class T>
void panel_worker(void* context, int worker) {
  Run<T>& run = *static_cast<Run<T>*>(context);
  Pace pace;
  for (int panel; (panel = run.work.take(worker)) < run.panels.count(); pace.count()) run_panel(run, panel, worker);
  if (worker == 0)
    complete_jobs(run.panels.count(), pace, [&](int64_t i) { return run.results.is_written(i); },
                  [&](int64_t i) { run_panel(run, static_cast<int>(i), 0); });
}

}  // namespace vector_rows

template <class T>
void linear_with_vectors(const LinearArgs& args) {
  static thread_local std::shared_ptr<Buffer> last;
  using Run = vector_rows::Run<T>;
  using Query = typename Run::Query;
  const std::shared_ptr<Buffer> packed = buffer_of_a_call(last);
  Query* x = packed->at_least<Query>(static_cast<size_t>(args.rows * args.inner));
  int64_t columns = 0;
  for (int i = 0; i < args.num_layers; ++i) columns += args.layers[i].columns;
  for (int64_t r = 0; r < args.rows; ++r) {
    const T* from = static_cast<const T*>(args.x) + r * args.x_stride;
    if constexpr (sizeof(T) == sizeof(Query)) std::memcpy(x + r * args.inner, from, args.inner * sizeof(T));
    else
      for (int64_t k = 0; k < args.inner; k += W) store(x + r * args.inner + k, load_float(from + k));
  }
  const int workers = args.rows * columns * args.inner < LINEAR_SERIAL_FLOPS ? 1 : args.num_threads;
  const auto run = make_run<Run>(args, packed, x, workers);
  if (workers <= 1) vector_rows::panel_worker<T>(run.get(), 0);
  else run_leaving(workers, vector_rows::panel_worker<T>, run);
}

template <class T>
void gate_values(Activation activation, T* gate, const T* up, int64_t count, int num_threads) {
  constexpr int64_t GRAIN = 1 << 14;
  for_ranges(count, GRAIN, num_threads, [=](int64_t i, int64_t end) {
    for (; i + W <= end; i += W) store_gated(activation, load_float(gate + i), load_float(up + i), gate + i);
    const int rest = static_cast<int>(end - i);
    T last[W];
    store_gated(activation, load_float_part(gate + i, rest), load_float_part(up + i, rest), last);
    std::memcpy(gate + i, last, rest * sizeof(T));
  });
}

}  // namespace pagebinder
