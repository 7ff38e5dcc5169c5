// Rows whose channels turn with their neighbours: vectors of the even channels and of the odd ones.
#pragma once

#include <utility>

#include "simd.h"
#include "small_floats.h"

namespace pagebinder {

template <int... Lane>
PB_INLINE Pair unzipped(VF a, VF b, std::integer_sequence<int, Lane...>) {
  return {__builtin_shufflevector(a, b, (2 * Lane)...), __builtin_shufflevector(a, b, (2 * Lane + 1)...)};
}
template <int... Lane>
PB_INLINE Pair zipped(VF even, VF odd, std::integer_sequence<int, Lane...>) {
  return {__builtin_shufflevector(even, odd, (Lane / 2 + Lane % 2 * W)...),
          __builtin_shufflevector(even, odd, (W / 2 + Lane / 2 + Lane % 2 * W)...)};
}
using Lanes = std::make_integer_sequence<int, W>;

// 2 W neighbours: those at even places, and those at odd ones.
template <class T>
PB_INLINE Pair load_neighbours(const T* p) { return unzipped(load_float(p), load_float(p + W), Lanes{}); }
PB_INLINE Pair load_neighbours(const bf16* p) { return apart(load<VU>(p)); }

template <class T>
PB_INLINE void store_neighbours(T* p, VF even, VF odd) {
  const Pair both = zipped(even, odd, Lanes{});
  store_float(p, both.first);
  store_float(p + W, both.second);
}
PB_INLINE void store_neighbours(bf16* p, VF even, VF odd) {
  store(p, (round_to_bf16(even) >> 16) | round_to_bf16(odd));
}

}  // namespace pagebinder
