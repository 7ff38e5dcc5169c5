// Products of a few rows and a panel of 32 columns on BF16 dots (AVX-512 BF16), for machines without matrix tiles.
//
//     x   [strip of up to 14 rows][pair of k][row][2]   a copy of rows that a product reads as one stream
//     W   [step of 32 k][2][16 pairs of k][16 columns][2]   a line of it is 16 columns of a pair of k, one vector
//
//     sums [row][2]  +=  a pair of one row of x, in all lanes  .  two lines of W
//
// Sums of a strip and a panel stay in registers, 28 of the 32: two lines of W meet 14 rows. An element is summed in the
// order of k, whatever rows are beside it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include "attention_scores.h"
#include "memory_streams.h"

namespace pagebinder {

constexpr int DOT_PANEL = 32;                            // columns, and k of a step
constexpr int DOT_STEP_BYTES = DOT_PANEL * DOT_PANEL * 2;
constexpr int DOT_PAIRS = DOT_PANEL / 2;                 // of k, of a step
constexpr int DOT_MOST_ROWS = 14;                        // of a strip
constexpr int DOT_PAIR_LINES = DOT_STEP_BYTES / 64 / DOT_PAIRS;  // of a panel, for each pair of k
constexpr int DOT_JUMP_PAIRS = 4;
constexpr int DOT_AHEAD = DOT_STEP_BYTES;                // bytes of W that the nearest cache is asked for

// Rows of x [rows, inner] in strips of the same length; the last may be shorter.
struct DotStrips {
  int64_t rows, inner;
  int count, most_rows;

  DotStrips(int64_t num_rows, int64_t k)
      : rows(num_rows), inner(k), count(static_cast<int>((num_rows + DOT_MOST_ROWS - 1) / DOT_MOST_ROWS)),
        most_rows(static_cast<int>((num_rows + count - 1) / std::max(count, 1))) {}

  int64_t first_row(int strip) const { return int64_t{strip} * most_rows; }
  int rows_of(int strip) const { return static_cast<int>(std::min<int64_t>(most_rows, rows - first_row(strip))); }
  int64_t words() const { return rows * (inner / 2); }
  int64_t offset(int strip) const { return first_row(strip) * (inner / 2); }  // in words

#if PAGEBINDER_BF16_DOT
  // A strip of x -> its place in `to`, memory of all words: 16 pairs of k of all its rows at a time.
  void copy(const void* x, int64_t x_stride, int strip, uint32_t* to) const {
    static_assert(W >= DOT_MOST_ROWS);
    const int count_here = rows_of(strip);
    const __mmask16 lanes = static_cast<__mmask16>((1u << count_here) - 1);
    const char* from[W];
    for (int r = 0; r < W; ++r)  // lanes beyond the rows are not stored
      from[r] = static_cast<const char*>(x) + (first_row(strip) + std::min(r, count_here - 1)) * x_stride * 2;
    to += offset(strip);
    for (int64_t pair = 0; pair < inner / 2; pair += W) {
      VF line[W];
      PB_UNROLL
      for (int r = 0; r < W; ++r) line[r] = load<VF>(from[r] + pair * 4);
      transpose(line);
      PB_UNROLL
      for (int p = 0; p < W; ++p, to += count_here) _mm512_mask_storeu_ps(to, lanes, bit_cast<__m512>(line[p]));
    }
  }
#endif
};

// What the second cache is asked for beside a product: some lines with each pair of k, and after four pairs a jump of some
// bytes. What a product reads itself it asks the nearest cache for, a step ahead. Both together are faster than either,
// and line by line than many at once (docs/measurements.md).
struct DotAhead {
  const char* first;
  int lines;
  int64_t jump = 0;
};

#if PAGEBINDER_BF16_DOT
// `steps` steps of ROWS rows and a panel: sums [ROWS][32], added to what is there unless they are the first.
template <int ROWS>
void multiply_dots(const uint32_t* x, const char* w, int steps, bool first, DotAhead ahead, float* sums) {
  constexpr int HALF = DOT_STEP_BYTES / 2;
  VF sum[ROWS][2];
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    sum[r][0] = first ? VF{} : load<VF>(sums + r * DOT_PANEL);
    sum[r][1] = first ? VF{} : load<VF>(sums + r * DOT_PANEL + W);
  }
  for (int step = 0; step < steps; ++step, w += HALF)
    for (int pair = 0; pair < DOT_PAIRS; ++pair, w += 64, x += ROWS) {
      if (pair % DOT_JUMP_PAIRS == 0) ahead.first += ahead.jump;
      for (int i = 0; i < ahead.lines; ++i, ahead.first += 64) __builtin_prefetch(ahead.first, 0, 2);
      __builtin_prefetch(w + DOT_AHEAD);
      __builtin_prefetch(w + HALF + DOT_AHEAD);
      const VU low = load<VU>(w), high = load<VU>(w + HALF);
      PB_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const VU row = load<uint32_t>(x + r) - VU{};
        sum[r][0] = PairElements::madd(sum[r][0], row, low);
        sum[r][1] = PairElements::madd(sum[r][1], row, high);
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
void multiply_dots_rising(const uint32_t* x, const char* w, int steps, float* sums) {
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
      const VU high = load<VU>(w + DOT_STEP_BYTES / 2 + pair * 64);
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

using MultiplyDots = void (*)(const uint32_t*, const char*, int, bool, DotAhead, float*);
using MultiplyDotsRising = void (*)(const uint32_t*, const char*, int, float*);

template <int... Less>
MultiplyDots multiply_dots_of(int rows, std::integer_sequence<int, Less...>) {
  static constexpr MultiplyDots OF[] = {multiply_dots<Less + 1>...};
  return OF[rows - 1];
}
inline MultiplyDots multiply_dots_of(int rows) {
  return multiply_dots_of(rows, std::make_integer_sequence<int, DOT_MOST_ROWS>{});
}

// sums [rows][32] of a packed panel that comes from memory. `next`: what is read behind it, or null.
inline void stream_dots(const uint32_t* x, int rows, const char* w, int steps, const char* next, float* sums) {
  constexpr int AHEAD_STEPS = 4;
  static constexpr MultiplyDotsRising RISING[] = {multiply_dots_rising<1>, multiply_dots_rising<2>,
                                                  multiply_dots_rising<3>, multiply_dots_rising<4>};
  if (prefetcher_follows_rising_lines() && rows <= static_cast<int>(std::size(RISING)))
    return RISING[rows - 1](x, w, steps, sums);
  const int streamed = std::max(steps - AHEAD_STEPS, 0);
  const MultiplyDots multiply = multiply_dots_of(rows);
  multiply(x, w, streamed, true, {w + AHEAD_STEPS * DOT_STEP_BYTES, DOT_PAIR_LINES}, sums);
  multiply(x + int64_t{streamed} * DOT_PAIRS * rows, w + int64_t{streamed} * DOT_STEP_BYTES, steps - streamed, false,
           {next, next == nullptr ? 0 : DOT_PAIR_LINES}, sums);
}
#endif

}  // namespace pagebinder
