// Rotation of channel pairs (2i, 2i + 1) in float32, with the bits of the plain formula: every product is rounded
// before the sum, where a compiler would otherwise fuse one of them.
#pragma once

namespace pagebinder {

inline float rounded(float product) {
#if defined(__x86_64__)
  __asm__("" : "+x"(product));
#else
  __asm__("" : "+m"(product));
#endif
  return product;
}

inline void rotate_pairs(float* x, const float* cos, const float* sin, int pairs) {
  for (int i = 0; i < pairs; ++i) {
    const float even = x[2 * i], odd = x[2 * i + 1];
    x[2 * i] = rounded(even * cos[i]) - rounded(odd * sin[i]);
    x[2 * i + 1] = rounded(even * sin[i]) + rounded(odd * cos[i]);
  }
}

}  // namespace pagebinder
