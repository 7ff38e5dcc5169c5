#include "channels.h"

namespace pagebinder {
namespace {

// [count, S] -> [S, lanes] and back: a constant S lets the compiler use shuffles.
template <int S>
void split_slots(const float* from, int64_t count, int64_t lanes, float* to) {
  for (int64_t i = 0; i < count; ++i)
    for (int s = 0; s < S; ++s) to[s * lanes + i] = from[S * i + s];
}
template <int S>
void join_slots(const float* from, int64_t count, int64_t lanes, float* to) {
  for (int64_t i = 0; i < count; ++i)
    for (int s = 0; s < S; ++s) to[S * i + s] = from[s * lanes + i];
}

// to[j][i] = from[i][j] in squares of W, reading and writing whole vectors.
void transpose_squares(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to,
                       int64_t to_stride) {
  for (int64_t i = 0; i < rows; i += W)
    for (int64_t j = 0; j < columns; j += W) {
      VF x[W];
      for (int k = 0; k < W; ++k) x[k] = load<VF>(from + (i + k) * from_stride + j);
      transpose(x);
      for (int k = 0; k < W; ++k) store(to + (j + k) * to_stride + i, x[k]);
    }
}

void split(const float* from, int64_t count, int64_t slots, int64_t lanes, float* to) {
  if (slots == 1) return split_slots<1>(from, count, lanes, to);
  if (slots == 2) return split_slots<2>(from, count, lanes, to);
  if (slots == 3) return split_slots<3>(from, count, lanes, to);
  if (slots == 4) return split_slots<4>(from, count, lanes, to);
  if (slots % W == 0 && count == lanes) return transpose_squares(from, slots, lanes, slots, to, lanes);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t s = 0; s < slots; ++s) to[s * lanes + i] = from[i * slots + s];
}

void join(const float* from, int64_t count, int64_t slots, int64_t lanes, float* to) {
  if (slots == 1) return join_slots<1>(from, count, lanes, to);
  if (slots == 2) return join_slots<2>(from, count, lanes, to);
  if (slots == 3) return join_slots<3>(from, count, lanes, to);
  if (slots % W == 0 && count == lanes) return transpose_squares(from, lanes, slots, lanes, to, slots);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t s = 0; s < slots; ++s) to[i * slots + s] = from[s * lanes + i];
}

// Calls f(first value in the cache, how many, their place in the staging memory) for the runs of adjacent values.
template <class F>
void for_runs(const ChannelState& c, const F& f) {
  if (c.slot_stride == 1 && c.channel_stride == c.slots) return f(0, c.count * c.slots, 0);
  if (c.slot_stride == 1)
    for (int64_t i = 0; i < c.count; ++i) f(i * c.channel_stride, c.slots, i * c.slots);
  else
    for (int64_t i = 0; i < c.count; ++i)
      for (int64_t s = 0; s < c.slots; ++s) f(i * c.channel_stride + s * c.slot_stride, 1, i * c.slots + s);
}

}  // namespace

void ChannelState::read(int64_t block) {
  with_element(cache.type, [&](auto x) {
    using T = decltype(x);
    const T* from = static_cast<const T*>(cache.base) + block * cache.block_stride + first * channel_stride;
    if (channel_stride == 1) {
      for (int64_t s = 0; s < slots; ++s) widen(from + s * slot_stride, count, state + s * lanes);
      return;
    }
    for_runs(*this, [&](int64_t at, int64_t n, int64_t to) {
      int64_t i = 0;
      for (; i + W <= n; i += W) store(staging + to + i, load_float(from + at + i));
      if (i == n) return;
      float rest[W];
      widen(from + at + i, n - i, rest);
      std::memcpy(staging + to + i, rest, (n - i) * sizeof(float));
    });
    split(staging, count, slots, lanes, state);
  });
}

void ChannelState::write(int64_t block) {
  with_element(cache.type, [&](auto x) {
    using T = decltype(x);
    T* to = static_cast<T*>(cache.base) + block * cache.block_stride + first * channel_stride;
    if (channel_stride == 1) {
      for (int64_t s = 0; s < slots; ++s) narrow_row(state + s * lanes, count, to + s * slot_stride);
      return;
    }
    join(state, count, slots, lanes, staging);
    for_runs(*this, [&](int64_t at, int64_t n, int64_t from) { narrow_row(staging + from, n, to + at); });
  });
}

void read_channels(const Operand& weights, int64_t first, int64_t count, int64_t slots, int64_t lanes, float* to,
                   float* staging) {
  const StateCache values{const_cast<void*>(weights.base), weights.type, 1, 0, {weights.strides[0], 1, 0}};
  ChannelState{values, weights.strides[0], 1, first, count, slots, lanes, to, staging}.read(0);
}

}  // namespace pagebinder
