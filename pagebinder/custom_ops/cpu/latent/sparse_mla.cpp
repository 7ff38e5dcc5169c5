// Cuts a batch of sparse_mla_attention into tiles and jobs and runs them. See sparse_mla.h for the picture.
#include "sparse_mla.h"

#include "sparse_mla_tile.h"

namespace pagebinder {
namespace {

constexpr int TILE_ROWS = SPARSE_MAX_GROUPS * SPARSE_GROUP_ROWS;
constexpr int PART_KEYS = 2 * SPARSE_BLOCK_KEYS;  // of a split line of keys, at least
constexpr int MAX_PARTS = 32;
constexpr int SPLIT_TILES = 4;                    // requests with more tiles have enough jobs without a split
constexpr int64_t SERIAL_PRODUCTS = 1 << 18;

struct Request {
  int64_t index, first_token, num_tokens, seq_len;
  int64_t position_of(int64_t token) const { return seq_len - num_tokens + token; }  // token: of this request
};

int64_t round_up(int64_t x, int64_t grain) { return (x + grain - 1) / grain * grain; }

SparseTile make_tile(const SparseMlaArgs& args, const Request& request, int64_t row_begin, int64_t rows) {
  const int64_t first = row_begin / args.num_heads, last = (row_begin + rows - 1) / args.num_heads;
  const int64_t first_p = request.position_of(first), last_p = request.position_of(last);
  SparseTile tile{};
  tile.request = static_cast<int32_t>(request.index);
  tile.row_begin = static_cast<int32_t>(row_begin);
  tile.rows = static_cast<int32_t>(rows);
  tile.single = first == last;
  if (args.window > 0) {
    tile.window_begin = static_cast<int32_t>(std::max<int64_t>(0, first_p - args.window + 1));
    tile.num_window = static_cast<int32_t>(std::max<int64_t>(0, last_p + 1 - tile.window_begin));
  }
  int64_t num_entries = args.entry_rows.table == nullptr ? 0 : visible_entries(last_p, args.ratio);
  if (args.indices != nullptr) num_entries = listed_entries(args, request.first_token + first, num_entries, nullptr);
  const int64_t entry_begin = tile.single ? tile.num_window : round_up(tile.num_window, SPARSE_BLOCK_KEYS);
  tile.entry_begin = static_cast<int32_t>(entry_begin);
  tile.num_keys = static_cast<int32_t>(num_entries > 0 ? entry_begin + num_entries : tile.num_window);
  tile.parts = 1;
  return tile;
}

void split_keys(const SparseMlaArgs& args, SparseTile& tile, SparsePlan& plan) {
  if (tile.num_keys <= PART_KEYS) return;
  const int64_t least = (tile.num_keys + MAX_PARTS - 1) / MAX_PARTS;
  tile.part_keys = static_cast<int32_t>(round_up(std::max<int64_t>(PART_KEYS, least), SPARSE_BLOCK_KEYS));
  tile.parts = (tile.num_keys + tile.part_keys - 1) / tile.part_keys;
  tile.first_partial = plan.partial_floats;
  tile.counter = plan.num_counters++;
  plan.partial_floats += int64_t{tile.parts} * tile.rows * (2 + round_up(args.width_v, W));
}

const char* plan_request(const SparseMlaArgs& args, SparsePlan& plan, const Request& request) {
  const PagedRows &window = args.window_rows, &entries = args.entry_rows;
  if (request.num_tokens < 0) return "query_start_loc must not fall";
  if (request.seq_len < 0) return "seq_lens must not be negative";
  if (request.num_tokens == 0) return nullptr;
  if (args.window > 0 && request.seq_len > window.max_blocks * window.pages.rows.entries)
    return "a seq_len exceeds its block table window_table";
  if (entries.table != nullptr && request.seq_len / args.ratio > entries.max_blocks * entries.pages.rows.entries)
    return "a seq_len exceeds its block table entry_table";
  // A list belongs to one token, so its tiles do not go beyond.
  const int64_t all_rows = request.num_tokens * args.num_heads;
  const int64_t span = args.indices != nullptr ? args.num_heads : all_rows;
  const int64_t span_tiles = (span + TILE_ROWS - 1) / TILE_ROWS, num_tiles = all_rows / span * span_tiles;
  for (int64_t t = num_tiles - 1; t >= 0; --t) {  // the last tile sees most keys
    const int64_t begin = t / span_tiles * span + t % span_tiles * TILE_ROWS;
    const int64_t end = std::min(begin + TILE_ROWS, (t / span_tiles + 1) * span);
    SparseTile tile = make_tile(args, request, begin, end - begin);
    if (num_tiles <= SPLIT_TILES) split_keys(args, tile, plan);
    for (int32_t part = 0; part < tile.parts; ++part)
      plan.jobs.push_back({static_cast<int32_t>(plan.tiles.size()), part});
    plan.work += int64_t{tile.rows} * tile.num_keys * (args.width + args.width_v);
    plan.tiles.push_back(tile);
  }
  return nullptr;
}

const char* make_plan(const SparseMlaArgs& args, SparsePlan& plan) {
  plan.tiles.clear();
  plan.jobs.clear();
  plan.partial_floats = plan.num_counters = plan.work = 0;
  plan.next_job = 0;
  plan.bad_row = false;
  const int32_t* starts = args.query_start_loc;
  if (starts[0] != 0) return "query_start_loc must begin with 0";
  if (starts[args.num_requests] > args.num_tokens) return "query_start_loc exceeds the tokens of q";
  for (int64_t r = 0; r < args.num_requests; ++r) {
    const Request request{r, starts[r], starts[r + 1] - starts[r], args.seq_lens[r]};
    if (const char* error = plan_request(args, plan, request)) return error;
  }
  plan.partials = plan.partial_buffer.at_least<float>(plan.partial_floats);
  plan.counters = plan.counter_buffer.at_least<std::atomic<int>>(plan.num_counters);
  for (int64_t i = 0; i < plan.num_counters; ++i) new (&plan.counters[i]) std::atomic<int>(0);
  return nullptr;
}

struct Run {
  const SparseMlaArgs& args;
  SparsePlan& plan;
  SparseKernel kernel;
};

void worker(void* context, int) {
  Run& run = *static_cast<Run*>(context);
  const int total = static_cast<int>(run.plan.jobs.size());
  for (int i; (i = run.plan.next_job.fetch_add(1, std::memory_order_relaxed)) < total;)
    run.kernel(run.args, run.plan, run.plan.jobs[i]);
}

const char* run_sparse(const SparseMlaArgs& args, size_t element_bytes, SparseKernel kernel) {
  static thread_local SparsePlan plan;
  if (const char* error = make_plan(args, plan)) return error;
  const int64_t used = args.query_start_loc[args.num_requests];
  const int64_t token_bytes = args.num_heads * args.width_v * static_cast<int64_t>(element_bytes);
  std::memset(static_cast<char*>(args.out) + used * token_bytes, 0, (args.num_tokens - used) * token_bytes);
  Run run{args, plan, kernel};
  const int64_t num_jobs = static_cast<int64_t>(plan.jobs.size());
  const int num_workers = static_cast<int>(std::min<int64_t>(args.num_threads, num_jobs));
  if (num_workers <= 1 || plan.work < SERIAL_PRODUCTS) worker(&run, 0);
  else args.run(num_workers, worker, &run);
  return plan.bad_row ? "a block id in a table is not valid" : nullptr;
}

}  // namespace

const char* sparse_mla_f32(const SparseMlaArgs& args) { return run_sparse(args, 4, sparse_job<float, FloatEngine>); }
const char* sparse_mla_f16(const SparseMlaArgs& args) { return run_sparse(args, 2, sparse_job<f16, FloatEngine>); }

const char* sparse_mla_bf16(const SparseMlaArgs& args) {
#if PAGEBINDER_AMX
  if (tiles_usable()) return run_sparse(args, 2, sparse_job<bf16, TileEngine>);
#endif
  return run_sparse(args, 2, sparse_job<bf16, FloatEngine>);
}

}  // namespace pagebinder
