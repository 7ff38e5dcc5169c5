// S = exp(dt A) * S + dt x B, y = S C + D x, see recurrent/diagonal.py.
#include "channels.h"

namespace pagebinder {
namespace {

constexpr int64_t LANES = 64;

class SelectiveRange {
 public:
  SelectiveRange(const SelectiveScanArgs& a, int64_t first, int64_t count, float* scratch)
      : state{a.cache, a.cache.strides[0], a.cache.strides[1], first, count, a.width, LANES, nullptr, nullptr},
        a_(a) {
    const int64_t row = whole_vectors(a.width);
    x_ = scratch, dt_ = x_ + LANES, d_ = dt_ + LANES, bias_ = d_ + LANES, b_ = bias_ + LANES, c_ = b_ + row;
    log_decay_ = c_ + row;
    state.state = log_decay_ + a.width * LANES, state.staging = state.state + a.width * LANES;
    read_channels(a.a, first, count, a.width, LANES, log_decay_, state.staging);
    for (int64_t i = 0; i < a.width * LANES; ++i) log_decay_[i] *= LOG2_E;
    read_weights(a.d, d_);
    read_weights(a.dt_bias, bias_);
  }

  static int64_t floats(const SelectiveScanArgs& a) {
    return (4 + a.width) * LANES + 2 * whole_vectors(a.width) + ChannelState::floats(a.width, LANES);
  }

  ChannelState state;

  void started() {}

  void tokens(int64_t row, int64_t n) {
    for (int64_t t = row; t < row + n; ++t) {
      read_row(a_.x, t, 0, state.first, state.count, x_);
      read_row(a_.dt, t, 0, state.first, state.count, dt_);
      read_row(a_.b, t, 0, 0, a_.width, b_);
      read_row(a_.c, t, 0, 0, a_.width, c_);
      for (int64_t i = 0; i < state.count; i += W) token(i);
      write_row(a_.out, t, 0, state.first, state.count, x_);
    }
  }

 private:
  const SelectiveScanArgs& a_;
  float *x_, *dt_, *d_, *bias_, *b_, *c_, *log_decay_;  // A as exponents of 2

  void read_weights(const Operand& weights, float* to) {
    if (weights.base != nullptr) read_row(weights, 0, 0, state.first, state.count, to);
    else std::fill_n(to, LANES, 0.0f);
  }

  // Channels [i, i + W); y takes x's place.
  void token(int64_t i) {
    const VF x = load<VF>(x_ + i), biased = load<VF>(dt_ + i) + load<VF>(bias_ + i);
    const VF dt = a_.dt_softplus ? softplus(biased) : biased, added = dt * x;
    VF y{};
    for (int64_t s = 0; s < a_.width; ++s) {
      float* at = state.state + s * LANES + i;
      const VF decay = exp2_approx(dt * load<VF>(log_decay_ + s * LANES + i));
      const VF now = fused(decay, load<VF>(at), added * b_[s]);
      store(at, now);
      y = fused(now, splat(c_[s]), y);
    }
    store(x_ + i, fused(load<VF>(d_ + i), x, y));
  }
};

struct Selective {
  const SelectiveScanArgs& a;

  int64_t range_floats() const { return SelectiveRange::floats(a); }
  SelectiveRange begin(int64_t first, int64_t count, float* scratch) const { return {a, first, count, scratch}; }
};

}  // namespace

const char* selective_scan(const SelectiveScanArgs& a) {
  constexpr int64_t EXPONENTIAL = 8;  // multiplications
  const int64_t work = a.channels * a.width * EXPONENTIAL;
  return run_channels<LANES>(a.step, a.cache, a.out, a.channels, work, Selective{a});
}

}  // namespace pagebinder
