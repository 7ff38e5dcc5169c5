// Rows of logits on vectors: what the likeliest token and drawn ones need both.
#pragma once

#include <limits>

#include "argmax.h"
#include "simd.h"

namespace pagebinder {

constexpr int AT_ONCE = 4;  // vectors, as each step of a sum waits for the one before
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// W / 2 lanes of 64 bits.
typedef uint64_t VL __attribute__((vector_size(W * 4)));

PB_INLINE bool any_lane(VI mask) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  return _mm512_test_epi32_mask(bit_cast<__m512i>(mask), bit_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256(bit_cast<__m256i>(mask), bit_cast<__m256i>(mask));
#else
  const VL words = bit_cast<VL>(mask);
  return (words[0] | words[1]) != 0;
#endif
}

template <int DISTANCE = W / 2>
PB_INLINE float largest_lane(VF x) {
  x = max(x, rotate<DISTANCE>(x));
  if constexpr (DISTANCE > 1) return largest_lane<DISTANCE / 2>(x);
  return x[0];
}

PB_INLINE VI lane_numbers() {
  VI lanes{};
  for (int i = 0; i < W; ++i) lanes[i] = i;
  return lanes;
}

// x[i ..], filled up with -inf.
template <class T>
PB_INLINE VF load_filled(const T* x, int64_t i, int64_t count) {
  if (i + W <= count) return load_float(x + i);
  const int rest = static_cast<int>(count - i);
  return select(lane_numbers() < rest, load_float_part(x + i, rest), splat(-INFINITE));
}

template <class T>
bool has_nan(const T* x, int64_t count) {
  for (int64_t i = 0; i < count; i += W) {
    const VF value = load_filled(x, i, count);
    if (any_lane(value != value)) return true;
  }
  return false;
}

// A sum is NaN where a value is, and where both infinities are.
PB_INLINE bool may_hide_nan(const VF* sums) {
  const VF sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return any_lane(sum != sum);
}

}  // namespace pagebinder
