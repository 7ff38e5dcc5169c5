// The streams after a block: X'_k = post_k * update + sum_j comb[j, k] X_j, channel by channel.
//
// Rounding is the source model's: weights, both terms and their sum are rounded to the streams' type.
#include "hyper.h"

namespace pagebinder {
namespace {

constexpr int64_t SERIAL_CHANNELS = 1 << 15;

template <class T, int SIZE>
void mix_token(const HyperMixArgs& a, int64_t token) {
  const int S = SIZE ? SIZE : static_cast<int>(a.streams);
  float post[MAX_STREAMS], comb[MAX_STREAMS * MAX_STREAMS];
  for (int k = 0; k < S; ++k) post[k] = rounded<T>(splat(a.post[token * S + k]))[0];
  for (int i = 0; i < S * S; ++i) comb[i] = rounded<T>(splat(a.comb[token * S * S + i]))[0];
  const T* x = static_cast<const T*>(a.x) + token * a.x_token_stride;
  const T* update = static_cast<const T*>(a.update) + token * a.update_stride;
  T* out = static_cast<T*>(a.out) + token * S * a.channels;
  const auto mix = [&](int64_t c, auto get, auto put) {
    VF old[SIZE ? SIZE : MAX_STREAMS];
    PB_UNROLL for (int j = 0; j < S; ++j) old[j] = get(x + j * a.x_stream_stride + c);
    const VF added = get(update + c);
    PB_UNROLL for (int k = 0; k < S; ++k) {
      VF kept = comb[k] * old[0];
      PB_UNROLL for (int j = 1; j < S; ++j) kept += comb[j * S + k] * old[j];
      put(out + k * a.channels + c, rounded<T>(post[k] * added) + rounded<T>(kept));
    }
  };
  int64_t c = 0;
  for (; c + W <= a.channels; c += W)
    mix(c, [](const T* p) { return load_float(p); }, [](T* p, VF value) { store_float(p, value); });
  const int rest = static_cast<int>(a.channels - c);
  if (rest)
    mix(c, [&](const T* p) { return load_float_part(p, rest); },
        [&](T* p, VF value) { store_float_part(p, value, rest); });
}

}  // namespace

void hyper_mix(const HyperMixArgs& a) {
  with_element(a.type, [&](auto x) {
    using T = decltype(x);
    const auto job = a.streams == 4 ? mix_token<T, 4> : mix_token<T, 0>;
    const bool serial = a.tokens * a.streams * a.channels < SERIAL_CHANNELS;
    run_jobs(a.tokens, serial, a.num_threads, a.run, [&](int64_t token) { job(a, token); });
  });
}

}  // namespace pagebinder
