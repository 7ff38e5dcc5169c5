// Registers LayerNorm, alone and of a sum, under `pagebinder_cpu`.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "checks.h"
#include "direct_calls.h"
#include "layer_norm.h"
#include "num_threads.h"
#include "recorder.h"
#include "row_tensors.h"

namespace {

using namespace pagebinder;

// LayerNorm of x, or of x + residual, which becomes `total`.
Tensor normed(const Tensor& x, const Tensor* residual, Tensor* total, const std::optional<Tensor>& weight,
              const std::optional<Tensor>& bias, double eps) {
  PB_CHECK(x.dim() > 0 && x.size(x.dim() - 1) > 0, "x must be [..., C]");
  const std::vector<int64_t> sizes = sizes_of(x);
  Tensor out = new_tensor(sizes, x.scalar_type());
  Copies copies;
  with_element(element_of(x, "x"), [&](auto type) {
    using T = decltype(type);
    LayerNormArgs<T> args{};
    args.columns = sizes.back(), args.rows = x.numel() / args.columns;
    args.x = rows_of<T>(x, copies), args.eps = static_cast<float>(eps);
    if (weight) args.weight = row_of(*weight, "weight", x, args.wide_weight, copies);
    if (bias) args.bias = row_of(*bias, "bias", x, args.wide_bias, copies);
    if (residual != nullptr) {
      args.residual = rows_of<T>(*residual, copies);
      args.total = static_cast<T*>(total->mutable_data_ptr());
    }
    args.out = static_cast<T*>(out.mutable_data_ptr()), args.num_threads = num_threads();
    launch([=] { layer_norm(args); }, !copies.empty());
  });
  return out;
}

Tensor layer_norm_op(const Tensor& x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps) {
  return normed(x, nullptr, nullptr, weight, bias, eps);
}

std::tuple<Tensor, Tensor> add_layer_norm_op(const Tensor& x, const Tensor& residual, std::optional<Tensor> weight,
                                             std::optional<Tensor> bias, double eps) {
  PB_CHECK(alike(x, residual), "x and residual must have the same shape and dtype");
  Tensor total = new_tensor(sizes_of(x), x.scalar_type());
  Tensor out = normed(x, &residual, &total, weight, bias, eps);
  return {out, total};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "layer_norm", TORCH_BOX(&layer_norm_op));
  pagebinder::implement(m, "add_layer_norm", TORCH_BOX(&add_layer_norm_op));
}
