// Rows for the grouped output projection: heads turned back, rounded to e4m3 if asked, and dealt to their groups.
//
//     x [T, H, D]  ->  [group][T][H / groups * D]        so that a group is one matrix
//
// e4m3 values times their power of two have 4 significant bits: they are written in x's own type, exactly.
#include "norm_rope.h"
#include "small_floats.h"

namespace pagebinder {
namespace {

constexpr int QUANT_CHANNELS = 128;
constexpr int64_t SERIAL_CHANNELS = 1 << 15;

template <class T>
void through_e4m3(T* x) {
  alignas(64) float block[QUANT_CHANNELS];
  for (int i = 0; i < QUANT_CHANNELS; i += W) store(block + i, load_float(x + i));
  const int exponent = fp8_exponent(largest_magnitude(block, QUANT_CHANNELS));
  const float down = inverse_power(exponent), up = power_of_two(exponent);
  for (int i = 0; i < QUANT_CHANNELS; i += W)
    store_float(x + i, decode_e4m3(encode_e4m3(load<VF>(block + i) * down)) * up);
}

template <class T>
void group_row(const HeadsArgs& a, int64_t token, int64_t group, const ExpandedAngles& angles) {
  const int64_t heads = a.heads / a.groups, turned = 2 * a.angles.pairs, kept = a.width - turned;
  T* row = static_cast<T*>(a.out) + (group * a.tokens + token) * heads * a.width;
  for (int64_t h = 0; h < heads; ++h) {
    const T* x = static_cast<const T*>(a.x) + token * a.x_token_stride + (group * heads + h) * a.x_head_stride;
    std::memcpy(row + h * a.width, x, kept * sizeof(T));
    turn_channels(x + kept, row + h * a.width + kept, turned, angles, [](VF v) { return v; });
  }
  if (a.fp8)
    for (int64_t i = 0; i < heads * a.width; i += QUANT_CHANNELS) through_e4m3(row + i);
}

}  // namespace

void inverse_rope_groups(const HeadsArgs& a) {
  const bool serial = a.tokens * a.heads * a.width < SERIAL_CHANNELS;
  with_element(a.type, [&](auto x) {
    run_jobs(a.tokens * a.groups, serial, a.num_threads, a.run, [&](int64_t job) {
      static thread_local Buffer scratch;
      const ExpandedAngles angles = expand(a.angles, job / a.groups, -1.0f, scratch);
      group_row<decltype(x)>(a, job / a.groups, job % a.groups, angles);
    });
  });
}

}  // namespace pagebinder
