// Exact top-k of one row of scores, in the order in which they lie.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "simd.h"

namespace pagebinder {

// Scores as unsigned integers of the same order; NaN as -inf, -0 as +0.
PB_INLINE VU sortable(VF x) {
  x = (x == x ? x : splat(-__builtin_inff())) + 0.0f;
  const VU bits = bit_cast<VU>(x);
  return bits ^ (bit_cast<VU>(bit_cast<VI>(bits) >> 31) | 0x80000000u);
}

// Finds the score of rank `topk` by its leading bits, then among those that share them.
class TopK {
 public:
  // Indices of the topk largest of `num` > topk scores, equal ones by the lowest index, ascending.
  void select(const uint32_t* scores, int64_t num, int64_t topk, int32_t* out) {
    const uint32_t bin = find_bin(scores, num, topk);
    alike_.clear();
    for (int64_t i = 0; i < num; ++i)
      if (scores[i] >> SHIFT == bin) alike_.push_back(scores[i]);
    std::nth_element(alike_.begin(), alike_.begin() + (needed_ - 1), alike_.end(), std::greater<uint32_t>());
    const uint32_t least = alike_[needed_ - 1];
    int64_t equal = needed_;  // of the least score, so many are taken
    for (int64_t i = 0; i < needed_; ++i) equal -= alike_[i] > least;
    int64_t count = 0;
    for (int64_t i = 0; count < topk; ++i) {
      const bool same = scores[i] == least, taken = scores[i] > least || (same && equal > 0);
      out[count] = static_cast<int32_t>(i);
      count += taken;
      equal -= same;
    }
  }

 private:
  static constexpr int SHIFT = 21, BINS = 1 << (32 - SHIFT);

  // The bin that holds the score of rank topk; `needed_` of its scores belong to the topk.
  uint32_t find_bin(const uint32_t* scores, int64_t num, int64_t topk) {
    histogram_.assign(2 * BINS, 0);  // two, so that neighbours in one bin do not wait for each other
    for (int64_t i = 0; i + 1 < num; i += 2) {
      ++histogram_[scores[i] >> SHIFT];
      ++histogram_[BINS + (scores[i + 1] >> SHIFT)];
    }
    if (num % 2 != 0) ++histogram_[scores[num - 1] >> SHIFT];
    needed_ = topk;
    for (int bin = BINS - 1;; --bin) {
      const int64_t count = histogram_[bin] + histogram_[BINS + bin];
      if (count >= needed_) return static_cast<uint32_t>(bin);
      needed_ -= count;
    }
  }

  std::vector<int32_t> histogram_;
  std::vector<uint32_t> alike_;
  int64_t needed_ = 0;
};

}  // namespace pagebinder
