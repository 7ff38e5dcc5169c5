// Registers moe_routed_experts under `pagebinder_cpu`, see custom_ops/moe/router.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "binding_moe.h"
#include "binding_router.h"
#include "direct_calls.h"

namespace {

using namespace pagebinder::binding;

Tensor moe_routed_experts(const Tensor& x, const Tensor& logits, MaybeTensor choice_bias, const Tensor& up,
                          const Tensor& down, MaybeTensor up_bias, MaybeTensor down_bias, int64_t top_k,
                          std::string score, bool sorted_choice, int64_t num_groups, int64_t top_groups,
                          std::string group_score, bool other_groups_zero, bool weigh_rated, std::string normalised,
                          double epsilon, double least_sum, std::optional<ScalarType> softmax_dtype, double scale,
                          std::optional<ScalarType> weight_dtype, bool transposed, std::string activation, bool gated,
                          bool interleaved, std::optional<double> limit, std::optional<double> alpha, double up_offset,
                          bool in_float32) {
  const Chosen chosen = choose(x.size(0), up.size(0), logits, choice_bias, top_k, score, sorted_choice, num_groups,
                               top_groups, group_score, other_groups_zero, weigh_rated, normalised, epsilon, least_sum,
                               softmax_dtype, scale, weight_dtype);
  return moe_experts(x, chosen.ids, chosen.weights, up, down, up_bias, down_bias, transposed, activation, gated,
                     interleaved, limit, alpha, up_offset, in_float32);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "moe_routed_experts", TORCH_BOX(&moe_routed_experts));
}
