// What an expert computes between its projections, in float32: gates.py on vectors.
#pragma once

#include "activations.h"

namespace pagebinder {

struct Gate {
  Activation activation;
  bool gated, interleaved, limited;
  float limit, up_offset;         // of gated experts
  float alpha;                    // of SILU: x * sigmoid(alpha * x)
};

// gate[i] becomes what the expert makes of gate[i] and up[i]; `up` is not read unless gated.
inline void apply_gate(const Gate& g, VF* gate, const VF* up, int count) {
  const VF limit = splat(g.limit);
  for (int i = 0; i < count; ++i) {
    VF x = gate[i];
    if (g.gated && g.limited) x = select(x > limit, limit, x);
    x = g.activation == Activation::SILU ? x * sigmoid(x * g.alpha) : activate(g.activation, x);
    if (g.gated) {
      VF y = up[i];
      if (g.limited) y = select(y > limit, limit, select(y < -limit, -limit, y));
      x *= y + g.up_offset;
    }
    gate[i] = x;
  }
}

}  // namespace pagebinder
