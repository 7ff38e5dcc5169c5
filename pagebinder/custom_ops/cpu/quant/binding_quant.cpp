// Registers the quantised linear layer under `pagebinder_cpu`: matrix tiles for bf16, float32 vectors otherwise.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "direct_calls.h"
#include "new_tensor.h"
#include "weight_tensors.h"

namespace {

using namespace pagebinder;

// x [..., K] in float32, bf16 or f16, see quantized_linear.h for the weight -> [..., N]
Tensor quantized_linear(const Tensor& x, const Tensor& qweight, const Tensor& scale, std::optional<Tensor> bias,
                        std::string format) {
  QuantizedLinearArgs a{};
  describe_weight(qweight, scale, format, a);
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                  "quantized_linear takes float32, bfloat16 and float16");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == a.columns && bias->scalar_type() == dtype),
                  "quantized_linear: bias must be [", a.columns, "] of x's dtype");
  const std::vector<int64_t> sizes = sizes_of_result(x, a);
  a.x_stride = a.inner;
  a.num_threads = static_cast<int>(torch::stable::get_num_threads()), a.run = run_parallel;
  const auto run_in = [&](ScalarType type, bool (*run)(const QuantizedLinearArgs&), Tensor& out) {
    const Tensor rows = torch::stable::contiguous(torch::stable::to(x, type));
    std::optional<Tensor> added;
    if (bias) added = torch::stable::contiguous(torch::stable::to(*bias, type));
    out = new_tensor(sizes, rows.scalar_type());
    a.x = rows.const_data_ptr(), a.out = out.mutable_data_ptr();
    a.bias = added ? added->const_data_ptr() : nullptr;
    return a.rows == 0 || a.columns == 0 || run(a);
  };
  Tensor out;
  if (dtype == ScalarType::BFloat16 && run_in(dtype, quantized_linear_in_bf16, out)) return out;
  run_in(ScalarType::Float, quantized_linear_with_vectors, out);
  return torch::stable::to(out, dtype);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "quantized_linear", TORCH_BOX(&quantized_linear));
}
