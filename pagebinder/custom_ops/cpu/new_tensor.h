// Tensors on the CPU that nothing was written to yet, contiguous. The dispatcher is not asked.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <vector>

#include "checks.h"
#include "recorder.h"

namespace pagebinder {

inline size_t element_bytes(torch::headeronly::ScalarType dtype) {
  using torch::headeronly::ScalarType;
  switch (dtype) {
    case ScalarType::Byte:
    case ScalarType::Char:
    case ScalarType::Bool:
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2: return 1;
    case ScalarType::Short:
    case ScalarType::Half:
    case ScalarType::BFloat16: return 2;
    case ScalarType::Int:
    case ScalarType::Float: return 4;
    default: return 8;
  }
}

inline torch::stable::Tensor new_tensor(const int64_t* sizes, size_t dims, torch::headeronly::ScalarType dtype) {
  constexpr size_t MOST_DIMS = 64;  // of any tensor
  int64_t strides[MOST_DIMS], stride = 1;
  PB_CHECK(dims <= MOST_DIMS, "a tensor of ", dims, " dims");
  for (size_t d = dims; d-- > 0; stride *= sizes[d] > 1 ? sizes[d] : 1) strides[d] = stride;
  AtenTensorHandle handle;
  if (Recorder* recorder = Recorder::current()) {
    void* place = recorder->memory->take(static_cast<size_t>(dims > 0 && sizes[0] == 0 ? 0 : stride) * element_bytes(dtype));
    PB_CHECK(aoti_torch_create_tensor_from_blob(place, static_cast<int64_t>(dims), sizes, strides, 0,
                                                static_cast<int32_t>(dtype), aoti_torch_device_type_cpu(), 0, &handle) == 0,
             "cannot describe the output");
    return torch::stable::Tensor(handle);
  }
  PB_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(dims), sizes, strides, static_cast<int32_t>(dtype),
                                    aoti_torch_device_type_cpu(), 0, &handle) == 0,
           "cannot allocate the output");
  return torch::stable::Tensor(handle);
}

inline torch::stable::Tensor new_tensor(std::initializer_list<int64_t> sizes, torch::headeronly::ScalarType dtype) {
  return new_tensor(sizes.begin(), sizes.size(), dtype);
}
inline torch::stable::Tensor new_tensor(const std::vector<int64_t>& sizes, torch::headeronly::ScalarType dtype) {
  return new_tensor(sizes.data(), sizes.size(), dtype);
}

}  // namespace pagebinder
