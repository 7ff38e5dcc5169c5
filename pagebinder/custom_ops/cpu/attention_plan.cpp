// Cuts a batch into jobs and runs them. See attention.h for the picture.
#include "attention.h"

#include <algorithm>
#include <cstring>

#include "attention_partials.h"
#include "simd.h"
#include "work_ranges.h"

namespace pagebinder {
namespace {

constexpr int TILE_ROWS = 4 * W;
constexpr int64_t DOT_QUERIES = 8;  // up to here a request's queries are computed as each would be alone
constexpr int DOT_PART_KEYS = 1024;  // split-KV: keys of one part in the two regimes
constexpr int LANE_PART_KEYS = 1024;
constexpr int MAX_PARTS = 32;
constexpr int SPLIT_TILES = 4;      // requests with more tiles than this have enough jobs without a split
constexpr int JOBS_PER_THREAD = 8;  // at least, for balance
constexpr int64_t SERIAL_BYTES = 96 * 1024;

int stride_for(int rows, bool dot) {
  if (dot) return rows <= 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : 8;
  // Not one of those of dots: such tiles have several heads in a job.
  for (const int stride : {W, 2 * W})
    if (stride > DOT_ROWS && rows <= stride) return stride;
  return TILE_ROWS;
}

int64_t part_size(int64_t span, bool dot) {
  const int64_t part = std::max<int64_t>(dot ? DOT_PART_KEYS : LANE_PART_KEYS, (span + MAX_PARTS - 1) / MAX_PARTS);
  return (part + DOT_PART_KEYS - 1) / DOT_PART_KEYS * DOT_PART_KEYS;
}

void split_keys(Tile& tile, bool may_split, bool dot) {
  const int64_t span = tile.keys.end - tile.keys.begin, part = part_size(span, dot);
  if (span <= part || !may_split) {
    tile.parts = 1;
    tile.part_keys = 0;
    return;
  }
  tile.part_keys = static_cast<int32_t>(part);
  tile.parts = static_cast<int32_t>((tile.keys.end + part - 1) / part - tile.keys.begin / part);
}

int32_t most_parts_of(const Plan& plan, int32_t begin, int32_t end) {
  int32_t most = 0;
  for (int32_t t = begin; t < end; ++t) most = std::max(most, plan.tiles[t].parts);
  return most;
}

void list_shared_jobs(Plan& plan, int32_t begin, int32_t end, int32_t num_heads) {
  const int32_t most_parts = most_parts_of(plan, begin, end);
  for (int32_t g = 0; g < num_heads; ++g)
    for (int32_t part = 0; part < most_parts; ++part)
      for (int32_t t = begin; t < end; ++t)
        if (part < plan.tiles[t].parts) plan.jobs.push_back({t, part, g, 1, 1});
}

// All tiles of a KV head come together, so that its K and V stay in the cache; `most` whole ones are one job.
void list_prefill_jobs(Plan& plan, int32_t begin, int32_t end, int32_t num_heads, int32_t most) {
  for (int32_t g = 0; g < num_heads; ++g)
    for (int32_t t = begin, next; t < end; t = next) {
      const int32_t last = plan.tiles[t].parts == 1 ? std::min(end, t + most) : t + 1;
      for (next = t + 1; next < last && plan.tiles[next].parts == 1;) ++next;
      for (int32_t part = 0; part < plan.tiles[t].parts; ++part) plan.jobs.push_back({t, part, g, 1, next - t});
    }
}

// Several tiles of a request read a part one after the other.
void list_decode_jobs(Plan& plan, int32_t begin, int32_t end, int32_t num_heads, int32_t job_heads) {
  const int32_t most_parts = most_parts_of(plan, begin, end);
  for (int32_t part = 0; part < most_parts; ++part)
    for (int32_t g = 0; g < num_heads; g += job_heads)
      for (int32_t t = begin; t < end; ++t)
        if (part < plan.tiles[t].parts) plan.jobs.push_back({t, part, g, std::min(job_heads, num_heads - g), 1});
}

// Decodes stream the cache once, and the KV heads of a block lie side by side in memory: a job takes as many heads
// as leave enough jobs for all threads. Of keys that several requests share all tiles of a part come together: their
// context is longer than a cache.
void list_jobs(const AttentionArgs& args, Plan& plan) {
  const int32_t num_heads = static_cast<int32_t>(args.num_kv_heads);
  int64_t decode_parts = 0, prefill_tiles = 0;
  for (const Tile& tile : plan.tiles) (tile.stride <= DOT_ROWS ? decode_parts : prefill_tiles) += tile.parts;
  const int64_t enough = JOBS_PER_THREAD * args.num_threads, most = std::min(num_heads, MAX_JOB_HEADS);
  const int32_t job_heads = static_cast<int32_t>(std::clamp<int64_t>(decode_parts * num_heads / enough, 1, most));
  const int64_t tiles_for_all = prefill_tiles * num_heads / enough;
  const int32_t job_tiles = static_cast<int32_t>(std::clamp<int64_t>(tiles_for_all, 1, MAX_JOB_TILES));
  const int32_t num_tiles = static_cast<int32_t>(plan.tiles.size());
  for (int32_t begin = 0, end; begin < num_tiles; begin = end) {
    for (end = begin; end < num_tiles && plan.tiles[end].request == plan.tiles[begin].request;) ++end;
    const bool decode = plan.tiles[begin].stride <= DOT_ROWS;
    if (!decode && args.row_tokens != nullptr) list_shared_jobs(plan, begin, end, num_heads);
    if (!decode && args.row_tokens == nullptr) list_prefill_jobs(plan, begin, end, num_heads, job_tiles);
    if (decode) list_decode_jobs(plan, begin, end, num_heads, job_heads);
  }
}

// Keys that some row of a tile sees.
KeyRange tile_keys(const AttentionArgs& args, const Tile& tile) {
  const int64_t begin = args.query_start_loc[tile.request] + tile.row_begin / args.group();
  const int64_t last = args.query_start_loc[tile.request] + (tile.row_begin + tile.rows - 1) / args.group();
  // Positions that rise by one: both ends of the interval never fall, so the first and the last query tell all.
  const bool rising = args.row_positions == nullptr && args.lookahead == nullptr;
  const int64_t step = rising ? std::max<int64_t>(last - begin, 1) : 1;
  KeyRange all{0, 0};
  for (int64_t query = begin; query <= last; query += step) {
    const KeyRange keys = visible_keys(args, tile.request, query);
    if (keys.begin == keys.end) continue;
    if (all.end == 0) all = keys;
    all.begin = std::min(all.begin, keys.begin);
    all.end = std::max(all.end, keys.end);
  }
  return all;
}

// Rows of a tile of few: those of as many queries as fit, if their keys are cut as they would be for each alone.
int64_t dot_tile_rows(const AttentionArgs& args, int64_t r) {
  const int64_t start = args.query_start_loc[r], end = args.query_start_loc[r + 1], group = args.group();
  if (args.row_tokens != nullptr || group > DOT_ROWS) return DOT_ROWS;
  const auto part_of = [&](int64_t query) {
    const KeyRange keys = visible_keys(args, r, query);
    return part_size(keys.end - keys.begin, true);
  };
  return part_of(start) == part_of(end - 1) ? DOT_ROWS / group * group : group;
}

const char* plan_request(const AttentionArgs& args, Plan& plan, int64_t r) {
  const int64_t start = args.query_start_loc[r], seq_len = args.seq_lens[r];
  const int64_t num_queries = args.query_start_loc[r + 1] - start, group = args.group();
  if (num_queries < 0) return "query_start_loc must not fall";
  if (seq_len < 0 || seq_len > args.max_blocks * args.block_size) return "a seq_len exceeds its block table";
  const int64_t rows = num_queries * group;
  const bool plain = args.row_tokens == nullptr;  // neighbours, all keys
  const bool dot = rows <= DOT_ROWS || (plain && num_queries <= DOT_QUERIES && group <= DOT_ROWS);
  const int64_t tile_rows = dot ? dot_tile_rows(args, r) : TILE_ROWS, num_tiles = (rows + tile_rows - 1) / tile_rows;
  for (int64_t t = num_tiles - 1; t >= 0; --t) {  // the last tile of a causal request sees most keys
    Tile tile{};
    tile.request = static_cast<int32_t>(r);
    tile.row_begin = static_cast<int32_t>(t * tile_rows);
    tile.rows = static_cast<int32_t>(std::min(tile_rows, rows - t * tile_rows));
    tile.stride = stride_for(tile.rows, dot);
    tile.keys = tile_keys(args, tile);
    split_keys(tile, dot || !plain || num_tiles <= SPLIT_TILES, dot);
    if (tile.parts > 1) {
      tile.first_partial = plan.partial_floats;
      tile.first_counter = plan.num_counters;
      plan.partial_floats += tile.parts * args.num_kv_heads * tile.rows * partial_row_floats(args);
      plan.num_counters += args.num_kv_heads;
    }
    plan.work_bytes += (tile.keys.end - tile.keys.begin) * args.num_kv_heads * tile.rows;
    plan.tiles.push_back(tile);
  }
  return nullptr;
}

const char* make_plan(const AttentionArgs& args, Plan& plan) {
  plan.tiles.clear();
  plan.jobs.clear();
  plan.partial_floats = plan.num_counters = plan.work_bytes = 0;
  plan.bad_block = false;
  if (args.query_start_loc[0] != 0) return "query_start_loc must begin with 0";
  if (args.query_start_loc[args.num_requests] > args.num_tokens) return "query_start_loc exceeds the tokens of q";
  for (int64_t r = 0; r < args.num_requests; ++r)
    if (const char* error = plan_request(args, plan, r)) return error;
  list_jobs(args, plan);
  plan.partials = plan.partial_buffer.at_least<float>(plan.partial_floats);
  plan.counters = plan.counter_buffer.at_least<std::atomic<int>>(plan.num_counters);
  for (int64_t i = 0; i < plan.num_counters; ++i) new (&plan.counters[i]) std::atomic<int>(0);
  return nullptr;
}

struct Run {
  const AttentionArgs& args;
  Plan& plan;
  JobKernel kernel;
  WorkRanges work;
};

void worker(void* context, int number) {
  Run& run = *static_cast<Run*>(context);
  const Job* jobs = run.plan.jobs.data();
  for (int job; (job = run.work.take(number)) < run.work.count();) {
    const int next = run.work.next(number);
    run.kernel(run.args, run.plan, jobs[job], next < run.work.count() ? &jobs[next] : nullptr);
  }
}

void clear_padding(const AttentionArgs& args, size_t element_bytes) {
  const int64_t used = args.query_start_loc[args.num_requests];
  const int64_t row_bytes = args.num_heads * args.head_dim_v * static_cast<int64_t>(element_bytes);
  std::memset(static_cast<char*>(args.out) + used * row_bytes, 0, (args.num_tokens - used) * row_bytes);
  if (args.lse == nullptr) return;
  for (int64_t h = 0; h < args.num_heads; ++h)
    std::fill(args.lse + h * args.num_tokens + used, args.lse + (h + 1) * args.num_tokens, -__builtin_inff());
}

}  // namespace

const char* run_attention(const AttentionArgs& args, size_t element_bytes, JobKernel kernel) {
  static thread_local Plan plan;
  if (const char* error = make_plan(args, plan)) return error;
  if (!args.carries_on) clear_padding(args, element_bytes);
  const int64_t num_jobs = static_cast<int64_t>(plan.jobs.size());
  const int64_t work = plan.work_bytes * (args.head_dim + args.head_dim_v) * static_cast<int64_t>(element_bytes);
  const int num_workers = work < SERIAL_BYTES ? 1 : static_cast<int>(std::min<int64_t>(args.num_threads, num_jobs));
  Run run{args, plan, kernel, {static_cast<int>(num_jobs), num_workers}};
  if (num_workers <= 1) worker(&run, 0);
  else args.run(num_workers, worker, &run);
  return plan.bad_block ? "a block id in block_table is not valid" : nullptr;
}

}  // namespace pagebinder
