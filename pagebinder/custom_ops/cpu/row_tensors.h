// Tensors [..., columns] as rows for bindings: checked, and described as the kernels want them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "checks.h"
#include "element_of.h"
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

inline bool alike(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && sizes_of(a) == sizes_of(b);
}

// A row [C] of x's dtype or, `is_wide`, float32; of another dtype or layout there is a copy.
inline const void* row_of(const Tensor& row, const char* name, const Tensor& x, bool& is_wide, Copies& copies) {
  PB_CHECK(row.dim() == 1 && row.size(0) == x.size(x.dim() - 1), name, " must be [C]");
  is_wide = row.scalar_type() != x.scalar_type() || row.scalar_type() == ScalarType::Float;
  const bool is_dense = row.size(0) == 1 || row.stride(0) == 1;
  if (is_dense && (!is_wide || row.scalar_type() == ScalarType::Float)) return row.const_data_ptr();
  copies.push_back(torch::stable::contiguous(is_wide ? torch::stable::to(row, ScalarType::Float) : row));
  return copies.back().const_data_ptr();
}

template <class T>
NormRows<T> norm_of(const Tensor& x, const std::optional<Tensor>& weight, double eps, const std::string& tail,
                    Copies& copies) {
  NormRows<T> rows{};
  rows.x = rows_of<T>(x, copies), rows.tail = tail_named(tail), rows.eps = static_cast<float>(eps);
  PB_CHECK(weight.has_value() == (rows.tail != NormTail::PLAIN), "a tail other than none needs a weight");
  if (weight) rows.weight = row_of(*weight, "weight", x, rows.wide_weight, copies);
  return rows;
}

}  // namespace pagebinder
