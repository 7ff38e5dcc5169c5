// What a step asks of each request, and how its work is shared out.
#pragma once

#include "rows.h"

namespace pagebinder {

// Null, or what is wrong with the metadata; nothing has been written then.
const char* check_step(const Step& step, const StateCache& cache);

// Tokens at absolute positions [context, end) of one request; position p is row first_row + p of the operands.
class Request {
 public:
  Request(const Step& step, int64_t r)
      : step_(step), table_(step.block_table + r * step.table_stride) {
    end = step.seq_lens[r];
    context = end - (step.query_start_loc[r + 1] - step.query_start_loc[r]);
    first_row = step.query_start_loc[r] - context;
  }

  int64_t context, end, first_row;

  bool empty() const { return context == end; }

  // The block of the state after position p - 1; 0: nobody wants it.
  int64_t block(int64_t p) const { return table_[(p - 1) / step_.block_size]; }

  // The nearest end of a wanted block behind p, or of the step.
  int64_t next_checkpoint(int64_t p) const {
    for (int64_t at = (p / step_.block_size + 1) * step_.block_size; at < end; at += step_.block_size)
      if (block(at) != 0) return at;
    return end;
  }

 private:
  const Step& step_;
  const int32_t* table_;
};

// While it lives, results below 2^-126 become 0 in this thread: a state that fades away would make a token as slow as
// a hundred. Operands are taken as they are, because halves are widened by way of such numbers.
class NoSubnormals {
 public:
#if defined(__x86_64__)
  NoSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | FLUSH_RESULTS); }
  ~NoSubnormals() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned FLUSH_RESULTS = 1u << 15;
  const unsigned before_;
#else
  NoSubnormals() {}
#endif
};

constexpr int64_t SERIAL_WORK = 1 << 15;

// Runs job(i) for i in [0, num_jobs), possibly at the same time. `work`: about how many multiplications a token
// takes.
template <class Job>
void run_jobs(const Step& step, int64_t num_jobs, int64_t work, const Job& job) {
  struct Shared {
    const Job& job;
    const int64_t num_jobs;
    std::atomic<int64_t> next{0};
  } shared{job, num_jobs};
  const auto worker = [](void* context, int) {
    const NoSubnormals guard;
    Shared& s = *static_cast<Shared*>(context);
    for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.num_jobs;) s.job(i);
  };
  const int64_t num_workers = std::min<int64_t>(num_jobs, step.num_threads);
  if (num_workers <= 1 || step.query_start_loc[step.num_requests] * work < SERIAL_WORK) worker(&shared, 0);
  else step.run(static_cast<int>(num_workers), worker, &shared);
}

inline size_t element_bytes(Element type) { return type == Element::F32 ? 4 : 2; }

// Rows of tokens that no request owns.
inline void zero_padding(const Step& step, const Result& out) {
  const size_t row = out.rows * out.width * element_bytes(out.type);
  const int64_t first = step.query_start_loc[step.num_requests];
  std::memset(static_cast<char*>(out.base) + first * row, 0, (step.num_tokens - first) * row);
}

}  // namespace pagebinder
