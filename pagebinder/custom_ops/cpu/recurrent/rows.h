// Rows of operands as float32, and the functions that gates are made of.
#pragma once

#include <algorithm>

#include "recurrent.h"

namespace pagebinder {

constexpr float LOG2_E = 1.44269504f;

inline int64_t whole_vectors(int64_t count) { return (count + W - 1) / W * W; }

// `to` is filled up to whole vectors, with zeros.
template <class T>
PB_INLINE void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(to + i, load_float(from + i));
  if (i < count) store(to + i, load_float_part(from + i, static_cast<int>(count - i)));
}

template <class T>
PB_INLINE void narrow_row(const float* from, int64_t count, T* to) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store_float(to + i, load<VF>(from + i));
  if (i < count) store_float_part(to + i, load<VF>(from + i), static_cast<int>(count - i));
}

// Values [first, first + count) of row i, j.
inline void read_row(const Operand& o, int64_t i, int64_t j, int64_t first, int64_t count, float* to) {
  const int64_t offset = i * o.strides[0] + j * o.strides[1] + first;
  with_element(o.type, [&](auto x) { widen(static_cast<const decltype(x)*>(o.base) + offset, count, to); });
}

// The first value of row i, j.
inline float read_value(const Operand& o, int64_t i, int64_t j) {
  float lanes[W];
  read_row(o, i, j, 0, 1, lanes);
  return lanes[0];
}

inline void write_row(const Result& out, int64_t token, int64_t row, int64_t first, int64_t count,
                      const float* from) {
  const int64_t offset = (token * out.rows + row) * out.width + first;
  with_element(out.type, [&](auto x) { narrow_row(from, count, static_cast<decltype(x)*>(out.base) + offset); });
}

// ---- gates -----------------------------------------------------------------------------------------------------

PB_INLINE VF magnitude_of(VF x) { return bit_cast<VF>(bit_cast<VU>(x) & 0x7fffffffu); }

// e^x for x <= 88.
PB_INLINE VF exp_approx(VF x) { return exp2_approx(x * LOG2_E); }

PB_INLINE VF silu(VF x) {
  const VF e = exp_approx(-magnitude_of(x));
  return x * select(x < VF{}, e, splat(1.0f)) * reciprocal(1.0f + e);
}

// log(1 + e^x) = max(x, 0) + log(1 + e), e = e^-|x|, and log(1 + e) = 2 artanh(e / (2 + e)), a series in at most 1/9.
PB_INLINE VF softplus(VF x) {
  const VF e = exp_approx(-magnitude_of(x));
  const VF z = e * reciprocal(2.0f + e), square = z * z;
  VF series = splat(1.0f / 15);
  for (int odd = 13; odd >= 1; odd -= 2) series = fused(series, square, splat(1.0f / static_cast<float>(odd)));
  return max(x, VF{}) + 2.0f * z * series;
}

}  // namespace pagebinder
