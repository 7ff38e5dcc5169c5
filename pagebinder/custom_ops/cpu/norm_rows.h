// Rows in float32, and RMSNorm of a row with every rounding made: custom_ops/norm/rms_norm.py.
#pragma once

#include <cmath>
#include <type_traits>

#include "rms_norm.h"
#include "simd.h"
#include "small_floats.h"

namespace pagebinder {

template <class T>
PB_INLINE VF rounded(VF x) {
  T narrow[W];
  store_float(narrow, x);
  return load_float(narrow);
}
template <> PB_INLINE VF rounded<float>(VF x) { return x; }
template <> PB_INLINE VF rounded<bf16>(VF x) { return through_bf16(x); }

// Calls each(i, load), load(p) being the lanes from p[i] on: zeros behind the last column.
template <class Each>
PB_INLINE void for_vectors(int64_t columns, Each each) {
  int64_t i = 0;
  for (; i + W <= columns; i += W) each(i, [i](const auto* p) { return load_float(p + i); });
  const int rest = static_cast<int>(columns - i);
  if (rest > 0) each(i, [i, rest](const auto* p) { return load_float_part(p + i, rest); });
}

template <class T>
PB_INLINE void store_lanes(T* to, int64_t i, int64_t columns, VF x) {
  if (i + W <= columns) store_float(to + i, x);
  else store_float_part(to + i, x, static_cast<int>(columns - i));
}

template <class T, class Weight>
PB_INLINE VF norm_tail(const NormRows<T>& rows, VF normed, VF weight) {
  switch (rows.tail) {
    case NormTail::CAST_SCALE: {
      const VF product = rounded<T>(normed) * weight;
      return std::is_same<Weight, T>::value ? rounded<T>(product) : product;
    }
    case NormTail::SCALE_CAST: return rounded<T>(normed * weight);
    case NormTail::OFFSET: return rounded<T>(normed * (weight + 1.0f));
    default: return rounded<T>(normed);
  }
}

template <class T, class Weight>
void scale_row(const NormRows<T>& rows, const Weight* weight, float scale, int64_t columns, float* to) {
  for_vectors(columns, [&](int64_t i, auto lanes) {
    const VF w = weight == nullptr ? VF{} : lanes(weight);
    store(to + i, norm_tail<T, Weight>(rows, load<VF>(to + i) * scale, w));
  });
}

template <class T>
void make_row(const NormRows<T>& rows, int64_t row, int64_t columns, float* to) {
  const T *x = rows.x[row], *residual = rows.residual.data == nullptr ? nullptr : rows.residual[row];
  VF squares = {};
  for_vectors(columns, [&](int64_t i, auto lanes) {
    VF value = lanes(x);
    if (residual != nullptr) {
      value = rounded<T>(value + lanes(residual));
      store_lanes(rows.total + row * columns, i, columns, value);
    }
    store(to + i, value);
    squares += value * value;
  });
  float sum = 0;
  for (int lane = 0; lane < W; ++lane) sum += squares[lane];
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(columns) + rows.eps);
  if (rows.wide_weight) scale_row(rows, static_cast<const float*>(rows.weight), scale, columns, to);
  else scale_row(rows, static_cast<const T*>(rows.weight), scale, columns, to);
}

}  // namespace pagebinder
