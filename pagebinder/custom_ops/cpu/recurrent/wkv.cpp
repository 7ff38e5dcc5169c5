// The weighted mean of values of RWKV-4, see recurrent/wkv.py.
#include "channels.h"

namespace pagebinder {
namespace {

constexpr int64_t LANES = 256;
constexpr float NOTHING_SEEN = -1e38f;

struct WkvRange {
  const WkvArgs& a;
  ChannelState state;  // sums of values, of weights, and the largest exponent
  float *k, *v, *decay, *first;

  void started() {
    const float* den = state.state + LANES;
    float* largest = state.state + 2 * LANES;
    for (int64_t i = 0; i < state.count; ++i)
      if (den[i] == 0.0f) largest[i] = NOTHING_SEEN;
  }

  void tokens(int64_t row, int64_t n) {
    for (int64_t t = row; t < row + n; ++t) {
      read_row(a.k, t, 0, state.first, state.count, k);
      read_row(a.v, t, 0, state.first, state.count, v);
      for (int64_t i = 0; i < state.count; i += W) token(i);
      write_row(a.out, t, 0, state.first, state.count, v);
    }
  }

 private:
  // Both exponentials, the larger exponent taken off, which is returned.
  static PB_INLINE VF scaled(VF a, VF b, VF& exp_a, VF& exp_b) {
    const VF largest = max(a, b);
    exp_a = exp_approx(a - largest), exp_b = exp_approx(b - largest);
    return largest;
  }

  // Channels [i, i + W); y takes v's place.
  void token(int64_t i) {
    float *num_at = state.state + i, *den_at = num_at + LANES, *largest_at = den_at + LANES;
    const VF num = load<VF>(num_at), den = load<VF>(den_at), largest = load<VF>(largest_at);
    const VF key = load<VF>(k + i), value = load<VF>(v + i);
    VF seen, now;
    scaled(largest, key + load<VF>(first + i), seen, now);
    store(v + i, fused(now, value, seen * num) / fused(seen, den, now));
    store(largest_at, scaled(largest + load<VF>(decay + i), key, seen, now));
    store(num_at, fused(now, value, seen * num));
    store(den_at, fused(seen, den, now));
  }
};

struct Wkv {
  const WkvArgs& a;

  int64_t range_floats() const { return 4 * LANES + ChannelState::floats(3, LANES); }
  WkvRange begin(int64_t first, int64_t count, float* f) const {
    float* state = f + 4 * LANES;
    read_row(a.decay, 0, 0, first, count, f + 2 * LANES);
    read_row(a.first, 0, 0, first, count, f + 3 * LANES);
    return {a, {a.cache, a.cache.strides[1], a.cache.strides[0], first, count, 3, LANES, state, state + 3 * LANES},
            f, f + LANES, f + 2 * LANES, f + 3 * LANES};
  }
};

}  // namespace

const char* wkv(const WkvArgs& a) {
  constexpr int64_t WORK_PER_CHANNEL = 64;
  return run_channels<LANES>(a.step, a.cache, a.out, a.channels, a.channels * WORK_PER_CHANNEL, Wkv{a});
}

}  // namespace pagebinder
