// Experts of float32 on vectors.
#include "moe_vectors.h"

namespace pagebinder {

template <> void moe_experts_vectors<Element::F32>(const MoeArgs& a) { moe_experts_of<float>(a); }
template <> void expert_linear_vectors<Element::F32>(const ExpertLinearArgs& a) { expert_linear_of<float>(a); }

}  // namespace pagebinder
