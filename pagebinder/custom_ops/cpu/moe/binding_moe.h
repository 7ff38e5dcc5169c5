// What the bindings of experts share.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <string>
#include <utility>

#include "checks.h"
#include "element_of.h"
#include "moe.h"

namespace pagebinder::binding {

using pagebinder::element_of;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Bias = std::optional<Tensor>;

// The same values with the last dimension dense: a copy if it is not.
inline Tensor dense(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return t.size(last) <= 1 || t.stride(last) == 1 ? t : torch::stable::contiguous(t);
}

inline Choice choice(const Tensor& ids, int64_t experts) {
  return {ids.size(0), ids.size(1), experts, static_cast<const int64_t*>(ids.const_data_ptr())};
}

inline Tensor dense_ids(const Tensor& ids) {
  PB_CHECK(ids.dim() == 2 && ids.scalar_type() == ScalarType::Long, "expert ids must be [T, K] int64");
  return torch::stable::contiguous(ids);
}

inline Bias dense(const Bias& bias) { return bias ? Bias(dense(*bias)) : bias; }

inline Gate gate(const std::string& activation, bool gated, bool interleaved, std::optional<double> limit,
                 std::optional<double> alpha, double up_offset) {
  static constexpr std::array<std::pair<const char*, Activation>, 7> names{{{"silu", Activation::SILU},
                                                                           {"gelu", Activation::GELU},
                                                                           {"gelu_tanh", Activation::GELU_TANH},
                                                                           {"relu", Activation::RELU},
                                                                           {"relu2", Activation::RELU2},
                                                                           {"sigmoid", Activation::SIGMOID},
                                                                           {"swish", Activation::SILU}}};
  PB_CHECK((activation == "swish") == alpha.has_value(), "alpha belongs to the activation \"swish\"");
  for (const auto& [name, kind] : names)
    if (activation == name)
      return {kind,
              gated,
              interleaved,
              limit.has_value(),
              static_cast<float>(limit.value_or(0)),
              static_cast<float>(up_offset),
              static_cast<float>(alpha.value_or(1))};
  PB_CHECK(false, "unknown activation ", activation);
}

// moe_experts of custom_ops/moe/experts.py.
torch::stable::Tensor moe_experts(const torch::stable::Tensor& x, const torch::stable::Tensor& ids,
                                  const torch::stable::Tensor& weights, const torch::stable::Tensor& up,
                                  const torch::stable::Tensor& down, std::optional<torch::stable::Tensor> up_bias,
                                  std::optional<torch::stable::Tensor> down_bias, bool transposed,
                                  std::string activation, bool gated, bool interleaved, std::optional<double> limit,
                                  std::optional<double> alpha, double up_offset, bool in_float32);

}  // namespace pagebinder::binding
