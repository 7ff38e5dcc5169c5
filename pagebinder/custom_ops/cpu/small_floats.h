// Number formats below 16 bits, W lanes at a time: E4M3 and E5M2 (fp8), E2M1 (fp4), UE8M0 (a power of two in a byte).
//
//     E4M3   s eeee mmm   bias 7, largest 448, no infinity, 0x7f is NaN
//     E5M2   s eeeee mm   bias 15, largest 57344; the upper byte of a half, with its infinity and NaN
//     E2M1   s ee m       0 0.5 1 1.5 2 3 4 6
//     UE8M0  eeeeeeee     2^(byte - 127), 255 is NaN
//
// Scales come from exponent bits: a floating log2 is off by one at powers of two on some machines. A block of
// largest magnitude amax gets the least e with amax * 2^-e <= 448 (fp8) or 6 (fp4); 448 = 1.75 * 2^8, 6 = 1.5 * 2^2.
#pragma once

#include "simd.h"

namespace pagebinder {

constexpr float E4M3_MAX = 448.0f, E5M2_MAX = 57344.0f;
constexpr float FP8_AMAX_FLOOR = 1e-4f;
constexpr float FP4_AMAX_FLOOR = 0x1.8p-124f;  // 6 * 2^-126

PB_INLINE VU select_bits(VI mask, VU yes, VU no) { return bit_cast<VU>(mask ? bit_cast<VI>(yes) : bit_cast<VI>(no)); }
PB_INLINE VF magnitude_of(VF x) { return bit_cast<VF>(bit_cast<VU>(x) & 0x7fffffffu); }

// x as it is after a trip through bfloat16.
PB_INLINE VF through_bf16(VF x) { return bit_cast<VF>(round_to_bf16(x)); }
inline float through_bf16(float x) { return through_bf16(splat(x))[0]; }

// x rounded to T and widened again.
template <class T>
PB_INLINE VF rounded(VF x) {
  T narrow[W];
  store_float(narrow, x);
  return load_float(narrow);
}
template <> PB_INLINE VF rounded<float>(VF x) { return x; }
template <> PB_INLINE VF rounded<bf16>(VF x) { return through_bf16(x); }

// ---- E4M3, E5M2 ------------------------------------------------------------------------------------------------

// Nearest, ties to even, saturating at 448; NaN stays NaN. The code is in the low byte of each lane.
PB_INLINE VU encode_e4m3(VF x) {
  const VU sign = (bit_cast<VU>(x) >> 24) & 0x80u;
  VF magnitude = magnitude_of(x);
  magnitude = select(magnitude > splat(E4M3_MAX), splat(E4M3_MAX), magnitude);
  const VU bits = bit_cast<VU>(magnitude);
  const VU normal = (bits - (120u << 23) + 0x7ffffu + ((bits >> 20) & 1u)) >> 20;
  const VU subnormal = bit_cast<VU>(magnitude + splat(0x1p14f)) - 0x46800000u;  // the addition rounds to 2^-9
  VU code = select_bits(magnitude < splat(0x1p-6f), subnormal, normal);
  code = select_bits(magnitude == magnitude, code, VU{} + 0x7fu);
  return code | sign;
}

PB_INLINE void store_e4m3(uint8_t* p, VF x) { store(p, low_bytes(encode_e4m3(x))); }

// No subnormal float32 occurs on the way: a program may have told the processor to flush them.
PB_INLINE VF decode_e4m3(VU code) {
  const VU magnitude = code & 0x7fu;
  const VF normal = bit_cast<VF>((magnitude << 20) + (120u << 23));
  const VF subnormal = __builtin_convertvector(bit_cast<VI>(magnitude), VF) * splat(0x1p-9f);
  VU bits = bit_cast<VU>(select(magnitude < (VU{} + 8u), subnormal, normal));
  bits = select_bits(magnitude == (VU{} + 0x7fu), VU{} + 0x7fc00000u, bits);
  return bit_cast<VF>(bits | ((code & 0x80u) << 24));
}

PB_INLINE VF load_e4m3(const uint8_t* p) { return decode_e4m3(widen(load<VB>(p))); }

// The same over 256, of codes that are no NaN: in place they are halves, whose exponent has another bias.
PB_INLINE VF load_e4m3_over_256(const uint8_t* p) {
  typedef int16_t Words __attribute__((vector_size(2 * W)));
  const Words signs_twice = __builtin_convertvector(load<VSB>(p), Words) << 7;
  return from_f16(bit_cast<VH>(signs_twice & static_cast<int16_t>(0xbfff)));
}

// Nearest, ties to even, saturating at 57344; NaN stays NaN.
PB_INLINE VU encode_e5m2(VF x) {
  const VU sign = (bit_cast<VU>(x) >> 24) & 0x80u;
  VF magnitude = magnitude_of(x);
  magnitude = select(magnitude > splat(E5M2_MAX), splat(E5M2_MAX), magnitude);
  const VU bits = bit_cast<VU>(magnitude);
  const VU normal = (bits - (112u << 23) + 0xfffffu + ((bits >> 21) & 1u)) >> 21;
  const VU subnormal = bit_cast<VU>(magnitude + splat(0x1p7f)) - 0x43000000u;  // the addition rounds to 2^-16
  VU code = select_bits(magnitude < splat(0x1p-14f), subnormal, normal);
  code = select_bits(magnitude == magnitude, code, VU{} + 0x7fu);
  return code | sign;
}

// ---- E2M1 ------------------------------------------------------------------------------------------------------

// Nearest, ties to even, saturating at 6; a NaN becomes 0 (its block's scale says NaN).
PB_INLINE VU encode_e2m1(VF x) {
  const VF m = magnitude_of(x);
  const VI code = (m > splat(0.25f)) + (m >= splat(0.75f)) + (m > splat(1.25f)) + (m >= splat(1.75f)) +
                  (m > splat(2.5f)) + (m >= splat(3.5f)) + (m > splat(5.0f));
  return bit_cast<VU>(-code) | ((bit_cast<VU>(x) >> 28) & 8u);
}

constexpr float E2M1_VALUES[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// ---- UE8M0 -----------------------------------------------------------------------------------------------------

PB_INLINE float decode_ue8m0(uint8_t byte) {
  if (byte == 0) return 0x1p-127f;
  return bit_cast<float>(byte == 255 ? 0x7fc00000u : static_cast<uint32_t>(byte) << 23);
}

// 2^-e, exact for -127 < e < 127.
PB_INLINE float inverse_power(int e) { return bit_cast<float>(static_cast<uint32_t>(127 - e) << 23); }
PB_INLINE float power_of_two(int e) { return bit_cast<float>(static_cast<uint32_t>(127 + e) << 23); }

// The exponent of a block's scale, see the top. amax may be infinite or NaN.
inline int fp8_exponent(float amax) {
  const uint32_t bits = bit_cast<uint32_t>(amax < FP8_AMAX_FLOOR ? FP8_AMAX_FLOOR : amax);
  return static_cast<int>(bits >> 23) - 127 - 8 + ((bits & 0x7fffffu) > 0x600000u);
}

inline int fp4_exponent(float amax) {
  const uint32_t bits = bit_cast<uint32_t>(amax < FP4_AMAX_FLOOR ? FP4_AMAX_FLOOR : amax);
  return static_cast<int>(bits >> 23) - 127 - 2 + ((bits & 0x7fffffu) > 0x400000u);
}

// Largest magnitude of `count` floats, a multiple of W; NaN if there is one (its bits are above those of infinity).
inline float largest_magnitude(const float* x, int count) {
  VU most{};
  for (int i = 0; i < count; i += W) {
    const VU bits = load<VU>(x + i) & 0x7fffffffu;
    most = select_bits(bits > most, bits, most);
  }
  uint32_t result = 0;
  for (int lane = 0; lane < W; ++lane) result = most[lane] > result ? most[lane] : result;
  return bit_cast<float>(result);
}

}  // namespace pagebinder
