// Scatters new K and V rows to their slots. Rows as they are are copied, so one version serves every element type.
#include <atomic>
#include <cstring>

#include "attention.h"

namespace pagebinder {
namespace {

constexpr int64_t SERIAL_ROWS_BYTES = 1 << 20;
constexpr int64_t TOKENS_AT_ONCE = 16;

void copy_token(const CacheWriteArgs& a, int64_t token, char* to) {
  const size_t k_bytes = a.head_dim * a.element_bytes, v_bytes = a.head_dim_v * a.element_bytes;
  for (int64_t g = 0; g < a.num_kv_heads; ++g, to += a.cache_head_stride) {
    std::memcpy(to, a.k + token * a.k_token_stride + g * a.k_head_stride, k_bytes);
    std::memcpy(to + k_bytes, a.v + token * a.v_token_stride + g * a.v_head_stride, v_bytes);
  }
}

struct WriteRun {
  const CacheWriteArgs& args;
  TokenWriter writer;
  std::atomic<int64_t> next{0};
};

void write_worker(void* context, int) {
  WriteRun& run = *static_cast<WriteRun*>(context);
  const CacheWriteArgs& a = run.args;
  for (int64_t t; (t = run.next.fetch_add(TOKENS_AT_ONCE, std::memory_order_relaxed)) < a.num_tokens;)
    for (int64_t i = t; i < a.num_tokens && i < t + TOKENS_AT_ONCE; ++i) {
      const int64_t slot = a.slot_mapping[i], block = slot / a.block_size, offset = slot % a.block_size;
      if (slot >= 0) run.writer(a, i, a.cache + block * a.cache_block_stride + offset * a.cache_slot_stride);
    }
}

}  // namespace

const char* write_tokens(const CacheWriteArgs& args, TokenWriter writer) {
  const int64_t num_slots = args.num_blocks * args.block_size;
  for (int64_t t = 0; t < args.num_tokens; ++t)
    if (args.slot_mapping[t] >= num_slots) return "a slot in slot_mapping lies outside kv_cache";
  WriteRun run{args, writer};
  const int64_t row_bytes = (args.head_dim + args.head_dim_v) * args.num_kv_heads * args.element_bytes;
  if (args.num_threads <= 1 || args.num_tokens * row_bytes < SERIAL_ROWS_BYTES) write_worker(&run, 0);
  else args.run(args.num_threads, write_worker, &run);
  return nullptr;
}

const char* kv_cache_write(const CacheWriteArgs& args) { return write_tokens(args, copy_token); }

}  // namespace pagebinder
