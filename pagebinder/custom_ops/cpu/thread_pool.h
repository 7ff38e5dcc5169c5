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
// as compilers mark it as unique (g++); else each library has a pool of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__)
#include <pthread.h>
#include <signal.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagebinder {

using LoopBody = void (*)(void* context, int worker);

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until ready(): for a while at full speed, then letting others run.
template <class Ready>
void wait_until(Ready ready) {
  constexpr int TURNS = 2000;
  for (int turn = 0; !ready(); ++turn)
    if (turn < TURNS) pause_briefly();
    else std::this_thread::yield();
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

  int num_helpers() const { return num_helpers_.load(std::memory_order_relaxed); }

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
  // A loop. Helpers count themselves in before they look whether it is open, callers close it before they look who is
  // inside: one of the two sees the other. It holds another loop only when nobody is inside.
  struct Loop {
    std::atomic<bool> open{false};
    std::atomic<int> inside{0}, next_worker{0};
    int num_workers = 0;
    LoopBody body = nullptr;
    void* context = nullptr;
    std::shared_ptr<void> kept;

    void take_part() {
      for (int w; (w = next_worker.fetch_add(1, std::memory_order_relaxed)) < num_workers;) body(context, w);
    }
  };

  struct Turn {
    std::atomic<bool>& has_caller;
    ~Turn() { has_caller.store(false); }
  };
  struct Closing {
    ThreadPool& pool;
    Loop& loop;
    ~Closing();
  };

  // A Reading that changes while a helper looks at it. A mixture of two does no harm: it only asks.
  struct alignas(64) SharedReading {
    std::atomic<const char*> first[2]{};
    std::atomic<int64_t> bytes{0};
    std::atomic<uint64_t> version{0};
    std::atomic<int64_t> asked{0};  // the helper's own
  };

  // How far a helper is with its reading.
  struct Reader {
    SharedReading* reading;
    uint64_t version = 0;
    int64_t at = 0;
    bool ask_for_more();
  };

  static constexpr std::chrono::microseconds LOOKS_FOR_WORK{100};

  static ThreadPool*& current();
  Loop& unused_loop();
  void add_helpers(int wanted);
  void publish(Loop& loop, int helpers);
  void help(int number);
  uint64_t next_epoch(uint64_t seen, Reader& reader);

  std::atomic<bool> has_caller_{false};  // who set it may publish loops
  std::vector<std::unique_ptr<Loop>> loops_;
  std::atomic<Loop*> published_{nullptr};
  std::atomic<uint64_t> epoch_{0};
  std::atomic<int> num_helpers_{0}, sleepers_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
  SharedReading readings_[MOST_READERS];
#if defined(__unix__)  // a key, as libraries share this object but not thread_local variables
  pthread_key_t threads_key_{};
  const bool has_key_ = pthread_key_create(&threads_key_, nullptr) == 0;
#endif
};

inline ThreadPool& ThreadPool::instance() { return *current(); }

inline ThreadPool*& ThreadPool::current() {
  static ThreadPool* pool = [] {
#if defined(__unix__)
    pthread_atfork(nullptr, nullptr, [] { current() = new ThreadPool; });
#endif
    return new ThreadPool;
  }();
  return pool;
}

inline void ThreadPool::run(int num_workers, LoopBody body, void* context, std::shared_ptr<void> kept) {
  const bool may_leave = kept != nullptr;
  if (has_caller_.exchange(true)) {  // the helpers have another caller: this one works alone
    for (int w = 0; w < (may_leave ? 1 : num_workers); ++w) body(context, w);
    return;
  }
  const Turn turn{has_caller_};
  if (num_helpers() < num_workers - 1) add_helpers(num_workers - 1);
  Loop& loop = unused_loop();
  loop.num_workers = num_workers, loop.body = body, loop.context = context, loop.kept = std::move(kept);
  loop.next_worker.store(may_leave ? 1 : 0, std::memory_order_relaxed);
  publish(loop, num_workers - 1);
  const Closing closing{*this, loop};
  if (may_leave) body(context, 0);
  else loop.take_part();
}

// Also where the caller's body throws.
inline ThreadPool::Closing::~Closing() {
  loop.open.store(false);
  const auto is_empty = [&] { return loop.inside.load() == 0; };
  if (loop.kept == nullptr) wait_until(is_empty);
  else if (is_empty()) loop.kept.reset();
  else pool.left_loops.fetch_add(1, std::memory_order_relaxed);
}

// Also lets go what left loops kept, if nobody is inside any more: helpers never do, as a last reference may be one to
// a tensor of Python's.
inline ThreadPool::Loop& ThreadPool::unused_loop() {
  Loop* unused = nullptr;
  for (const auto& loop : loops_)
    if (loop->inside.load() == 0) {
      loop->kept.reset();
      unused = loop.get();
    }
  if (unused == nullptr) {
    loops_.push_back(std::make_unique<Loop>());
    unused = loops_.back().get();
  }
  return *unused;
}

inline void ThreadPool::publish(Loop& loop, int helpers) {
  loop.open.store(true);
  published_.store(&loop);
  epoch_.fetch_add(1);
  if (sleepers_.load() == 0) return;
  const std::lock_guard<std::mutex> lock(sleep_);
  if (helpers >= sleepers_.load()) wake_.notify_all();
  else
    while (helpers-- > 0) wake_.notify_one();
}

inline void ThreadPool::add_helpers(int wanted) {
#if defined(__unix__)  // signals are for the threads of the application
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
  try {
    while (num_helpers() < wanted) {
      std::thread([this, number = num_helpers()] { help(number); }).detach();
      num_helpers_.fetch_add(1);
    }
  } catch (const std::system_error&) {  // no more threads: those that exist do it
  }
#if defined(__unix__)
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
}

inline int ThreadPool::threads_of_caller() const {
#if defined(__unix__)
  if (has_key_) return static_cast<int>(reinterpret_cast<intptr_t>(pthread_getspecific(threads_key_)));
#endif
  return 0;
}

inline bool ThreadPool::set_threads_of_caller(int count) {
#if defined(__unix__)
  return has_key_ && pthread_setspecific(threads_key_, reinterpret_cast<void*>(static_cast<intptr_t>(count))) == 0;
#else
  return count == 0;
#endif
}

inline void ThreadPool::will_read(int helper, const Reading& reading) {
  if (helper >= MOST_READERS) return;
  SharedReading& shared = readings_[helper];
  for (int i = 0; i < 2; ++i) shared.first[i].store(reading.first[i], std::memory_order_relaxed);
  shared.bytes.store(reading.bytes, std::memory_order_relaxed);
  shared.version.fetch_add(1, std::memory_order_release);
}

inline int64_t ThreadPool::asked_bytes() const {
  int64_t sum = 0;
  for (const SharedReading& reading : readings_) sum += reading.asked.load(std::memory_order_relaxed);
  return sum;
}

// A few lines, so that a new loop is seen at once. False: there are no more.
inline bool ThreadPool::Reader::ask_for_more() {
  constexpr int AT_ONCE = 512;  // bytes of each run
  if (reading == nullptr) return false;
  if (const uint64_t now = reading->version.load(std::memory_order_acquire); now != version) version = now, at = 0;
  if (at >= reading->bytes.load(std::memory_order_relaxed)) return false;
  int64_t asked = reading->asked.load(std::memory_order_relaxed);
  for (const auto& run : reading->first)
    if (const char* first = run.load(std::memory_order_relaxed)) {
      for (int i = 0; i < AT_ONCE; i += 64) __builtin_prefetch(first + at + i, 0, 2);
      asked += AT_ONCE;
    }
  reading->asked.store(asked, std::memory_order_relaxed);
  at += AT_ONCE;
  return true;
}

inline void ThreadPool::help(int number) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "pagebinder");
#endif
  Reader reader{number < MOST_READERS ? &readings_[number] : nullptr};
  for (uint64_t seen = 0;;) {
    seen = next_epoch(seen, reader);
    Loop* loop = published_.load();
    loop->inside.fetch_add(1);
    if (loop->open.load()) loop->take_part();
    loop->inside.fetch_sub(1);
  }
}

// Waits for an epoch other than `seen`.
inline uint64_t ThreadPool::next_epoch(uint64_t seen, Reader& reader) {
  constexpr int TURNS = 50;  // between looks at the clock
  const auto until = std::chrono::steady_clock::now() + LOOKS_FOR_WORK;
  do {
    for (int turn = 0; turn < TURNS; ++turn) {
      if (const uint64_t epoch = epoch_.load(); epoch != seen) return epoch;
      if (!reader.ask_for_more()) pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < until);
  std::unique_lock<std::mutex> lock(sleep_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] { return epoch_.load() != seen; });
  sleepers_.fetch_sub(1);
  return epoch_.load();
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
inline void stand_still(int worker) {
  const int microseconds = ThreadPool::instance().stall_microseconds.load(std::memory_order_relaxed);
  if (worker > 0 && microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

}  // namespace pagebinder
