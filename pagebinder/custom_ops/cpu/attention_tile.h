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
    return reinterpret_cast<typename E::Query*>(c.scratch.query);
  }

  static void pack(const TileContext<T>& c) {
    const int rows = c.tile.rows;
    if (!staged(c.width)) {
      if constexpr (DOT) pack_dot_queries<Direct, STRIDE>(c.q_rows, rows, c.width, query<Direct>(c));
      else if constexpr (std::is_same<T, float>::value || PAIRED<T>)
        pack_lane_queries<Direct>(c.q_rows, rows, c.width, STRIDE, query<Direct>(c));
      return;
    }
    if constexpr (DOT) {
      float q[8 * 2 * W] = {};  // staged dots are narrower than one step
      const float* q_rows[STRIDE];
      for (int r = 0; r < rows; ++r) {
        stage_rows(&c.q_rows[r], 0, 1, c.width, q + r * 2 * W, &q_rows[r]);
      }
      pack_dot_queries<Staged, STRIDE>(q_rows, rows, padded(c.width), query<Staged>(c));
    } else {
      pack_lane_queries<Staged>(c.q_rows, rows, c.width, STRIDE, query<Staged>(c));
    }
  }

  static void compute(const TileContext<T>& c, int num_keys) {
    if (!staged(c.width)) {
      if constexpr (DOT)
        dot_scores<Direct, STRIDE>(c.rows, c.next_rows, num_keys, query<Direct>(c), c.width, c.scratch.scores);
      else if constexpr (std::is_same<T, float>::value || PAIRED<T>)
        lane_scores<Direct, STRIDE / W>(c.rows, num_keys, query<Direct>(c), c.width, c.scratch.scores);
      return;
    }
    const float* k_rows[ROW_BUFFER];
    stage_rows(c.rows, 0, num_keys, c.width, c.scratch.staged_k, k_rows);
    repeat_last_row(k_rows, num_keys);
    if constexpr (DOT)
      dot_scores<Staged, STRIDE>(k_rows, k_rows, num_keys, query<Staged>(c), padded(c.width), c.scratch.scores);
    else lane_scores<Staged, STRIDE / W>(k_rows, num_keys, query<Staged>(c), c.width, c.scratch.scores);
  }
};

// ---- values ------------------------------------------------------------------------------------------------

template <class T, int STRIDE>
constexpr bool PAIR_WEIGHTS = PAIRED<T> && (STRIDE > 8);

template <class T, int STRIDE>
void values(const TileContext<T>& c, const ValueBlock& block) {
  const bool narrow = c.width_v < W;
#if PAGEBINDER_BF16_DOT
  if constexpr (PAIR_WEIGHTS<T, STRIDE>) {
    const bf16* v_rows[BLOCK_KEYS];
    bf16 padded[BLOCK_KEYS][W];
    for (int k = 0; narrow && k < block.num_keys; ++k) {
      std::memset(padded[k], 0, sizeof(padded[k]));
      std::memcpy(padded[k], c.rows[k] + c.width, c.width_v * sizeof(bf16));
      v_rows[k] = padded[k];
    }
    uint32_t* packed = reinterpret_cast<uint32_t*>(c.scratch.staged_v);
    const int width = narrow ? W : c.width_v;
    if (narrow) pack_value_pairs(v_rows, 0, block.num_keys, width, packed);
    else pack_value_pairs(c.rows, c.width, block.num_keys, width, packed);
    add_value_pairs<STRIDE>(block, packed, c.tile.rows, width);
    return;
  }
#endif
  constexpr bool CONVERT_ONCE = STRIDE > 8 && !std::is_same<T, float>::value;
  if (CONVERT_ONCE || narrow) {
    const float* v_rows[ROW_BUFFER];
    stage_rows(c.rows, c.width, block.num_keys, c.width_v, c.scratch.staged_v, v_rows);
    add_values<STRIDE>(block, ValueRows<float>{v_rows, v_rows, 0}, c.tile.rows, c.vectors_v * W);
  } else if constexpr (!CONVERT_ONCE) {
    add_values<STRIDE>(block, ValueRows<T>{c.rows, c.next_rows, c.width}, c.tile.rows, c.width_v);
  }
}

// ---- one job ---------------------------------------------------------------------------------------------------

template <class T, int STRIDE>
void start_state(const TileContext<T>& c, SoftmaxState<STRIDE>& state, int* common_begin, int* common_end) {
  constexpr int LANES = SoftmaxState<STRIDE>::VECTORS * W;
  int32_t begin[LANES], end[LANES], position[LANES], lane_key[W];
  float slope[LANES];
  *common_begin = 0;
  *common_end = INT32_MAX;
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
    *common_begin = std::max(*common_begin, keys.begin);
    *common_end = std::min(*common_end, keys.end);
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

// The rows that the next job reads first, so that this one can ask for them.
template <class T>
bool find_first_rows(const AttentionArgs& args, const Plan& plan, const Job& job, const T** rows) {
  const Tile& tile = plan.tiles[job.tile];
  const KeyRange keys = part_keys(tile, job.part);
  if (keys.begin == keys.end) return false;
  const int end = std::min(keys.end, keys.begin / BLOCK_KEYS * BLOCK_KEYS + BLOCK_KEYS);
  return find_rows(args, tile, job.kv_head, {keys.begin, end, keys.begin, end}, rows);
}

// Attention of the tile's rows to the keys of one part. False: bad block id.
template <class T, int STRIDE>
bool attend(TileContext<T>& c, const Plan& plan, const Job* next_job, KeyRange part, RowResults& results) {
  const int key_begin = part.begin, key_end = part.end;
  using State = SoftmaxState<STRIDE>;
  constexpr int GRAIN = std::max(State::KEYS_PER_VECTOR, PAIR_WEIGHTS<T, STRIDE> ? 2 : 1);
  State state;
  int common_begin, common_end;
  start_state(c, state, &common_begin, &common_end);
  const float cap = c.args.soft_cap;
  const ScoreOptions options{cap != 0.0f ? c.args.scale / cap : c.args.scale * LOG2_E, cap * LOG2_E,
                             c.args.alibi_slopes != nullptr};
  float correction[State::VECTORS * W];
  ValueBlock block{c.scratch.scores, 0, correction, results.out, results.stride, true};
  auto block_at = [&](int at) {
    BlockKeys b{std::max(at, key_begin), std::min(at + BLOCK_KEYS, key_end), 0, 0};
    b.from = b.begin / GRAIN * GRAIN;
    b.to = (b.end + GRAIN - 1) / GRAIN * GRAIN;
    return b;
  };
  int at = key_begin / BLOCK_KEYS * BLOCK_KEYS;
  BlockKeys keys = block_at(at), next{};
  c.rows = c.row_buffers[0];
  if (key_begin < key_end) {
    if (!find_rows(c.args, c.tile, c.kv_head, keys, c.rows)) return false;
    Scores<T, STRIDE>::pack(c);
  }
  for (; at < key_end; at += BLOCK_KEYS, keys = next, c.rows = c.next_rows) {
    c.next_rows = c.row_buffers[c.rows == c.row_buffers[0] ? 1 : 0];
    if (at + BLOCK_KEYS < key_end) {
      next = block_at(at + BLOCK_KEYS);
      if (!find_rows(c.args, c.tile, c.kv_head, next, c.next_rows)) return false;
    } else if (STRIDE > 8 || next_job == nullptr || !find_first_rows(c.args, plan, *next_job, c.next_rows)) {
      c.next_rows = c.rows;
    }
    const int num_keys = keys.to - keys.from;
    const bool masked = keys.from < common_begin || keys.to > common_end;
    Scores<T, STRIDE>::compute(c, num_keys);
    softmax_block<PAIR_WEIGHTS<T, STRIDE>>(state, options, masked, keys.from, num_keys, c.scratch.scores);
    for (int v = 0; v < State::VECTORS; ++v) store(correction + v * W, state.correction[v]);
    block.num_keys = num_keys;
    values<T, STRIDE>(c, block);
    block.first = false;
  }
  if (block.first) std::memset(results.out, 0, sizeof(float) * STRIDE * results.stride);
  float top[State::VECTORS * W], sum[State::VECTORS * W];
  for (int v = 0; v < State::VECTORS; ++v) {
    store(top + v * W, state.top[v]);
    store(sum + v * W, state.sum[v]);
  }
  for (int r = 0; r < STRIDE && r < c.tile.rows; ++r) {
    results.top[r] = top[r];
    results.sum[r] = 0.0f;
    for (int lane = r; lane < (STRIDE < W ? W : r + 1); lane += STRIDE) results.sum[r] += sum[lane];
  }
  return true;
}

template <class T, int STRIDE>
void run_tile(const AttentionArgs& args, Plan& plan, const Job& job, const Job* next) {
  const Tile& tile = plan.tiles[job.tile];
  const int kv_head = job.kv_head;
  static thread_local Scratch scratch;
  const int row_floats = static_cast<int>(partial_row_floats(args));
  TileContext<T> c{args, tile, kv_head, static_cast<int>(args.head_dim), static_cast<int>(args.head_dim_v),
                   (row_floats - 2) / W, scratch, {}, {}, nullptr, nullptr};
  scratch.reserve(STRIDE, (c.width + 2 * W - 1) / (2 * W) * 2 * W, c.vectors_v * W);
  const T* q = static_cast<const T*>(args.q);
  for (int r = 0; r < tile.rows; ++r)
    c.q_rows[r] = q + c.token_of(r) * args.q_token_stride + c.head_of(r) * args.q_head_stride;
  float top[STRIDE], sum[STRIDE];
  RowResults results{top, sum, scratch.out, c.vectors_v * W};
  if (!attend<T, STRIDE>(c, plan, next, part_keys(tile, job.part), results)) {
    plan.bad_block = true;
    return;
  }
  if (tile.parts > 1 && !merge_if_last(c, plan, job, row_floats, results)) return;
  constexpr bool CONVERTED = STRIDE > 8 && !std::is_same<T, float>::value && !PAIRED<T>;
  write_rows(c, results, !CONVERTED && c.width_v >= W);
}

template <class T>
void attention_job(const AttentionArgs& args, Plan& plan, const Job& job, const Job* next) {
  switch (plan.tiles[job.tile].stride) {
    case 1: return run_tile<T, 1>(args, plan, job, next);
    case 2: return run_tile<T, 2>(args, plan, job, next);
    case 4: return run_tile<T, 4>(args, plan, job, next);
    case 8: return run_tile<T, 8>(args, plan, job, next);
    case 16: return run_tile<T, 16>(args, plan, job, next);
    case 32: return run_tile<T, W >= 8 ? 32 : 16>(args, plan, job, next);
    case 64: return run_tile<T, W >= 16 ? 64 : 16>(args, plan, job, next);
  }
}

}  // namespace pagebinder
