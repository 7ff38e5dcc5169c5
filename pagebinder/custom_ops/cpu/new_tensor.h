// Tensors on the CPU that nothing was written to yet, contiguous. The dispatcher is not asked.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <vector>

#include "checks.h"
#include "recorder.h"

namespace pagebinder {

inline torch::stable::Tensor new_tensor(const int64_t* sizes, size_t dims, torch::headeronly::ScalarType dtype) {
  constexpr size_t MOST_DIMS = 64;  // of any tensor
  int64_t strides[MOST_DIMS], stride = 1;
  PB_CHECK(dims <= MOST_DIMS, "a tensor of ", dims, " dims");
  for (size_t d = dims; d-- > 0; stride *= sizes[d] > 1 ? sizes[d] : 1) strides[d] = stride;
  AtenTensorHandle handle;
  if (Recorder* recorder = Recorder::current()) {
    const size_t numel = dims > 0 && sizes[0] == 0 ? 0 : static_cast<size_t>(stride);
    void* place = recorder->memory->take(numel * aoti_torch_dtype_element_size(static_cast<int32_t>(dtype)));
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
