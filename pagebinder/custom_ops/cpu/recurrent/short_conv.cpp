// The causal depthwise convolution, see recurrent/short_conv.py. A window of inputs, a row of channels each:
//
//     row 0 ... K-2            K-1 ... K-2+n     token i sees rows i ... i + K - 1; its result takes row i's place;
//     the last K - 1 inputs    n tokens          then the last K - 1 rows become the first
#include "channels.h"

namespace pagebinder {
namespace {

constexpr int64_t LANES = 256, WINDOW_TOKENS = 12;

struct ConvRange {
  const ShortConvArgs& a;
  ChannelState state;    // the beginning of the window
  float *weight, *bias;  // [K, LANES], [LANES]

  void started() {}

  void tokens(int64_t row, int64_t n) {
    for (int64_t i = 0; i < n; i += WINDOW_TOKENS) window(row + i, std::min(WINDOW_TOKENS, n - i));
  }

 private:
  void window(int64_t row, int64_t n) {
    float* rows = state.state;
    for (int64_t i = 0; i < n; ++i)
      read_row(a.x, row + i, 0, state.first, state.count, rows + (state.slots + i) * LANES);
    for (int64_t i = 0; i < n; ++i) {
      if (a.taps == 4) convolve<4>(rows + i * LANES);
      else if (a.taps == 3) convolve<3>(rows + i * LANES);
      else convolve<0>(rows + i * LANES);
      write_row(a.out, row + i, 0, state.first, state.count, rows + i * LANES);
    }
    std::memmove(rows, rows + n * LANES, state.slots * LANES * sizeof(float));
  }

  // K taps, 0: any number.
  template <int K>
  void convolve(float* rows) const {
    const int64_t taps = K == 0 ? a.taps : K;
    for (int64_t i = 0; i < state.count; i += W) {
      VF sum{};
      for (int64_t tap = 0; tap < taps; ++tap)
        sum = fused(load<VF>(weight + tap * LANES + i), load<VF>(rows + tap * LANES + i), sum);
      sum += load<VF>(bias + i);
      store(rows + i, a.silu ? silu(sum) : sum);
    }
  }
};

struct Conv {
  const ShortConvArgs& a;

  int64_t range_floats() const { return (3 * a.taps + WINDOW_TOKENS + 1) * LANES + W; }

  ConvRange begin(int64_t first, int64_t count, float* scratch) const {
    float *weight = scratch, *bias = weight + a.taps * LANES, *staging = bias + LANES;
    float* window = staging + a.taps * LANES + W;
    read_channels(a.weight, first, count, a.taps, LANES, weight, staging);
    if (a.bias.base != nullptr) read_row(a.bias, 0, 0, first, count, bias);
    else std::fill_n(bias, LANES, 0.0f);
    const StateCache& cache = a.cache;
    return {a, {cache, cache.strides[0], cache.strides[1], first, count, a.taps - 1, LANES, window, staging}, weight,
            bias};
  }
};

}  // namespace

const char* short_conv(const ShortConvArgs& a) {
  return run_channels<LANES>(a.step, a.cache, a.out, a.channels, a.channels * a.taps, Conv{a});
}

}  // namespace pagebinder
