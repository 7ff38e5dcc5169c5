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

// The call with rows of x of type T as codes meet them.
template <class T>
bool run_on_copies(const QuantizedLayers& call, bool (*run)(const QuantizedLayers&)) {
  static thread_local Buffer buffer;
  const QuantizedLinearArgs& a = call.first();
  const int64_t stride = a.inner + APART;
  float* x = buffer.at_least<float>(static_cast<size_t>(a.rows * stride));
  float lowering[FLOAT_FEW_ROWS];
  rows_for_codes(a.code, static_cast<const T*>(a.x), a.x_stride, a.rows, a.inner, stride, x, lowering);
  std::vector<QuantizedLinearArgs> layers(call.layers, call.layers + call.num_layers);
  for (QuantizedLinearArgs& layer : layers) layer.x = x, layer.x_stride = stride, layer.lowering = lowering;
  QuantizedLayers copied = call;
  copied.layers = layers.data();
  return run(copied);
}

}  // namespace

const float* sums_of_groups(const QuantizedLinearArgs& a, bool is_bf16) {
  static thread_local Buffer buffer;
  float* sums = buffer.at_least<float>(static_cast<size_t>(a.rows * (a.inner / a.scale_group)));
  const auto sum = [&](const auto* x) { sum_groups(x, a.x_stride, a.rows, a.inner, a.scale_group, sums); };
  is_bf16 ? sum(static_cast<const bf16*>(a.x)) : sum(static_cast<const float*>(a.x));
  return sums;
}

bool quantized_linear_with_vectors(const QuantizedLayers& call) {
  const QuantizedLinearArgs& a = call.first();
  return meets_lifted_rows(a.code, a.rows) ? run_on_copies<float>(call, run_panels<float>) : run_panels<float>(call);
}

bool quantized_linear_in_bf16_with_vectors(const QuantizedLayers& call) {
  return run_on_copies<bf16>(call, call.first().wide_out ? run_panels<float> : run_panels<bf16>);
}

}  // namespace pagebinder
