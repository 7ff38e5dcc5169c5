// Experts of float16 on vectors.
#include "moe_vectors.h"

namespace pagebinder {

template <> void moe_experts_vectors<Element::F16>(const MoeArgs& a) { moe_experts_of<f16>(a); }
template <> void expert_linear_vectors<Element::F16>(const ExpertLinearArgs& a) { expert_linear_of<f16>(a); }

}  // namespace pagebinder
