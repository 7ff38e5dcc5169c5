// Scores q.k of a block of keys, laid out [key][row]: score of key k and row r at scores[k * stride + r].
//
// Two register-blocked forms:
//   dot    few rows (decode): vectors run along the head width, each K row is loaded once for all rows.
//   lanes  many rows (prefill): each lane is a query row, K elements are broadcast straight from the cache.
// Both read K through row pointers, so any block size and layout costs the same as contiguous memory.
#pragma once

#include <type_traits>

#include "elements.h"
#include "simd.h"

namespace pagebinder {

constexpr int MAX_KEYS_AT_ONCE = 16;  // forms may compute (and ignore) fewer keys than this beyond the last

constexpr int NEAR_KEYS = 8;          // how much further on the nearest cache is asked for rows
static_assert(NEAR_KEYS <= MAX_KEYS_AT_ONCE);

constexpr int RUNS_AHEAD = PAGEBINDER_AMX ? 8 : 1;  // of rows, asked for side by side

// Rows somewhere in memory: row k is `offset` elements after rows[k].
template <class T>
struct Rows {
  const T* const* rows;
  int64_t offset;
  PB_INLINE const T* operator[](int k) const { return rows[k] + offset; }
  PB_INLINE Rows after(int64_t elements) const { return {rows, offset + elements}; }
};

// The lines of rows that are read after those at hand: the second cache is asked for one of them whenever a line at hand is
// read, so that memory is busy all the time (the nearest cache would lose what is at hand). In the order in which they lie,
// or neither memory nor the processor's own prefetcher is at its fastest; on processors with matrix tiles, whose prefetcher
// reads each run of lines at most 20 ahead, in several runs in turn, a row at a time. Of rows at hand the nearest cache is
// asked for those some keys further on; as with all keys that forms compute beyond the last, there are pointers for
// MAX_KEYS_AT_ONCE more.
template <class T>
class AheadLines {
 public:
  AheadLines() = default;  // nothing comes from memory
  AheadLines(Rows<T> rows, int num_rows, int length)
      : rows_(rows), num_rows_(num_rows), left_(num_rows), row_bytes_(length * sizeof(T)) {
    if (left_ > 0) begin_row();
  }
  bool any() const { return left_ > 0; }
  // Some lines, mostly of one row.
  template <int LINES>
  PB_INLINE void ask() {
    if (end_ - at_ >= LINES * 64) {
      PB_UNROLL
      for (int i = 0; i < LINES; ++i) __builtin_prefetch(at_ + i * 64, 0, 2);
      at_ += LINES * 64;
      if (at_ >= end_) end_row();
    } else {
      for (int i = 0; i < LINES; ++i) ask();
    }
  }
  PB_INLINE void ask() {
    if (left_ == 0) return;
    __builtin_prefetch(at_, 0, 2);
    at_ += 64;
    if (at_ >= end_) end_row();
  }
  void ask_for_rest() {
    while (left_ > 0) ask();
  }

 private:
  PB_INLINE void begin_row() {
    const int run_rows = (num_rows_ + RUNS_AHEAD - 1) / RUNS_AHEAD;
    int row;
    do {
      row = asked_ % RUNS_AHEAD * run_rows + asked_ / RUNS_AHEAD, ++asked_;
    } while (row >= num_rows_);  // of the last run, which may be shorter
    at_ = reinterpret_cast<const char*>(rows_[row]);
    end_ = at_ + row_bytes_;
  }
  PB_INLINE void end_row() {
    if (--left_ > 0) begin_row();
    else at_ = end_;
  }

  Rows<T> rows_{};
  int num_rows_ = 0, asked_ = 0, left_ = 0;
  int64_t row_bytes_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;
};

// How a form reads elements. `Key` in the cache, `Query` as packed; `STEP` elements make one multiply-add.
template <class T>
struct FloatElements {
  using Key = T;
  using Query = float;
  static constexpr int STEP = W;
  static constexpr int PER_LANE = 1;
  using Vec = VF;
  static PB_INLINE Vec load_key(const Key* p) { return load_float(p); }
  static PB_INLINE Vec load_query(const Query* p) { return load<VF>(p); }
  static PB_INLINE Vec splat_key(const Key* p) { return splat(*p); }
  static PB_INLINE VF madd(VF sum, Vec a, Vec b) { return sum + a * b; }
};

// Elements that are read two vectors at a time.
struct PairedFloats {
  using Query = float;
  static constexpr int STEP = 2 * W;
  static constexpr int PER_LANE = 1;
  using Vec = Pair;
  static PB_INLINE Vec load_query(const Query* p) { return {load<VF>(p), load<VF>(p + W)}; }
  static PB_INLINE VF madd(VF sum, Vec a, Vec b) { return sum + a.first * b.first + a.second * b.second; }
};

// bf16, queries packed in the same order.
struct ApartElements : PairedFloats {
  using Key = bf16;
  static PB_INLINE Vec load_key(const Key* p) { return apart(load<VU>(p)); }
};

#if PAGEBINDER_BF16_DOT
// Pairs of bf16 multiplied and added to a float32: the products are exact.
struct PairElements {
  using Key = bf16;
  using Query = bf16;
  static constexpr int STEP = 2 * W;
  static constexpr int PER_LANE = 2;
  using Vec = VU;
  static PB_INLINE Vec load_key(const Key* p) { return load<VU>(p); }
  static PB_INLINE Vec load_query(const Query* p) { return load<VU>(p); }
  static PB_INLINE Vec splat_key(const Key* p) { return load<uint32_t>(p) - VU{}; }
  static PB_INLINE VF madd(VF sum, Vec a, Vec b) {
    return bit_cast<VF>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(a), bit_cast<__m512bh>(b)));
  }
};
#endif

// ---- dot form --------------------------------------------------------------------------------------------

// Packed queries: [step][row][STEP]. The last step ends at `width`; where it overlaps the one before, the query
// is zero. Needs width >= STEP.
template <class E, int ROWS, class T>
void pack_dot_queries(const T* const* q_rows, int rows, int width, typename E::Query* packed) {
  const int steps = (width + E::STEP - 1) / E::STEP;
  for (int i = 0; i < steps; ++i) {
    const int begin = i * E::STEP, offset = begin + E::STEP <= width ? begin : width - E::STEP;
    for (int r = 0; r < ROWS; ++r) {
      typename E::Query* to = packed + (i * ROWS + r) * E::STEP;
      std::memset(to, 0, sizeof(*to) * E::STEP);
      if (r >= rows) continue;
      if constexpr (E::PER_LANE == 2) {
        const int skip = begin - offset;
        std::memcpy(to + skip, q_rows[r] + begin, (E::STEP - skip) * sizeof(*to));
      } else {
        float lanes[E::STEP];
        for (int e = 0; e < E::STEP; e += W) store(lanes + e, load_float(q_rows[r] + offset + e));
        for (int e = begin - offset; e < E::STEP; ++e) to[e] = lanes[e];
        if constexpr (std::is_same_v<E, ApartElements>) {
          VF even = load<VF>(to), odd = load<VF>(to + W);
          take_apart(even, odd);
          store(to, even), store(to + W, odd);
        }
      }
    }
  }
}

template <class E, int ROWS>
void dot_scores(Rows<typename E::Key> k_rows, AheadLines<typename E::Key>& ahead, int num_keys,
                const typename E::Query* q, int width, float* scores) {
  constexpr int KEYS = W > ROWS ? W / ROWS : 1;  // keys whose sums fill whole vectors
  constexpr int MOST = ROWS == 1 ? 8 : 4, SUB = KEYS < MOST ? KEYS : MOST;  // keys in flight
  constexpr int STEP_BYTES = E::STEP * static_cast<int>(sizeof(typename E::Key));
  constexpr int LINE_STEPS = STEP_BYTES < 64 ? 64 / STEP_BYTES : 1;
  const int steps = (width + E::STEP - 1) / E::STEP, last = width - E::STEP;
  const bool from_memory = ahead.any();
  AheadLines<typename E::Key> asking = ahead;  // in registers
  for (int k = 0; k < num_keys; k += KEYS) {
    VF sum[KEYS * ROWS] = {};
    PB_UNROLL
    for (int sub = 0; sub < KEYS; sub += SUB) {
      const typename E::Key *key[SUB], *near[SUB];
      PB_UNROLL
      for (int j = 0; j < SUB; ++j) {
        key[j] = k_rows[k + sub + j];
        near[j] = from_memory ? k_rows[k + sub + j + NEAR_KEYS] : key[j];
      }
      const typename E::Query* packed = q;
      const auto step = [&](int i) __attribute__((always_inline)) {
        const int offset = i * E::STEP < last ? i * E::STEP : last;
        typename E::Vec query[ROWS];
        PB_UNROLL
        for (int r = 0; r < ROWS; ++r) query[r] = E::load_query(packed + r * E::STEP);
        PB_UNROLL
        for (int j = 0; j < SUB; ++j) {
          typename E::Vec x = E::load_key(key[j] + offset);
          PB_UNROLL
          for (int r = 0; r < ROWS; ++r)
            sum[(sub + j) * ROWS + r] = E::madd(sum[(sub + j) * ROWS + r], x, query[r]);
        }
        packed += ROWS * E::STEP;
      };
      for (int i = 0; i < steps; i += LINE_STEPS) {  // line by line of K
        PB_UNROLL
        for (int j = 0; j < SUB; ++j) __builtin_prefetch(near[j] + i * E::STEP);
        asking.template ask<SUB>();
        if (i + LINE_STEPS <= steps) {
          PB_UNROLL
          for (int s = 0; s < LINE_STEPS; ++s) step(i + s);
        } else {
          for (int s = i; s < steps; ++s) step(s);
        }
      }
    }
    PB_UNROLL
    for (int v = 0; v < KEYS * ROWS / W; ++v) store(scores + k * ROWS + v * W, sum_lanes(sum + v * W));
  }
  ahead = asking;
}

// ---- lanes form ------------------------------------------------------------------------------------------

// Packed queries: [width / PER_LANE][stride] of PER_LANE elements each, rows beyond `rows` zero.
template <class E, class T>
void pack_lane_queries(const T* const* q_rows, int rows, int width, int stride, typename E::Query* packed) {
  const int steps = width / E::PER_LANE;
  for (int first_row = 0; first_row < stride; first_row += W) {
    for (int d = 0; d < steps; d += W) {
      const int count = steps - d < W ? steps - d : W;
      VF x[W];
      for (int r = 0; r < W; ++r) {
        x[r] = VF{};
        if (first_row + r >= rows) continue;
        const T* from = q_rows[first_row + r] + d * E::PER_LANE;
        if constexpr (E::PER_LANE == 2) {
          if (count == W) x[r] = load<VF>(from);
          else std::memcpy(&x[r], from, count * 4);
        } else {
          x[r] = count == W ? load_float(from) : load_float_part(from, count);
        }
      }
      transpose(x);
      float* to = reinterpret_cast<float*>(packed) + d * stride + first_row;
      for (int i = 0; i < count; ++i) store(to + i * stride, x[i]);
    }
  }
}

template <class E, int VECTORS>
void lane_scores(Rows<typename E::Key> k_rows, int num_keys, const typename E::Query* q, int width,
                 float* scores) {
  constexpr int STRIDE = VECTORS * W;
  // As many sums as registers hold: 32 with AVX-512, else 16.
  constexpr int KEYS = W < 16 ? (VECTORS == 4 ? 2 : 8 / VECTORS) : VECTORS < 4 ? 8 : E::PER_LANE == 2 ? 4 : 6;
  const int steps = width / E::PER_LANE;
  const float* packed = reinterpret_cast<const float*>(q);
  for (int k = 0; k < num_keys; k += KEYS) {
    VF sum[KEYS][VECTORS] = {};
    const typename E::Key* key[KEYS];
    for (int j = 0; j < KEYS; ++j) key[j] = k_rows[k + j];
    for (int d = 0; d < steps; ++d) {
      typename E::Vec query[VECTORS];
      PB_UNROLL
      for (int v = 0; v < VECTORS; ++v) query[v] = load<typename E::Vec>(packed + d * STRIDE + v * W);
      PB_UNROLL
      for (int j = 0; j < KEYS; ++j) {
        typename E::Vec x = E::splat_key(key[j] + d * E::PER_LANE);
        PB_UNROLL
        for (int v = 0; v < VECTORS; ++v) sum[j][v] = E::madd(sum[j][v], x, query[v]);
      }
    }
    PB_UNROLL
    for (int j = 0; j < KEYS; ++j)
      PB_UNROLL
      for (int v = 0; v < VECTORS; ++v) store(scores + (k + j) * STRIDE + v * W, sum[j][v]);
  }
}

}  // namespace pagebinder
