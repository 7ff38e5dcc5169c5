// Registers RMSNorm, alone and of a sum, under `pagebinder_cpu`.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "checks.h"
#include "direct_calls.h"
#include "num_threads.h"
#include "recorder.h"
#include "rms_norm.h"
#include "row_tensors.h"

namespace {

using namespace pagebinder;

// RMSNorm of x, or of x + residual, which becomes `total`.
Tensor normed(const Tensor& x, const Tensor* residual, Tensor* total, const std::optional<Tensor>& weight, double eps,
              const std::string& tail) {
  PB_CHECK(x.dim() > 0 && x.size(x.dim() - 1) > 0, "x must be [..., C]");
  const bool widens = weight && tail == "cast_scale" && weight->scalar_type() != x.scalar_type();
  const std::vector<int64_t> sizes = sizes_of(x);
  const int64_t columns = sizes.back(), count = x.numel() / columns;
  const int num_threads = pagebinder::num_threads();
  Tensor out = new_tensor(sizes, widens ? ScalarType::Float : x.scalar_type());
  Copies copies;
  with_element(element_of(x, "x"), [&](auto type) {
    using T = decltype(type);
    NormRows<T> rows = norm_of<T>(x, weight, eps, tail, copies);
    if (residual != nullptr) {
      rows.residual = rows_of<T>(*residual, copies);
      rows.total = static_cast<T*>(total->mutable_data_ptr());
    }
    const auto norm = [&](auto* to) {
      launch([=] { rms_norm(rows, count, columns, to, num_threads); }, !copies.empty());
    };
    if (widens) norm(static_cast<float*>(out.mutable_data_ptr()));
    else norm(static_cast<T*>(out.mutable_data_ptr()));
  });
  return out;
}

Tensor rms_norm_op(const Tensor& x, std::optional<Tensor> weight, double eps, std::string tail) {
  return normed(x, nullptr, nullptr, weight, eps, tail);
}

std::tuple<Tensor, Tensor> add_rms_norm_op(const Tensor& x, const Tensor& residual, std::optional<Tensor> weight,
                                           double eps, std::string tail) {
  PB_CHECK(alike(x, residual), "x and residual must have the same shape and dtype");
  Tensor total = new_tensor(sizes_of(x), x.scalar_type());
  Tensor out = normed(x, &residual, &total, weight, eps, tail);
  return {out, total};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "rms_norm", TORCH_BOX(&rms_norm_op));
  pagebinder::implement(m, "add_rms_norm", TORCH_BOX(&add_rms_norm_op));
}
