// Weightless RMSNorm of each query head, then RoPE of its trailing channels: two passes over a head, which stays in
// the first-level cache between them. A token's angles are expanded once for all heads of a job.
#include <algorithm>
#include <cmath>

#include "norm_rope.h"

namespace pagebinder {
namespace {

constexpr int64_t JOB_HEADS = 16;
constexpr int64_t SERIAL_CHANNELS = 1 << 15;

template <class T>
float inverse_rms(const T* x, int64_t width, float eps) {
  VF squares[W] = {};
  int64_t i = 0;
  for (; i + 2 * W <= width; i += 2 * W) {
    const VF a = load_float(x + i), b = load_float(x + i + W);
    squares[0] += a * a;
    squares[1] += b * b;
  }
  for (; i < width; i += W) {
    const VF a = i + W <= width ? load_float(x + i) : load_float_part(x + i, static_cast<int>(width - i));
    squares[0] += a * a;
  }
  const VF sums = sum_lanes(squares);
  return 1.0f / std::sqrt((sums[0] + sums[1]) / static_cast<float>(width) + eps);
}

template <class T>
void norm_and_turn(const T* x, T* out, int64_t width, int64_t turned, const ExpandedAngles& angles, float eps) {
  const float factor = inverse_rms(x, width, eps);
  const int64_t kept = width - turned;
  int64_t i = 0;
  for (; i + W <= kept; i += W) store_float(out + i, load_float(x + i) * factor);
  const int rest = static_cast<int>(kept - i);
  if (rest) store_float_part(out + i, load_float_part(x + i, rest) * factor, rest);
  turn_channels(x + kept, out + kept, turned, angles, [&](VF v) { return rounded<T>(v * factor); });
}

}  // namespace

void q_norm_rope(const HeadsArgs& a) {
  const int64_t parts = (a.heads + JOB_HEADS - 1) / JOB_HEADS;
  const bool serial = a.tokens * a.heads * a.width < SERIAL_CHANNELS;
  with_element(a.type, [&](auto x) {
    using T = decltype(x);
    run_jobs(a.tokens * parts, serial, a.num_threads, a.run, [&](int64_t job) {
      static thread_local Buffer scratch;
      const int64_t token = job / parts, first = job % parts * JOB_HEADS;
      const ExpandedAngles angles = expand(a.angles, token, 1.0f, scratch);
      for (int64_t h = first; h < std::min(a.heads, first + JOB_HEADS); ++h) {
        const T* x = static_cast<const T*>(a.x) + token * a.x_token_stride + h * a.x_head_stride;
        T* out = static_cast<T*>(a.out) + (token * a.heads + h) * a.width;
        norm_and_turn(x, out, a.width, 2 * a.angles.pairs, angles, a.eps);
      }
    });
  });
}

}  // namespace pagebinder
