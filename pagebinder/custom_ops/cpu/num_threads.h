// How many threads a call of ours uses, and how many torch's own loops do.
//
// OpenMP's threads go on looking for work for some ten milliseconds after each of torch's loops, on the cores where the
// pool's helpers (thread_pool.h) work: a softmax of 8 rows then costs the experts behind it a third of their time. Where
// steps leave little to torch, its loops stay in the thread that calls them, and only ours go on using all.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "thread_pool.h"

// Torch's, if it has them.
extern "C" {
__attribute__((weak)) void omp_set_num_threads(int count);
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int count);
}

namespace pagebinder {

inline int torch_num_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

// Of a call of ours by this thread.
inline int num_threads() {
  const int own = ThreadPool::instance().threads_of_caller();
  return own > 0 ? own : torch_num_threads();
}

// From now on torch's loops that this thread calls use it alone, or as many threads as before. Returns what held before.
inline bool limit_torch_threads(bool limited) {
  ThreadPool& pool = ThreadPool::instance();
  const int own = pool.threads_of_caller();
  if (limited == (own > 0) || omp_set_num_threads == nullptr) return own > 0;
  const int all = limited ? torch_num_threads() : own;
  if (!pool.set_threads_of_caller(limited ? all : 0)) return false;
  omp_set_num_threads(limited ? 1 : all);
  if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(limited ? 1 : all);
  return !limited;
}

// While it lives, torch uses all threads: for products that are torch's. Not in a process that was made by fork(), where
// it would wait without an end for threads that stayed with the parent.
class AllTorchThreads {
 public:
  AllTorchThreads() = default;
  AllTorchThreads(const AllTorchThreads&) = delete;
  ~AllTorchThreads() {
    if (are_there_) limit_torch_threads(before_);
  }

 private:
  const bool are_there_ = !ThreadPool::instance().is_in_child();
  const bool before_ = are_there_ && limit_torch_threads(false);
};

}  // namespace pagebinder
