// Registers linear layers under `pagebinder_cpu`: kernels of ours for few rows, torch's own linear for the rest.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "linear.h"

namespace {

using pagebinder::Activation;
using pagebinder::bf16;
using pagebinder::LinearArgs;
using pagebinder::LinearLayer;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Bias = std::optional<Tensor>;
using Kernel = void (*)(const LinearArgs&);

void run_parallel(int num_workers, void (*body)(void*, int), void* context) {
  torch::stable::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(context, static_cast<int>(i));
  });
}

Tensor torch_linear(const Tensor& x, const Tensor& weight, const Bias& bias) {
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

Kernel packed_kernel() {
  return pagebinder::packed_weights_usable() ? pagebinder::linear_with_packed_weights : nullptr;
}

Kernel kernel_for(ScalarType type, int64_t rows, int64_t columns, int64_t inner) {
  const bool whole = columns % pagebinder::LINEAR_GRAIN == 0 && inner % pagebinder::LINEAR_GRAIN == 0 && inner > 0;
  if (!whole) return nullptr;
  const bool stream = PAGEBINDER_BF16_DOT && rows <= pagebinder::LINEAR_STREAM_ROWS;
  if (type == ScalarType::BFloat16 && !stream && pagebinder::linear_suits_tiles(rows, columns, inner))
    return pagebinder::linear_with_tiles;
  if (rows > pagebinder::LINEAR_MOST_VECTOR_ROWS) return nullptr;
  if (type == ScalarType::Float) return pagebinder::linear_with_vectors<float>;
  return type == ScalarType::BFloat16 ? pagebinder::linear_with_vectors<bf16> : nullptr;
}

// ---- packed weights --------------------------------------------------------------------------------------------

constexpr int64_t PACKED_DIMS = 6;  // [N / 32, K / 32, 2, 16, 16, 2]

bool is_packed(const Tensor& weight) { return weight.dim() == PACKED_DIMS; }
int64_t columns_of(const Tensor& weight) {
  return weight.size(0) * (is_packed(weight) ? pagebinder::PACKED_PANEL : 1);
}

void for_panels(const Tensor& plain, const Tensor& packed, bool unpack) {
  STD_TORCH_CHECK(plain.scalar_type() == ScalarType::BFloat16 && packed.scalar_type() == ScalarType::BFloat16 &&
                      plain.dim() == 2 && plain.stride(1) == 1 && is_packed(packed) && packed.is_contiguous() &&
                      plain.numel() == packed.numel() && packed.size(0) * pagebinder::PACKED_PANEL == plain.size(0),
                  "a bf16 weight [N, K] is packed as [N / 32, K / 32, 2, 16, 16, 2]");
  const pagebinder::PackedWeight weight{plain.mutable_data_ptr(), plain.stride(0), plain.size(1),
                                        packed.mutable_data_ptr()};
  torch::stable::parallel_for(0, packed.size(0), 1, [&](int64_t panel, int64_t end) {
    for (; panel < end; ++panel) pagebinder::pack_panel(weight, panel, unpack);
  });
}

void pack_linear_weight(const Tensor& weight, Tensor packed) { for_panels(weight, packed, false); }
void unpack_linear_weight(const Tensor& packed, Tensor weight) { for_panels(weight, packed, true); }

// The weight [N, K] for kernels that want it so.
Tensor plain(const Tensor& weight) {
  if (!is_packed(weight)) return weight;
  Tensor result = torch::stable::new_empty(
      weight, std::vector<int64_t>{columns_of(weight), weight.size(1) * pagebinder::PACKED_PANEL});
  for_panels(result, weight, true);
  return result;
}

// ---- calls -----------------------------------------------------------------------------------------------------

// One call for several layers on the same x; `kernel` is null where torch has to serve them.
struct Call {
  std::vector<LinearLayer> layers;
  LinearArgs args{};
  Kernel kernel = nullptr;

  Call(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Bias>& biases) {
    if (x.dim() == 0 || !evenly_spaced_rows(x, args.rows, args.x_stride) || args.rows == 0) return;
    args.x = x.const_data_ptr(), args.inner = x.size(x.dim() - 1);
    args.num_threads = static_cast<int>(torch::stable::get_num_threads()), args.run = run_parallel;
    Kernel chosen = nullptr;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!fits(x, weights[i], biases[i])) return;
      if (is_packed(weights[i]) != is_packed(weights[0])) return;
      chosen = is_packed(weights[i]) ? packed_kernel()
                                     : kernel_for(x.scalar_type(), args.rows, weights[i].size(0), args.inner);
      if (chosen == nullptr) return;
      layers.push_back({columns_of(weights[i]), weights[i].const_data_ptr(), weights[i].stride(0),
                        biases[i] ? biases[i]->const_data_ptr() : nullptr, nullptr});
    }
    args.layers = layers.data(), args.num_layers = static_cast<int>(layers.size());
    kernel = chosen;
  }

  bool fits(const Tensor& x, const Tensor& weight, const Bias& bias) const {
    const ScalarType type = x.scalar_type();
    const bool lies_well = is_packed(weight)
                               ? weight.is_contiguous() && weight.size(1) * pagebinder::PACKED_PANEL == args.inner
                               : weight.dim() == 2 && weight.stride(1) == 1 && weight.size(1) == args.inner;
    return lies_well && weight.scalar_type() == type &&
           (!bias || (bias->scalar_type() == type && bias->dim() == 1 && bias->size(0) == columns_of(weight) &&
                      (bias->size(0) <= 1 || bias->stride(0) == 1)));
  }
};

// An empty result of a layer for x [..., K].
Tensor new_result(const Tensor& x, int64_t columns) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) sizes.push_back(x.size(d));
  sizes.push_back(columns);
  return torch::stable::new_empty(x, sizes);
}

std::vector<Tensor> linears(const Tensor& x, std::vector<Tensor> weights, std::vector<Tensor> given_biases) {
  STD_TORCH_CHECK(given_biases.empty() || given_biases.size() == weights.size(),
                  "linears needs a bias for every weight, or none");
  std::vector<Bias> biases(given_biases.begin(), given_biases.end());
  biases.resize(weights.size());
  std::vector<Tensor> results;
  Call call(x, weights, biases);
  for (size_t i = 0; i < weights.size(); ++i) {
    results.push_back(call.kernel ? new_result(x, columns_of(weights[i]))
                                  : torch_linear(x, plain(weights[i]), biases[i]));
    if (call.kernel) call.layers[i].out = results[i].mutable_data_ptr();
  }
  if (call.kernel) call.kernel(call.args);
  return results;
}

Tensor linear(const Tensor& x, const Tensor& weight, Bias bias) {
  Call call(x, {weight}, {bias});
  if (!call.kernel) return torch_linear(x, plain(weight), bias);
  Tensor out = new_result(x, columns_of(weight));
  call.layers[0].out = out.mutable_data_ptr();
  call.kernel(call.args);
  return out;
}

// ---- gated layers ----------------------------------------------------------------------------------------------

Activation activation_named(const std::string& name) {
  constexpr std::pair<const char*, Activation> NAMES[] = {
      {"silu", Activation::SILU}, {"gelu", Activation::GELU},   {"gelu_tanh", Activation::GELU_TANH},
      {"relu", Activation::RELU}, {"relu2", Activation::RELU2}, {"sigmoid", Activation::SIGMOID}};
  for (const auto& [known, activation] : NAMES)
    if (name == known) return activation;
  STD_TORCH_CHECK(false, "unknown activation \"", name, "\"");
  return Activation::NONE;
}

// gate[i] = act(gate[i]) * up[i]
template <class T>
void gate_values(Activation activation, T* gate, const T* up, int64_t count) {
  constexpr int64_t GRAIN = 1 << 14;
  torch::stable::parallel_for(0, count, GRAIN, [&](int64_t i, int64_t end) {
    using pagebinder::W;
    for (; i + W <= end; i += W)
      pagebinder::store_gated(activation, pagebinder::load_float(gate + i), pagebinder::load_float(up + i), gate + i);
    const int rest = static_cast<int>(end - i);
    T last[W];
    pagebinder::store_gated(activation, pagebinder::load_float_part(gate + i, rest),
                            pagebinder::load_float_part(up + i, rest), last);
    std::memcpy(gate + i, last, rest * sizeof(T));
  });
}

template <class T>
void gate_tensors(Activation activation, const Tensor& gate, const Tensor& up) {
  gate_values(activation, static_cast<T*>(gate.mutable_data_ptr()), static_cast<const T*>(up.const_data_ptr()),
              gate.numel());
}

Tensor gated_linear(const Tensor& x, const Tensor& gate, const Tensor& up, Bias gate_bias, Bias up_bias,
                    std::string activation) {
  STD_TORCH_CHECK((gate.dim() == 2 || is_packed(gate)) && up.dim() == gate.dim() && gate.size(0) == up.size(0),
                  "gate and up must be [N, K] alike");
  const Activation kind = activation_named(activation);
  Call call(x, {gate, up}, {gate_bias, up_bias});
  if (call.kernel) {
    Tensor out = new_result(x, columns_of(gate));
    call.layers[0].out = out.mutable_data_ptr(), call.args.gate = kind;
    call.kernel(call.args);
    return out;
  }
  const Tensor out = torch_linear(x, plain(gate), gate_bias), other = torch_linear(x, plain(up), up_bias);
  switch (out.scalar_type()) {
    case ScalarType::Float: gate_tensors<float>(kind, out, other); break;
    case ScalarType::BFloat16: gate_tensors<bf16>(kind, out, other); break;
    case ScalarType::Half: gate_tensors<pagebinder::f16>(kind, out, other); break;
    default: STD_TORCH_CHECK(false, "gated_linear serves float32, bfloat16 and float16");
  }
  return out;
}

bool has_matrix_tiles() {
  return pagebinder::linear_suits_tiles(1, pagebinder::LINEAR_GRAIN, pagebinder::LINEAR_GRAIN);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linears", TORCH_BOX(&linears));
  m.impl("gated_linear", TORCH_BOX(&gated_linear));
  m.impl("pack_linear_weight", TORCH_BOX(&pack_linear_weight));
  m.impl("unpack_linear_weight", TORCH_BOX(&unpack_linear_weight));
}

// Does this machine let the kernels use matrix tiles?
STABLE_TORCH_LIBRARY_FRAGMENT(pagebinder_cpu, m) {
  m.def("has_matrix_tiles() -> bool");
  m.def("pack_linear_weight(Tensor weight, Tensor(a!) packed) -> ()");
  m.def("unpack_linear_weight(Tensor packed, Tensor(a!) weight) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CompositeExplicitAutograd, m) {
  m.impl("has_matrix_tiles", TORCH_BOX(&has_matrix_tiles));
}
