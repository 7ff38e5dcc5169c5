// What the bindings of experts share.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

namespace pagebinder::binding {

// moe_experts of custom_ops/moe/experts.py.
torch::stable::Tensor moe_experts(const torch::stable::Tensor& x, const torch::stable::Tensor& ids,
                                  const torch::stable::Tensor& weights, const torch::stable::Tensor& up,
                                  const torch::stable::Tensor& down, std::optional<torch::stable::Tensor> up_bias,
                                  std::optional<torch::stable::Tensor> down_bias, bool transposed,
                                  std::string activation, bool gated, bool interleaved, std::optional<double> limit,
                                  std::optional<double> alpha, double up_offset, bool in_float32);

}  // namespace pagebinder::binding
