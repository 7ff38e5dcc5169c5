// The quantised linear layer in float32 with vectors of any width; layout and formats: quantized_linear.h.
//
// One job = one panel of columns (panel_floats.h). An element of y is summed in the same order whatever the number of
// rows and threads.
#include "quantized_linear.h"

#include <algorithm>

#include "panel_floats.h"
#include "work_ranges.h"

namespace pagebinder {
namespace {

constexpr int64_t SERIAL_FLOPS = 1 << 19;

struct Run {
  const QuantizedLinearArgs& args;
  int num_panels, num_workers;
  WorkRanges work{num_panels, num_workers};
};

void run_panel(const QuantizedLinearArgs& a, int64_t panel, float* sums) {
  panel_in_floats_of(a.code)(a, panel, sums);
  const float* bias = static_cast<const float*>(a.bias);
  for (int64_t row = 0; row < a.rows; ++row)
    for (int i = 0; i < QUANT_PANEL; i += W) {
      const int64_t column = panel * QUANT_PANEL + i;
      const VF added = bias == nullptr ? VF{} : load<VF>(bias + column);
      store(static_cast<float*>(a.out) + row * a.columns + column, load<VF>(sums + row * QUANT_PANEL + i) + added);
    }
}

void worker(void* context, int index) {
  static thread_local Buffer buffer;
  Run& run = *static_cast<Run*>(context);
  float* sums = buffer.at_least<float>(static_cast<size_t>(run.args.rows) * QUANT_PANEL);
  for (int panel; (panel = run.work.take(index)) < run.num_panels;)
    run_panel(run.args, panel, sums);
}

}  // namespace

bool quantized_linear_with_vectors(const QuantizedLinearArgs& args) {
  const int num_panels = static_cast<int>(args.columns / QUANT_PANEL);
  const bool serial = args.rows * args.columns * args.inner < SERIAL_FLOPS;
  Run run{args, num_panels, serial ? 1 : std::min(args.num_threads, num_panels)};
  if (run.num_workers <= 1) worker(&run, 0);
  else args.run(run.num_workers, worker, &run);
  return true;
}

}  // namespace pagebinder
