// Products of a few rows and a panel of 32 columns, a pair of k at a time.
//
//     x   [strip of rows][pair of k][row][2]   a copy of rows that a product reads as one stream
//     W   [step of 32 k][2][16 pairs of k][16 columns][2]   a line of it is 16 columns of a pair of k
//
// With AVX-512 BF16 x is bf16 as well, and a pair is one instruction (a dot):
//
//     sums [row][2]  +=  a pair of one row of x, in all lanes  .  two lines of W
//
// Sums of a strip and a panel stay in registers, 28 of the 32: two lines of W meet 14 rows. Elsewhere x is widened to
// float32 when it is copied, and a line becomes floats as it is read: those of even k by a shift, those of odd k by a
// mask. Half a panel then meets a strip at a time, as many rows as registers hold.
//
// An element is summed in the order of k, whatever rows are beside it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_scores.h"
#include "by_count.h"
#include "memory_streams.h"

namespace pagebinder {

constexpr int DOT_PANEL = 32;                            // columns, and k of a step
constexpr int DOT_STEP_BYTES = DOT_PANEL * DOT_PANEL * 2;
constexpr int DOT_HALF_BYTES = DOT_STEP_BYTES / 2;       // 16 columns of a step
constexpr int DOT_PAIRS = DOT_PANEL / 2;                 // of k, of a step
constexpr int DOT_PAIR_LINES = DOT_STEP_BYTES / 64 / DOT_PAIRS;  // of a panel, for each pair of k
constexpr int DOT_JUMP_LINES = 8;
constexpr int DOT_AHEAD = DOT_STEP_BYTES;                // bytes of W that the nearest cache is asked for

// On x86 alone: on ARM torch's own layers have instructions that these do not use.
#if defined(__x86_64__)
constexpr bool DOTS_PAY = true;
#else
constexpr bool DOTS_PAY = false;
#endif

#if PAGEBINDER_BF16_DOT
using DotPair = uint32_t;                                // two bf16
#else
struct DotPair { float even, odd; };
#endif

constexpr int DOT_MOST_ROWS = W == 16 ? 14 : W == 8 ? 6 : 3;        // of a strip
constexpr int DOT_MOST_RISING_ROWS = W == 16 ? 4 : W == 8 ? 3 : 1;  // of those that meet both halves of a panel at once

// 16 pairs of k of each of some rows -> [16][rows]
inline void put_pairs(const bf16* const* rows, int count, DotPair* to) {
#if PAGEBINDER_BF16_DOT
  static_assert(W >= DOT_MOST_ROWS);
  const __mmask16 lanes = static_cast<__mmask16>((1u << count) - 1);
  VF line[W];
  PB_UNROLL
  for (int r = 0; r < W; ++r) line[r] = load<VF>(rows[std::min(r, count - 1)]);  // lanes beyond the rows are not stored
  transpose(line);
  PB_UNROLL
  for (int p = 0; p < W; ++p) _mm512_mask_storeu_ps(to + p * count, lanes, bit_cast<__m512>(line[p]));
#else
  for (int r = 0; r < count; ++r) {
    float wide[2 * DOT_PAIRS];
    for (int i = 0; i < 2 * DOT_PAIRS; i += W) store(wide + i, load_float(rows[r] + i));
    PB_UNROLL
    for (int p = 0; p < DOT_PAIRS; ++p) std::memcpy(to + p * count + r, wide + 2 * p, sizeof(DotPair));
  }
#endif
}

// Rows of x [rows, inner] in strips of the same length; the last may be shorter.
struct DotStrips {
  int64_t rows, inner;
  int count, most_rows;

  DotStrips(int64_t num_rows, int64_t k)
      : rows(num_rows), inner(k), count(static_cast<int>((num_rows + DOT_MOST_ROWS - 1) / DOT_MOST_ROWS)),
        most_rows(static_cast<int>((num_rows + count - 1) / std::max(count, 1))) {}

  int64_t first_row(int strip) const { return int64_t{strip} * most_rows; }
  int rows_of(int strip) const { return static_cast<int>(std::min<int64_t>(most_rows, rows - first_row(strip))); }
  int64_t pairs() const { return rows * (inner / 2); }
  int64_t offset(int strip) const { return first_row(strip) * (inner / 2); }  // in pairs

  // A strip of x -> its place in `to`, memory of all pairs.
  void copy(const void* x, int64_t x_stride, int strip, DotPair* to) const {
    const int count_here = rows_of(strip);
    const bf16* from[DOT_MOST_ROWS];
    for (int r = 0; r < count_here; ++r) from[r] = static_cast<const bf16*>(x) + (first_row(strip) + r) * x_stride;
    to += offset(strip);
    for (int64_t k = 0; k < inner; k += 2 * DOT_PAIRS, to += DOT_PAIRS * count_here) {
      put_pairs(from, count_here, to);
      for (int r = 0; r < count_here; ++r) from[r] += 2 * DOT_PAIRS;
    }
  }
};

// Lines that sums will be written to, one a row. With each step one of them is fetched to be written, or the stores of a
// strip, which the next claim of a product waits for, take 3 to 5 % of its time; asked for all at once, lines come late.
struct DotResults {
  const char* first;
  int64_t stride;  // bytes
  int rows;
};

// What the second cache is asked for beside a product: some lines with each pair of k, and after eight lines a jump of
// some bytes. What a product reads itself it asks the nearest cache for, a step ahead. Both together are faster than
// either, and line by line than many at once (docs/measurements.md).
struct DotAhead {
  const char* first;
  int lines;
  int64_t jump = 0;
  DotResults results{};  // of dots alone
};

#if PAGEBINDER_BF16_DOT
// `steps` steps of ROWS rows and a panel: sums [ROWS][32], added to what is there unless they are the first.
template <int ROWS>
void multiply_dots(const DotPair* x, const char* w, int steps, bool first, DotAhead ahead, float* sums) {
  VF sum[ROWS][2];
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    sum[r][0] = first ? VF{} : load<VF>(sums + r * DOT_PANEL);
    sum[r][1] = first ? VF{} : load<VF>(sums + r * DOT_PANEL + W);
  }
  for (int step = 0; step < steps; ++step, w += DOT_HALF_BYTES) {
    if (step < ahead.results.rows) __builtin_prefetch(ahead.results.first + step * ahead.results.stride, 1);
    for (int pair = 0; pair < DOT_PAIRS; ++pair, w += 64, x += ROWS) {
      if (pair % (DOT_JUMP_LINES / DOT_PAIR_LINES) == 0) ahead.first += ahead.jump;
      for (int i = 0; i < ahead.lines; ++i, ahead.first += 64) __builtin_prefetch(ahead.first, 0, 2);
      __builtin_prefetch(w + DOT_AHEAD);
      __builtin_prefetch(w + DOT_HALF_BYTES + DOT_AHEAD);
      const VU low = load<VU>(w), high = load<VU>(w + DOT_HALF_BYTES);
      PB_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const VU row = load<uint32_t>(x + r) - VU{};
        sum[r][0] = PairElements::madd(sum[r][0], row, low);
        sum[r][1] = PairElements::madd(sum[r][1], row, high);
      }
    }
  }
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    store(sums + r * DOT_PANEL, sum[r][0]);
    store(sums + r * DOT_PANEL + W, sum[r][1]);
  }
}

// The same of a whole panel for few rows, whose lines are read strictly in the order in which they lie: the lines of a
// half of a step wait in registers for those of the other.
template <int ROWS>
void multiply_dots_rising(const DotPair* x, const char* w, int steps, float* sums) {
  VF sum[ROWS][2] = {};
  for (int step = 0; step < steps; ++step, w += DOT_STEP_BYTES) {
    VU low[DOT_PAIRS];
    PB_UNROLL
    for (int pair = 0; pair < DOT_PAIRS; ++pair) {
      low[pair] = load<VU>(w + pair * 64);
      asm volatile("" : "+v"(low[pair]));  // here, not where it is used
    }
    PB_UNROLL
    for (int pair = 0; pair < DOT_PAIRS; ++pair, x += ROWS) {
      const VU high = load<VU>(w + DOT_HALF_BYTES + pair * 64);
      PB_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const VU row = load<uint32_t>(x + r) - VU{};
        sum[r][0] = PairElements::madd(sum[r][0], row, low[pair]);
        sum[r][1] = PairElements::madd(sum[r][1], row, high);
      }
    }
  }
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    store(sums + r * DOT_PANEL, sum[r][0]);
    store(sums + r * DOT_PANEL + W, sum[r][1]);
  }
}

#else
constexpr int HALF_VECTORS = 16 / W;  // of a line
constexpr int FLOAT_CHUNK = 8;        // steps of a strip, and of half a panel, that the nearest cache holds

// sums [row][vector] += one k of each row, a pair apart, times a line of weights.
template <int ROWS>
PB_INLINE void add_k(const float* x, const VF (&w)[HALF_VECTORS], VF (&sum)[ROWS][HALF_VECTORS]) {
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    VF value = splat(x[2 * r]);
#if defined(__x86_64__)
    asm volatile("" : "+x"(value));  // not before the row's turn
#endif
    PB_UNROLL
    for (int v = 0; v < HALF_VECTORS; ++v) add_product(sum[r][v], value, w[v]);
  }
}

// sums [row][vector] += a pair of k of each row times a line.
template <int ROWS>
PB_INLINE void add_pair(const DotPair* x, const char* line, VF (&sum)[ROWS][HALF_VECTORS]) {
  VF w[HALF_VECTORS];
  PB_UNROLL
  for (int v = 0; v < HALF_VECTORS; ++v) w[v] = bit_cast<VF>(load<VU>(line + v * W * 4) << 16);
  add_k<ROWS>(&x->even, w, sum);
  asm volatile("" ::: "memory");  // the line is read again: there is no register that could keep it
  PB_UNROLL
  for (int v = 0; v < HALF_VECTORS; ++v) w[v] = bit_cast<VF>(load<VU>(line + v * W * 4) & 0xffff0000u);
  add_k<ROWS>(&x->odd, w, sum);
}

template <int ROWS>
PB_INLINE void load_sums(const float* sums, bool first, VF (&sum)[ROWS][HALF_VECTORS]) {
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r)
    PB_UNROLL
    for (int v = 0; v < HALF_VECTORS; ++v) sum[r][v] = first ? VF{} : load<VF>(sums + r * DOT_PANEL + v * W);
}

template <int ROWS>
PB_INLINE void store_sums(const VF (&sum)[ROWS][HALF_VECTORS], float* sums) {
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r)
    PB_UNROLL
    for (int v = 0; v < HALF_VECTORS; ++v) store(sums + r * DOT_PANEL + v * W, sum[r][v]);
}

// `steps` steps of ROWS rows and half a panel, 16 columns.
template <int ROWS>
__attribute__((noinline)) void multiply_half(const DotPair* x, const char* w, int steps, bool first, int lines,
                                             DotAhead& ahead, float* sums) {
  VF sum[ROWS][HALF_VECTORS];
  load_sums(sums, first, sum);
  const char* ask = ahead.first;
  for (int step = 0; step < steps; ++step, w += DOT_HALF_BYTES)
    for (int pair = 0; pair < DOT_PAIRS; ++pair, w += 64, x += ROWS) {
      if (pair % DOT_JUMP_LINES == 0) ask += ahead.jump;
      for (int i = 0; i < lines; ++i, ask += 64) __builtin_prefetch(ask, 0, 2);
      add_pair<ROWS>(x, w, sum);
    }
  ahead.first = ask;
  store_sums(sum, sums);
}

// The same of both halves at once: of so few rows a half's sums alone would wait for each other.
template <int ROWS>
__attribute__((noinline)) void multiply_halves(const DotPair* x, const char* w, int steps, bool first, DotAhead ahead,
                                               float* sums) {
  VF low[ROWS][HALF_VECTORS], high[ROWS][HALF_VECTORS];
  load_sums(sums, first, low);
  load_sums(sums + 16, first, high);
  for (int step = 0; step < steps; ++step, w += DOT_HALF_BYTES)
    for (int pair = 0; pair < DOT_PAIRS; ++pair, w += 64, x += ROWS) {
      if (pair % (DOT_JUMP_LINES / DOT_PAIR_LINES) == 0) ahead.first += ahead.jump;
      for (int i = 0; i < ahead.lines; ++i, ahead.first += 64) __builtin_prefetch(ahead.first, 0, 2);
      add_pair<ROWS>(x, w, low);
      add_pair<ROWS>(x, w + DOT_HALF_BYTES, high);
    }
  store_sums(low, sums);
  store_sums(high, sums + 16);
}

// `steps` steps of ROWS rows and a panel: sums [ROWS][32], added to what is there unless they are the first.
template <int ROWS>
void multiply_dots(const DotPair* x, const char* w, int steps, bool first, DotAhead ahead, float* sums) {
  for (int step = 0; step < steps; step += FLOAT_CHUNK) {
    const int count = std::min(FLOAT_CHUNK, steps - step);
    for (int half = 0; half < 2; ++half)
      multiply_half<ROWS>(x + int64_t{step} * DOT_PAIRS * ROWS, w + int64_t{step} * DOT_STEP_BYTES + half * DOT_HALF_BYTES,
                          count, first && step == 0, (ahead.lines + 1 - half) / 2, ahead, sums + half * 16);
  }
}

// The same of a whole panel for few rows, whose lines are read strictly in the order in which they lie.
template <int ROWS>
void multiply_dots_rising(const DotPair* x, const char* w, int steps, float* sums) {
  VF low[ROWS][HALF_VECTORS] = {}, high[ROWS][HALF_VECTORS] = {};
  for (int step = 0; step < steps; ++step, x += DOT_PAIRS * ROWS) {
    for (int pair = 0; pair < DOT_PAIRS; ++pair, w += 64) add_pair<ROWS>(x + pair * ROWS, w, low);
    for (int pair = 0; pair < DOT_PAIRS; ++pair, w += 64) add_pair<ROWS>(x + pair * ROWS, w, high);
  }
  store_sums(low, sums);
  store_sums(high, sums + 16);
}
#endif

inline auto multiply_dots_of(int rows) {
  return by_count<DOT_MOST_ROWS>(rows, [](auto count) { return multiply_dots<decltype(count)::value>; });
}
// Of weights in the nearest cache.
inline auto multiply_near_dots_of(int rows) {
#if PAGEBINDER_BF16_DOT
  return multiply_dots_of(rows);
#else
  constexpr int MOST_HALVES = 3;
  return by_count<DOT_MOST_ROWS>(rows, [](auto count) {
    constexpr int ROWS = decltype(count)::value;
    if constexpr (ROWS <= MOST_HALVES) return multiply_halves<ROWS>;
    else return multiply_dots<ROWS>;
  });
#endif
}
inline auto multiply_dots_rising_of(int rows) {
  return by_count<DOT_MOST_RISING_ROWS>(rows, [](auto count) { return multiply_dots_rising<decltype(count)::value>; });
}

// sums [rows][32] of a packed panel that comes from memory. `next`: what is read behind it, or null.
inline void stream_dots(const DotPair* x, int rows, const char* w, int steps, const char* next, const DotResults& results,
                        float* sums) {
  constexpr int AHEAD_STEPS = 4;
  if (prefetcher_follows_rising_lines() && rows <= DOT_MOST_RISING_ROWS)
    return multiply_dots_rising_of(rows)(x, w, steps, sums);
  const int streamed = std::max(steps - AHEAD_STEPS, 0);
  const auto multiply = multiply_dots_of(rows);
  multiply(x, w, streamed, true, {w + AHEAD_STEPS * DOT_STEP_BYTES, DOT_PAIR_LINES, 0, results}, sums);
  multiply(x + int64_t{streamed} * DOT_PAIRS * rows, w + int64_t{streamed} * DOT_STEP_BYTES, steps - streamed,
           streamed == 0, {next, next == nullptr ? 0 : DOT_PAIR_LINES}, sums);
}

}  // namespace pagebinder
