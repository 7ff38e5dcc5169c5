// Which experts tokens go to, and with which weights: the router of custom_ops/moe/router.py as bindings use it.
//
// Choosing is ours. Exponentials and sums are torch's own functions, called from here: so scores and weights have the
// bits that they have without this op.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cmath>
#include <optional>
#include <string>

#include "checks.h"
#include "moe_router.h"
#include "new_tensor.h"
#include "num_threads.h"
#include "thread_pool.h"

namespace pagebinder::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline Tensor cast(const Tensor& t, ScalarType type) { return t.scalar_type() == type ? t : torch::stable::to(t, type); }

inline Tensor softmax(const Tensor& t) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(t), torch::stable::detail::from(int64_t{-1}),
                                    torch::stable::detail::from(std::nullopt)};
  PB_CHECK(aoti_torch_call_dispatcher("aten::softmax", "int", stack.data()) == 0, "aten::softmax failed");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor sigmoid(const Tensor& t) {
  std::array<StableIValue, 1> stack{torch::stable::detail::from(t)};
  PB_CHECK(aoti_torch_call_dispatcher("aten::sigmoid", "", stack.data()) == 0, "aten::sigmoid failed");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor scores_of(const Tensor& logits, const std::string& score) {
  const Tensor wide = cast(logits, ScalarType::Float);
  if (score == "softmax") return softmax(wide);
  if (score == "sigmoid") return sigmoid(wide);
  PB_CHECK(score == "logits", "unknown score ", score);
  return wide;
}

// w / max(sum w + epsilon, least) * scale of each row, in place; a sum may be negative if there is no least one.
inline void divide_by_sum(Tensor& weights, double epsilon, double least, double scale) {
  const std::array<int64_t, 1> last{-1};
  const Tensor sums = torch::stable::sum(weights, torch::headeronly::IntHeaderOnlyArrayRef(last.data(), 1), true);
  const float* sum = static_cast<const float*>(sums.const_data_ptr());
  float* w = static_cast<float*>(weights.mutable_data_ptr());
  const int64_t slots = weights.size(1);
  for (int64_t t = 0; t < weights.size(0); ++t) {
    float divisor = sum[t] + static_cast<float>(epsilon);
    if (least != 0.0 && divisor < static_cast<float>(least)) divisor = static_cast<float>(least);
    for (int64_t k = 0; k < slots; ++k, ++w) *w = *w / divisor * static_cast<float>(scale);
  }
}

inline void multiply(Tensor& weights, double scale) {
  float* w = static_cast<float*>(weights.mutable_data_ptr());
  for (int64_t i = 0; scale != 1.0 && i < weights.numel(); ++i) w[i] *= static_cast<float>(scale);
}

struct Chosen { Tensor ids, weights; };  // [T, K] each

// logits [tokens, experts]; the rest are the fields of Router.
inline Chosen choose(int64_t tokens, int64_t experts, const Tensor& logits, const MaybeTensor& choice_bias,
                     int64_t top_k, const std::string& score, bool sorted_choice, int64_t num_groups,
                     int64_t top_groups, const std::string& group_score, bool other_groups_zero, bool weigh_rated,
                     const std::string& normalised, double epsilon, double least_sum,
                     std::optional<ScalarType> softmax_dtype, double scale, std::optional<ScalarType> weight_dtype) {
  PB_CHECK(logits.dim() == 2 && logits.size(0) == tokens && logits.size(1) == experts,
           "moe_routed_experts takes logits [T, E] of the experts whose weights it is given");
  PB_CHECK(!choice_bias || (choice_bias->dim() == 1 && choice_bias->size(0) == experts),
           "moe_routed_experts takes a bias [E], one value an expert, or none");
  PB_CHECK(top_k >= 1 && top_k <= experts && num_groups >= 1 && experts % num_groups == 0 &&
               top_groups >= 1 && top_groups <= num_groups,
           experts, " experts do not give ", top_k, " in ", num_groups, " groups");
  const Tensor scores = torch::stable::contiguous(scores_of(logits, score));
  const MaybeTensor bias =
      choice_bias ? MaybeTensor(torch::stable::contiguous(cast(*choice_bias, ScalarType::Float))) : std::nullopt;
  Tensor ids = new_tensor({tokens, top_k}, ScalarType::Long);
  Tensor weights = new_tensor({tokens, top_k}, ScalarType::Float);
  RouterArgs a{};
  a.tokens = tokens, a.experts = experts, a.top_k = top_k;
  a.scores = static_cast<const float*>(scores.const_data_ptr());
  a.bias = bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
  a.sorted = sorted_choice, a.weigh_rated = weigh_rated;
  a.groups = num_groups, a.top_groups = top_groups;
  a.best_two = group_score == "best_two", a.outside = other_groups_zero ? 0.0f : -INFINITY;
  a.ids = static_cast<int64_t*>(ids.mutable_data_ptr());
  a.chosen = static_cast<float*>(weights.mutable_data_ptr());
  a.num_threads = pagebinder::num_threads(), a.run = run_parallel;
  choose_experts(a);
  if (normalised == "sum") {
    divide_by_sum(weights, epsilon, least_sum, scale);
  } else {
    const ScalarType type = softmax_dtype.value_or(ScalarType::Float);
    if (normalised == "softmax") weights = cast(softmax(cast(weights, type)), ScalarType::Float);
    multiply(weights, scale);
  }
  return {ids, cast(weights, weight_dtype.value_or(ScalarType::Float))};
}

}  // namespace pagebinder::binding
