// Which engine serves a call: dots for packed experts, matrix tiles where type, sizes and machine suit them, vectors for
// the rest.
#include "moe.h"

namespace pagebinder {

void moe_experts(const MoeArgs& a) {
  if (a.up.packed) moe_experts_dots(a);
  else if (tiles_suit(a.type, a.up) && tiles_suit(a.type, a.down)) moe_experts_tiles(a);
  else if (a.type == Element::F32) moe_experts_vectors<Element::F32>(a);
  else if (a.type == Element::BF16) moe_experts_vectors<Element::BF16>(a);
  else moe_experts_vectors<Element::F16>(a);
}

void expert_linear(const ExpertLinearArgs& a) {
  if (tiles_suit(a.type, a.projection)) expert_linear_tiles(a);
  else if (a.type == Element::F32) expert_linear_vectors<Element::F32>(a);
  else if (a.type == Element::BF16) expert_linear_vectors<Element::BF16>(a);
  else expert_linear_vectors<Element::F16>(a);
}

}  // namespace pagebinder
