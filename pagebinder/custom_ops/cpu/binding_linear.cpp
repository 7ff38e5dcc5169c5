// Registers the linear layer under `pagebinder_cpu`: matrix tiles for few rows, torch's own linear for the rest.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <vector>

#include "linear.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void run_parallel(int num_workers, void (*body)(void*, int), void* context) {
  torch::stable::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(context, static_cast<int>(i));
  });
}

bool is_bf16(const Tensor& t) { return t.scalar_type() == ScalarType::BFloat16; }

Tensor torch_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  STD_TORCH_CHECK(aoti_torch_call_dispatcher("aten::linear", "", stack.data()) == 0, "aten::linear failed");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// x [..., K] as rows that are `stride` elements apart. False: they are not evenly spaced.
bool evenly_spaced_rows(const Tensor& x, int64_t& rows, int64_t& stride) {
  rows = 1;
  stride = x.size(x.dim() - 1);
  for (int64_t d = x.dim() - 2; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (rows > 1 && x.stride(d) != rows * stride) return false;
    if (rows == 1) stride = x.stride(d);
    rows *= x.size(d);
  }
  return x.stride(x.dim() - 1) == 1;
}

// x [..., K], weight [N, K], bias [N] or none -> [..., N]
Tensor linear(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias) {
  pagebinder::LinearArgs a{};
  const bool good_x = x.dim() > 0 && is_bf16(x) && evenly_spaced_rows(x, a.rows, a.x_stride) && a.rows > 0;
  const bool good_weight = weight.dim() == 2 && is_bf16(weight) && weight.stride(1) == 1;
  const bool good_bias = !bias || (is_bf16(*bias) && bias->dim() == 1 && bias->stride(0) == 1);
  if (!good_x || !good_weight || !good_bias || x.size(x.dim() - 1) != weight.size(1) ||
      (bias && bias->size(0) != weight.size(0)) ||
      !pagebinder::linear_suits_tiles(a.rows, weight.size(0), weight.size(1)))
    return torch_linear(x, weight, bias);
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) sizes.push_back(x.size(d));
  sizes.push_back(weight.size(0));
  Tensor out = torch::stable::new_empty(x, sizes);
  a.columns = weight.size(0), a.inner = weight.size(1);
  a.x = x.const_data_ptr();
  a.weight = weight.const_data_ptr(), a.weight_stride = weight.stride(0);
  a.bias = bias ? bias->const_data_ptr() : nullptr;
  a.out = out.mutable_data_ptr();
  a.num_threads = static_cast<int>(torch::stable::get_num_threads()), a.run = run_parallel;
  pagebinder::linear_with_tiles(a);
  return out;
}

bool has_matrix_tiles() {
  return pagebinder::linear_suits_tiles(1, pagebinder::LINEAR_GRAIN, pagebinder::LINEAR_GRAIN);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) { m.impl("linear", TORCH_BOX(&linear)); }

// Does this machine let the kernels use matrix tiles?
STABLE_TORCH_LIBRARY_FRAGMENT(pagebinder_cpu, m) { m.def("has_matrix_tiles() -> bool"); }
STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CompositeExplicitAutograd, m) {
  m.impl("has_matrix_tiles", TORCH_BOX(&has_matrix_tiles));
}
