// One job of paged attention: the rows of one tile against the keys of one part, for one KV head.
//
// Flash-attention style (Dao et al., 2022; Flash-Decoding, 2023): blocks of BLOCK_KEYS keys pass through
// scores -> online softmax -> weighted values without leaving the cache. Blocks begin at absolute multiples of
// BLOCK_KEYS and only keys that some row of the tile sees are read.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_forms.h"
#include "attention_results.h"
#include "attention_rows.h"
#include "attention_softmax.h"

namespace pagebinder {

template <class T, int STRIDE>
void start_state(const TileContext<T>& c, SoftmaxState<STRIDE>& state) {
  constexpr int LANES = SoftmaxState<STRIDE>::VECTORS * W;
  int32_t begin[LANES], end[LANES], position[LANES], bias_at[LANES], lane_key[W];
  float slope[LANES];
  state.common = {0, INT32_MAX};
  for (int lane = 0; lane < LANES; ++lane) {
    const int row = STRIDE < W ? lane % STRIDE : lane;
    begin[lane] = end[lane] = position[lane] = bias_at[lane] = 0;
    slope[lane] = 0.0f;
    if (row >= c.tile.rows) continue;
    const KeyRange keys = visible_keys(c.args, c.tile.request, c.query_of(row));
    begin[lane] = keys.begin;
    end[lane] = keys.end;
    position[lane] = static_cast<int32_t>(c.position_of(row));
    if (c.args.alibi_slopes != nullptr) slope[lane] = c.args.alibi_slopes[c.head_of(row)] * LOG2_E;
    bias_at[lane] =
        static_cast<int32_t>(c.token_of(row) * c.args.bias_token_stride + c.head_of(row) * c.args.bias_head_stride);
    state.common.begin = std::max(state.common.begin, keys.begin);
    state.common.end = std::min(state.common.end, keys.end);
  }
  for (int lane = 0; lane < W; ++lane) lane_key[lane] = STRIDE < W ? lane / STRIDE : 0;
  state.lane_key = load<VI>(lane_key);
  for (int v = 0; v < SoftmaxState<STRIDE>::VECTORS; ++v) {
    state.top[v] = splat(MINUS_INFINITY);
    for (int i = 0; i < SoftmaxState<STRIDE>::SUMS; ++i) state.sum[i * SoftmaxState<STRIDE>::VECTORS + v] = VF{};
    state.begin[v] = load<VI>(begin + v * W);
    state.end[v] = load<VI>(end + v * W);
    state.position[v] = load<VI>(position + v * W);
    state.slope[v] = load<VF>(slope + v * W);
    state.bias_at[v] = load<VI>(bias_at + v * W);
  }
}

template <int STRIDE>
void collect_rows(const SoftmaxState<STRIDE>& state, int rows, RowResults& results) {
  constexpr int VECTORS = SoftmaxState<STRIDE>::VECTORS, SUMS = SoftmaxState<STRIDE>::SUMS, LANES = VECTORS * W;
  float top[LANES], sum[SUMS * LANES];
  for (int v = 0; v < VECTORS; ++v) store(top + v * W, state.top[v]);
  for (int i = 0; i < SUMS * VECTORS; ++i) store(sum + i * W, state.sum[i]);
  for (int r = 0; r < STRIDE && r < rows; ++r) {
    results.top[r] = top[r];
    results.sum[r] = 0.0f;
    for (int i = 0; i < SUMS; ++i)  // in the order of keys
      for (int lane = r; lane < (STRIDE < W ? W : r + 1); lane += STRIDE) results.sum[r] += sum[i * LANES + lane];
  }
}

// Block `at` of `size` keys of a part, widened to whole multiples of `grain` keys.
inline BlockKeys block_keys(KeyRange part, int at, int size, int grain) {
  const int begin = std::max(at, part.begin), end = std::min(at + size, part.end);
  return {begin, end, begin / grain * grain, (end + grain - 1) / grain * grain};
}

// The rows that the next job reads first, so that this one can ask for them, and how many; 0: not known.
template <class S>
int find_first_rows(const AttentionArgs& args, const Plan& plan, const Job* job, const S** rows) {
  if (job == nullptr) return 0;
  const Tile& tile = plan.tiles[job->tile];
  const KeyRange part = part_keys(tile, job->part);
  if (part.begin == part.end) return 0;
  const BlockKeys keys = block_keys(part, part.begin / BLOCK_KEYS * BLOCK_KEYS, BLOCK_KEYS, 1);
  return find_rows(args, tile, job->kv_head, keys, rows) ? keys.to - keys.from : 0;
}

inline ScoreOptions score_options(const AttentionArgs& args) {
  const float cap = args.soft_cap;
  return {cap != 0.0f ? args.scale / cap : args.scale * LOG2_E, cap * LOG2_E, args.alibi_slopes != nullptr, nullptr};
}

// The biases by distance of one query and head, from the column of some key on: those of all keys beyond stand at the ends.
template <class B>
struct BiasRow {
  const B* columns;
  int64_t first, last;  // columns: of the key at hand, and the last there is

  // Of W keys from `key` on.
  PB_INLINE VF take(int key) const {
    const int64_t at = first + key;
    if (at >= 0 && at + W - 1 <= last) return load_float(columns + at);
    if (at + W - 1 <= 0 || at >= last) return splat(of(at));
    float values[W];
    for (int lane = 0; lane < W; ++lane) values[lane] = of(at + lane);
    return load<VF>(values);
  }
  PB_INLINE float of(int64_t at) const { return load_float_part(columns + std::clamp<int64_t>(at, 0, last), 1)[0]; }
};

// Biases of a block of keys, laid out as its scores are.
template <class B, int STRIDE>
void lay_out_bias(const AttentionArgs& args, const SoftmaxState<STRIDE>& state, int rows, const BlockKeys& keys, float* to) {
  constexpr int LANES = SoftmaxState<STRIDE>::VECTORS * W;
  int32_t at[LANES], position[LANES];
  for (int v = 0; v < SoftmaxState<STRIDE>::VECTORS; ++v)
    store(at + v * W, state.bias_at[v]), store(position + v * W, state.position[v]);
  const auto row_of = [&](int row) -> BiasRow<B> {
    return {static_cast<const B*>(args.bias) + at[row], keys.from - position[row] + args.num_behind, args.bias_columns - 1};
  };
  const int num_keys = keys.to - keys.from;
  if constexpr (STRIDE >= W) {
    for (int first = 0; first < STRIDE; first += W)
      for (int k = 0; k < num_keys; k += W) {
        VF x[W];
        for (int i = 0; i < W; ++i) x[i] = first + i < rows ? row_of(first + i).take(k) * LOG2_E : VF{};
        transpose(x);
        for (int i = 0; i < W; ++i) store(to + (k + i) * STRIDE + first, x[i]);
      }
  } else {
    for (int row = 0; row < STRIDE; ++row)
      for (int k = 0; k < num_keys; k += W) {
        const VF x = row < rows ? row_of(row).take(k) * LOG2_E : VF{};
        for (int i = 0; i < W; ++i) to[(k + i) * STRIDE + row] = x[i];
      }
  }
}

// Into the scratch memory for weights, which are made later; null without biases.
template <class T, class R, int STRIDE>
const float* bias_of_block(const BlockContext<T, R>& c, const SoftmaxState<STRIDE>& state, const BlockKeys& keys) {
  if (c.args.bias == nullptr) return nullptr;
  const auto lay_out = c.args.wide_bias ? lay_out_bias<float, STRIDE> : lay_out_bias<T, STRIDE>;
  lay_out(c.args, state, c.tile.rows, keys, c.scratch.weights);
  return c.scratch.weights;
}

// Is some key of a block invisible to some row?
template <int STRIDE>
bool hides_keys(const SoftmaxState<STRIDE>& state, const BlockKeys& keys) {
  return keys.from < state.common.begin || keys.to > state.common.end;
}

// Scores of a block -> weights. SCALED: its rows are quantised.
template <bool PAIRS, bool SCALED, class T, class R, int STRIDE>
void softmax_keys(const BlockContext<T, R>& c, SoftmaxState<STRIDE>& state, const BlockKeys& keys) {
  const int num_keys = keys.to - keys.from;
  if (SCALED) scale_scores<STRIDE>(c.scratch.key_scales, num_keys, c.scratch.scores);
  ScoreOptions options = score_options(c.args);
  options.bias = bias_of_block(c, state, keys);
  softmax_block<PAIRS, SCALED>(state, options, hides_keys(state, keys), keys.from, num_keys, c.scratch.scores,
                               c.scratch.value_scales);
}

// One head's attention to a block of keys.
template <bool SCALED, class T, class R, int STRIDE>
void attend_block(BlockContext<T, R>& c, SoftmaxState<STRIDE>& state, const BlockKeys& keys, float* out,
                  bool first) {
  using State = SoftmaxState<STRIDE>;
  const int num_keys = keys.to - keys.from;
  Scores<T, R, STRIDE>::compute(c, num_keys);
  softmax_keys<PAIR_WEIGHTS<R, STRIDE>, SCALED>(c, state, keys);
  float correction[State::VECTORS * W];
  for (int v = 0; v < State::VECTORS; ++v) store(correction + v * W, state.correction[v]);
  values<T, R, STRIDE>(c, {c.scratch.scores, num_keys, correction, out, c.vectors_v * W, first});
}

// What the arithmetic reads where rows are stored as S: few query rows take quantised rows as they are, for many
// query rows they are decoded to q's type first, a block at a time.
template <class T, class S, int STRIDE>
using RowsRead = std::conditional_t<QUANTISED<S> && (STRIDE > DOT_ROWS), T, S>;

// Turns to one head's rows of a block: `stored`, and `ahead` those to be read next.
template <class T, class R, class S>
void take_rows(BlockContext<T, R>& c, Rows<S> stored, Rows<S> ahead, int num_ahead, int num_keys,
               const R** decoded_rows, int capacity = ROW_BUFFER) {
  if constexpr (QUANTISED<S>) {
    const AttentionArgs& a = c.args;
    const int width = c.width + c.width_v;
    float fixed[2];
    if (a.kv_scales != nullptr) fixed[0] = a.kv_scales[c.kv_head], fixed[1] = a.kv_scales[a.num_kv_heads + c.kv_head];
    read_scales(stored, num_keys, width, a.kv_scales != nullptr ? fixed : nullptr, c.scratch.key_scales,
                c.scratch.value_scales);
    if constexpr (!std::is_same<R, S>::value) {
      R* decoded = reinterpret_cast<R*>(c.scratch.decoded);
      decode_rows(stored, num_keys, width, decoded, c.row_stride);
      for (int k = 0; k < capacity; ++k) decoded_rows[k] = decoded + std::min(k, num_keys - 1) * c.row_stride;
      c.rows = {decoded_rows, 0}, c.ahead = {};
    }
  }
  if constexpr (std::is_same<R, S>::value) {
    c.rows = stored;
    c.ahead = {ahead, num_ahead, std::max(c.width, static_cast<int>(c.args.value_offset) + c.width_v)};
  }
}

// Block by block, and within a block head by head: memory is read in the order in which it lies.
// False: the block table has a bad entry.
template <class S, int STRIDE, class T, class R>
bool attend(BlockContext<T, R>& c, const Plan& plan, const Job& job, const Job* next_job,
            SoftmaxState<STRIDE>* states) {
  constexpr int GRAIN = std::max(SoftmaxState<STRIDE>::KEYS_PER_VECTOR, PAIR_WEIGHTS<R, STRIDE> ? 2 : 1);
  const KeyRange part = part_keys(c.tile, job.part);
  const int64_t head_stride = c.args.cache_head_stride;
  const S* buffers[2][ROW_BUFFER];
  const S **rows = buffers[0], **next_rows = buffers[1];
  const R* decoded_rows[ROW_BUFFER];
  int at = part.begin / BLOCK_KEYS * BLOCK_KEYS;
  BlockKeys keys = block_keys(part, at, BLOCK_KEYS, GRAIN), next{};
  if (part.begin < part.end && !find_rows(c.args, c.tile, job.kv_head, keys, rows)) return false;
  for (bool first = true; at < part.end; at += BLOCK_KEYS, keys = next, first = false, std::swap(rows, next_rows)) {
    int num_next = 0;  // rows that are read after those of the last head; 0: not known
    if (at + BLOCK_KEYS < part.end) {
      next = block_keys(part, at + BLOCK_KEYS, BLOCK_KEYS, GRAIN);
      if (!find_rows(c.args, c.tile, job.kv_head, next, next_rows)) return false;
      num_next = next.to - next.from;
    } else if (STRIDE <= DOT_ROWS) {
      num_next = find_first_rows(c.args, plan, next_job, next_rows);
    }
    const int num_keys = keys.to - keys.from;
    for (int h = 0; h < job.num_heads; ++h) {
      c.kv_head = job.kv_head + h;
      c.query = c.scratch.query + h * c.scratch.query_floats;
      if (first) {
        start_state(c, states[h]);
        Scores<T, R, STRIDE>::pack(c);
      }
      const bool last = h + 1 == job.num_heads;
      const Rows<S> ahead = last ? Rows<S>{next_rows, 0} : Rows<S>{rows, (h + 1) * head_stride};
      take_rows(c, Rows<S>{rows, h * head_stride}, ahead, last ? num_next : num_keys, num_keys, decoded_rows);
      attend_block<QUANTISED<S>>(c, states[h], keys, c.scratch.out + h * c.scratch.out_floats, first);
      if (STRIDE <= DOT_ROWS) c.ahead.ask_for_rest();  // a short block asked for few
    }
  }
  return true;
}

// Writes the rows of the head at hand, unless other parts of the tile are still to be merged.
template <class T, int STRIDE>
void finish_head(const TileContext<T>& c, Plan& plan, const Job& job, const SoftmaxState<STRIDE>& state, float* out,
                 bool last_overlaps) {
  float top[STRIDE] = {}, sum[STRIDE] = {};
  RowResults results{top, sum, out, c.vectors_v * W};
  if (c.tile.keys.begin == c.tile.keys.end) std::memset(out, 0, sizeof(float) * STRIDE * results.stride);
  else collect_rows(state, c.tile.rows, results);
  if (c.tile.parts == 1 || merge_if_last(c, plan, job, 2 + results.stride, results))
    write_rows(c, results, last_overlaps);
}

template <class T, class S, int STRIDE>
void run_job(const AttentionArgs& args, Plan& plan, const Job& job, const Job* next) {
  using R = RowsRead<T, S, STRIDE>;
  static thread_local Scratch scratch;
  const Tile& tile = plan.tiles[job.tile];
  const int width = static_cast<int>(args.head_dim), width_v = static_cast<int>(args.head_dim_v);
  const int vectors_v = (width_v + W - 1) / W;
  constexpr bool DECODED = !std::is_same<R, S>::value;
  scratch.reserve(job.num_heads, STRIDE, (width + 2 * W - 1) / (2 * W) * 2 * W, vectors_v * W, BLOCK_KEYS,
                  DECODED ? width + width_v : 0);
  BlockContext<T, R> c{
      {args, tile, width, width_v, vectors_v, scratch, job.kv_head, nullptr}, {}, {}, width + width_v};
  SoftmaxState<STRIDE> states[STRIDE <= DOT_ROWS ? MAX_JOB_HEADS : 1];
  if (!attend<S, STRIDE>(c, plan, job, next, states)) {
    plan.bad_block = true;
    return;
  }
  constexpr bool CONVERTED = STRIDE > DOT_ROWS && !std::is_same<T, float>::value && !PAIRED<T>;
  for (int h = 0; h < job.num_heads; ++h) {
    c.kv_head = job.kv_head + h;
    finish_head(c, plan, job, states[h], scratch.out + h * scratch.out_floats, !CONVERTED && width_v >= W);
  }
}

template <class T, class S>
void attend_tile(const AttentionArgs& args, Plan& plan, const Job& job, const Job* next) {
  switch (plan.tiles[job.tile].stride) {
    case 1: return run_job<T, S, 1>(args, plan, job, next);
    case 2: return run_job<T, S, 2>(args, plan, job, next);
    case 4: return run_job<T, S, 4>(args, plan, job, next);
    case 8: return run_job<T, S, 8>(args, plan, job, next);
    case 16: return run_job<T, S, 16>(args, plan, job, next);
    case 32: return run_job<T, S, W >= 8 ? 32 : 16>(args, plan, job, next);
    case 64: return run_job<T, S, W >= 16 ? 64 : 16>(args, plan, job, next);
  }
}

// S: of the cache's rows, T: of q and the output. The tiles of a job one after the other.
template <class T, class S = T>
void attention_job(const AttentionArgs& args, Plan& plan, const Job& job, const Job* next) {
  for (int32_t i = 0; i < job.num_tiles; ++i) {
    const Job one{job.tile + i, job.part, job.kv_head, job.num_heads, 1};
    attend_tile<T, S>(args, plan, one, i + 1 == job.num_tiles ? next : nullptr);
  }
}

}  // namespace pagebinder
