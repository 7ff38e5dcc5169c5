// Philox4x32-10 and the logarithms of its exponential noise, W tokens at a time: sampling/noise.py, with equal bits.
#pragma once

#include "logit_rows.h"

namespace pagebinder {

// The full products of the lanes' low halves.
PB_INLINE VL multiply_low(VL a, uint32_t b) {
  const VL factor = VL{} + b;
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  return bit_cast<VL>(_mm512_mul_epu32(bit_cast<__m512i>(a), bit_cast<__m512i>(factor)));
#elif defined(__AVX2__)
  return bit_cast<VL>(_mm256_mul_epu32(bit_cast<__m256i>(a), bit_cast<__m256i>(factor)));
#elif defined(__SSE2__)
  return bit_cast<VL>(_mm_mul_epu32(bit_cast<__m128i>(a), bit_cast<__m128i>(factor)));
#else
  return (a & 0xffffffffu) * factor;
#endif
}

// A random stream: what seed and position name.
struct Stream {
  uint64_t seed;
  uint32_t position;
};

// The four words of counters first .. first + W - 1, a counter a lane.
PB_INLINE void philox4x32(Stream stream, uint32_t first, VU* words) {
  VL c[2][4];  // of even and of odd lanes; the high halves hold rubbish that no product sees
  for (int odd = 0; odd < 2; ++odd) {
    VL counter{};
    for (int i = 0; i < W / 2; ++i) counter[i] = first + 2 * i + odd;
    VL &c0 = c[odd][0] = counter, &c1 = c[odd][1] = VL{} + stream.position, &c2 = c[odd][2] = VL{},
       &c3 = c[odd][3] = VL{};
    uint32_t k0 = static_cast<uint32_t>(stream.seed), k1 = static_cast<uint32_t>(stream.seed >> 32);
    PB_UNROLL
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      const VL a = multiply_low(c0, 0xD2511F53u), b = multiply_low(c2, 0xCD9E8D57u);
      c0 = (b >> 32) ^ c1 ^ k0, c1 = b;
      c2 = (a >> 32) ^ c3 ^ k1, c3 = a;
    }
  }
  for (int j = 0; j < 4; ++j) words[j] = bit_cast<VU>((c[0][j] & 0xffffffffu) | (c[1][j] << 32));
}

// By Horner's rule, the highest power first.
template <size_t N>
PB_INLINE VF polynomial(VF x, const float (&coefficients)[N]) {
  VF result = splat(coefficients[0]);
  PB_UNROLL
  for (size_t i = 1; i < N; ++i) result = unfused(result * x) + coefficients[i];
  return result;
}

// x = (1 + rest) * 2^exponent with 1 + rest in [sqrt(1/2), sqrt(2)), for normal x > 0.
struct Split {
  VF exponent, rest;
};
PB_INLINE Split split(VF x) {
  const VI bits = bit_cast<VI>(x), exponent = (bits - 0x3f3504f3) >> 23;
  return {__builtin_convertvector(exponent, VF), bit_cast<VF>(bits - (exponent << 23)) - 1.0f};
}

PB_INLINE VF log2_of(Split x) {
  constexpr float POLYNOMIAL[] = {-0.145811647f, 0.234042346f, -0.24887687f,  0.287098706f,
                                  -0.360239625f, 0.480923235f, -0.721352816f, 1.4426949f};
  return x.exponent + unfused(x.rest * polynomial(x.rest, POLYNOMIAL));
}

// log2 of e = -log2(1 - t), where t is uniform and comes of the word's upper 31 bits.
PB_INLINE VF log2_noise(VU words) {
  const VF limit = splat(1 - 0x1p-24f);
  VF t = (__builtin_convertvector(bit_cast<VI>(words >> 1), VF) + 0.5f) * 0x1p-31f;
  t = select(t < limit, t, limit);
  const Split far = split(1.0f - t);
  const VI is_small = t < splat(0.25f);  // there 1 - t would lose digits of t
  return log2_of(split(-log2_of({select(is_small, VF{}, far.exponent), select(is_small, -t, far.rest)})));
}

// Below log2_noise by at most 0.2, or more where e is large: e >= t / ln 2, and a float's bits, as a number, are
// log2 of it drawn with straight lines from below.
PB_INLINE VF least_log2_noise(VU words) {
  const VF t = __builtin_convertvector(bit_cast<VI>(words >> 1), VF) + 0.5f;
  return __builtin_convertvector(bit_cast<VI>(t), VF) * 0x1p-23f - 157.5f;
}

}  // namespace pagebinder
