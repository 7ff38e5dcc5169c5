// The quantised linear layer in float32 with vectors of any width; layout and formats: quantized_linear.h.
//
// One job = one panel of columns (panel_floats.h). An element of y is summed in the same order whatever the number of
// rows and threads. Rows of bf16 are widened once.
#include "quantized_linear.h"

#include <vector>

#include "panel_floats.h"
#include "quantized_jobs.h"

namespace pagebinder {
namespace {

constexpr int64_t APART = 16;  // floats between rows: those that are a power of two apart would share places of a cache

template <class Out>
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
    write_panel<Out>(run, job, sums, 0, run.args.rows);
  }
}

template <class Out>
bool run_panels(const QuantizedLayers& call) {
  QuantizedRun run(call);
  tell_next_weights(run);
  run.in_workers(false, worker<Out>);
  return true;
}

}  // namespace

bool quantized_linear_with_vectors(const QuantizedLayers& call) { return run_panels<float>(call); }

bool quantized_linear_in_bf16_with_vectors(const QuantizedLayers& call) {
  static thread_local Buffer buffer;
  const QuantizedLinearArgs& a = call.first();
  const int64_t stride = a.inner + APART;
  float* x = buffer.at_least<float>(static_cast<size_t>(a.rows * stride));
  for (int64_t r = 0; r < a.rows; ++r)
    for (int64_t k = 0; k < a.inner; k += W)
      store(x + r * stride + k, load_float(static_cast<const bf16*>(a.x) + r * a.x_stride + k));
  std::vector<QuantizedLinearArgs> layers(call.layers, call.layers + call.num_layers);
  for (QuantizedLinearArgs& layer : layers) layer.x = x, layer.x_stride = stride;
  QuantizedLayers widened = call;
  widened.layers = layers.data();
  return a.wide_out ? run_panels<float>(widened) : run_panels<bf16>(widened);
}

}  // namespace pagebinder
