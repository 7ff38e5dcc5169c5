// Which weights a step reads next, so that threads without work ask memory for them (ThreadPool::will_read).
#pragma once

#include <algorithm>
#include <unordered_map>

#include "thread_pool.h"

namespace pagebinder {

constexpr int64_t NEXT_WEIGHTS_ROWS = 32;  // calls of more rows do not wait for memory

// A step calls the same layers in the same order again and again. So whoever calls one knows which comes next, and where
// the helpers will begin to read it. One for each calling thread.
class NextWeights {
 public:
  // The layer with `weight` is called now. begin(worker): from where a worker reads it on, in bytes of all there is.
  template <class Begin>
  void told_of(const void* weight, int num_workers, const Begin& begin) {
    if (known_.size() > MOST_KNOWN) known_.clear();
    Readings& readings = known_[last_];
    readings.count = std::min(num_workers - 1, ThreadPool::MOST_READERS);
    for (int helper = 0; helper < readings.count; ++helper) {
      Reading& reading = readings.of[helper];
      reading = begin(helper + 1);
      reading.bytes = std::min(reading.bytes, MOST_BYTES / (reading.first[1] == nullptr ? 1 : 2));
    }
    last_ = weight;
    const auto next = known_.find(weight);
    if (next == known_.end()) return;
    for (int helper = 0; helper < next->second.count; ++helper)
      ThreadPool::instance().will_read(helper, next->second.of[helper]);
  }

 private:
  static constexpr size_t MOST_KNOWN = 4096;
  static constexpr int64_t MOST_BYTES = 1 << 20;  // half of a second cache

  struct Readings {
    int count;
    Reading of[ThreadPool::MOST_READERS];
  };

  std::unordered_map<const void*, Readings> known_;
  const void* last_ = nullptr;
};

}  // namespace pagebinder
