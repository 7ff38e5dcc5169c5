// Tensors [..., columns] as rows for bindings: checked, and described as the kernels want them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "checks.h"
#include "new_tensor.h"
#include "rms_norm.h"

namespace pagebinder {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline NormTail tail_named(const std::string& name) {
  if (name == "cast_scale") return NormTail::CAST_SCALE;
  if (name == "scale_cast") return NormTail::SCALE_CAST;
  if (name == "offset") return NormTail::OFFSET;
  PB_CHECK(name == "none", "unknown RMSNorm tail ", name);
  return NormTail::PLAIN;
}

inline std::vector<int64_t> sizes_of(const Tensor& t) {
  std::vector<int64_t> sizes(t.dim());
  for (int64_t d = 0; d < t.dim(); ++d) sizes[d] = t.size(d);
  return sizes;
}

// The distance of rows in a tensor [..., columns] whose rows lie at equal distances; -1 if they do not.
inline int64_t row_stride(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  if (t.size(last) > 1 && t.stride(last) != 1) return -1;
  int64_t stride = t.size(last), next = -1;  // next: the stride that a dimension must have
  for (int64_t d = last - 1; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    if (next == -1) stride = t.stride(d);
    else if (t.stride(d) != next) return -1;
    next = t.stride(d) * t.size(d);
  }
  return stride;
}

// Copies that a call made of operands, for as long as it reads them.
using Copies = std::vector<Tensor>;

// A tensor as rows; of one whose rows lie anyhow there is a copy.
template <class T>
RowsOf<T> rows_of(const Tensor& t, Copies& copies) {
  const int64_t stride = t.numel() == 0 ? 0 : row_stride(t);
  if (stride >= 0) return {static_cast<const T*>(t.const_data_ptr()), stride};
  copies.push_back(torch::stable::contiguous(t));
  return {static_cast<const T*>(copies.back().const_data_ptr()), t.size(t.dim() - 1)};
}

// Calls use(T{}) with the type of x's values.
template <class Use>
void with_type_of(const Tensor& x, Use use) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return use(float{});
    case ScalarType::BFloat16: return use(bf16{});
    default: PB_CHECK(x.scalar_type() == ScalarType::Half, "values must be float32, bfloat16 or float16");
  }
  use(f16{});
}

inline bool alike(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && sizes_of(a) == sizes_of(b);
}

template <class T>
NormRows<T> norm_of(const Tensor& x, const std::optional<Tensor>& weight, double eps, const std::string& tail,
                    Copies& copies) {
  NormRows<T> rows{};
  rows.x = rows_of<T>(x, copies), rows.tail = tail_named(tail), rows.eps = static_cast<float>(eps);
  PB_CHECK(weight.has_value() == (rows.tail != NormTail::PLAIN), "a tail other than none needs a weight");
  if (!weight) return rows;
  PB_CHECK(weight->dim() == 1 && weight->size(0) == x.size(x.dim() - 1), "weight must be [C]");
  rows.wide_weight = weight->scalar_type() != x.scalar_type() || weight->scalar_type() == ScalarType::Float;
  const bool is_other = rows.wide_weight && weight->scalar_type() != ScalarType::Float;
  if (is_other) copies.push_back(torch::stable::to(*weight, ScalarType::Float));
  if (const Tensor& values = is_other ? copies.back() : *weight; !values.is_contiguous())
    copies.push_back(torch::stable::contiguous(values));
  rows.weight = (is_other || !weight->is_contiguous() ? copies.back() : *weight).const_data_ptr();
  return rows;
}

}  // namespace pagebinder
