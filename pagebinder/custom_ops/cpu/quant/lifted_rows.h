// Rows of x for codes of FP8 that are multiplied as they are placed in the bits of a float: 2^-120 of what they are.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"
#include "small_floats.h"

namespace pagebinder {

// The bits of the largest magnitude of `count` numbers, a multiple of W; NaN counts as larger than all others.
template <class T>
uint32_t largest_bits(const T* x, int64_t count) {
  VU most{};
  for (int64_t i = 0; i < count; i += W) {
    const VU magnitude = bit_cast<VU>(load_float(x + i)) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  uint32_t largest = 0;
  for (int i = 0; i < W; ++i) largest = std::max<uint32_t>(largest, most[i]);
  return largest;
}

// A row times a power of two, which lifts its largest number to 2^120, or all numbers beyond 2; returns what sums are times.
// So products with numbers of 2^-126 and more are normal, but for those that others exceed 2^100 times.
template <class From, class To>
float lift_row(const From* from, int64_t count, To* to) {
  const int exponent = static_cast<int>(largest_bits(from, count) >> 23) - 127, up = std::min(120 - exponent, 127);
  for (int64_t k = 0; k < count; k += W) store_float(to + k, load_float(from + k) * power_of_two(up));
  return power_of_two(120 - up);
}

}  // namespace pagebinder
