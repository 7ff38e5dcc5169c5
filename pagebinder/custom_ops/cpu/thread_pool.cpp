// The pool of threads, see thread_pool.h.
#include "thread_pool.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__)
#include <signal.h>
#endif

namespace pagebinder {

struct ThreadPool::Helpers {
  static constexpr std::chrono::microseconds LOOK_FOR_WORK{100};

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
    std::atomic<int64_t>& left_loops;
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

  Loop& unused_loop();
  void add_helpers(int wanted);
  void publish(Loop& loop, int count);
  void help(int number);
  uint64_t next_epoch(uint64_t seen, Reader& reader);

  std::atomic<bool> has_caller{false};  // who set it may publish loops
  std::vector<std::unique_ptr<Loop>> loops;
  std::atomic<Loop*> published{nullptr};
  std::atomic<uint64_t> epoch{0};
  std::atomic<int> num_helpers{0}, sleepers{0};
  std::mutex sleep;
  std::condition_variable wake;
  SharedReading readings[MOST_READERS];
#if defined(__unix__)  // a key, as libraries share this object but not thread_local variables
  pthread_key_t threads_key{};
  const bool has_key = pthread_key_create(&threads_key, nullptr) == 0;
#endif
};

ThreadPool::ThreadPool() : helpers_(*new Helpers) {}

int ThreadPool::num_helpers() const { return helpers_.num_helpers.load(std::memory_order_relaxed); }

void ThreadPool::run(int num_workers, LoopBody body, void* context, std::shared_ptr<void> kept) {
  const bool may_leave = kept != nullptr;
  if (helpers_.has_caller.exchange(true)) {  // the helpers have another caller: this one works alone
    for (int w = 0; w < (may_leave ? 1 : num_workers); ++w) body(context, w);
    return;
  }
  const Helpers::Turn turn{helpers_.has_caller};
  if (num_helpers() < num_workers - 1) helpers_.add_helpers(num_workers - 1);
  Helpers::Loop& loop = helpers_.unused_loop();
  loop.num_workers = num_workers, loop.body = body, loop.context = context, loop.kept = std::move(kept);
  loop.next_worker.store(may_leave ? 1 : 0, std::memory_order_relaxed);
  helpers_.publish(loop, num_workers - 1);
  const Helpers::Closing closing{left_loops, loop};
  if (may_leave) body(context, 0);
  else loop.take_part();
}

// Also where the caller's body throws.
ThreadPool::Helpers::Closing::~Closing() {
  loop.open.store(false);
  const auto is_empty = [&] { return loop.inside.load() == 0; };
  if (loop.kept == nullptr) wait_until(is_empty);
  else if (is_empty()) loop.kept.reset();
  else left_loops.fetch_add(1, std::memory_order_relaxed);
}

// Also lets go what left loops kept, if nobody is inside any more: helpers never do, as a last reference may be one to
// a tensor of Python's.
ThreadPool::Helpers::Loop& ThreadPool::Helpers::unused_loop() {
  Loop* unused = nullptr;
  for (const auto& loop : loops)
    if (loop->inside.load() == 0) {
      loop->kept.reset();
      unused = loop.get();
    }
  if (unused == nullptr) {
    loops.push_back(std::make_unique<Loop>());
    unused = loops.back().get();
  }
  return *unused;
}

void ThreadPool::Helpers::publish(Loop& loop, int count) {
  loop.open.store(true);
  published.store(&loop);
  epoch.fetch_add(1);
  if (sleepers.load() == 0) return;
  const std::lock_guard<std::mutex> lock(sleep);
  if (count >= sleepers.load()) wake.notify_all();
  else
    while (count-- > 0) wake.notify_one();
}

void ThreadPool::Helpers::add_helpers(int wanted) {
#if defined(__unix__)  // signals are for the threads of the application
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
  try {
    while (num_helpers.load() < wanted) {
      std::thread([this, number = num_helpers.load()] { help(number); }).detach();
      num_helpers.fetch_add(1);
    }
  } catch (const std::system_error&) {  // no more threads: those that exist do it
  }
#if defined(__unix__)
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
}

int ThreadPool::threads_of_caller() const {
#if defined(__unix__)
  if (helpers_.has_key) return static_cast<int>(reinterpret_cast<intptr_t>(pthread_getspecific(helpers_.threads_key)));
#endif
  return 0;
}

bool ThreadPool::set_threads_of_caller(int count) {
#if defined(__unix__)
  void* const kept = reinterpret_cast<void*>(static_cast<intptr_t>(count));
  return helpers_.has_key && pthread_setspecific(helpers_.threads_key, kept) == 0;
#else
  return count == 0;
#endif
}

void ThreadPool::will_read(int helper, const Reading& reading) {
  if (helper >= MOST_READERS) return;
  Helpers::SharedReading& shared = helpers_.readings[helper];
  for (int i = 0; i < 2; ++i) shared.first[i].store(reading.first[i], std::memory_order_relaxed);
  shared.bytes.store(reading.bytes, std::memory_order_relaxed);
  shared.version.fetch_add(1, std::memory_order_release);
}

int64_t ThreadPool::asked_bytes() const {
  int64_t sum = 0;
  for (const Helpers::SharedReading& reading : helpers_.readings) sum += reading.asked.load(std::memory_order_relaxed);
  return sum;
}

// A few lines, so that a new loop is seen at once. False: there are no more.
bool ThreadPool::Helpers::Reader::ask_for_more() {
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

void ThreadPool::Helpers::help(int number) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "pagebinder");
#endif
  Reader reader{number < MOST_READERS ? &readings[number] : nullptr};
  for (uint64_t seen = 0;;) {
    seen = next_epoch(seen, reader);
    Loop* loop = published.load();
    loop->inside.fetch_add(1);
    if (loop->open.load()) loop->take_part();
    loop->inside.fetch_sub(1);
  }
}

// Waits for an epoch other than `seen`.
uint64_t ThreadPool::Helpers::next_epoch(uint64_t seen, Reader& reader) {
  constexpr int TURNS = 50;  // between looks at the clock
  const auto until = std::chrono::steady_clock::now() + LOOK_FOR_WORK;
  do {
    for (int turn = 0; turn < TURNS; ++turn) {
      if (const uint64_t now = epoch.load(); now != seen) return now;
      if (!reader.ask_for_more()) pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < until);
  std::unique_lock<std::mutex> lock(sleep);
  sleepers.fetch_add(1);
  wake.wait(lock, [&] { return epoch.load() != seen; });
  sleepers.fetch_sub(1);
  return epoch.load();
}

void stand_still(int worker) {
  const int microseconds = ThreadPool::instance().stall_microseconds.load(std::memory_order_relaxed);
  if (worker > 0 && microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

}  // namespace pagebinder
