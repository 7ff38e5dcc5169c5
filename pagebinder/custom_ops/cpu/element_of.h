// What kernels call the element type of a tensor.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "checks.h"
#include "elements.h"

namespace pagebinder {

inline bool is_float(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}

// `name`: what a message calls the tensor.
inline Element element_of(const torch::stable::Tensor& t, const char* name) {
  using torch::headeronly::ScalarType;
  const ScalarType type = t.scalar_type();
  PB_CHECK(is_float(type), name, " must be float32, bfloat16 or float16");
  return type == ScalarType::Float ? Element::F32 : type == ScalarType::BFloat16 ? Element::BF16 : Element::F16;
}

}  // namespace pagebinder
