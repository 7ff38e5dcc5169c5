// Registers linear layers under `pagebinder_cpu`: kernels of ours for few rows, torch's own linear for the rest.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "activation_names.h"
#include "binding_elements.h"
#include "checks.h"
#include "direct_calls.h"
#include "linear.h"
#include "new_tensor.h"
#include "num_threads.h"
#include "recorder.h"
#include "thread_pool.h"

namespace {

using pagebinder::Activation;
using pagebinder::activation_named;
using pagebinder::bf16;
using pagebinder::LinearArgs;
using pagebinder::LinearLayer;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Bias = std::optional<Tensor>;
using Kernel = void (*)(const LinearArgs&);

Tensor torch_linear(const Tensor& x, const Tensor& weight, const Bias& bias) {
  const pagebinder::AllTorchThreads all;
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  PB_CHECK(aoti_torch_call_dispatcher("aten::linear", "", stack.data()) == 0, "aten::linear failed");
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

bool has_matrix_tiles() {
  return pagebinder::linear_suits_tiles(1, pagebinder::LINEAR_GRAIN, pagebinder::LINEAR_GRAIN);
}
bool has_dots() { return pagebinder::linear_suits_dots(pagebinder::LINEAR_GRAIN, pagebinder::LINEAR_GRAIN); }

Kernel packed_kernel() {
  if (has_matrix_tiles()) return pagebinder::packed_linear_with_tiles;
  return has_dots() ? pagebinder::packed_linear_with_dots : nullptr;
}
bool reads_packed_weights() { return packed_kernel() != nullptr; }

// Has torch no products of float16 here? oneDNN has those of AVX-512 FP16, which all processors with matrix tiles have,
// and of ARM.
bool torch_lacks_float16() {
#if defined(__x86_64__) && !defined(__AVX512FP16__)
  return !has_matrix_tiles();
#else
  return false;
#endif
}

Kernel kernel_for(ScalarType type, int64_t rows, int64_t columns, int64_t inner) {
  const bool whole = columns % pagebinder::LINEAR_GRAIN == 0 && inner % pagebinder::LINEAR_GRAIN == 0 && inner > 0;
  if (!whole) return nullptr;
  if (type == ScalarType::BFloat16 && rows > pagebinder::LINEAR_STREAM_ROWS) {
    if (pagebinder::linear_suits_tiles(rows, columns, inner)) return pagebinder::linear_with_tiles;
    if (!has_matrix_tiles() && has_dots()) return pagebinder::linear_with_dots;
  }
  const bool few = rows <= pagebinder::LINEAR_MOST_VECTOR_ROWS;
  if (type == ScalarType::Half && torch_lacks_float16())
    return few ? pagebinder::float16_linear().few_rows : pagebinder::float16_linear().many_rows;
  if (!few) return nullptr;
  if (type == ScalarType::Float) return pagebinder::linear_with_vectors<float>;
  return type == ScalarType::BFloat16 ? pagebinder::linear_with_vectors<bf16> : nullptr;
}

// ---- packed weights --------------------------------------------------------------------------------------------

constexpr int64_t PACKED_DIMS = 6;  // [N / 32, K / 32, 2, 16, 16, 2]

constexpr int64_t CODED_DIMS = 3;   // [N / 32, K / 256, bytes of a block]

bool is_packed(const Tensor& weight) { return weight.dim() == PACKED_DIMS; }
bool is_coded(const Tensor& weight) { return weight.dim() == CODED_DIMS && weight.scalar_type() == ScalarType::Byte; }
bool is_plain(const Tensor& weight) { return !is_packed(weight) && !is_coded(weight); }
int64_t columns_of(const Tensor& weight) {
  return weight.size(0) * (is_plain(weight) ? 1 : pagebinder::PACKED_PANEL);
}

void for_panels(const Tensor& plain, const Tensor& packed, bool unpack) {
  PB_CHECK(plain.scalar_type() == ScalarType::BFloat16 && packed.scalar_type() == ScalarType::BFloat16 &&
               plain.dim() == 2 && plain.stride(1) == 1 && is_packed(packed) && packed.is_contiguous() &&
               plain.numel() == packed.numel() && packed.size(0) * pagebinder::PACKED_PANEL == plain.size(0),
           "a bf16 weight [N, K] is packed as [N / 32, K / 32, 2, 16, 16, 2]");
  const pagebinder::PackedWeight weight{plain.mutable_data_ptr(), plain.stride(0), plain.size(1),
                                        packed.mutable_data_ptr()};
  const int num_threads = pagebinder::num_threads();
  pagebinder::for_ranges(packed.size(0), 1, num_threads, [&](int64_t panel, int64_t) {
    pagebinder::pack_panel(weight, panel, unpack);
  });
}

void pack_linear_weight(const Tensor& weight, Tensor packed) { for_panels(weight, packed, false); }
void unpack_linear_weight(const Tensor& packed, Tensor weight) { for_panels(weight, packed, true); }

// ---- coded weights ---------------------------------------------------------------------------------------------

pagebinder::PackedWeight to_be_coded(const Tensor& weight) {
  PB_CHECK(weight.scalar_type() == ScalarType::BFloat16 && weight.dim() == 2 && weight.stride(1) == 1 &&
               weight.size(0) % pagebinder::PACKED_PANEL == 0 && weight.size(1) % pagebinder::CODED_INNER == 0,
           "a bf16 weight [N, K] is coded, N a multiple of 32 and K of ", pagebinder::CODED_INNER);
  return {weight.mutable_data_ptr(), weight.stride(0), weight.size(1), nullptr};
}

int64_t coded_block_bytes(const Tensor& weight) {
  const pagebinder::PackedWeight plain = to_be_coded(weight);
  std::atomic<int64_t> most{0};
  const int num_threads = pagebinder::num_threads();
  pagebinder::for_ranges(columns_of(weight) / pagebinder::PACKED_PANEL, 1, num_threads, [&](int64_t panel, int64_t) {
    const int64_t bytes = pagebinder::coded_bytes_of_panel(plain, panel);
    for (int64_t before = most.load(); bytes > before && !most.compare_exchange_weak(before, bytes);) {}
  });
  return most.load();
}

void code_linear_weight(const Tensor& weight, Tensor coded) {
  const pagebinder::PackedWeight plain = to_be_coded(weight);
  PB_CHECK(is_coded(coded) && coded.is_contiguous() && columns_of(coded) == weight.size(0) &&
               coded.size(1) * pagebinder::CODED_INNER == weight.size(1) &&
               coded.size(2) >= coded_block_bytes(weight),
           "codes of [N, K] are uint8 [N / 32, K / ", pagebinder::CODED_INNER, ", coded_block_bytes]");
  uint8_t* codes = static_cast<uint8_t*>(coded.mutable_data_ptr());
  const int64_t bytes = coded.size(2), panel_bytes = coded.size(1) * bytes;
  const int num_threads = pagebinder::num_threads();
  pagebinder::for_ranges(coded.size(0), 1, num_threads, [&](int64_t panel, int64_t) {
    pagebinder::code_panel(plain, panel, bytes, codes + panel * panel_bytes);
  });
}

Tensor decode_linear_weight(const Tensor& coded) {
  PB_CHECK(is_coded(coded) && coded.is_contiguous(), "codes are uint8 [N / 32, K / 256, bytes], contiguous");
  const int64_t inner = coded.size(1) * pagebinder::CODED_INNER, bytes = coded.size(2);
  Tensor packed = pagebinder::new_tensor({coded.size(0), inner / 32, 2, 16, 16, 2}, ScalarType::BFloat16);
  uint16_t* to = static_cast<uint16_t*>(packed.mutable_data_ptr());
  const uint8_t* codes = static_cast<const uint8_t*>(coded.const_data_ptr());
  const int num_threads = pagebinder::num_threads();
  pagebinder::for_ranges(coded.size(0), 1, num_threads, [&](int64_t panel, int64_t) {
    pagebinder::decode_panel(codes + panel * coded.size(1) * bytes, bytes, inner,
                             to + panel * pagebinder::PACKED_PANEL * inner);
  });
  return packed;
}

// The weight [N, K] for kernels that want it so.
Tensor plain(const Tensor& weight) {
  if (is_coded(weight)) return plain(decode_linear_weight(weight));
  if (!is_packed(weight)) return weight;
  Tensor result = pagebinder::new_tensor({columns_of(weight), weight.size(1) * pagebinder::PACKED_PANEL},
                                         weight.scalar_type());
  for_panels(result, weight, true);
  return result;
}

// ---- calls -----------------------------------------------------------------------------------------------------

// What threads of a call read, as long as one of them does.
struct Operands {
  Tensor x;
  std::vector<Tensor> weights;
  std::vector<Bias> biases;
};

// One call for several layers on the same x; `kernel` is null where torch has to serve them.
struct Call {
  std::vector<LinearLayer> layers;
  LinearArgs args{};
  Kernel kernel = nullptr;

  Call(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Bias>& biases) {
    if (x.dim() == 0 || !evenly_spaced_rows(x, args.rows, args.x_stride) || args.rows == 0) return;
    args.x = x.const_data_ptr(), args.inner = x.size(x.dim() - 1);
    args.num_threads = pagebinder::num_threads();
    Kernel chosen = nullptr;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!fits(x, weights[i], biases[i])) return;
      if (is_packed(weights[i]) != is_packed(weights[0]) || is_coded(weights[i]) != is_coded(weights[0])) return;
      chosen = is_plain(weights[i]) ? kernel_for(x.scalar_type(), args.rows, weights[i].size(0), args.inner)
                                    : packed_kernel();
      if (chosen == nullptr) return;
      layers.push_back({columns_of(weights[i]), weights[i].const_data_ptr(), weights[i].stride(0),
                        is_coded(weights[i]) ? weights[i].size(2) : 0, biases[i] ? biases[i]->const_data_ptr() : nullptr, nullptr});
    }
    args.num_layers = static_cast<int>(layers.size());
    args.operands = pagebinder::kept_with_memory(std::make_shared<Operands>(Operands{x, weights, biases}));
    kernel = chosen;
  }

  void launch() const {
    pagebinder::launch([kernel = kernel, args = args, layers = layers]() mutable {
      args.layers = layers.data();
      kernel(args);
    });
  }

  bool fits(const Tensor& x, const Tensor& weight, const Bias& bias) const {
    const ScalarType type = x.scalar_type();
    const int64_t k_of_one = is_packed(weight) ? pagebinder::PACKED_PANEL : pagebinder::CODED_INNER;
    const bool lies_well = is_plain(weight)
                               ? weight.dim() == 2 && weight.stride(1) == 1 && weight.size(1) == args.inner
                               : weight.is_contiguous() && weight.size(1) * k_of_one == args.inner;
    const ScalarType type_of_numbers = is_coded(weight) ? ScalarType::BFloat16 : weight.scalar_type();
    return lies_well && type_of_numbers == type &&
           (!bias || (bias->scalar_type() == type && bias->dim() == 1 && bias->size(0) == columns_of(weight) &&
                      (bias->size(0) <= 1 || bias->stride(0) == 1)));
  }
};

// An empty result of a layer for x [..., K].
Tensor new_result(const Tensor& x, int64_t columns) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) sizes.push_back(x.size(d));
  sizes.push_back(columns);
  return pagebinder::new_tensor(sizes, x.scalar_type());
}

std::vector<Tensor> linears(const Tensor& x, std::vector<Tensor> weights, std::vector<Tensor> given_biases) {
  PB_CHECK(given_biases.empty() || given_biases.size() == weights.size(),
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
  if (call.kernel) call.launch();
  return results;
}

Tensor linear(const Tensor& x, const Tensor& weight, Bias bias) {
  Call call(x, {weight}, {bias});
  if (!call.kernel) return torch_linear(x, plain(weight), bias);
  Tensor out = new_result(x, columns_of(weight));
  call.layers[0].out = out.mutable_data_ptr();
  call.launch();
  return out;
}

// ---- gated layers ----------------------------------------------------------------------------------------------

template <class T>
void gate_tensors(void (*gate_values)(Activation, T*, const T*, int64_t, int), Activation activation, const Tensor& gate,
                  const Tensor& up) {
  gate_values(activation, static_cast<T*>(gate.mutable_data_ptr()), static_cast<const T*>(up.const_data_ptr()),
              gate.numel(), pagebinder::num_threads());
}

Tensor gated_linear(const Tensor& x, const Tensor& gate, const Tensor& up, Bias gate_bias, Bias up_bias,
                    std::string activation) {
  PB_CHECK((gate.dim() == 2 || !is_plain(gate)) && up.dim() == gate.dim() && gate.size(0) == up.size(0),
           "gate and up must be [N, K] alike");
  const Activation kind = activation_named(activation);
  Call call(x, {gate, up}, {gate_bias, up_bias});
  if (call.kernel) {
    Tensor out = new_result(x, columns_of(gate));
    call.layers[0].out = out.mutable_data_ptr(), call.args.gate = kind;
    call.launch();
    return out;
  }
  const Tensor out = torch_linear(x, plain(gate), gate_bias), other = torch_linear(x, plain(up), up_bias);
  switch (out.scalar_type()) {
    case ScalarType::Float: gate_tensors(pagebinder::gate_values<float>, kind, out, other); break;
    case ScalarType::BFloat16: gate_tensors(pagebinder::gate_values<bf16>, kind, out, other); break;
    case ScalarType::Half: gate_tensors(pagebinder::float16_linear().gate_values, kind, out, other); break;
    default: PB_CHECK(false, "gated_linear serves float32, bfloat16 and float16");
  }
  return out;
}

// ---- threads, for tests and benchmarks -------------------------------------------------------------------------

std::vector<int64_t> thread_pool_counts() {
  const auto& pool = pagebinder::ThreadPool::instance();
  return {pool.num_helpers(), pool.redone_jobs.load(), pool.left_loops.load(), pool.asked_bytes()};
}

void stall_helpers(int64_t microseconds) {
  pagebinder::ThreadPool::instance().stall_microseconds.store(static_cast<int>(microseconds));
}

bool limit_torch_threads(bool limited) { return pagebinder::limit_torch_threads(limited); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "linear", TORCH_BOX(&linear));
  pagebinder::implement(m, "linears", TORCH_BOX(&linears));
  pagebinder::implement(m, "gated_linear", TORCH_BOX(&gated_linear));
  pagebinder::implement(m, "pack_linear_weight", TORCH_BOX(&pack_linear_weight));
  pagebinder::implement(m, "unpack_linear_weight", TORCH_BOX(&unpack_linear_weight));
  pagebinder::implement(m, "coded_block_bytes", TORCH_BOX(&coded_block_bytes));
  pagebinder::implement(m, "code_linear_weight", TORCH_BOX(&code_linear_weight));
  pagebinder::implement(m, "decode_linear_weight", TORCH_BOX(&decode_linear_weight));
}

// has_matrix_tiles: does this machine let the kernels use them? reads_packed_weights: has it kernels for packed weights,
// be it without tiles? thread_pool_counts: threads, jobs that were done again
// because a thread stood still, loops that were left with one inside, bytes of weights that threads without work asked
// for. stall_helpers: from now on threads of the pool stand still for so long before they write a result.
// limit_torch_threads: see num_threads.h.
STABLE_TORCH_LIBRARY_FRAGMENT(pagebinder_cpu, m) {
  m.def("has_matrix_tiles() -> bool");
  m.def("reads_packed_weights() -> bool");
  m.def("thread_pool_counts() -> int[]");
  m.def("stall_helpers(int microseconds) -> ()");
  m.def("limit_torch_threads(bool limited) -> bool");
  m.def("pack_linear_weight(Tensor weight, Tensor(a!) packed) -> ()");
  m.def("unpack_linear_weight(Tensor packed, Tensor(a!) weight) -> ()");
  m.def("coded_block_bytes(Tensor weight) -> int");
  m.def("code_linear_weight(Tensor weight, Tensor(a!) coded) -> ()");
  m.def("decode_linear_weight(Tensor coded) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CompositeExplicitAutograd, m) {
  pagebinder::implement(m, "has_matrix_tiles", TORCH_BOX(&has_matrix_tiles));
  pagebinder::implement(m, "reads_packed_weights", TORCH_BOX(&reads_packed_weights));
  pagebinder::implement(m, "thread_pool_counts", TORCH_BOX(&thread_pool_counts));
  pagebinder::implement(m, "stall_helpers", TORCH_BOX(&stall_helpers));
  pagebinder::implement(m, "limit_torch_threads", TORCH_BOX(&limit_torch_threads));
}
