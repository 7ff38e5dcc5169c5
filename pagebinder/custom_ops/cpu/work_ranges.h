// Jobs 0 .. count - 1 for some workers, each of which begins with a run of its own.
//
//     jobs    | 0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15 |        worker 1 is done: it takes the last job that is left
//     worker  | 0 ->          < |  1 ->                 |        of worker 0
//
// Jobs that follow one another mostly read memory that does, and a worker that reads on and on in one direction is what
// memory is fastest at: a quarter faster than workers that take turns (docs/measurements.md). A slow worker costs its
// share, as the others help it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace pagebinder {

class WorkRanges {
 public:
  WorkRanges(int count, int num_workers) : count_(count), slots_(std::clamp(num_workers, 1, MOST_SLOTS)) {
    for (int64_t s = 0; s < slots_; ++s)
      slot_[s].range.store(pack(count * s / slots_, count * (s + 1) / slots_), std::memory_order_relaxed);
  }
  int count() const { return count_; }

  // The next job of a worker; `count()` if none is left to begin.
  int take(int worker) {
    uint64_t range = slot_[worker % slots_].range.load(std::memory_order_relaxed);
    while (length(range) > 0)
      if (exchange(worker % slots_, range, begin_of(range) + 1, end_of(range))) return begin_of(range);
    for (;;) {
      int longest = 0;
      range = 0;
      for (int s = 0; s < slots_; ++s) {
        const uint64_t other = slot_[s].range.load(std::memory_order_relaxed);
        if (length(other) > length(range)) longest = s, range = other;
      }
      if (length(range) <= 0) return count_;
      if (exchange(longest, range, begin_of(range), end_of(range) - 1)) return end_of(range) - 1;
    }
  }

  // What the worker takes next, if nobody is faster; `count()` if its own run has ended.
  int next(int worker) const {
    const uint64_t range = slot_[worker % slots_].range.load(std::memory_order_relaxed);
    return length(range) > 0 ? begin_of(range) : count_;
  }

 private:
  static constexpr int MOST_SLOTS = 64;  // more workers share them
  struct alignas(64) Slot { std::atomic<uint64_t> range; };  // begin, end

  static uint64_t pack(int64_t begin, int64_t end) { return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end); }
  static int begin_of(uint64_t range) { return static_cast<int>(range >> 32); }
  static int end_of(uint64_t range) { return static_cast<int>(range & 0xffffffffu); }
  static int length(uint64_t range) { return end_of(range) - begin_of(range); }

  // Replaces a slot's range; if somebody else did, `range` is what it is now.
  bool exchange(int slot, uint64_t& range, int begin, int end) {
    return slot_[slot].range.compare_exchange_strong(range, pack(begin, end), std::memory_order_relaxed);
  }

  const int count_, slots_;
  Slot slot_[MOST_SLOTS];
};

}  // namespace pagebinder
