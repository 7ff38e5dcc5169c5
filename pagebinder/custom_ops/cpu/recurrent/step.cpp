#include "step.h"

namespace pagebinder {
namespace {

const char* check_request(const Step& step, const StateCache& cache, int64_t r) {
  const int64_t start = step.query_start_loc[r], length = step.query_start_loc[r + 1] - start;
  if (length < 0 || start + length > step.num_tokens) return "query_start_loc must rise from 0 to at most T";
  if (length == 0) return nullptr;
  if (step.seq_lens[r] < length) return "a seq_len is smaller than its new tokens";
  if (step.seq_lens[r] > step.max_blocks * step.block_size) return "a seq_len exceeds its block table";
  const Request request(step, r);
  const auto is_valid = [&](int64_t p) { return request.block(p) >= 0 && request.block(p) < cache.num_blocks; };
  if (request.context > 0) {
    if (request.block(request.context) == 0) return "the block of a request's start state is null";
    if (!is_valid(request.context)) return "a block id in block_table is not valid";
  }
  for (int64_t p = request.context; p < request.end;) {
    p = request.next_checkpoint(p);
    if (!is_valid(p)) return "a block id in block_table is not valid";
  }
  return nullptr;
}

}  // namespace

const char* check_step(const Step& step, const StateCache& cache) {
  if (step.query_start_loc[0] != 0) return "query_start_loc must rise from 0 to at most T";
  for (int64_t r = 0; r < step.num_requests; ++r)
    if (const char* error = check_request(step, cache, r)) return error;
  return nullptr;
}

}  // namespace pagebinder
