// Linear layers in float16 and what they export, see element_kernels.h.
#include "element_kernels.h"
#include "linear_vectors.h"

const pagebinder::Float16Linear* pagebinder_linear_float16() {
  using namespace pagebinder;
  static constexpr Float16Linear KERNELS{linear_with_vectors<f16>, linear_with_floats<f16>, gate_values<f16>};
  return &KERNELS;
}
