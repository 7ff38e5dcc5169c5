// One job of sparse_mla_attention: the rows of a tile against the keys of one part.
//
//     block of keys:  find rows -> decode into scratch -> for each group of rows: scores -> softmax -> values
//
// What is decoded serves all groups.
#pragma once

#include "attention_results.h"
#include "sparse_mla_engines.h"

namespace pagebinder {

// ---- results ---------------------------------------------------------------------------------------------------

template <class T>
void write_rows(const SparseContext& c, const RowResults& results) {
  const int width_v = static_cast<int>(c.args.width_v);
  for (int r = 0; r < c.tile.rows; ++r) {
    const int64_t head = c.head_of(r);
    const float top = results.top[r], sum = results.sum[r];
    float shift = top, total = sum;
    if (c.args.sinks != nullptr && c.args.sinks[head] != MINUS_INFINITY) {
      const float sink = c.args.sinks[head] * LOG2_E;
      shift = std::max(top, sink);
      total = sum * std::exp2(top - shift) + std::exp2(sink - shift);
    }
    // A row that saw no key has sum 0. A NaN sum must stay NaN.
    const float factor = sum == 0.0f ? 0.0f : std::exp2(top - shift) / total;
    T* to = static_cast<T*>(c.args.out) + (c.token_of(r) * c.args.num_heads + head) * width_v;
    const float* from = results.out + static_cast<int64_t>(r) * results.stride;
    for (int i = 0; i < c.vectors_v; ++i) {
      const VF x = load<VF>(from + i * W) * factor;
      if (width_v - i * W >= W) store_float(to + i * W, x);
      else store_float_part(to + i * W, x, width_v - i * W);
    }
  }
}

// Keeps the results of one part; whoever finishes the last part of a tile merges all. False: others are not done.
inline bool merge_if_last(const SparseContext& c, SparsePlan& plan, const SparseJob& job, RowResults& results) {
  const int rows = c.tile.rows, row_floats = 2 + results.stride;
  float* partials = plan.partials + c.tile.first_partial;
  float* mine = partials + static_cast<int64_t>(job.part) * rows * row_floats;
  for (int r = 0; r < rows; ++r, mine += row_floats) {
    mine[0] = results.top[r];
    mine[1] = results.sum[r];
    std::memcpy(mine + 2, results.out + static_cast<int64_t>(r) * results.stride, results.stride * sizeof(float));
  }
  if (plan.counters[c.tile.counter].fetch_add(1, std::memory_order_acq_rel) + 1 < c.tile.parts) return false;
  merge_parts(partials, c.tile.parts, rows, row_floats, results);
  return true;
}

// ---- one job ---------------------------------------------------------------------------------------------------

template <class Engine, int STRIDE>
void attend_block(const SparseContext& c, const typename Engine::Element* const* rows, KeyRange keys, int group,
                  const RowLimits<STRIDE>& limits, SoftmaxState<STRIDE>& state, bool first) {
  const int kind = keys.begin < c.tile.num_window ? 0 : 1;
  const int group_rows = std::min(STRIDE, c.tile.rows - group * STRIDE);
  const int num_keys = (keys.end - keys.begin + Engine::GRAIN - 1) / Engine::GRAIN * Engine::GRAIN;
  std::memcpy(state.begin, limits.begin[kind], sizeof(state.begin));
  std::memcpy(state.end, limits.end[kind], sizeof(state.end));
  state.common = limits.common[kind];
  const bool masked = keys.begin < state.common.begin || keys.begin + num_keys > state.common.end;
  Engine::scores(c, rows, num_keys, c.scratch.query + group * c.scratch.query_floats);
  softmax_block<Engine::PAIRS>(state, {c.args.scale * LOG2_E, 0.0f, false}, masked, keys.begin, num_keys,
                               c.scratch.scores);
  float correction[STRIDE];
  for (int v = 0; v < STRIDE / W; ++v) store(correction + v * W, state.correction[v]);
  float* out = c.scratch.out + group * c.scratch.out_floats;
  Engine::values(c, rows, group_rows, {c.scratch.scores, num_keys, correction, out, c.vectors_v * W, first});
}

// All keys of a part. False: a table has a bad entry.
template <class Engine, int STRIDE>
bool attend(const SparseContext& c, KeyRange part, int groups, SoftmaxState<STRIDE>* states) {
  [[maybe_unused]] const typename Engine::Setup setup{};
  RowLimits<STRIDE> limits[SPARSE_MAX_GROUPS];
  for (int g = 0; g < groups; ++g) {
    const int rows = std::min(STRIDE, c.tile.rows - g * STRIDE);
    start_state(states[g]);
    find_limits<STRIDE>(c, g * STRIDE, rows, limits[g]);
    Engine::pack(c, g * STRIDE, rows, c.scratch.query + g * c.scratch.query_floats);
  }
  FoundRow found[SPARSE_BLOCK_KEYS];
  const typename Engine::Element* rows[SPARSE_ROW_BUFFER];
  for (int at = part.begin; at < part.end; at += SPARSE_BLOCK_KEYS) {
    const bool before_gap = !c.tile.single && at < c.tile.num_window;
    const int end = std::min({at + SPARSE_BLOCK_KEYS, part.end, before_gap ? c.tile.num_window : part.end});
    if (!find_rows(c, at, end - at, found)) return false;
    Engine::load_block(c, found, end - at, rows);
    for (int g = 0; g < groups; ++g)
      attend_block<Engine, STRIDE>(c, rows, {at, end}, g, limits[g], states[g], at == part.begin);
  }
  return true;
}

template <class T, class Engine, int STRIDE>
void run_sparse_job(const SparseMlaArgs& args, SparsePlan& plan, const SparseJob& job) {
  static thread_local SparseScratch scratch;
  const SparseTile& tile = plan.tiles[job.tile];
  const int width = static_cast<int>(args.width), vectors_v = (static_cast<int>(args.width_v) + W - 1) / W;
  const int groups = (tile.rows + STRIDE - 1) / STRIDE, pitch = Engine::pitch(width);
  scratch.reserve(groups, STRIDE, pitch, vectors_v);
  const SparseContext c{args, tile, scratch, width, vectors_v, pitch};
  if (args.indices != nullptr) {
    scratch.list = scratch.list_buffer.at_least<int32_t>(args.num_indices);
    listed_entries(args, c.token_of(0), visible_entries(c.position_of(0), args.ratio), scratch.list);
  }
  const int begin = job.part * tile.part_keys;
  const KeyRange part{begin, tile.parts == 1 ? tile.num_keys : std::min(begin + tile.part_keys, tile.num_keys)};
  SoftmaxState<STRIDE> states[SPARSE_MAX_GROUPS];
  if (!attend<Engine, STRIDE>(c, part, groups, states)) {
    plan.bad_row = true;
    return;
  }
  float top[SPARSE_MAX_GROUPS * STRIDE], sum[SPARSE_MAX_GROUPS * STRIDE];
  for (int g = 0; g < groups; ++g)
    for (int v = 0; v < STRIDE / W; ++v) {
      store(top + g * STRIDE + v * W, states[g].top[v]);
      VF all = states[g].sum[v];
      for (int i = 1; i < SoftmaxState<STRIDE>::SUMS; ++i) all += states[g].sum[i * (STRIDE / W) + v];
      store(sum + g * STRIDE + v * W, all);
    }
  RowResults results{top, sum, scratch.out, vectors_v * W};
  if (part.begin >= part.end) std::memset(scratch.out, 0, groups * scratch.out_floats * sizeof(float));
  if (tile.parts == 1 || merge_if_last(c, plan, job, results)) write_rows<T>(c, results);
}

template <class T, template <class, int> class Engine>
void sparse_job(const SparseMlaArgs& args, SparsePlan& plan, const SparseJob& job) {
  const int rows = plan.tiles[job.tile].rows;
  if (rows <= W) run_sparse_job<T, Engine<T, W>, W>(args, plan, job);
  else if (rows <= 2 * W) run_sparse_job<T, Engine<T, 2 * W>, 2 * W>(args, plan, job);
  else run_sparse_job<T, Engine<T, 4 * W>, 4 * W>(args, plan, job);
}

}  // namespace pagebinder
