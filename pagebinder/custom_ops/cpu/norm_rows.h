// Rows in float32, and RMSNorm of a row with every rounding made: custom_ops/norm/rms_norm.py.
#pragma once

#include <cmath>
#include <type_traits>

#include "rms_norm.h"
#include "simd.h"
#include "small_floats.h"

namespace pagebinder {

// Calls each(i, load), load(p) being the lanes from p[i] on: zeros behind the last column.
template <class Each>
PB_INLINE void for_vectors(int64_t columns, Each each) {
  int64_t i = 0;
  for (; i + W <= columns; i += W) each(i, [i](const auto* p) { return load_float(p + i); });
  const int rest = static_cast<int>(columns - i);
  if (rest > 0) each(i, [i, rest](const auto* p) { return load_float_part(p + i, rest); });
}

// ---- two vectors at a time -------------------------------------------------------------------------------------

constexpr int64_t WW = 2 * W;
inline int64_t whole_pairs(int64_t count) { return (count + WW - 1) / WW * WW; }

// Two vectors of neighbours as T. Of bfloat16 one instruction rounds both, and takes subnormal numbers for zeros, as
// products do.
template <class T> struct NarrowPair { VH first, second; };
template <> struct NarrowPair<float> { Pair lanes; };
#if PAGEBINDER_BF16_DOT
template <> struct NarrowPair<bf16> { VU lanes; };
#endif

template <class T>
PB_INLINE NarrowPair<T> narrowed(Pair x) {
  if constexpr (std::is_same<T, float>::value) return {x};
  else if constexpr (std::is_same<T, f16>::value) return {to_f16(x.first), to_f16(x.second)};
#if PAGEBINDER_BF16_DOT
  else return {narrow_both(x.first, x.second)};
#else
  else return {to_bf16(x.first), to_bf16(x.second)};
#endif
}

template <class T>
PB_INLINE Pair widened(NarrowPair<T> x) {
  if constexpr (std::is_same<T, float>::value) return x.lanes;
  else if constexpr (std::is_same<T, f16>::value) return {from_f16(x.first), from_f16(x.second)};
#if PAGEBINDER_BF16_DOT
  else return from_both(x.lanes);
#else
  else return {from_bf16(x.first), from_bf16(x.second)};
#endif
}

template <class T>
PB_INLINE Pair rounded(Pair x) {
  constexpr bool IN_WORDS = std::is_same<T, bf16>::value && !PAGEBINDER_BF16_DOT;  // nothing need be packed
  if constexpr (IN_WORDS) return {rounded<T>(x.first), rounded<T>(x.second)};
  else return widened<T>(narrowed<T>(x));
}

template <class T>
PB_INLINE Pair load_pair(const T* p) { return {load_float(p), load_float(p + W)}; }
// Vector by vector: a struct would be copied in halves, and loads of a whole one wait for those to reach the cache.
template <class T>
PB_INLINE void store_pair(T* p, NarrowPair<T> x) {
  if constexpr (std::is_same<T, float>::value) store(p, x.lanes.first), store(p + W, x.lanes.second);
#if PAGEBINDER_BF16_DOT
  else if constexpr (std::is_same<T, bf16>::value) store(p, x.lanes);
#endif
  else store(p, x.first), store(p + W, x.second);
}
PB_INLINE void store_pair(float* p, Pair x) { store(p, x.first), store(p + W, x.second); }

PB_INLINE Pair operator+(Pair a, Pair b) { return {a.first + b.first, a.second + b.second}; }
PB_INLINE Pair operator-(Pair a, Pair b) { return {a.first - b.first, a.second - b.second}; }
PB_INLINE Pair operator*(Pair a, Pair b) { return {a.first * b.first, a.second * b.second}; }
PB_INLINE Pair operator*(Pair a, float b) { return {a.first * b, a.second * b}; }
PB_INLINE Pair unfused(Pair x) { return {unfused(x.first), unfused(x.second)}; }

// The last columns of a row, filled up with zeros.
template <class T>
struct LastColumns {
  T values[WW] = {};
  LastColumns(const T* from, int64_t count) {
    if (from != nullptr) std::memcpy(values, from, static_cast<size_t>(count) * sizeof(T));
  }
};

// ---- norms -----------------------------------------------------------------------------------------------------

template <NormTail TAIL>
using Tail = std::integral_constant<NormTail, TAIL>;

// Normed values times their weights, before they are rounded for the last time.
template <class T, NormTail TAIL>
PB_INLINE Pair weighted(Tail<TAIL>, Pair normed, Pair weight) {
  if constexpr (TAIL == NormTail::CAST_SCALE) return rounded<T>(normed) * weight;
  else if constexpr (TAIL == NormTail::SCALE_CAST) return normed * weight;
  else if constexpr (TAIL == NormTail::OFFSET) return normed * Pair{weight.first + 1.0f, weight.second + 1.0f};
  else return normed;
}

template <class Body>
PB_INLINE void with_tail(NormTail tail, Body body) {
  switch (tail) {
    case NormTail::CAST_SCALE: return body(Tail<NormTail::CAST_SCALE>());
    case NormTail::SCALE_CAST: return body(Tail<NormTail::SCALE_CAST>());
    case NormTail::OFFSET: return body(Tail<NormTail::OFFSET>());
    default: return body(Tail<NormTail::PLAIN>());
  }
}

// Some columns of a row, or of the sum of two, as floats; their squares are added.
template <bool ADDED, class T>
PB_INLINE void widen_columns(const T* x, const T* residual, T* total, float* to, VF& squares) {
  Pair value = load_pair(x);
  if constexpr (ADDED) {
    const NarrowPair<T> sum = narrowed<T>(value + load_pair(residual));
    store_pair(total, sum);
    value = widened<T>(sum);
  }
  store_pair(to, value);
  squares = fused(value.second, value.second, fused(value.first, value.first, squares));
}

// Returns the sum of a row's squares: those of a lane are added up in the order of columns, then those of the lanes.
template <bool ADDED, class T>
float widen_row(const T* x, const T* residual, T* total, int64_t columns, float* to) {
  VF squares = {};
  int64_t i = 0;
  for (; i + WW <= columns; i += WW)
    widen_columns<ADDED>(x + i, ADDED ? residual + i : nullptr, ADDED ? total + i : nullptr, to + i, squares);
  if (i < columns) {
    const LastColumns<T> last(x + i, columns - i), last_residual(ADDED ? residual + i : nullptr, columns - i);
    LastColumns<T> last_total(nullptr, 0);
    widen_columns<ADDED>(last.values, last_residual.values, last_total.values, to + i, squares);
    if (ADDED) std::memcpy(total + i, last_total.values, static_cast<size_t>(columns - i) * sizeof(T));
  }
  float sum = 0;
  for (int lane = 0; lane < W; ++lane) sum += squares[lane];
  return sum;
}

// Some columns normed and rounded to T; as float32 unrounded where a float32 weight widens the product.
template <class T, class Weight, class Out, NormTail TAIL>
PB_INLINE void scale_columns(Tail<TAIL> tail, const float* from, const Weight* weight, float scale, Out* to) {
  constexpr bool WIDE = TAIL == NormTail::CAST_SCALE && !std::is_same<Weight, T>::value;
  const Pair w = TAIL == NormTail::PLAIN ? Pair{} : load_pair(weight);
  const Pair value = weighted<T>(tail, load_pair(from) * scale, w);
  if constexpr (std::is_same<Out, T>::value) store_pair(to, narrowed<T>(value));
  else store_pair(to, WIDE ? value : rounded<T>(value));
}

// `to` may be `from`.
template <class T, class Weight, class Out, NormTail TAIL>
void scale_row(Tail<TAIL> tail, const float* from, const Weight* weight, float scale, int64_t columns, Out* to) {
  int64_t i = 0;
  for (; i + WW <= columns; i += WW)
    scale_columns<T>(tail, from + i, TAIL == NormTail::PLAIN ? weight : weight + i, scale, to + i);
  if (i < columns) {
    const LastColumns<Weight> last_weight(TAIL == NormTail::PLAIN ? nullptr : weight + i, columns - i);
    LastColumns<Out> last(nullptr, 0);
    scale_columns<T>(tail, from + i, last_weight.values, scale, last.values);
    std::memcpy(to + i, last.values, static_cast<size_t>(columns - i) * sizeof(Out));
  }
}

// A row normed. `values`: memory for it as floats, whole_pairs(columns); `to` may be that.
template <class T, class Out>
void norm_row(const NormRows<T>& rows, int64_t row, int64_t columns, float* values, Out* to) {
  const float squares = rows.residual.data == nullptr
                            ? widen_row<false, T>(rows.x[row], nullptr, nullptr, columns, values)
                            : widen_row<true, T>(rows.x[row], rows.residual[row], rows.total + row * columns, columns,
                                                 values);
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(columns) + rows.eps);
  with_tail(rows.tail, [&](auto tail) {
    if (rows.wide_weight) scale_row<T>(tail, values, static_cast<const float*>(rows.weight), scale, columns, to);
    else scale_row<T>(tail, values, static_cast<const T*>(rows.weight), scale, columns, to);
  });
}

template <class T>
void make_row(const NormRows<T>& rows, int64_t row, int64_t columns, float* to) {
  norm_row(rows, row, columns, to, to);
}

}  // namespace pagebinder
