// The quantised linear layer in float32 with vectors of any width; layout and formats: quantized_linear.h.
//
// One job = one panel of columns (panel_floats.h). An element of y is summed in the same order whatever the number of
// rows and threads.
#include "quantized_linear.h"

#include "panel_floats.h"
#include "quantized_jobs.h"

namespace pagebinder {
namespace {

void worker(void* context, int index) {
  static thread_local Buffer buffer;
  QuantizedRun& run = *static_cast<QuantizedRun*>(context);
  const size_t size = static_cast<size_t>(run.args.rows) * QUANT_PANEL;
  float* memory = buffer.at_least<float>(size * run.parts);
  float* const sums[2] = {memory, memory + (run.parts - 1) * size};
  for (int i; (i = run.work.take(index)) < run.num_jobs;) {
    const QuantizedJob job = run.job(i);
    for (int part = 0; part < run.parts; ++part)
      panel_in_floats_of(run.args.code)(job.layer[part], job.panel, sums[part]);
    write_panel<float>(run, job, sums, 0, run.args.rows);
  }
}

}  // namespace

bool quantized_linear_with_vectors(const QuantizedLayers& call) {
  QuantizedRun run(call);
  run.in_workers(false, worker);
  return true;
}

}  // namespace pagebinder
