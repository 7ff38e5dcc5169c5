// Cuts a batch of the indexer into tiles and waves, scores and selects. See indexer.h for the picture.
#include "indexer.h"

#include <type_traits>

#include "indexer_scores.h"

namespace pagebinder {
namespace {

constexpr int64_t WAVE_SCORES = 8 << 20;  // kept at the same time
constexpr int64_t SERIAL_PRODUCTS = 1 << 18;

// ---- jobs ------------------------------------------------------------------------------------------------------

void select_for(IndexRun& run, const IndexTile& tile) {
  static thread_local TopK top;
  const IndexerArgs& a = run.args;
  for (int t = 0; t < tile.tokens; ++t) {
    const int64_t num = visible_entries(tile.first_p + t, a.ratio);
    top.select(run.scores + tile.scores + t * tile.num_keys, num, a.topk, a.out + (tile.first_token + t) * a.topk);
  }
}

template <class T, template <int> class Products>
void index_worker(void* context, int) {
  IndexRun& run = *static_cast<IndexRun*>(context);
  const int total = static_cast<int>(run.jobs.size());
  for (int i; (i = run.next_job.fetch_add(1, std::memory_order_relaxed)) < total;) {
    const IndexTile& tile = run.tiles[run.jobs[i].tile];
    if (!score_part<T, Products>(run, tile, run.jobs[i].part)) run.bad_row = true;
    if (run.counters[tile.counter].fetch_add(1, std::memory_order_acq_rel) + 1 == tile.parts && !run.bad_row)
      select_for(run, tile);
  }
}

// Scores and selects for the tiles at hand.
void run_wave(IndexRun& run, int64_t num_scores, void (*worker)(void*, int)) {
  static thread_local Buffer score_buffer, counter_buffer;
  run.jobs.clear();
  run.next_job = 0;
  const int num_tiles = static_cast<int>(run.tiles.size());
  run.scores = score_buffer.at_least<uint32_t>(num_scores);
  run.counters = counter_buffer.at_least<std::atomic<int>>(num_tiles);
  for (int i = 0; i < num_tiles; ++i) {
    new (&run.counters[i]) std::atomic<int>(0);
    run.tiles[i].counter = i;
    for (int32_t part = 0; part < run.tiles[i].parts; ++part) run.jobs.push_back({i, part});
  }
  const int64_t products = num_scores * run.args.num_heads * run.args.width;
  const int workers = static_cast<int>(std::min<int64_t>(run.args.num_threads, run.jobs.size()));
  if (workers <= 1 || products < SERIAL_PRODUCTS) worker(&run, 0);
  else run.args.run(workers, worker, &run);
  run.tiles.clear();
}

// All entries that the tokens see, where these are no more than topk; the tokens come first in a request.
int64_t list_all(const IndexerArgs& a, int64_t first_token, int64_t num_tokens, int64_t first_p) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int64_t num = visible_entries(first_p + t, a.ratio);
    if (num > a.topk) return t;
    int32_t* out = a.out + (first_token + t) * a.topk;
    for (int64_t i = 0; i < a.topk; ++i) out[i] = i < num ? static_cast<int32_t>(i) : -1;
  }
  return num_tokens;
}

const char* run_indexer(const IndexerArgs& a, void (*worker)(void*, int)) {
  const int32_t* starts = a.query_start_loc;
  if (!a.keys.pages.rows.is_plain() && a.width > MAX_INDEX_WIDTH) return "quantised index keys are at most 1024 wide";
  if (starts[0] != 0) return "query_start_loc must begin with 0";
  if (starts[a.num_requests] > a.num_tokens) return "query_start_loc exceeds the tokens of q";
  IndexRun run{a, {}, {}, nullptr, nullptr};
  int64_t wave = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t num_tokens = starts[r + 1] - starts[r], first_p = a.seq_lens[r] - num_tokens;
    if (num_tokens < 0) return "query_start_loc must not fall";
    if (a.seq_lens[r] < 0) return "seq_lens must not be negative";
    if (num_tokens == 0) continue;
    if (a.seq_lens[r] / a.ratio > a.keys.max_blocks * a.keys.pages.rows.entries)
      return "a seq_len exceeds its block table k_table";
    for (int64_t t = list_all(a, starts[r], num_tokens, first_p); t < num_tokens; t += INDEX_TILE_TOKENS) {
      const int64_t tokens = std::min<int64_t>(INDEX_TILE_TOKENS, num_tokens - t);
      const int64_t num_keys = visible_entries(first_p + t + tokens - 1, a.ratio);
      if (wave > 0 && wave + tokens * num_keys > WAVE_SCORES) {
        run_wave(run, wave, worker);
        wave = 0;
      }
      const int32_t parts = static_cast<int32_t>((num_keys + INDEX_PART_KEYS - 1) / INDEX_PART_KEYS);
      run.tiles.push_back({static_cast<int32_t>(r), static_cast<int32_t>(tokens), starts[r] + t, first_p + t,
                           num_keys, wave, parts, 0});
      wave += tokens * num_keys;
    }
  }
  if (wave > 0) run_wave(run, wave, worker);
  std::fill(a.out + starts[a.num_requests] * a.topk, a.out + a.num_tokens * a.topk, -1);
  return run.bad_row ? "a block id in k_table is not valid" : nullptr;
}

// Quantised keys and the queries that they meet are bfloat16 without loss, whatever the queries' type.
template <class T>
const char* run_typed(const IndexerArgs& args) {
#if PAGEBINDER_AMX
  const bool suits = std::is_same<T, bf16>::value || !args.keys.pages.rows.is_plain();
  if (suits && tiles_usable()) return run_indexer(args, index_worker<T, TileProducts>);
#endif
  return run_indexer(args, index_worker<T, FloatProducts>);
}

}  // namespace

const char* indexer_f32(const IndexerArgs& args) { return run_typed<float>(args); }
const char* indexer_bf16(const IndexerArgs& args) { return run_typed<bf16>(args); }
const char* indexer_f16(const IndexerArgs& args) { return run_typed<f16>(args); }

}  // namespace pagebinder
