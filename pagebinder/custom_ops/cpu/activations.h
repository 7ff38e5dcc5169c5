// Activations of gated layers on vectors, in float32: activation/gated_activation.py.
#pragma once

#include "activation.h"
#include "simd.h"

namespace pagebinder {

PB_INLINE VF sigmoid(VF x) {
  const VF power = x * -1.44269504f;
  return reciprocal(1.0f + exp2_approx(min(splat(125.0f), power)));
}

// x Phi(x): erfc by Abramowitz and Stegun 7.1.26, whose absolute error is below 1.5e-7.
PB_INLINE VF gelu(VF x) {
  const VF z = bit_cast<VF>(bit_cast<VU>(x) & 0x7fffffffu) * 0.70710678f;
  const VF t = 1.0f / (1.0f + 0.3275911f * z);
  VF poly = splat(1.061405429f);
  poly = poly * t - 1.453152027f;
  poly = poly * t + 1.421413741f;
  poly = poly * t - 0.284496736f;
  poly = poly * t + 0.254829592f;
  const VF tail = 0.5f * x * (poly * t * exp2_approx(z * z * -1.44269504f));
  return select(x < VF{}, tail, x - tail);
}

PB_INLINE VF activate(Activation activation, VF x) {
  switch (activation) {
    case Activation::SILU: return x * sigmoid(x);
    case Activation::GELU: return gelu(x);
    case Activation::GELU_TANH: return 0.5f * x * (1.0f + tanh_approx(0.79788456f * (x + 0.044715f * x * x * x)));
    case Activation::RELU: return select(x < VF{}, VF{}, x);
    case Activation::RELU2: {
      const VF positive = select(x < VF{}, VF{}, x);
      return positive * positive;
    }
    case Activation::SIGMOID: return sigmoid(x);
    default: return x;
  }
}

// act(gate) * up of values of bf16, act(gate) rounded to it, the product not yet.
PB_INLINE VF gated_product(Activation activation, VF gate, VF up) {
  return bit_cast<VF>(round_to_normal_bf16(activate(activation, gate))) * up;
}

// The same rounded, in the upper halves of words.
PB_INLINE VU gated_bf16(Activation activation, VF gate, VF up) {
  return round_to_normal_bf16(gated_product(activation, gate, up));
}

// The same of any T.
template <class T>
PB_INLINE void store_gated(Activation activation, VF gate, VF up, T* to) {
  T rounded[W];
  store_float(rounded, activate(activation, gate));
  store_float(to, load_float(rounded) * up);
}
PB_INLINE void store_gated(Activation activation, VF gate, VF up, bf16* to) {
  store(to, narrow(gated_bf16(activation, gate, up) >> 16));
}

}  // namespace pagebinder
