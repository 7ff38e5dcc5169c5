// Slots sorted by expert, and jobs that threads take one by one.
//
//     ids [T, K]         3 0 | 0 5 | 3 5
//     positions          1 2 . . | 0 4 . . | 3 5 . .      a run for each expert that was chosen, in whole groups
//     (which slot)       expert 0  expert 3  expert 5
#pragma once

#include <algorithm>
#include <vector>

#include "moe.h"
#include "work_ranges.h"

namespace pagebinder {

// The rows of one expert: positions [first, first + rows), `first` a multiple of the group.
struct Run { int expert, first, rows; };

struct Routing {
  std::vector<Run> runs;          // ascending experts
  std::vector<int> run_of;        // group of positions -> run
  std::vector<int> slot_at;       // position -> slot, -1 in the padding
  std::vector<int> position_of;   // slot -> position, -1 without an expert

  void assign(const Choice& choice, int group) {
    const int64_t num_slots = choice.tokens * choice.slots;
    next_.assign(choice.experts, 0);
    const auto chosen = [&](int64_t slot) { return choice.ids[slot] >= 0 && choice.ids[slot] < choice.experts; };
    for (int64_t s = 0; s < num_slots; ++s)
      if (chosen(s)) ++next_[choice.ids[s]];
    runs.clear();
    run_of.clear();
    int position = 0;
    for (int e = 0; e < choice.experts; ++e) {
      const int rows = next_[e];
      next_[e] = position;
      if (rows == 0) continue;
      runs.push_back({e, position, rows});
      run_of.insert(run_of.end(), (rows + group - 1) / group, static_cast<int>(runs.size()) - 1);
      position += (rows + group - 1) / group * group;
    }
    slot_at.assign(position, -1);
    position_of.assign(num_slots, -1);
    for (int64_t s = 0; s < num_slots; ++s) {
      if (!chosen(s)) continue;
      const int at = next_[choice.ids[s]]++;
      slot_at[at] = static_cast<int>(s);
      position_of[s] = at;
    }
  }

  int64_t positions() const { return static_cast<int64_t>(slot_at.size()); }

 private:
  std::vector<int> next_;         // of an expert: its rows, then the position of its next row
};

// Asks memory for weights that are needed soon, in the order in which they lie there: that is what memory and its
// prefetcher are fastest at. What is read is `rows` rows, each of `lines` * 64 bytes in one part or in each of two.
class Fetch {
 public:
  Fetch() = default;
  Fetch(const void* first, const void* second, int64_t row_bytes, int rows, int lines)
      : part_{static_cast<const char*>(first), static_cast<const char*>(second)},
        row_bytes_(row_bytes), rows_(first == nullptr ? 0 : rows), lines_(lines), parts_(second == nullptr ? 1 : 2) {}

  int lines() const { return rows_ * lines_ * parts_; }

  PB_INLINE void ask(int count) {
    for (; count > 0 && row_ < rows_; --count) {
      __builtin_prefetch(part_[of_part_] + row_ * row_bytes_ + line_ * 64, 0, 2);
      if (++line_ < lines_) continue;
      line_ = 0;
      if (++of_part_ < parts_) continue;
      of_part_ = 0;
      ++row_;
    }
  }

 private:
  const char* part_[2] = {};
  int64_t row_bytes_ = 0;
  int rows_ = 0, lines_ = 0, parts_ = 1, row_ = 0, of_part_ = 0, line_ = 0;
};

// The threads of a call. Jobs below SERIAL_PRODUCTS multiplications in all are not worth waking others for.
struct Team {
  static constexpr int64_t SERIAL_PRODUCTS = 1 << 19;
  int num_threads;
  ParallelRun run;

  static Team of(int64_t products, int num_threads, ParallelRun run) {
    return {products < SERIAL_PRODUCTS ? 1 : num_threads, run};
  }
};

struct NoSetup {};

// Runs job(i, next, setup) for i in [0, num_jobs), possibly at the same time. `next` is what the same thread runs after
// i, num_jobs or more if nothing. A `Setup` lives while a thread works.
template <class Setup, class Job>
void for_jobs(int64_t num_jobs, const Team& team, const Job& job) {
  struct Shared {
    const Job& job;
    WorkRanges work;
  };
  const auto worker = [](void* context, int index) {
    Setup setup{};
    Shared& s = *static_cast<Shared*>(context);
    for (int i = s.work.take(index), next; i < s.work.count(); i = next) {
      next = s.work.take(index);
      s.job(i, next, setup);
    }
  };
  const int workers = static_cast<int>(std::min<int64_t>(num_jobs, team.num_threads));
  Shared shared{job, {static_cast<int>(num_jobs), workers}};
  if (workers <= 1) worker(&shared, 0);
  else team.run(workers, worker, &shared);
}

}  // namespace pagebinder
