// Registers moe_experts and expert_linear under `pagebinder_cpu`.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "binding_moe.h"
#include "checks.h"
#include "coded_weights.h"
#include "direct_calls.h"
#include "moe.h"
#include "new_tensor.h"
#include "num_threads.h"
#include "thread_pool.h"

namespace {

using namespace pagebinder::binding;
using pagebinder::run_parallel;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Are the experts' matrices views that were transposed? Then they are read as what they are views of.
bool is_view_of_transposed(const Tensor& weight) {
  return weight.stride(1) == 1 && weight.size(2) > 1 && weight.stride(2) != 1;
}

constexpr int64_t PACKED_DIMS = 7;  // [E, N / 32, K / 32, 2, 16, 16, 2]
bool is_packed(const Tensor& weight) { return weight.dim() == PACKED_DIMS; }
bool has_panels(const Tensor& packed) {
  return packed.size(3) == 2 && packed.size(4) == 16 && packed.size(5) == 16 && packed.size(6) == 2;
}

// [E, N / 32, K / 256, bytes of a block], as codes of weights in fewer bits are not: their last dimension is short.
bool is_coded(const Tensor& weight) {
  return weight.dim() == 4 && weight.scalar_type() == ScalarType::Byte && weight.size(3) >= pagebinder::coded_block_bytes(0);
}

constexpr int64_t CODED_INNER = pagebinder::CODED_STEPS * 32;  // k of a block

Tensor decoded(const Tensor& coded) {
  const Tensor from = torch::stable::contiguous(coded);
  const int64_t blocks = coded.size(0) * coded.size(1) * coded.size(2), steps = coded.size(2) * pagebinder::CODED_STEPS;
  const Tensor packed = pagebinder::new_tensor({coded.size(0), coded.size(1), steps, 2, 16, 16, 2}, ScalarType::BFloat16);
  pagebinder::decode_blocks<0>(static_cast<const uint8_t*>(from.const_data_ptr()), coded.size(3), blocks,
                               static_cast<uint16_t*>(packed.mutable_data_ptr()));
  return packed;
}

// As stored [E, N, K], for a processor that does not read packed ones.
Tensor unpacked(const Tensor& weight) {
  const Tensor packed = is_coded(weight) ? decoded(weight) : weight;
  const int64_t panels = packed.size(1), steps = packed.size(2), K = steps * 32;
  const Tensor from = torch::stable::contiguous(packed);
  Tensor plain = pagebinder::new_tensor({packed.size(0), panels * 32, K}, packed.scalar_type());
  const uint32_t* pair = static_cast<const uint32_t*>(from.const_data_ptr());
  uint32_t* to = static_cast<uint32_t*>(plain.mutable_data_ptr());
  for (int64_t panel = 0; panel < packed.size(0) * panels; ++panel)
    for (int64_t step = 0; step < steps; ++step)
      for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 16; ++k)
          for (int column = 0; column < 16; ++column, ++pair)
            to[((panel * 32 + half * 16 + column) * K + step * 32) / 2 + k] = *pair;
  return plain;
}

ScalarType type_of_numbers(const Tensor& weight) {
  return is_coded(weight) ? ScalarType::BFloat16 : weight.scalar_type();
}

pagebinder::Projection projection(const Tensor& weight, const Bias& bias, bool transposed) {
  pagebinder::Projection p{};
  p.weight = weight.const_data_ptr();
  p.expert_stride = weight.stride(0), p.line_stride = weight.stride(1);
  p.columns = weight.size(transposed ? 2 : 1), p.inner = weight.size(transposed ? 1 : 2);
  if (is_packed(weight)) p.packed = true, p.columns *= 32, p.inner *= 32;
  if (is_coded(weight)) p.packed = true, p.columns *= 32, p.inner *= CODED_INNER, p.coded_bytes = weight.size(3);
  if (bias) {
    PB_CHECK(bias->dim() == 2 && bias->size(0) == weight.size(0) && bias->size(1) == p.columns &&
                 bias->scalar_type() == type_of_numbers(weight),
             "a bias of experts must be [", weight.size(0), ", ", p.columns, "] of their dtype");
    p.bias = bias->const_data_ptr(), p.bias_stride = bias->stride(0);
  }
  return p;
}

}  // namespace

namespace pagebinder::binding {

// `in_float32` needs nothing: gates are always computed in float32.
Tensor moe_experts(const Tensor& x_in, const Tensor& ids_in, const Tensor& weights_in, const Tensor& up_in,
                   const Tensor& down_in, Bias up_bias, Bias down_bias, bool transposed, std::string activation,
                   bool gated, bool interleaved, std::optional<double> limit, std::optional<double> alpha,
                   double up_offset, bool) {
  PB_CHECK(x_in.dim() == 2 && ids_in.dim() == 2 && weights_in.dim() == 2 && ids_in.size(0) == x_in.size(0) &&
               weights_in.size(0) == x_in.size(0) && weights_in.size(1) == ids_in.size(1),
           "moe_experts takes x [T, C], expert ids and weights [T, K]");
  const bool coded = is_coded(up_in), packed = coded || is_packed(up_in);
  PB_CHECK((up_in.dim() == 3 || packed) && down_in.dim() == up_in.dim() && up_in.size(0) == down_in.size(0) &&
               is_coded(down_in) == coded,
           "moe_experts takes the weights of all experts, [E, ., .], or both packed, or both coded");
  PB_CHECK(!packed || (!transposed && !interleaved), "packed experts are not transposed and have gates before values");
  PB_CHECK(!packed || coded ||
               (up_in.scalar_type() == ScalarType::BFloat16 && has_panels(up_in) && has_panels(down_in)),
           "packed experts are bfloat16 [E, N / 32, K / 32, 2, 16, 16, 2]");
  if (packed && !pagebinder::reads_packed_experts())
    return moe_experts(x_in, ids_in, weights_in, unpacked(up_in), unpacked(down_in), up_bias, down_bias, transposed,
                       activation, gated, interleaved, limit, alpha, up_offset, false);
  PB_CHECK(x_in.scalar_type() == type_of_numbers(up_in) && x_in.scalar_type() == type_of_numbers(down_in),
           "x and the experts differ in dtype: cast x first");
  const bool turned = !packed && is_view_of_transposed(up_in) && is_view_of_transposed(down_in);
  const auto stored = [&](const Tensor& t) {
    return packed ? torch::stable::contiguous(t) : dense(turned ? torch::stable::transpose(t, 1, 2) : t);
  };
  const Tensor up = stored(up_in), down = stored(down_in), x = dense(x_in), ids = dense_ids(ids_in);
  const Tensor weights = torch::stable::contiguous(torch::stable::to(weights_in, ScalarType::Float));
  up_bias = dense(up_bias), down_bias = dense(down_bias);
  pagebinder::MoeArgs a{};
  a.choice = choice(ids, up.size(0));
  a.type = element_of(x, "the input of experts"), a.transposed = transposed != turned;
  a.x = x.const_data_ptr(), a.x_stride = x.stride(0);
  a.weights = static_cast<const float*>(weights.const_data_ptr());
  a.up = projection(up, up_bias, a.transposed), a.down = projection(down, down_bias, a.transposed);
  a.gate = gate(activation, gated, interleaved, limit, alpha, up_offset);
  PB_CHECK(a.up.inner == x.size(1) && a.down.columns == x.size(1), "x and the experts differ in C");
  PB_CHECK(a.up.columns == (gated ? 2 : 1) * a.down.inner, "up and down differ in the inner width");
  Tensor out = pagebinder::new_tensor({x.size(0), x.size(1)}, x.scalar_type());
  if (out.numel() == 0) return out;
  a.out = out.mutable_data_ptr();
  a.num_threads = pagebinder::num_threads(), a.run = run_parallel;
  pagebinder::moe_experts(a);
  return out;
}

}  // namespace pagebinder::binding

namespace {

Tensor expert_linear(const Tensor& x_in, const Tensor& ids_in, const Tensor& weight_in, Bias bias, bool transposed) {
  PB_CHECK((x_in.dim() == 2 || x_in.dim() == 3) && ids_in.dim() == 2 && x_in.size(0) == ids_in.size(0) &&
               (x_in.dim() == 2 || x_in.size(1) == ids_in.size(1)),
           "expert_linear takes x [T, C] or [T, K, C] and ids [T, K]");
  PB_CHECK(weight_in.dim() == 3, "expert_linear takes the weights of all experts, [E, ., .]");
  PB_CHECK(x_in.scalar_type() == weight_in.scalar_type(), "x and the experts differ in dtype: cast x first");
  const bool turned = is_view_of_transposed(weight_in);
  const Tensor weight = dense(turned ? torch::stable::transpose(weight_in, 1, 2) : weight_in);
  const bool row_per_slot = x_in.dim() == 3;
  const Tensor x = row_per_slot ? torch::stable::contiguous(x_in) : dense(x_in), ids = dense_ids(ids_in);
  bias = dense(bias);
  pagebinder::ExpertLinearArgs a{};
  a.choice = choice(ids, weight.size(0));
  a.type = element_of(x, "the input of experts"), a.transposed = transposed != turned;
  a.x = x.const_data_ptr(), a.x_stride = x.stride(x.dim() - 2), a.row_per_slot = row_per_slot;
  a.projection = projection(weight, bias, a.transposed);
  PB_CHECK(a.projection.inner == x.size(x.dim() - 1), "x and the experts differ in C");
  Tensor out = pagebinder::new_tensor({ids.size(0), ids.size(1), a.projection.columns}, x.scalar_type());
  if (out.numel() == 0) return out;
  a.out = out.mutable_data_ptr();
  a.num_threads = pagebinder::num_threads(), a.run = run_parallel;
  pagebinder::expert_linear(a);
  return out;
}

bool reads_packed_experts() { return pagebinder::reads_packed_experts(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pagebinder_cpu, m) { m.def("reads_packed_experts() -> bool"); }
STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CompositeExplicitAutograd, m) {
  pagebinder::implement(m, "reads_packed_experts", TORCH_BOX(&reads_packed_experts));
}
STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "moe_experts", TORCH_BOX(&pagebinder::binding::moe_experts));
  pagebinder::implement(m, "expert_linear", TORCH_BOX(&expert_linear));
}
