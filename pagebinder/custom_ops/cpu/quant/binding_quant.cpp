// Registers quantised linear layers under `pagebinder_cpu`.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "activation_names.h"
#include "checks.h"
#include "direct_calls.h"
#include "new_tensor.h"
#include "num_threads.h"
#include "recorder.h"
#include "weight_tensors.h"

namespace {

using namespace pagebinder;

using Bias = std::optional<Tensor>;

// The operands of a layer.
struct Weight {
  const Tensor& codes;
  const Tensor& scale;
  const Bias& bias;
};

// One call for layers that read the same x [..., K] in float32, bf16 or f16; see quantized_linear.h for the weights. Results
// are [..., N] in x's dtype: one for each layer, or one of a gate and what it is times.
std::vector<Tensor> multiply(const Tensor& x, const std::vector<Weight>& weights, const std::string& format,
                             Activation gate = Activation::NONE) {
  const ScalarType dtype = x.scalar_type();
  PB_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
           "quantised linear layers take float32, bfloat16 and float16");
  std::vector<QuantizedLinearArgs> layers(weights.size());
  std::vector<std::vector<int64_t>> sizes;
  for (size_t i = 0; i < weights.size(); ++i) {
    QuantizedLinearArgs& a = layers[i];
    describe_weight(weights[i].codes, weights[i].scale, format, a);
    const Bias& bias = weights[i].bias;
    PB_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == a.columns && bias->scalar_type() == dtype),
             "a quantised linear layer's bias must be [", a.columns, "] of x's dtype");
    sizes.push_back(sizes_of_result(x, a));
    a.x_stride = a.inner;
    a.num_threads = pagebinder::num_threads(), a.run = run_parallel;
  }
  QuantizedLayers call{layers.data(), static_cast<int>(layers.size()), gate, false};
  std::vector<Tensor> results;
  const auto run_in = [&](ScalarType type, bool (*run)(const QuantizedLayers&)) {
    const Tensor rows = torch::stable::contiguous(torch::stable::to(x, type));
    bool is_copied = rows.const_data_ptr() != x.const_data_ptr();
    std::vector<Tensor> biases;
    results.clear();
    for (size_t i = 0; i < layers.size(); ++i) {
      layers[i].x = rows.const_data_ptr();
      if (weights[i].bias) biases.push_back(torch::stable::contiguous(torch::stable::to(*weights[i].bias, type)));
      layers[i].bias = weights[i].bias ? biases.back().const_data_ptr() : nullptr;
      is_copied |= weights[i].bias && layers[i].bias != weights[i].bias->const_data_ptr();
      if (static_cast<int>(i) >= call.num_results()) continue;
      results.push_back(new_tensor(sizes[i], type));
      layers[i].out = results[i].mutable_data_ptr();
    }
    call.rounds = type != dtype;
    if (layers[0].rows == 0 || call.num_jobs(1) == 0) return;
    const auto kernel = [call, layers, run, type]() mutable {
      if (layers[0].is_shifted) {
        const float* sums = sums_of_groups(layers[0], type == ScalarType::BFloat16);
        for (QuantizedLinearArgs& layer : layers) layer.x_sums = sums;
      }
      call.layers = layers.data();
      run(call);
    };
    launch(kernel, is_copied);
  };
  if (dtype == ScalarType::BFloat16) {
    run_in(dtype, quantized_linear_in_bf16);
    return results;
  }
  run_in(ScalarType::Float, quantized_linear_with_vectors);
  for (Tensor& result : results) result = torch::stable::to(result, dtype);
  return results;
}

Tensor quantized_linear(const Tensor& x, const Tensor& qweight, const Tensor& scale, Bias bias, std::string format) {
  return multiply(x, {{qweight, scale, bias}}, format)[0];
}

std::vector<Tensor> quantized_linears(const Tensor& x, std::vector<Tensor> qweights, std::vector<Tensor> scales,
                                      std::vector<Tensor> given_biases, std::string format) {
  PB_CHECK(!qweights.empty() && scales.size() == qweights.size() &&
               (given_biases.empty() || given_biases.size() == qweights.size()),
           "quantized_linears needs a scale for every weight, and a bias for every weight or none");
  std::vector<Bias> biases(given_biases.begin(), given_biases.end());
  biases.resize(qweights.size());
  std::vector<Weight> weights;
  for (size_t i = 0; i < qweights.size(); ++i) weights.push_back({qweights[i], scales[i], biases[i]});
  return multiply(x, weights, format);
}

Tensor quantized_gated_linear(const Tensor& x, const Tensor& gate, const Tensor& gate_scale, const Tensor& up,
                              const Tensor& up_scale, Bias gate_bias, Bias up_bias, std::string format,
                              std::string activation) {
  PB_CHECK(x.scalar_type() != ScalarType::Half, "quantized_gated_linear takes float32 and bfloat16");
  PB_CHECK(gate.dim() == 4 && up.dim() == 4 && gate.size(0) == up.size(0), "gate and up must be [N, K] alike");
  return multiply(x, {{gate, gate_scale, gate_bias}, {up, up_scale, up_bias}}, format, activation_named(activation))[0];
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "quantized_linear", TORCH_BOX(&quantized_linear));
  pagebinder::implement(m, "quantized_linears", TORCH_BOX(&quantized_linears));
  pagebinder::implement(m, "quantized_gated_linear", TORCH_BOX(&quantized_gated_linear));
}
