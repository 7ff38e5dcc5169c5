// Linear layers of few rows for the types that models are mostly in; those of float16: float16/linear.cpp.
#include "linear_vectors.h"

namespace pagebinder {

template void linear_with_vectors<bf16>(const LinearArgs&);
template void linear_with_vectors<float>(const LinearArgs&);
template void gate_values(Activation, bf16*, const bf16*, int64_t, int);
template void gate_values(Activation, float*, const float*, int64_t, int);

}  // namespace pagebinder
