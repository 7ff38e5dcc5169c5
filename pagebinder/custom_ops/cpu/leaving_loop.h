// Loops whose caller does not wait for a helper that stands still in the middle of a job: it does the job again.
//
//     helper   take job 7 | compute into scratch ...  (not run for 4 ms)  ... | claim 7: too late, drop it
//     caller   its own jobs | all others' | 7 is open, wait for a job's time | compute 7 | claim 7 | write | go on
//
// Who claims a piece of the result writes it, so each is written once, by either; both compute the same bits. What a
// late helper still reads belongs to the context of its loop (run_leaving).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "thread_pool.h"

namespace pagebinder {

// Allocates one object at a time: where the last of its type lay, if nobody is there. What a loop works on takes KB,
// and a step makes hundreds of them: malloc took a twelfth of a small model's step.
template <class T>
struct ReusedMemory {
  using value_type = T;
  ReusedMemory() = default;
  template <class Other>
  ReusedMemory(const ReusedMemory<Other>&) {}

  T* allocate(std::size_t count) {
    void* memory = count == 1 ? last().exchange(nullptr, std::memory_order_acquire) : nullptr;
    return memory != nullptr ? static_cast<T*>(memory) : std::allocator<T>().allocate(count);
  }
  void deallocate(T* memory, std::size_t count) {
    if (count == 1) memory = static_cast<T*>(last().exchange(memory, std::memory_order_acq_rel));
    if (memory != nullptr) std::allocator<T>().deallocate(memory, count);
  }
  friend bool operator==(const ReusedMemory&, const ReusedMemory&) { return true; }
  friend bool operator!=(const ReusedMemory&, const ReusedMemory&) { return false; }

 private:
  static std::atomic<void*>& last() {
    static std::atomic<void*> memory{nullptr};
    return memory;
  }
};

// What a loop works on, which may be left: see run_leaving.
template <class Run, class... Args>
std::shared_ptr<Run> make_run(Args&&... args) {
  return std::allocate_shared<Run>(ReusedMemory<Run>(), std::forward<Args>(args)...);
}

// Pieces of a result that are to be written once.
class Claims {
 public:
  explicit Claims(int64_t count) : states_(static_cast<size_t>(count)) {}

  // Runs write() if nobody else does or did.
  template <class Write>
  void write_once(int64_t piece, const Write& write) {
    uint8_t state = OPEN;
    if (!states_[piece].compare_exchange_strong(state, CLAIMED, std::memory_order_acq_rel)) return;
    write();
    states_[piece].store(WRITTEN, std::memory_order_release);
  }
  bool is_open(int64_t piece) const { return states_[piece].load(std::memory_order_relaxed) == OPEN; }
  bool is_written(int64_t piece) const { return states_[piece].load(std::memory_order_acquire) == WRITTEN; }

 private:
  enum : uint8_t { OPEN, CLAIMED, WRITTEN };
  std::vector<std::atomic<uint8_t>> states_;
};

// The mean time of what a thread does again and again.
class Pace {
 public:
  void count() { ++count_; }
  std::chrono::nanoseconds of_one() const {
    return (std::chrono::steady_clock::now() - started_) / (count_ > 0 ? count_ : 1);
  }

 private:
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  int64_t count_ = 0;
};

// The end of worker 0: until written(job) of all jobs in [0, count), does jobs again of which no other thread made
// something in the time of two, as it may have taken the next one, too.
template <class Written, class Redo>
void complete_jobs(int64_t count, const Pace& pace, const Written& written, const Redo& redo) {
  constexpr std::chrono::microseconds AT_LEAST{5};
  const auto until = std::chrono::steady_clock::now() + AT_LEAST + 2 * pace.of_one();
  for (int64_t job = 0; job < count; ++job) {
    while (!written(job) && std::chrono::steady_clock::now() < until) pause_briefly();
    if (written(job)) continue;
    ThreadPool::instance().redone_jobs.fetch_add(1, std::memory_order_relaxed);
    redo(job);
    wait_until([&] { return written(job); });  // who claimed it before us is writing
  }
}

}  // namespace pagebinder
