// One job of paged attention: the rows of one tile against the keys of one part, for one KV head.
//
// Flash-attention style (Dao et al., 2022; Flash-Decoding, 2023): blocks of BLOCK_KEYS keys pass through
// scores -> online softmax -> weighted values without leaving the cache. Blocks begin at absolute multiples of
// BLOCK_KEYS and only keys that some row of the tile sees are read.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_results.h"
#include "attention_rows.h"
#include "attention_scores.h"
#include "attention_softmax.h"
#include "attention_values.h"

namespace pagebinder {

// ---- queries and scores, in the form that fits the rows and the type -------------------------------------------

template <class T, int STRIDE>
struct Scores {
  static constexpr bool DOT = STRIDE <= 8;
#if PAGEBINDER_BF16_DOT
  using Direct = std::conditional_t<PAIRED<T>, PairElements, FloatElements<T>>;
#else
  using Direct = FloatElements<T>;
#endif
  using Staged = FloatElements<float>;

  // Must K be converted first? Dots need a whole step; lanes broadcast what the hardware multiplies as it is.
  static bool staged(int width) {
    if (DOT) return width < Direct::STEP;
    return !(std::is_same<T, float>::value || (PAIRED<T> && width % 2 == 0));
  }
  static int padded(int width) { return (width + W - 1) / W * W; }

  template <class E>
  static typename E::Query* query(const TileContext<T>& c) {
    return reinterpret_cast<typename E::Query*>(c.query);
  }

  static void pack(const TileContext<T>& c) {
    const int rows = c.tile.rows;
    const T* q_in[MAX_TILE_ROWS];
    for (int r = 0; r < rows; ++r) q_in[r] = c.query_row(r);
    if (!staged(c.width)) {
      if constexpr (DOT) pack_dot_queries<Direct, STRIDE>(q_in, rows, c.width, query<Direct>(c));
      else if constexpr (std::is_same<T, float>::value || PAIRED<T>)
        pack_lane_queries<Direct>(q_in, rows, c.width, STRIDE, query<Direct>(c));
      return;
    }
    if constexpr (DOT) {
      float q[8 * 2 * W] = {};  // staged dots are narrower than one step
      const float* q_rows[STRIDE];
      for (int r = 0; r < rows; ++r) stage_rows(Rows<T>{&q_in[r], 0}, 1, c.width, q + r * 2 * W, &q_rows[r]);
      pack_dot_queries<Staged, STRIDE>(q_rows, rows, padded(c.width), query<Staged>(c));
    } else {
      pack_lane_queries<Staged>(q_in, rows, c.width, STRIDE, query<Staged>(c));
    }
  }

  static void compute(const TileContext<T>& c, int num_keys) {
    if (!staged(c.width)) {
      if constexpr (DOT)
        dot_scores<Direct, STRIDE>(c.rows, c.ahead, num_keys, query<Direct>(c), c.width, c.scratch.scores);
      else if constexpr (std::is_same<T, float>::value || PAIRED<T>)
        lane_scores<Direct, STRIDE / W>(c.rows, num_keys, query<Direct>(c), c.width, c.scratch.scores);
      return;
    }
    const float* k_rows[ROW_BUFFER];
    stage_rows(c.rows, num_keys, c.width, c.scratch.staged_k, k_rows);
    for (int k = num_keys; k < ROW_BUFFER; ++k) k_rows[k] = k_rows[num_keys - 1];
    const Rows<float> keys{k_rows, 0};
    if constexpr (DOT)
      dot_scores<Staged, STRIDE>(keys, keys, num_keys, query<Staged>(c), padded(c.width), c.scratch.scores);
    else lane_scores<Staged, STRIDE / W>(keys, num_keys, query<Staged>(c), c.width, c.scratch.scores);
  }
};

// ---- values ------------------------------------------------------------------------------------------------

template <class T, int STRIDE>
constexpr bool PAIR_WEIGHTS = PAIRED<T> && (STRIDE > 8);

#if PAGEBINDER_BF16_DOT
// V of the block at hand as pairs of keys. Rows narrower than a vector are filled up with zeros.
inline const uint32_t* pack_values(const TileContext<bf16>& c, int num_keys, int pair_stride, int column_stride) {
  const Rows<bf16> rows = c.rows.after(c.args.value_offset);
  uint32_t* packed = reinterpret_cast<uint32_t*>(c.scratch.staged_v);
  if (c.width_v >= W) {
    pack_value_pairs(rows, num_keys, c.width_v, pair_stride, column_stride, packed);
    return packed;
  }
  for (int k = 0; k < num_keys; k += 2) {
    bf16 even[W] = {}, odd[W] = {};
    const bf16* pair[2] = {even, odd};
    std::memcpy(even, rows[k], c.width_v * sizeof(bf16));
    std::memcpy(odd, rows[k + 1], c.width_v * sizeof(bf16));
    pack_value_pairs(Rows<bf16>{pair, 0}, 2, W, 0, 0, packed + k / 2 * pair_stride);
  }
  return packed;
}
#endif

template <class T, int STRIDE>
void values(const TileContext<T>& c, const ValueBlock& block) {
#if PAGEBINDER_BF16_DOT
  if constexpr (PAIR_WEIGHTS<T, STRIDE>) {
    const uint32_t* packed = pack_values(c, block.num_keys, c.vectors_v * W, W);
    add_value_pairs<STRIDE>(block, packed, c.tile.rows, c.vectors_v);
    return;
  }
#endif
  const bool narrow = c.width_v < W;
  const Rows<T> rows = c.rows.after(c.args.value_offset);
  constexpr bool CONVERT_ONCE = STRIDE > 8 && !std::is_same<T, float>::value;
  if (CONVERT_ONCE || narrow) {
    const float* v_rows[ROW_BUFFER];
    stage_rows(rows, block.num_keys, c.width_v, c.scratch.staged_v, v_rows);
    add_values<STRIDE>(block, Rows<float>{v_rows, 0}, Rows<float>{v_rows, 0}, c.tile.rows, c.vectors_v * W);
  } else if constexpr (!CONVERT_ONCE) {
    add_values<STRIDE>(block, rows, c.ahead.after(c.args.value_offset), c.tile.rows, c.width_v);
  }
}

// ---- one job ---------------------------------------------------------------------------------------------------

template <class T, int STRIDE>
void start_state(const TileContext<T>& c, SoftmaxState<STRIDE>& state) {
  constexpr int LANES = SoftmaxState<STRIDE>::VECTORS * W;
  int32_t begin[LANES], end[LANES], position[LANES], lane_key[W];
  float slope[LANES];
  state.common = {0, INT32_MAX};
  const int64_t seq_len = c.args.seq_lens[c.tile.request];
  for (int lane = 0; lane < LANES; ++lane) {
    const int row = STRIDE < W ? lane % STRIDE : lane;
    begin[lane] = end[lane] = position[lane] = 0;
    slope[lane] = 0.0f;
    if (row >= c.tile.rows) continue;
    const int64_t p = c.position_of(row);
    const KeyRange keys = visible_keys(c.args, p, seq_len);
    begin[lane] = keys.begin;
    end[lane] = keys.end;
    position[lane] = static_cast<int32_t>(p);
    if (c.args.alibi_slopes != nullptr) slope[lane] = c.args.alibi_slopes[c.head_of(row)] * LOG2_E;
    state.common.begin = std::max(state.common.begin, keys.begin);
    state.common.end = std::min(state.common.end, keys.end);
  }
  for (int lane = 0; lane < W; ++lane) lane_key[lane] = STRIDE < W ? lane / STRIDE : 0;
  state.lane_key = load<VI>(lane_key);
  for (int v = 0; v < SoftmaxState<STRIDE>::VECTORS; ++v) {
    state.top[v] = splat(MINUS_INFINITY);
    state.sum[v] = VF{};
    state.begin[v] = load<VI>(begin + v * W);
    state.end[v] = load<VI>(end + v * W);
    state.position[v] = load<VI>(position + v * W);
    state.slope[v] = load<VF>(slope + v * W);
  }
}

template <int STRIDE>
void collect_rows(const SoftmaxState<STRIDE>& state, int rows, RowResults& results) {
  constexpr int VECTORS = SoftmaxState<STRIDE>::VECTORS;
  float top[VECTORS * W], sum[VECTORS * W];
  for (int v = 0; v < VECTORS; ++v) {
    store(top + v * W, state.top[v]);
    store(sum + v * W, state.sum[v]);
  }
  for (int r = 0; r < STRIDE && r < rows; ++r) {
    results.top[r] = top[r];
    results.sum[r] = 0.0f;
    for (int lane = r; lane < (STRIDE < W ? W : r + 1); lane += STRIDE) results.sum[r] += sum[lane];
  }
}

// Block `at` of `size` keys of a part, widened to whole multiples of `grain` keys.
inline BlockKeys block_keys(KeyRange part, int at, int size, int grain) {
  const int begin = std::max(at, part.begin), end = std::min(at + size, part.end);
  return {begin, end, begin / grain * grain, (end + grain - 1) / grain * grain};
}

// The rows that the next job reads first, so that this one can ask for them. False: not known.
template <class T>
bool find_first_rows(const AttentionArgs& args, const Plan& plan, const Job* job, const T** rows) {
  if (job == nullptr) return false;
  const Tile& tile = plan.tiles[job->tile];
  const KeyRange part = part_keys(tile, job->part);
  if (part.begin == part.end) return false;
  const BlockKeys keys = block_keys(part, part.begin / BLOCK_KEYS * BLOCK_KEYS, BLOCK_KEYS, 1);
  return find_rows(args, tile, job->kv_head, keys, rows);
}

inline ScoreOptions score_options(const AttentionArgs& args) {
  const float cap = args.soft_cap;
  return {cap != 0.0f ? args.scale / cap : args.scale * LOG2_E, cap * LOG2_E, args.alibi_slopes != nullptr};
}

// Is some key of a block invisible to some row?
template <int STRIDE>
bool hides_keys(const SoftmaxState<STRIDE>& state, const BlockKeys& keys) {
  return keys.from < state.common.begin || keys.to > state.common.end;
}

// One head's attention to a block of keys.
template <class T, int STRIDE>
void attend_block(const TileContext<T>& c, SoftmaxState<STRIDE>& state, const BlockKeys& keys, float* out,
                  bool first) {
  using State = SoftmaxState<STRIDE>;
  const int num_keys = keys.to - keys.from;
  Scores<T, STRIDE>::compute(c, num_keys);
  softmax_block<PAIR_WEIGHTS<T, STRIDE>>(state, score_options(c.args), hides_keys(state, keys), keys.from, num_keys,
                                         c.scratch.scores);
  float correction[State::VECTORS * W];
  for (int v = 0; v < State::VECTORS; ++v) store(correction + v * W, state.correction[v]);
  values<T, STRIDE>(c, {c.scratch.scores, num_keys, correction, out, c.vectors_v * W, first});
}

// Block by block, and within a block head by head: memory is read in the order in which it lies.
// False: the block table has a bad entry.
template <class T, int STRIDE>
bool attend(TileContext<T>& c, const Plan& plan, const Job& job, const Job* next_job, SoftmaxState<STRIDE>* states) {
  constexpr int GRAIN = std::max(SoftmaxState<STRIDE>::KEYS_PER_VECTOR, PAIR_WEIGHTS<T, STRIDE> ? 2 : 1);
  const KeyRange part = part_keys(c.tile, job.part);
  const int64_t head_stride = c.args.cache_head_stride;
  const T* buffers[2][ROW_BUFFER];
  const T **rows = buffers[0], **next_rows = buffers[1];
  int at = part.begin / BLOCK_KEYS * BLOCK_KEYS;
  BlockKeys keys = block_keys(part, at, BLOCK_KEYS, GRAIN), next{};
  if (part.begin < part.end && !find_rows(c.args, c.tile, job.kv_head, keys, rows)) return false;
  for (bool first = true; at < part.end; at += BLOCK_KEYS, keys = next, first = false, std::swap(rows, next_rows)) {
    bool known = at + BLOCK_KEYS < part.end;
    if (known) {
      next = block_keys(part, at + BLOCK_KEYS, BLOCK_KEYS, GRAIN);
      if (!find_rows(c.args, c.tile, job.kv_head, next, next_rows)) return false;
    } else if (STRIDE <= DOT_ROWS) {
      known = find_first_rows(c.args, plan, next_job, next_rows);
    }
    for (int h = 0; h < job.num_heads; ++h) {
      c.kv_head = job.kv_head + h;
      c.query = c.scratch.query + h * c.scratch.query_floats;
      if (first) {
        start_state(c, states[h]);
        Scores<T, STRIDE>::pack(c);
      }
      c.rows = {rows, h * head_stride};
      c.ahead = h + 1 < job.num_heads ? Rows<T>{rows, (h + 1) * head_stride} : Rows<T>{known ? next_rows : rows, 0};
      attend_block(c, states[h], keys, c.scratch.out + h * c.scratch.out_floats, first);
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

template <class T, int STRIDE>
void run_job(const AttentionArgs& args, Plan& plan, const Job& job, const Job* next) {
  static thread_local Scratch scratch;
  const Tile& tile = plan.tiles[job.tile];
  const int width = static_cast<int>(args.head_dim), width_v = static_cast<int>(args.head_dim_v);
  const int vectors_v = (width_v + W - 1) / W;
  scratch.reserve(job.num_heads, STRIDE, (width + 2 * W - 1) / (2 * W) * 2 * W, vectors_v * W);
  TileContext<T> c{args, tile, width, width_v, vectors_v, scratch, job.kv_head, nullptr, {}, {}};
  SoftmaxState<STRIDE> states[STRIDE <= DOT_ROWS ? MAX_JOB_HEADS : 1];
  if (!attend<T, STRIDE>(c, plan, job, next, states)) {
    plan.bad_block = true;
    return;
  }
  constexpr bool CONVERTED = STRIDE > DOT_ROWS && !std::is_same<T, float>::value && !PAIRED<T>;
  for (int h = 0; h < job.num_heads; ++h) {
    c.kv_head = job.kv_head + h;
    finish_head(c, plan, job, states[h], scratch.out + h * scratch.out_floats, !CONVERTED && width_v >= W);
  }
}

template <class T>
void attention_job(const AttentionArgs& args, Plan& plan, const Job& job, const Job* next) {
  switch (plan.tiles[job.tile].stride) {
    case 1: return run_job<T, 1>(args, plan, job, next);
    case 2: return run_job<T, 2>(args, plan, job, next);
    case 4: return run_job<T, 4>(args, plan, job, next);
    case 8: return run_job<T, 8>(args, plan, job, next);
    case 16: return run_job<T, 16>(args, plan, job, next);
    case 32: return run_job<T, W >= 8 ? 32 : 16>(args, plan, job, next);
    case 64: return run_job<T, W >= 16 ? 64 : 16>(args, plan, job, next);
  }
}

}  // namespace pagebinder
