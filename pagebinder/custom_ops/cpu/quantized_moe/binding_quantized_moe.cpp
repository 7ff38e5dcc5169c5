// Registers quantized_moe_experts and quantized_moe_routed_experts under `pagebinder_cpu`, see
// custom_ops/moe/quantized_experts.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "checks.h"
#include "coded_stack.h"
#include "direct_calls.h"
#include "moe/binding_moe.h"
#include "moe/binding_router.h"
#include "new_tensor.h"
#include "num_threads.h"
#include "quant/weight_tensors.h"
#include "thread_pool.h"

namespace {

using namespace pagebinder::binding;
using pagebinder::CodedStack;

// "int8_g16" is the format of both, "uint4_g32/int8_g16" one for each.
struct Formats {
  std::string up, down;

  explicit Formats(const std::string& name) : up(name.substr(0, name.find('/'))), down(up) {
    if (const size_t at = name.find('/'); at != std::string::npos) down = name.substr(at + 1);
  }
};

CodedStack stack_of(const Tensor& codes, const Tensor& scale, const std::string& format) {
  PB_CHECK(codes.dim() == 5, "quantized_moe_experts takes the codes of all experts, [E, ., ., 2, .]");
  CodedStack stack{};
  pagebinder::describe_weight(codes, scale, format, stack.first, 1);
  const int64_t experts = codes.size(0);
  if (experts == 0) return stack;
  stack.code_bytes = codes.numel() / experts;
  stack.scale_bytes = scale.numel() / experts * static_cast<int64_t>(scale.element_size());
  return stack;
}

pagebinder::Projection projection_of(const CodedStack& stack, const Bias& bias, int64_t experts, const Tensor& x) {
  pagebinder::Projection p{};
  p.codes = &stack;
  p.columns = stack.first.columns, p.inner = stack.first.inner;
  if (bias) {
    PB_CHECK(bias->dim() == 2 && bias->size(0) == experts && bias->size(1) == p.columns &&
                 bias->scalar_type() == x.scalar_type(),
             "a bias of experts must be [", experts, ", ", p.columns, "] of x's dtype");
    p.bias = bias->const_data_ptr(), p.bias_stride = bias->stride(0);
  }
  return p;
}

Tensor quantized_moe_experts(const Tensor& x_in, const Tensor& ids_in, const Tensor& weights_in, const Tensor& up,
                             const Tensor& up_scale, const Tensor& down, const Tensor& down_scale, Bias up_bias,
                             Bias down_bias, std::string format, std::string activation, bool gated, bool interleaved,
                             std::optional<double> limit, std::optional<double> alpha, double up_offset, bool) {
  PB_CHECK(x_in.dim() == 2 && ids_in.dim() == 2 && weights_in.dim() == 2 && ids_in.size(0) == x_in.size(0) &&
               weights_in.size(0) == x_in.size(0) && weights_in.size(1) == ids_in.size(1),
           "quantized_moe_experts takes x [T, C], expert ids and weights [T, K]");
  const Formats formats(format);
  const CodedStack up_stack = stack_of(up, up_scale, formats.up), down_stack = stack_of(down, down_scale, formats.down);
  PB_CHECK(up.size(0) == down.size(0), "up and down have different numbers of experts");
  const Tensor x = dense(x_in), ids = dense_ids(ids_in);
  const Tensor weights = torch::stable::contiguous(cast(weights_in, ScalarType::Float));
  up_bias = dense(up_bias), down_bias = dense(down_bias);
  pagebinder::MoeArgs a{};
  a.choice = choice(ids, up.size(0));
  a.type = element_of(x, "the input of experts");
  a.x = x.const_data_ptr(), a.x_stride = x.stride(0);
  a.weights = static_cast<const float*>(weights.const_data_ptr());
  a.up = projection_of(up_stack, up_bias, up.size(0), x);
  a.down = projection_of(down_stack, down_bias, up.size(0), x);
  a.gate = gate(activation, gated, interleaved, limit, alpha, up_offset);
  PB_CHECK(a.up.inner == x.size(1) && a.down.columns == x.size(1), "x and the experts differ in C");
  PB_CHECK(a.up.columns == (gated ? 2 : 1) * a.down.inner, "up and down differ in the inner width");
  Tensor out = pagebinder::new_tensor({x.size(0), x.size(1)}, x.scalar_type());
  if (out.numel() == 0) return out;
  a.out = out.mutable_data_ptr();
  a.num_threads = pagebinder::num_threads(), a.run = pagebinder::run_parallel;
  pagebinder::quantized_moe_experts(a);
  return out;
}

Tensor quantized_moe_routed_experts(
    const Tensor& x, const Tensor& logits, MaybeTensor choice_bias, const Tensor& up, const Tensor& up_scale,
    const Tensor& down, const Tensor& down_scale, Bias up_bias, Bias down_bias, int64_t top_k, std::string score,
    bool sorted_choice, int64_t num_groups, int64_t top_groups, std::string group_score, bool other_groups_zero,
    bool weigh_rated, std::string normalised, double epsilon, double least_sum,
    std::optional<ScalarType> softmax_dtype, double scale, std::optional<ScalarType> weight_dtype, std::string format,
    std::string activation, bool gated, bool interleaved, std::optional<double> limit, std::optional<double> alpha,
    double up_offset, bool in_float32) {
  const Chosen chosen = choose(x.size(0), up.size(0), logits, choice_bias, top_k, score, sorted_choice, num_groups,
                               top_groups, group_score, other_groups_zero, weigh_rated, normalised, epsilon, least_sum,
                               softmax_dtype, scale, weight_dtype);
  return quantized_moe_experts(x, chosen.ids, chosen.weights, up, up_scale, down, down_scale, up_bias, down_bias,
                               format, activation, gated, interleaved, limit, alpha, up_offset, in_float32);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "quantized_moe_experts", TORCH_BOX(&quantized_moe_experts));
  pagebinder::implement(m, "quantized_moe_routed_experts", TORCH_BOX(&quantized_moe_routed_experts));
}
