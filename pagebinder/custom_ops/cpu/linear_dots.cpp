// Linear layers in bf16 for machines without matrix tiles, on BF16 dots or on floats; see linear.h.
//
//     x   in strips of some rows, copied in each call     W   packed as 16 columns of a pair of k in a line: dots.h
//
// Of not too many rows every worker copies x for itself: that costs less than to wait for each other and to fetch the
// half that another core has just written.
//
// Sums of a strip and a panel stay in registers for all of K. A panel comes from memory once; of several strips each asks
// for its share of the next panel, while the second cache keeps this one. A single strip reads a panel as a stream, asked
// for some KB ahead or, of few rows, as the processor brings it (memory_streams.h).
//
// Panels of coded weights are decoded, those of plain weights brought into order, in the worker's memory before rows
// meet them: of several strips a panel at a time, of one a few steps, which the nearest cache holds, or registers
// (coded_dots.h).
//
// An element of y is summed in the same order whatever the form of W and the number of rows and threads.
#include "activations.h"
#include "coded_dots.h"
#include "dots.h"
#include "packed_jobs.h"

namespace pagebinder {
namespace {

constexpr int HALF = PANEL / 2;                     // columns of a line
constexpr int VECTORS = PANEL / W;                  // of a row of a panel
constexpr int64_t MOST_BLOCK = 1 << 20;             // bytes of x that each job reads
constexpr int CHUNK = 8;                            // steps of a plain weight that are put in order for a single strip
constexpr int64_t OWN_COPIES = 1 << 19;             // elements of x that all workers copy together, each for itself
static_assert(PANEL == DOT_PANEL);

enum class Form { PLAIN, PACKED, CODED };

struct Run : PackedRun {
  const Form form;
  const DotStrips rows{args.rows, args.inner};
  const std::shared_ptr<Buffer> memory;  // of x, if it was copied for all
  const DotPair* const x;                // null: every worker copies it for itself
  std::atomic<int> next_strip{0};

  Run(const LinearArgs& a, const PackedShape& shape, Form f, std::shared_ptr<Buffer> buffer, const DotPair* pairs)
      : PackedRun(a, shape), form(f), memory(std::move(buffer)), x(pairs) {}
};

void copy_worker(void* context, int) {
  Run& run = *static_cast<Run*>(context);
  DotPair* to = run.memory->at_least<DotPair>(0);
  for (int strip; (strip = run.next_strip.fetch_add(1, std::memory_order_relaxed)) < run.strips;)
    run.rows.copy(run.args.x, run.args.x_stride, strip, to);
}

// ---- panels ----------------------------------------------------------------------------------------------------

struct Panel {
  const LinearLayer* layer;
  const char* first;  // null: there is no such job
};

// The panel of a job, which has one, or that of its gated partner.
Panel panel_of(const Run& run, const PackedJob& job, int which) {
  if (job.panels == 0) return {};
  const LinearLayer* layer = job.layer + which;
  const int64_t bytes = run.form == Form::PLAIN ? layer->weight_stride * PANEL * 2 : run.panel_bytes_of(*layer);
  return {layer, static_cast<const char*>(layer->weight) + job.column / PANEL * bytes};
}

// 16 columns of a plain weight, 32 k of each -> half a step.
PB_INLINE void order_half(const char* from, int64_t stride, char* to) {
  PB_UNROLL
  for (int column = 0; column < HALF; column += W)
    PB_UNROLL
    for (int pair = 0; pair < DOT_PAIRS; pair += W) {
      VF line[W];
      PB_UNROLL
      for (int c = 0; c < W; ++c) line[c] = load<VF>(from + (column + c) * stride + pair * 4);
      transpose(line);
      PB_UNROLL
      for (int p = 0; p < W; ++p) store(to + (pair + p) * 64 + column * 4, line[p]);
    }
}

// Steps of a panel as products read them: where they lie, or in `memory`.
const char* in_order(const Run& run, const Panel& panel, int first_step, int steps, char* memory) {
  if (run.form == Form::PACKED) return panel.first + int64_t{first_step} * STEP_BYTES;
  if (run.form == Form::CODED) {
    const int64_t block_bytes = panel.layer->coded_bytes;
    decode_steps(panel.first + first_step / CODED_STEPS * block_bytes, block_bytes, steps, memory);
    return memory;
  }
  const int64_t stride = panel.layer->weight_stride * 2;
  for (int64_t half = 0; half < 2 * steps; ++half)
    order_half(panel.first + half % 2 * HALF * stride + (first_step + half / 2) * PANEL * 2, stride,
               memory + half * (STEP_BYTES / 2));
  return memory;
}

// ---- results ---------------------------------------------------------------------------------------------------

PB_INLINE VF bias_of(const LinearLayer& layer, int64_t column) {
  return layer.bias == nullptr ? VF{} : load_float(static_cast<const bf16*>(layer.bias) + column);
}

bf16* result_at(const LinearLayer& layer, int64_t row, int64_t column) {
  return static_cast<bf16*>(layer.out) + row * layer.columns + column;
}

// Sums [row][32] of a layer, or of the two of a gate -> rows of y, each a line of it.
void write_rows(const Run& run, const LinearLayer* layer, int64_t column, const float* const* sums, int64_t row,
                int rows) {
  const Activation gate = run.args.gate;
  VF bias[VECTORS], other[VECTORS];
  for (int v = 0; v < VECTORS; ++v) {
    bias[v] = bias_of(*layer, column + v * W);
    other[v] = run.gated() ? bias_of(layer[1], column + v * W) : VF{};
  }
  bf16* out = result_at(*layer, row, column);
  for (int r = 0; r < rows; ++r, out += layer->columns)
    for (int v = 0; v < VECTORS; ++v) {
      const VF sum = load<VF>(sums[0] + r * PANEL + v * W) + bias[v];
      if (run.gated()) {
        const VF up = load<VF>(sums[1] + r * PANEL + v * W) + other[v];
        store_gated(gate, bit_cast<VF>(round_to_bf16(sum)), bit_cast<VF>(round_to_bf16(up)), out + v * W);
      } else {
        store_float(out + v * W, sum);
      }
    }
}

// ---- one job ---------------------------------------------------------------------------------------------------

class Worker {
 public:
  Worker(Run& run, int number) : run_(run), number_(number), layers_(run.gated() ? 2 : 1) {
    static thread_local Buffer ordered;
    if (run.form == Form::PACKED) return;
    const int64_t steps = run.strips > 1 ? int64_t{layers_} * run.steps : CHUNK;
    ordered_ = ordered.at_least<char>(static_cast<size_t>(steps) * STEP_BYTES);
  }

  void run_job(const PackedJob& job, const PackedJob& next) {
    Panel now[2] = {}, coming[2] = {};
    for (int i = 0; i < layers_; ++i) now[i] = panel_of(run_, job, i), coming[i] = panel_of(run_, next, i);
    if (x_ == nullptr) x_ = own_copy();
    if (run_.strips == 1) stream(job, now, coming[0].first);
    else meet_strips(job, now, coming);
  }

 private:
  const DotPair* own_copy() const {
    static thread_local Buffer kept;
    DotPair* to = kept.at_least<DotPair>(static_cast<size_t>(run_.rows.pairs()));
    for (int strip = 0; strip < run_.strips; ++strip) run_.rows.copy(run_.args.x, run_.args.x_stride, strip, to);
    return to;
  }

  // One strip: panels are read once. `behind` them lies what is read next, or nothing.
  void stream(const PackedJob& job, const Panel* now, const char* behind) {
    const int rows = run_.rows.rows_of(0);
    for (int i = 0; i < layers_; ++i) {
      const char *w = now[i].first, *next = i + 1 < layers_ ? now[i + 1].first : behind;
      const DotResults written = results(job, 0, i);
      if (run_.form == Form::PACKED) stream_dots(x_, rows, w, run_.steps, next, written, sums_[i]);
      else if (run_.form == Form::CODED)
        stream_coded(x_, rows, w, now[i].layer->coded_bytes, run_.steps, next, written, sums_[i]);
      else stream_plain(now[i], next, i);
    }
    write(job, 0);
  }

  // A chunk at a time is put in order; beside its product the rows of the next one are asked for, one after the other, or
  // memory would stand still.
  void stream_plain(const Panel& panel, const char* next, int layer) {
    const int64_t jump = panel.layer->weight_stride * 2 - int64_t{DOT_JUMP_LINES} * 64;
    for (int step = 0; step < run_.steps; step += CHUNK) {
      const int steps = std::min(CHUNK, run_.steps - step);
      const char* at = step + CHUNK < run_.steps ? panel.first + (step / CHUNK + 1) * (CHUNK * PANEL * 2) : next;
      const DotAhead ahead = at == nullptr ? DotAhead{} : DotAhead{at - jump, DOT_PAIR_LINES, jump};
      add(0, in_order(run_, panel, step, steps, ordered_), step, steps, ahead, layer);
    }
  }

  // Several strips: the first ones ask for the next panels.
  void meet_strips(const PackedJob& job, const Panel* now, const Panel* coming) {
    const char* w[2];
    for (int i = 0; i < layers_; ++i) w[i] = in_order(run_, now[i], 0, run_.steps, ordered_ + i * run_.panel_bytes());
    for (int strip = job.first_strip; strip < job.end_strip; ++strip) {
      for (int i = 0; i < layers_; ++i) add(strip, w[i], 0, run_.steps, share(job, strip, coming[i], i), i);
      write(job, strip);
    }
  }

  // Where a strip is written: asked for beside the first of its products.
  DotResults results(const PackedJob& job, int strip, int layer) const {
    if (layer > 0) return {};
    const char* first = reinterpret_cast<const char*>(result_at(*job.layer, run_.rows.first_row(strip), job.column));
    return {first, job.layer->columns * 2, run_.rows.rows_of(strip)};
  }

  DotAhead share(const PackedJob& job, int strip, const Panel& coming, int layer) const {
    DotAhead ahead{nullptr, 0, 0, results(job, strip, layer)};
    if (coming.first == nullptr) return ahead;
    const int64_t lines = run_.panel_bytes_of(*coming.layer) / 64, pairs = int64_t{run_.steps} * DOT_PAIRS;
    const int64_t strips = job.end_strip - job.first_strip, each = (lines + strips * pairs - 1) / (strips * pairs);
    const int64_t begin = (strip - job.first_strip) * each * pairs;
    if (begin < lines) ahead.first = coming.first + begin * 64, ahead.lines = static_cast<int>(each);
    return ahead;
  }

  void add(int strip, const char* w, int first_step, int steps, const DotAhead& ahead, int layer) {
    const int rows = run_.rows.rows_of(strip);
    const DotPair* x = x_ + run_.rows.offset(strip) + int64_t{first_step} * DOT_PAIRS * rows;
    multiply_dots_of(rows)(x, w, steps, first_step == 0, ahead, sums_[layer]);
  }

  // Writes a strip's columns of a panel, if nobody else did.
  __attribute__((noinline)) void write(const PackedJob& job, int strip) {
    const float* sums[2] = {sums_[0], sums_[1]};
    stand_still(number_);
    run_.products.write_once(run_.product_of(job, strip), [&] {
      write_rows(run_, job.layer, job.column, sums, run_.rows.first_row(strip), run_.rows.rows_of(strip));
    });
  }

  Run& run_;
  const int number_, layers_;
  const DotPair* x_ = run_.x;
  char* ordered_ = nullptr;  // panels
  alignas(64) float sums_[2][DOT_MOST_ROWS * PANEL];
};

void job_worker(void* context, int number) {
  Run& run = *static_cast<Run*>(context);
  Worker worker(run, number);
  run_jobs(run, number, [&](const PackedJob& job, const PackedJob& next) { worker.run_job(job, next); });
}

void linear_with_dots(const LinearArgs& args, Form form) {
  static thread_local std::shared_ptr<Buffer> last;
  const DotStrips rows(args.rows, args.inner);
  const int64_t strip_bytes = rows.most_rows * args.inner / 2 * static_cast<int64_t>(sizeof(DotPair));
  const int most_strips = static_cast<int>(std::max<int64_t>(MOST_BLOCK / strip_bytes, 1));
  const PackedShape shape = packed_shape(args, rows.most_rows, most_strips, 1);
  if (PAGEBINDER_BF16_DOT && args.rows == 1) {  // lies as a strip does
    const DotPair* x = static_cast<const DotPair*>(args.x);
    return run_packed(make_run<Run>(args, shape, form, nullptr, x), job_worker);
  }
  if (args.rows * args.inner * shape.num_workers <= OWN_COPIES)
    return run_packed(make_run<Run>(args, shape, form, nullptr, nullptr), job_worker);
  const std::shared_ptr<Buffer> memory = buffer_of_a_call(last);
  const DotPair* x = memory->at_least<DotPair>(static_cast<size_t>(rows.pairs()));
  const auto run = make_run<Run>(args, shape, form, memory, x);
  if (shape.num_workers <= 1 || shape.strips == 1) copy_worker(run.get(), 0);
  else run_parallel(shape.num_workers, copy_worker, run.get());
  run_packed(run, job_worker);
}

}  // namespace

bool linear_suits_dots(int64_t columns, int64_t inner) {
  return DOTS_PAY && columns % LINEAR_GRAIN == 0 && inner % LINEAR_GRAIN == 0 && inner > 0;
}
void linear_with_dots(const LinearArgs& args) { linear_with_dots(args, Form::PLAIN); }
void packed_linear_with_dots(const LinearArgs& args) {
  linear_with_dots(args, args.layers[0].coded_bytes > 0 ? Form::CODED : Form::PACKED);
}

}  // namespace pagebinder
