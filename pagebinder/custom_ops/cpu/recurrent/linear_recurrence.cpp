// h = decay * h + x, see recurrent/diagonal.py.
#include "channels.h"

namespace pagebinder {
namespace {

constexpr int64_t LANES = 256;

struct LinearRange {
  const LinearRecurrenceArgs& a;
  ChannelState state;
  float *x, *decay;

  void started() {}

  void tokens(int64_t row, int64_t n) {
    for (int64_t t = row; t < row + n; ++t) {
      read_row(a.x, t, 0, state.first, state.count, x);
      read_row(a.decay, t, 0, state.first, state.count, decay);
      for (int64_t i = 0; i < state.count; i += W)
        store(state.state + i, fused(load<VF>(decay + i), load<VF>(state.state + i), load<VF>(x + i)));
      write_row(a.out, t, 0, state.first, state.count, state.state);
    }
  }
};

struct Linear {
  const LinearRecurrenceArgs& a;

  int64_t range_floats() const { return 2 * LANES + ChannelState::floats(1, LANES); }
  LinearRange begin(int64_t first, int64_t count, float* f) const {
    return {a, {a.cache, a.cache.strides[0], 1, first, count, 1, LANES, f + 2 * LANES, f + 3 * LANES}, f, f + LANES};
  }
};

}  // namespace

const char* linear_recurrence(const LinearRecurrenceArgs& a) {
  return run_channels<LANES>(a.step, a.cache, a.out, a.channels, a.channels, Linear{a});
}

}  // namespace pagebinder
