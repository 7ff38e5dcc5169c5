// Jobs of linear layers with packed weights (linear.h): a group of panels (of gated layers: of both) against a block of
// strips of rows, as many rows as a kernel takes at once.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "leaving_loop.h"
#include "linear.h"
#include "next_weights.h"
#include "work_ranges.h"

namespace pagebinder {

constexpr int PANEL = PACKED_PANEL;             // columns
constexpr int STEP_BYTES = PANEL * PANEL * 2;   // of a panel, 32 k
constexpr int STEP_WEIGHTS = PANEL * PANEL;
constexpr int JOBS_OF_A_THREAD = 4;             // at least, before jobs get more panels

struct PackedJob;

struct PackedShape {
  int steps, strips, block_strips, blocks, group, num_workers;  // group: panels of a job
};

// Blocks of at most `most_strips` strips, groups of at most `most_group` panels.
inline PackedShape packed_shape(const LinearArgs& args, int strip_rows, int most_strips, int most_group) {
  PackedShape shape{};
  shape.steps = static_cast<int>(args.inner / PANEL);
  shape.strips = static_cast<int>((args.rows + strip_rows - 1) / strip_rows);
  const int least_blocks = (shape.strips + most_strips - 1) / most_strips;
  shape.block_strips = (shape.strips + least_blocks - 1) / least_blocks;
  shape.blocks = (shape.strips + shape.block_strips - 1) / shape.block_strips;
  int64_t columns = 0;
  for (int i = 0; i < args.num_layers; ++i) columns += args.layers[i].columns;
  const int64_t jobs = columns / PANEL * least_blocks / args.num_threads;
  shape.group = static_cast<int>(std::clamp<int64_t>(jobs / JOBS_OF_A_THREAD, 1, most_group));
  shape.num_workers = args.rows * columns * args.inner < LINEAR_SERIAL_FLOPS ? 1 : args.num_threads;
  return shape;
}

struct PackedRun : PackedShape {
  const KeptLinearArgs args;
  const LinearPanels panels{args, PANEL * group};  // groups of them
  const int num_jobs = blocks * panels.count();
  WorkRanges work{num_jobs, num_workers};
  Claims products{static_cast<int64_t>(num_jobs) * block_strips};  // of each job by strip

  PackedRun(const LinearArgs& a, const PackedShape& shape) : PackedShape(shape), args(a) {}

  bool gated() const { return args.gate != Activation::NONE; }
  bool coded() const { return args.layers[0].coded_bytes > 0; }
  int64_t product_of(const PackedJob& job, int strip) const;
  bool is_written(int job) const;
  int64_t panel_bytes() const { return static_cast<int64_t>(steps) * STEP_BYTES; }
  int64_t bytes_of(const LinearLayer& layer, int num_steps) const {
    return layer.coded_bytes > 0 ? num_steps * int64_t{PANEL} / CODED_INNER * layer.coded_bytes
                                 : int64_t{num_steps} * STEP_BYTES;
  }
  int64_t panel_bytes_of(const LinearLayer& layer) const { return bytes_of(layer, steps); }
};

// One job: where its panels begin, of which rows. Plain layers have one panel, gated ones two.
struct PackedJob {
  int index;
  const LinearLayer* layer;
  int64_t column;
  const char* panel[2];
  int panels, first_strip, end_strip;
};

inline PackedJob job_at(const PackedRun& run, int index) {
  if (index >= run.num_jobs) return {};
  const int count = run.panels.count(), block = index / count;
  const auto [result, column] = run.panels[index % count];
  const LinearLayer* layer = run.args.layers + result;
  const auto panel_of = [&, at = column](const LinearLayer& l) {
    return static_cast<const char*>(l.weight) + at / PANEL * run.panel_bytes_of(l);
  };
  return {index, layer, column, {panel_of(*layer), run.gated() ? panel_of(layer[1]) : nullptr},
          static_cast<int>(std::min<int64_t>(run.group, (layer->columns - column) / PANEL)), block * run.block_strips,
          std::min((block + 1) * run.block_strips, run.strips)};
}

inline int64_t PackedRun::product_of(const PackedJob& job, int strip) const {
  return static_cast<int64_t>(job.index) * block_strips + strip - job.first_strip;
}

inline bool PackedRun::is_written(int index) const {
  const PackedJob job = job_at(*this, index);
  for (int strip = job.first_strip; strip < job.end_strip; ++strip)
    if (!products.is_written(product_of(job, strip))) return false;
  return true;
}

// Does all jobs of a worker: run_job(job, the next one) of each.
template <class RunJob>
void run_jobs(PackedRun& run, int number, const RunJob& run_job) {
  Pace pace;
  for (int index = run.work.take(number), next; index < run.num_jobs; index = next, pace.count()) {
    next = run.work.take(number);
    run_job(job_at(run, index), job_at(run, next));
  }
  if (number == 0)
    complete_jobs(run.num_jobs, pace, [&](int64_t job) { return run.is_written(static_cast<int>(job)); },
                  [&](int64_t job) { run_job(job_at(run, static_cast<int>(job)), {}); });
}

// From where a worker reads the weights of a call.
inline Reading reading_of(const PackedRun& run, int worker) {
  const PackedJob job = job_at(run, static_cast<int>(static_cast<int64_t>(run.num_jobs) * worker / run.num_workers));
  return {{job.panel[0], job.panel[1]}, (job.layer->columns - job.column) / PANEL * run.panel_bytes_of(*job.layer)};
}

// Runs `worker` on the threads of a call, which the caller leaves behind if they stand still.
template <class Run>
void run_packed(const std::shared_ptr<Run>& run, LoopBody worker) {
  if (run->num_workers <= 1) return worker(run.get(), 0);
  static thread_local NextWeights next;
  if (run->args.rows <= NEXT_WEIGHTS_ROWS)
    next.told_of(run->args.layers[0].weight, run->num_workers, [&](int number) { return reading_of(*run, number); });
  run_leaving(run->num_workers, worker, run);
}

}  // namespace pagebinder
