// Rows of a latent cache: rotated, rounded, quantised and stored in one pass over each.
#include <algorithm>

#include "latent.h"
#include "rope_pairs.h"

namespace pagebinder {
namespace {

constexpr int64_t SERIAL_ELEMENTS = 1 << 15;
constexpr int64_t TOKENS_AT_ONCE = 16;

struct Scratch {
  Buffer row, cos, sin;
};

void write_token(const LatentWriteArgs& a, int64_t token, Scratch& scratch) {
  const int64_t slot = a.slot_mapping[token];
  if (slot < 0) return;
  const RowLayout& rows = a.cache.rows;
  float* row = scratch.row.at_least<float>(rows.width);
  a.rows.to_float(token * a.row_stride, rows.width, row);
  if (a.pairs > 0) {
    float *cos = scratch.cos.at_least<float>(a.pairs), *sin = scratch.sin.at_least<float>(a.pairs);
    a.cos.to_float(token * a.cos_stride, a.pairs, cos);
    a.sin.to_float(token * a.sin_stride, a.pairs, sin);
    rotate_pairs(row + rows.width - 2 * a.pairs, cos, sin, a.pairs);
  }
  round_row(rows, row);
  encode_row(rows, a.cache.page(slot / rows.entries), slot % rows.entries, row);
}

struct Run {
  const LatentWriteArgs& args;
  std::atomic<int64_t> next{0};
};

void worker(void* context, int) {
  static thread_local Scratch scratch;
  Run& run = *static_cast<Run*>(context);
  const int64_t num_tokens = run.args.num_tokens;
  for (int64_t t; (t = run.next.fetch_add(TOKENS_AT_ONCE, std::memory_order_relaxed)) < num_tokens;)
    for (int64_t i = t; i < std::min(num_tokens, t + TOKENS_AT_ONCE); ++i) write_token(run.args, i, scratch);
}

}  // namespace

const char* latent_cache_write(const LatentWriteArgs& args) {
  const int64_t num_slots = args.cache.num_blocks * args.cache.rows.entries;
  for (int64_t t = 0; t < args.num_tokens; ++t)
    if (args.slot_mapping[t] >= num_slots) return "a slot in slot_mapping lies outside the cache";
  Run run{args};
  if (args.num_threads <= 1 || args.num_tokens * args.cache.rows.width < SERIAL_ELEMENTS) worker(&run, 0);
  else args.run(args.num_threads, worker, &run);
  return nullptr;
}

}  // namespace pagebinder
