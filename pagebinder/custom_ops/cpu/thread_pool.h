// Threads of ours that help with loops, and that nobody has to wait for.
//
//     caller   publish | body(0) ......................... | close | waits for helpers that are inside | goes on
//     helper           |   enter | body(1) ............ | leave
//     helper           |             (the system runs something else on its core)
//
// A loop of OpenMP ends when all threads of its team have come, also those that the system does not run just now: where
// half of one core is taken, half of all time is lost. Here the caller does what nobody else has begun. What a helper
// has begun can be left, too, see `run_leaving` and leaving_loop.h: then a thread that stands still costs nothing but
// its share.
//
// Helpers that have nothing to do look for a loop for some microseconds, then sleep. Short waits are on purpose: a core
// whose helper sleeps can take over a thread that waits for another core. While they look they ask memory for what the
// caller says they will read next: it would have nothing to do either.
//
// One pool serves all libraries of a process: the function-local static of an inline function is one object, as long
// as compilers mark it as unique (g++); else each library has a pool of its own. What it does is in thread_pool.cpp, which
// every library holds: most kernels include this file, and the headers of threads take long to read.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#if defined(__unix__)
#include <pthread.h>
#include <sched.h>
#endif

namespace pagebinder {

using LoopBody = void (*)(void* context, int worker);

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Lets other threads of this core run.
inline void step_aside() {
#if defined(__unix__)
  sched_yield();
#else
  pause_briefly();
#endif
}

// Waits until ready(): for a while at full speed, then letting others run.
template <class Ready>
void wait_until(Ready ready) {
  constexpr int TURNS = 2000;
  for (int turn = 0; !ready(); ++turn)
    if (turn < TURNS) pause_briefly();
    else step_aside();
}

// Memory that is read soon: one run of bytes, or two side by side.
struct Reading {
  const char* first[2];  // the second may be null
  int64_t bytes;         // of each
};

class __attribute__((visibility("default"))) ThreadPool {
 public:
  // Of this process; the child of a fork has one of its own. It lives until the process ends.
  static ThreadPool& instance();

  // See run_parallel and run_leaving. `kept`: not null for a loop that may be left.
  void run(int num_workers, LoopBody body, void* context, std::shared_ptr<void> kept);

  int num_helpers() const;

  // Was this process made by fork() from one that had a pool? OpenMP's threads stayed there.
  bool is_in_child() const { return is_in_child_; }

  // What a helper asks for from now on while it has no work. A caller's; helpers count from 0, those beyond
  // MOST_READERS read nothing.
  static constexpr int MOST_READERS = 8;
  void will_read(int helper, const Reading& reading);

  // How many threads a loop of the calling thread uses; 0: nobody said. See num_threads.h. False: it cannot be kept.
  int threads_of_caller() const;
  bool set_threads_of_caller(int count);

  // For tests: helpers stand still for that long where `stand_still` is called.
  std::atomic<int> stall_microseconds{0};
  // How many jobs a caller did that a helper had begun; how many loops were left with a helper inside.
  std::atomic<int64_t> redone_jobs{0}, left_loops{0};
  // Bytes that helpers asked for while they had no work.
  int64_t asked_bytes() const;

 private:
  struct Helpers;

  ThreadPool();
  static ThreadPool*& current();

  Helpers& helpers_;  // as long as the process
  bool is_in_child_ = false;
};

inline ThreadPool& ThreadPool::instance() { return *current(); }

inline ThreadPool*& ThreadPool::current() {
  static ThreadPool* pool = [] {
#if defined(__unix__)
    pthread_atfork(nullptr, nullptr, [] {
      current() = new ThreadPool;
      current()->is_in_child_ = true;
    });
#endif
    return new ThreadPool;
  }();
  return pool;
}

// Runs body(context, worker) for every worker in [0, num_workers), possibly at the same time, and returns when all have
// ended. The caller runs those that no helper has begun.
inline void run_parallel(int num_workers, LoopBody body, void* context) {
  ThreadPool::instance().run(num_workers, body, context, nullptr);
}

// Runs body(context, 0), helpers some of the other workers up to num_workers, and returns when body(context, 0) does,
// whatever helpers are doing: they must not change anything then but what is in the context, which lives as long as one
// of them is inside.
template <class Context>
void run_leaving(int num_workers, LoopBody body, std::shared_ptr<Context> context) {
  Context* at = context.get();
  ThreadPool::instance().run(num_workers, body, at, std::move(context));
}

// Runs body(begin, end) over ranges of [0, count) of `grain` elements or less.
template <class Body>
void for_ranges(int64_t count, int64_t grain, int num_threads, const Body& body) {
  struct Shared {
    const Body& body;
    const int64_t count, grain;
    std::atomic<int64_t> next{0};
  } shared{body, count, grain};
  const auto worker = [](void* context, int) {
    Shared& s = *static_cast<Shared*>(context);
    for (int64_t i; (i = s.next.fetch_add(s.grain, std::memory_order_relaxed)) < s.count;)
      s.body(i, i + s.grain < s.count ? i + s.grain : s.count);
  };
  const int64_t ranges = (count + grain - 1) / grain;
  if (ranges <= 1 || num_threads <= 1) worker(&shared, 0);
  else run_parallel(static_cast<int>(ranges < num_threads ? ranges : num_threads), worker, &shared);
}

// For tests: what a helper does that the system does not run for a while.
void stand_still(int worker);

}  // namespace pagebinder
