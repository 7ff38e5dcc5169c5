// The state of a compressor while its tokens are added: per slot rows m, l and sum, padded to whole vectors.
#pragma once

#include <algorithm>
#include <cfloat>

#include "latent.h"

namespace pagebinder {

// m where l = 0. In a cache m is 0 there; this one is below every z and finite, so that what is empty needs no case
// of its own, not even beside a z of -inf.
constexpr float EMPTY_MOST = -FLT_MAX;

struct CompressSlot {
  float *most, *total, *sum;
};

inline int64_t whole_vectors(int64_t count) { return (count + W - 1) / W * W; }

struct CompressState {
  CompressSlot slot[2];
  int slots, width;

  CompressState(float* memory, int slots, int width) : slots(slots), width(width) {
    for (int s = 0; s < slots; ++s)
      slot[s] = {memory + (3 * s) * whole_vectors(width), memory + (3 * s + 1) * whole_vectors(width),
                 memory + (3 * s + 2) * whole_vectors(width)};
  }
  static int64_t floats(const CompressArgs& a) { return a.slots * 3 * whole_vectors(a.width); }

  void clear(int s) {
    std::fill_n(slot[s].most, whole_vectors(width), EMPTY_MOST);
    std::fill_n(slot[s].total, whole_vectors(width), 0.0f);
    std::fill_n(slot[s].sum, whole_vectors(width), 0.0f);
  }
  void clear() {
    for (int s = 0; s < slots; ++s) clear(s);
  }
  void close_window() {
    if (slots == 2) std::swap(slot[0], slot[1]);
    clear(slots - 1);
  }
};

inline void read_compress_state(const CompressArgs& a, int64_t block, CompressState& state) {
  state.clear();
  for (int s = 0; s < a.slots; ++s) {
    const float* from = a.state + block * a.state_block_stride + s * a.state_slot_stride;
    std::memcpy(state.slot[s].total, from + a.state_part_stride, a.width * sizeof(float));
    std::memcpy(state.slot[s].sum, from + 2 * a.state_part_stride, a.width * sizeof(float));
    for (int i = 0; i < a.width; ++i) state.slot[s].most[i] = state.slot[s].total[i] == 0.0f ? EMPTY_MOST : from[i];
  }
}

inline void write_compress_state(const CompressArgs& a, int64_t block, const CompressState& state) {
  for (int s = 0; s < a.slots; ++s) {
    float* to = a.state + block * a.state_block_stride + s * a.state_slot_stride;
    for (int i = 0; i < a.width; ++i) to[i] = state.slot[s].total[i] == 0.0f ? 0.0f : state.slot[s].most[i];
    std::memcpy(to + a.state_part_stride, state.slot[s].total, a.width * sizeof(float));
    std::memcpy(to + 2 * a.state_part_stride, state.slot[s].sum, a.width * sizeof(float));
  }
}

}  // namespace pagebinder
