// Linear layers of many rows whose weights become float32 on the way, see linear.h: float16, for which few processors have
// products (torch has none without them).
//
//     x   [strip of rows][k][row]          widened and copied in each call, as many rows as registers hold sums of
//     W   [step of 32 k][2][32 k][16 columns]   a panel of 32 columns, widened and put in this order once for a block of x
//
// An element of y is summed in the order of k whatever the number of rows and threads.
#include "activations.h"
#include "dots.h"
#include "packed_jobs.h"

namespace pagebinder {
namespace {

constexpr int HALF = PANEL / 2;                   // columns of half a panel, which meets a strip at a time
constexpr int VECTORS = HALF / W;
constexpr int STEP_FLOATS = PANEL * PANEL;
constexpr int CHUNK = 4;                          // steps of half a panel, and of a strip, in the nearest cache
constexpr int MOST_ROWS = DOT_MOST_ROWS;          // of a strip
constexpr int64_t MOST_BLOCK = 1 << 20;           // bytes of x that each job reads
constexpr int64_t SERIAL_COPY = 1 << 15;          // elements of x

struct Run : PackedRun {
  const DotStrips rows{args.rows, args.inner};
  const std::shared_ptr<Buffer> memory;
  float* const x;  // in strips
  std::atomic<int> next_strip{0};

  Run(const LinearArgs& a, const PackedShape& shape, std::shared_ptr<Buffer> buffer, float* strips)
      : PackedRun(a, shape), memory(std::move(buffer)), x(strips) {}
  float* strip(int i) const { return x + rows.first_row(i) * args.inner; }
};

template <class T>
void copy_worker(void* context, int) {
  Run& run = *static_cast<Run*>(context);
  for (int strip; (strip = run.next_strip.fetch_add(1, std::memory_order_relaxed)) < run.strips;) {
    const int count = run.rows.rows_of(strip);
    for (int r = 0; r < count; ++r) {
      const T* from = static_cast<const T*>(run.args.x) + (run.rows.first_row(strip) + r) * run.args.x_stride;
      float* to = run.strip(strip) + r;
      for (int64_t k = 0; k < run.args.inner; k += W) {
        const VF wide = load_float(from + k);
        for (int i = 0; i < W; ++i, to += count) *to = wide[i];
      }
    }
  }
}

// 16 columns of a weight, 32 k of each -> half a step.
template <class T>
PB_INLINE void order_half(const T* from, int64_t stride, float* to) {
  for (int column = 0; column < HALF; column += W)
    for (int k = 0; k < PANEL; k += W) {
      VF line[W];
      PB_UNROLL
      for (int c = 0; c < W; ++c) line[c] = load_float(from + (column + c) * stride + k);
      transpose(line);
      PB_UNROLL
      for (int i = 0; i < W; ++i) store(to + (k + i) * HALF + column, line[i]);
    }
}

// sums [ROWS][16 of 32] of `steps` steps of a strip and half a panel, added to what is there unless they are the first.
template <int ROWS>
__attribute__((noinline)) void multiply_half(const float* x, const float* w, int steps, bool first, float* sums) {
  VF sum[ROWS][VECTORS];
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r)
    PB_UNROLL
    for (int v = 0; v < VECTORS; ++v) sum[r][v] = first ? VF{} : load<VF>(sums + r * PANEL + v * W);
  for (int step = 0; step < steps; ++step, w += STEP_FLOATS / 2)
    for (int k = 0; k < PANEL; ++k, w += HALF, x += ROWS) {
      VF line[VECTORS];
      PB_UNROLL
      for (int v = 0; v < VECTORS; ++v) line[v] = load<VF>(w + v * W);
      PB_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const VF value = splat(x[r]);
        PB_UNROLL
        for (int v = 0; v < VECTORS; ++v) add_product(sum[r][v], value, line[v]);
      }
    }
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r)
    PB_UNROLL
    for (int v = 0; v < VECTORS; ++v) store(sums + r * PANEL + v * W, sum[r][v]);
}

template <class T>
class Worker {
 public:
  Worker(Run& run, int number) : run_(run), number_(number), layers_(run.gated() ? 2 : 1) {
    static thread_local Buffer ordered;
    ordered_ = ordered.at_least<float>(static_cast<size_t>(layers_) * run.steps * STEP_FLOATS);
  }

  void run_job(const PackedJob& job) {
    const int64_t panel_floats = int64_t{run_.steps} * STEP_FLOATS;
    for (int i = 0; i < layers_; ++i) order(job.layer[i], job.column, ordered_ + i * panel_floats);
    for (int strip = job.first_strip; strip < job.end_strip; ++strip) {
      for (int i = 0; i < layers_; ++i) add(strip, ordered_ + i * panel_floats, sums_[i]);
      write(job, strip);
    }
  }

 private:
  void order(const LinearLayer& layer, int64_t column, float* to) const {
    const T* from = static_cast<const T*>(layer.weight) + column * layer.weight_stride;
    for (int half = 0; half < 2 * run_.steps; ++half, to += STEP_FLOATS / 2)
      order_half(from + half % 2 * HALF * layer.weight_stride + half / 2 * PANEL, layer.weight_stride, to);
  }

  void add(int strip, const float* w, float* sums) const {
    const int rows = run_.rows.rows_of(strip);
    const auto multiply = by_count<MOST_ROWS>(rows, [](auto count) { return multiply_half<decltype(count)::value>; });
    for (int step = 0; step < run_.steps; step += CHUNK)
      for (int half = 0; half < 2; ++half)
        multiply(run_.strip(strip) + int64_t{step} * PANEL * rows, w + step * STEP_FLOATS + half * (STEP_FLOATS / 2),
                 std::min(CHUNK, run_.steps - step), step == 0, sums + half * HALF);
  }

  static PB_INLINE VF bias_of(const LinearLayer& layer, int64_t column) {
    return layer.bias == nullptr ? VF{} : load_float(static_cast<const T*>(layer.bias) + column);
  }

  // Writes a strip's columns of a panel, if nobody else did.
  void write(const PackedJob& job, int strip) {
    stand_still(number_);
    run_.products.write_once(run_.product_of(job, strip), [&] {
      for (int c = 0; c < PANEL; c += W) {
        const VF bias = bias_of(*job.layer, job.column + c);
        const VF other = run_.gated() ? bias_of(job.layer[1], job.column + c) : VF{};
        T* out = static_cast<T*>(job.layer->out) + run_.rows.first_row(strip) * job.layer->columns + job.column + c;
        for (int r = 0; r < run_.rows.rows_of(strip); ++r, out += job.layer->columns) {
          const VF sum = load<VF>(sums_[0] + r * PANEL + c) + bias;
          if (!run_.gated()) {
            store_float(out, sum);
            continue;
          }
          T rounded[2][W];
          store_float(rounded[0], sum);
          store_float(rounded[1], load<VF>(sums_[1] + r * PANEL + c) + other);
          store_gated(run_.args.gate, load_float(rounded[0]), load_float(rounded[1]), out);
        }
      }
    });
  }

  Run& run_;
  const int number_, layers_;
  float* ordered_;  // panels
  alignas(64) float sums_[2][MOST_ROWS * PANEL];
};

template <class T>
void job_worker(void* context, int number) {
  Run& run = *static_cast<Run*>(context);
  Worker<T> worker(run, number);
  run_jobs(run, number, [&](const PackedJob& job, const PackedJob&) { worker.run_job(job); });
}

}  // namespace

template <class T>
void linear_with_floats(const LinearArgs& args) {
  static thread_local std::shared_ptr<Buffer> last;
  const DotStrips rows(args.rows, args.inner);
  const int most_strips = static_cast<int>(std::max<int64_t>(MOST_BLOCK / (rows.most_rows * args.inner * 4), 1));
  const PackedShape shape = packed_shape(args, rows.most_rows, most_strips, 1);
  const std::shared_ptr<Buffer> memory = buffer_of_a_call(last);
  float* x = memory->at_least<float>(static_cast<size_t>(args.rows * args.inner));
  const auto run = make_run<Run>(args, shape, memory, x);
  if (shape.num_workers <= 1 || args.rows * args.inner < SERIAL_COPY) copy_worker<T>(run.get(), 0);
  else run_parallel(shape.num_workers, copy_worker<T>, run.get());
  run_packed(run, job_worker<T>);
}

template void linear_with_floats<f16>(const LinearArgs&);

}  // namespace pagebinder
