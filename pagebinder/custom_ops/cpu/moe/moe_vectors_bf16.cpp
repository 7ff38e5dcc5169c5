// Experts of bfloat16 on vectors.
#include "moe_vectors.h"

namespace pagebinder {

template <> void moe_experts_vectors<Element::BF16>(const MoeArgs& a) { moe_experts_of<bf16>(a); }
template <> void expert_linear_vectors<Element::BF16>(const ExpertLinearArgs& a) { expert_linear_of<bf16>(a); }

}  // namespace pagebinder
