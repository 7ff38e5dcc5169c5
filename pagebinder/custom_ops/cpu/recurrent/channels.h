// Recurrences whose channels are independent: channels are vector lanes, a job is a range of them for all requests.
//
//     cache   [C, S] or [S, C]      ─▶   state [S, LANES] float32      ─▶   tokens of one request, one by one
#pragma once

#include "step.h"

namespace pagebinder {

// The states of a range of channels: `slots` values of each, as rows of `lanes` floats.
struct ChannelState {
  const StateCache& cache;
  int64_t channel_stride, slot_stride;  // in the cache
  int64_t first, count, slots, lanes;
  float* state;
  float* staging;                       // slots * lanes floats, and a vector that may be read past them

  static int64_t floats(int64_t slots, int64_t lanes) { return 2 * slots * lanes + W; }

  void clear() { std::fill_n(state, slots * lanes, 0.0f); }
  void read(int64_t block);
  void write(int64_t block);
};

// Channels [first, first + count) of weights [C, slots] -> [slots, lanes]; `staging` as in a ChannelState.
void read_channels(const Operand& weights, int64_t first, int64_t count, int64_t slots, int64_t lanes, float* to,
                   float* staging);

// op.range_floats(): scratch of a range. op.begin(first, count, scratch) -> a range of at most LANES channels with
//   state: its ChannelState;  started(): the state has been read;  tokens(row, n): adds rows [row, row + n).
template <int64_t LANES, class Op>
const char* run_channels(const Step& step, const StateCache& cache, const Result& out, int64_t channels, int64_t work,
                         const Op& op) {
  if (const char* error = check_step(step, cache)) return error;
  const int64_t num_jobs = (channels + LANES - 1) / LANES;
  run_jobs(step, num_jobs, work, [&](int64_t job) {
    static thread_local Buffer memory;
    const int64_t first = job * LANES, count = std::min<int64_t>(LANES, channels - first);
    auto range = op.begin(first, count, memory.at_least<float>(op.range_floats()));
    for (int64_t r = 0; r < step.num_requests; ++r) {
      const Request request(step, r);
      if (request.empty()) continue;
      if (request.context == 0) range.state.clear();
      else range.state.read(request.block(request.context));
      range.started();
      for (int64_t p = request.context; p < request.end;) {
        const int64_t stop = request.next_checkpoint(p);
        range.tokens(request.first_row + p, stop - p);
        if (const int64_t block = request.block(stop)) range.state.write(block);
        p = stop;
      }
    }
  });
  zero_padding(step, out);
  return nullptr;
}

}  // namespace pagebinder
