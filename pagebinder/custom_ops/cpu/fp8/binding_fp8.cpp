// Registers the quantisation of activations, alone and with what makes them, under `pagebinder_cpu`.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "activation_names.h"
#include "checks.h"
#include "direct_calls.h"
#include "fp8/fp8.h"
#include "new_tensor.h"
#include "num_threads.h"
#include "row_tensors.h"
#include "thread_pool.h"

namespace {

using namespace pagebinder;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Granularity granularity_named(const std::string& name) {
  if (name == "tensor") return Granularity::TENSOR;
  if (name == "token") return Granularity::TOKEN;
  PB_CHECK(name == "group", "granularity must be tensor, token or group, not ", name);
  return Granularity::GROUP;
}

struct Quantised {
  Tensor codes, scales;
  Fp8Output out;
};

// Results for values of x's shape.
Quantised quantised_like(const Tensor& x, const std::optional<Tensor>& scale, const std::string& name) {
  PB_CHECK(x.dim() > 0 && x.size(x.dim() - 1) > 0, "x must be [..., K]");
  Fp8Output out{};
  out.granularity = granularity_named(name), out.columns = x.size(x.dim() - 1), out.rows = x.numel() / out.columns;
  std::vector<int64_t> sizes = sizes_of(x);
  Tensor codes = new_tensor(sizes, ScalarType::Float8_e4m3fn);
  if (out.granularity == Granularity::TENSOR) sizes = {1};
  else sizes.back() = out.granularity == Granularity::TOKEN ? 1 : (out.columns + FP8_GROUP - 1) / FP8_GROUP;
  Tensor scales = new_tensor(sizes, ScalarType::Float);
  out.codes = static_cast<uint8_t*>(codes.mutable_data_ptr());
  out.scales = static_cast<float*>(scales.mutable_data_ptr());
  if (scale) {
    PB_CHECK(out.granularity == Granularity::TENSOR, "a static scale is one of the whole tensor");
    PB_CHECK(scale->scalar_type() == ScalarType::Float && scale->dim() == 1 && scale->size(0) == 1,
             "a static scale must be [1] float32");
    *out.scales = *static_cast<const float*>(scale->const_data_ptr());
    out.is_static = true;
  }
  out.num_threads = pagebinder::num_threads(), out.run = run_parallel;
  return {codes, scales, out};
}

std::tuple<Tensor, Tensor> scaled_fp8_quant(const Tensor& x, std::optional<Tensor> scale, std::string granularity) {
  const Quantised to = quantised_like(x, scale, granularity);
  Copies copies;
  with_element(element_of(x, "x"), [&](auto type) {
    using T = decltype(type);
    quantise(to.out, PlainRows<T>{rows_of<T>(x, copies)});
  });
  return {to.codes, to.scales};
}

std::tuple<Tensor, Tensor> gated_activation(const Tensor& gate, const Tensor& up, std::optional<Tensor> scale,
                                            std::string activation, std::string granularity) {
  PB_CHECK(alike(gate, up), "gate and up must have the same shape and dtype");
  const Quantised to = quantised_like(gate, scale, granularity);
  Copies copies;
  with_element(element_of(gate, "gate"), [&](auto type) {
    using T = decltype(type);
    quantise(to.out, GatedRows<T>{rows_of<T>(gate, copies), rows_of<T>(up, copies), activation_named(activation)});
  });
  return {to.codes, to.scales};
}

std::tuple<Tensor, Tensor> rms_norm_op(const Tensor& x, std::optional<Tensor> weight, std::optional<Tensor> scale,
                                    double eps, std::string tail, std::string granularity) {
  const Quantised to = quantised_like(x, scale, granularity);
  Copies copies;
  with_element(element_of(x, "x"), [&](auto type) {
    quantise(to.out, norm_of<decltype(type)>(x, weight, eps, tail, copies));
  });
  return {to.codes, to.scales};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_op(const Tensor& x, const Tensor& residual, std::optional<Tensor> weight,
                                                std::optional<Tensor> scale, double eps, std::string tail,
                                                std::string granularity) {
  PB_CHECK(alike(x, residual), "x and residual must have the same shape and dtype");
  const Quantised to = quantised_like(x, scale, granularity);
  Tensor total = new_tensor(sizes_of(x), x.scalar_type());
  Copies copies;
  with_element(element_of(x, "x"), [&](auto type) {
    using T = decltype(type);
    NormRows<T> rows = norm_of<T>(x, weight, eps, tail, copies);
    rows.residual = rows_of<T>(residual, copies), rows.total = static_cast<T*>(total.mutable_data_ptr());
    quantise(to.out, rows);
  });
  return {to.codes, to.scales, total};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "scaled_fp8_quant", TORCH_BOX(&scaled_fp8_quant));
  pagebinder::implement(m, "gated_activation_fp8_quant", TORCH_BOX(&gated_activation));
  pagebinder::implement(m, "rms_norm_fp8_quant", TORCH_BOX(&rms_norm_op));
  pagebinder::implement(m, "add_rms_norm_fp8_quant", TORCH_BOX(&add_rms_norm_op));
}
