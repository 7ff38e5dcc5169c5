// Rotation of neighbouring channels (RoPE style "interleaved"), with the same rounding as plain PyTorch's.
#pragma once

#include "hyper.h"

namespace pagebinder {

template <int... Lane>
PB_INLINE VF swap_pairs(VF x, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(x, x, (Lane ^ 1)...);
}

// One column for every channel: cos twice, sin as -sin, +sin. `direction` -1 turns back.
struct ExpandedAngles {
  const float *cos, *sin;

  PB_INLINE VF turn(VF x, VF c, VF s) const {
    return unfused(x * c) + unfused(swap_pairs(x, std::make_integer_sequence<int, W>{}) * s);
  }
};

inline float element_at(const void* p, Element type, int64_t index) {
  return with_element(type, [&](auto x) { return load_float_part(static_cast<const decltype(x)*>(p) + index, 1)[0]; });
}

// The columns of one token, in `scratch`, which belongs to the thread.
inline ExpandedAngles expand(const Angles& a, int64_t token, float direction, Buffer& scratch) {
  float* cos = scratch.at_least<float>(4 * a.pairs + 2 * W);
  float* sin = cos + 2 * a.pairs;
  for (int64_t i = 0; i < a.pairs; ++i) {
    cos[2 * i] = cos[2 * i + 1] = element_at(a.cos, a.cos_type, token * a.cos_stride + i);
    sin[2 * i + 1] = direction * element_at(a.sin, a.sin_type, token * a.sin_stride + i);
    sin[2 * i] = -sin[2 * i + 1];
  }
  return {cos, sin};
}

// to[i] = turned(prepare(from[i])) for `count` channels, an even number.
template <class T, class Prepare>
PB_INLINE void turn_channels(const T* from, T* to, int64_t count, const ExpandedAngles& angles, Prepare prepare) {
  int64_t i = 0;
  for (; i + W <= count; i += W)
    store_float(to + i, angles.turn(prepare(load_float(from + i)), load<VF>(angles.cos + i), load<VF>(angles.sin + i)));
  const int rest = static_cast<int>(count - i);
  if (rest == 0) return;
  const VF cos = load_float_part(angles.cos + i, rest), sin = load_float_part(angles.sin + i, rest);
  store_float_part(to + i, angles.turn(prepare(load_float_part(from + i, rest)), cos, sin), rest);
}

}  // namespace pagebinder
