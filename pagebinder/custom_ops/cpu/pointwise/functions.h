// Elementary functions of float32 on vectors, within two units of the last place: what pointwise programs compute.
#pragma once

#include "activations.h"
#include "simd.h"
#include "small_floats.h"

namespace pagebinder::pointwise {

constexpr float INFINITE = __builtin_inff();

// e^x: x = n ln 2 + r with ln 2 in two parts, so that r is right for large x, too. 0 below -87.3, infinity above 88.7.
PB_INLINE VF exponential(VF x) {
  const VF bounded = min(max(x, splat(-87.5f)), splat(89.0f));
  const VF n = round_nearest(bounded * 1.44269504f);
  VF r = fused(n, splat(-0.693359375f), bounded);
  r = fused(n, splat(2.12194440e-4f), r);
  VF poly = splat(1.9875691500e-4f);
  poly = fused(poly, r, splat(1.3981999507e-3f));
  poly = fused(poly, r, splat(8.3334519073e-3f));
  poly = fused(poly, r, splat(4.1665795894e-2f));
  poly = fused(poly, r, splat(1.6666665459e-1f));
  poly = fused(poly, r, splat(5.0000001201e-1f));
  poly = fused(poly * r, r, r + 1.0f);
  // 2^n in two steps, as 2^128 is none.
  const VI half = __builtin_convertvector(n, VI) >> 1, rest = __builtin_convertvector(n, VI) - half;
  VF power = poly * bit_cast<VF>((half + 127) << 23) * bit_cast<VF>((rest + 127) << 23);
  power = select(x < splat(-87.33655f), VF{}, power);
  power = select(x > splat(88.72284f), splat(INFINITE), power);
  return select(x == x, power, x);
}

// ln x of x = 2^e m with m in [sqrt(1/2), sqrt(2)). NaN below 0, -infinity for 0; subnormal numbers are taken for 2^-126.
PB_INLINE VF logarithm(VF x) {
  const VF normal = max(x, splat(0x1p-126f));
  const VU bits = bit_cast<VU>(normal);
  VF e = __builtin_convertvector(bit_cast<VI>(bits >> 23) - 126, VF);
  VF m = bit_cast<VF>((bits & 0x7fffffu) | 0x3f000000u);  // [0.5, 1)
  const VI small = m < splat(0.707106781f);
  e = select(small, e - 1.0f, e);
  m = select(small, m + m, m) - 1.0f;
  const VF z = m * m;
  VF poly = splat(7.0376836292e-2f);
  poly = fused(poly, m, splat(-1.1514610310e-1f));
  poly = fused(poly, m, splat(1.1676998740e-1f));
  poly = fused(poly, m, splat(-1.2420140846e-1f));
  poly = fused(poly, m, splat(1.4249322787e-1f));
  poly = fused(poly, m, splat(-1.6668057665e-1f));
  poly = fused(poly, m, splat(2.0000714765e-1f));
  poly = fused(poly, m, splat(-2.4999993993e-1f));
  poly = fused(poly, m, splat(3.3333331174e-1f));
  VF y = poly * m * z;
  y = fused(e, splat(-2.12194440e-4f), y);
  y = fused(z, splat(-0.5f), y);
  VF result = fused(e, splat(0.693359375f), m + y);
  result = select(x == VF{}, splat(-INFINITE), result);
  result = select(x == splat(INFINITE), splat(INFINITE), result);
  return select(x >= VF{}, result, splat(__builtin_nanf("")));
}

// ln(1 + x): what the addition drops is put right by x / ((1 + x) - 1).
PB_INLINE VF logarithm_of_one_plus(VF x) {
  const VF sum = 1.0f + x, added = unfused(sum) - 1.0f;
  const VF result = select(added == VF{}, x, logarithm(sum) * (x / added));
  return select(sum == splat(INFINITE), splat(INFINITE), result);
}

// e^x - 1: t = tanh(x / 2), 2 t / (1 - t) near zero, where e^x - 1 would lose what they share.
PB_INLINE VF exponential_minus_one(VF x) {
  const VF t = tanh_approx(0.5f * x);
  const VF near_zero = 2.0f * t / (1.0f - t);
  return select(magnitude_of(x) < splat(0.5f), near_zero, exponential(x) - 1.0f);
}

PB_INLINE VF logistic(VF x) { return 1.0f / (1.0f + exponential(-x)); }

PB_INLINE VF floor_of(VF x) {
  const VF whole = __builtin_convertvector(__builtin_convertvector(x, VI), VF);  // towards zero
  const VF lower = select(whole > x, whole - 1.0f, whole);
  return select(magnitude_of(x) < splat(0x1p23f), lower, x);  // the others are whole; NaN stays
}

PB_INLINE VF truth(VI mask) { return select(mask, splat(1.0f), VF{}); }

}  // namespace pagebinder::pointwise
