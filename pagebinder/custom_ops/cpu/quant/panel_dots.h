// One panel of a quantised weight meets rows of x on BF16 dots.
//
// Of one or two rows, and of a single strip (dots.h), codes become pairs in registers and are used there. Several strips
// meet blocks of steps that were decoded into the nearest cache; the first one asks for the next block's codes.
#pragma once

#include "decode.h"
#include "dots.h"

#if PAGEBINDER_BF16_DOT
namespace pagebinder {

constexpr int PANEL_FAR_BYTES = 8192, PANEL_NEAR_BYTES = 1024;  // asked for ahead, of the second cache and the nearest
constexpr int DOT_BLOCK_STEPS = 16;             // whose pairs are in the nearest cache
static_assert(QUANT_PANEL == DOT_PANEL && QUANT_STEP == DOT_PANEL);

// ---- one or two rows -------------------------------------------------------------------------------------------

// sums [panel][row][half] of panels that are read side by side; x: the words of each row, WORD_STRIDE apart. Of each sum,
// even and odd lines are summed apart: a sum waits for the one before. PLACED: codes of FP8 are multiplied as they are
// placed, so sums are 2^-120 of what they should be.
template <Code CODE, int ROWS, int PANELS, int WORD_STRIDE = 1, bool PLACED = false>
void add_panels(const PanelOf (&panels)[PANELS], const uint32_t* const (&x)[ROWS], VF (&sums)[PANELS][ROWS][2]) {
  const QuantizedLinearArgs& a = *panels[0].weight;
  const uint8_t* codes[PANELS];
  for (int p = 0; p < PANELS; ++p) codes[p] = panels[p].weight->weight + panels[p].panel * a.panel_bytes();
  const int steps = static_cast<int>(a.inner / QUANT_STEP), span = static_cast<int>(a.scaled_steps());
  for (int step = 0; step < steps; step += span) {
    __m512 sum[PANELS][ROWS][2][2] = {};
    const int end = std::min(steps, step + span);
    for (int i = step; i < end; ++i)
      PB_UNROLL
      for (int at = 0; at < 2 * PANELS; ++at) {
        const int half = at % 2, p = at / 2;
        decode_tile<CODE, PANEL_NEAR_BYTES, PLACED>(codes[p], [&](int line, __m512i pairs) {
          if (PANELS == 1 && line % CODE_LINES<CODE> == 0)
            __builtin_prefetch(codes[p] + PANEL_FAR_BYTES + line / CODE_LINES<CODE> * 64, 0, 2);
          PB_UNROLL
          for (int r = 0; r < ROWS; ++r) {
            const __m512i of_row = _mm512_set1_epi32(static_cast<int>(x[r][(i * DOT_PAIRS + line) * WORD_STRIDE]));
            __m512& to = sum[p][r][half][line % 2];
            to = _mm512_dpbf16_ps(to, bit_cast<__m512bh>(pairs), bit_cast<__m512bh>(of_row));
          }
        });
        codes[p] += a.tile_bytes();
      }
    alignas(64) float scales[QUANT_PANEL];
    for (int p = 0; p < PANELS; ++p) {
      scales_of(*panels[p].weight, panels[p].panel, step, scales);
      for (int r = 0; r < ROWS; ++r)
        for (int half = 0; half < 2; ++half) {
          const VF total = bit_cast<VF>(_mm512_add_ps(sum[p][r][half][0], sum[p][r][half][1]));
          sums[p][r][half] += load<VF>(scales + half * W) * (1.0f / PAIR_FACTOR<CODE>) * total;
        }
    }
  }
}

// ---- strips of rows --------------------------------------------------------------------------------------------

// Some rows of x as [pair of k][row][2].
struct DotStrip {
  const uint32_t* x;
  int64_t first_row;
  int rows;  // DOT_MOST_ROWS at most
};

// What the sums of a row are times, but for the scales of columns.
PB_INLINE float scale_of_row(const QuantizedLinearArgs& a, int64_t row, int64_t step) {
  return a.x_scale_at(row, step) * (a.lowering == nullptr ? 1.0f : a.lowering[row]);
}

// totals [rows][32] += sums [rows][32] times their scales.
inline void add_scaled(const QuantizedLinearArgs& a, int64_t row, int rows, int64_t step, const float* scales,
                       const float* sums, float* totals) {
  for (int r = 0; r < rows; ++r) {
    const float of_row = scale_of_row(a, row + r, step);
    for (int i = r * QUANT_PANEL; i < (r + 1) * QUANT_PANEL; i += W) {
      const VF scale = load<VF>(scales + i % QUANT_PANEL) * of_row;
      store(totals + i, load<VF>(totals + i) + scale * load<VF>(sums + i));
    }
  }
}

// Steps that are summed before scales are applied.
inline int summed_steps(const QuantizedLinearArgs& a) {
  return static_cast<int>(std::min<int64_t>(a.scaled_steps(), DOT_BLOCK_STEPS));
}

// Halves of a panel that a line meets at a time: more sums than these leave no registers to decode in.
constexpr int halves_of(int rows) { return rows <= 8 ? 2 : 1; }
constexpr int MOST_RISING = 6;  // rows, beside whose sums the codes of a half find room, too

// totals [ROWS][32] = the rows of a single strip times a panel, whose codes become pairs in registers.
template <Code CODE, bool PLACED, int ROWS>
void meet_in_registers(const QuantizedLinearArgs& a, int64_t panel, const DotStrip& strip, float* totals) {
  constexpr int HALVES = halves_of(ROWS), LINES = TILE_LINES_OF<CODE>, PAIRS = CODE_LINES<CODE>;
  const int steps = static_cast<int>(a.inner / QUANT_STEP), span = summed_steps(a);
  constexpr int64_t TILE = tile_bytes_of(CODE);
  constexpr bool RISING = ROWS <= MOST_RISING;
  const auto next_line = [](const uint8_t* at) {
    __builtin_prefetch(at + PANEL_NEAR_BYTES, 0, 3);
    __builtin_prefetch(at + PANEL_FAR_BYTES, 0, 2);
    return load<__m512i>(at);
  };
  alignas(64) float scales[QUANT_PANEL];
  std::fill(totals, totals + ROWS * QUANT_PANEL, 0.0f);
  for (int begin = 0, end; begin < steps; begin = end) {
    end = std::min({begin + span, begin / DOT_BLOCK_STEPS * DOT_BLOCK_STEPS + DOT_BLOCK_STEPS, steps});
    scales_of(a, panel, begin, scales);
    for (int first = 0; first < 2; first += HALVES) {
      VF sum[ROWS][HALVES] = {};
      const uint8_t* codes = a.weight + panel * a.panel_bytes() + (2 * begin + first) * TILE;
      const uint32_t* x = strip.x + int64_t{begin} * DOT_PAIRS * ROWS;
      for (int step = begin; step < end; ++step, codes += 2 * TILE, x += DOT_PAIRS * ROWS) {
        __m512i waiting[RISING ? LINES : 1];  // the first half, as memory is read in one rising order
        const auto meet_line = [&](int line) __attribute__((always_inline)) {
          __m512i pairs[HALVES][PAIRS];
          if (RISING) pairs_of_line<CODE, PLACED>(waiting[line], pairs[0]);
          PB_UNROLL
          for (int half = RISING; half < HALVES; ++half)
            pairs_of_line<CODE, PLACED>(next_line(codes + half * TILE + line * 64), pairs[half]);
          PB_UNROLL
          for (int i = 0; i < PAIRS; ++i)
            PB_UNROLL
            for (int r = 0; r < ROWS; ++r) {
              const VU row = load<uint32_t>(x + (line * PAIRS + i) * ROWS + r) - VU{};
              for (int half = 0; half < HALVES; ++half)
                sum[r][half] = PairElements::madd(sum[r][half], row, bit_cast<VU>(pairs[half][i]));
            }
        };
        if constexpr (RISING) {
          PB_UNROLL
          for (int line = 0; line < LINES; ++line) {
            waiting[line] = next_line(codes + line * 64);
            asm volatile("" : "+v"(waiting[line]));  // here, not where it is used
          }
          PB_UNROLL
          for (int line = 0; line < LINES; ++line) meet_line(line);
        } else {
          for (int line = 0; line < LINES; ++line) meet_line(line);
        }
      }
      const bool rows_are_scaled = a.x_scale != nullptr || a.lowering != nullptr;
      PB_UNROLL
      for (int half = 0; half < HALVES; ++half) {
        const VF scale = load<VF>(scales + (first + half) * W) * (1.0f / PAIR_FACTOR<CODE>);
        float* total = totals + (first + half) * W;
        PB_UNROLL
        for (int r = 0; r < ROWS; ++r, total += QUANT_PANEL) {
          const VF of_row = rows_are_scaled ? scale * scale_of_row(a, strip.first_row + r, begin) : scale;
          store(total, load<VF>(total) + of_row * sum[r][half]);
        }
      }
    }
  }
}

// A decoded block of steps meets a strip, span by span of what shares its scales.
inline void meet_strip(const QuantizedLinearArgs& a, int64_t panel, const DotStrip& strip, int step, int count,
                       const char* pairs, float factor, DotAhead ahead, float* totals) {
  const int rows = strip.rows, span = summed_steps(a);
  alignas(64) float sums[DOT_MOST_ROWS * QUANT_PANEL], scales[QUANT_PANEL];
  for (int i = 0; i < count; i += span) {
    const int steps = std::min(span, count - i);
    const uint32_t* x = strip.x + int64_t{step + i} * DOT_PAIRS * rows;
    multiply_dots_of(rows)(x, pairs + int64_t{i} * DOT_STEP_BYTES, steps, true, ahead, sums);
    ahead.first += steps * DOT_PAIRS * 64;
    scales_of(a, panel, step + i, scales);
    for (int c = 0; c < QUANT_PANEL; c += W) store(scales + c, load<VF>(scales + c) * factor);
    add_scaled(a, strip.first_row, rows, step + i, scales, sums, totals + strip.first_row * QUANT_PANEL);
  }
}

// totals [rows][32] = x times a panel of columns, scaled. strip_of(i): a DotStrip. MOST_IN_REGISTERS: rows of a strip, 0:
// also a single strip meets decoded blocks. PLACED: codes of FP8 are multiplied as they are placed, rows were lifted for that.
template <Code CODE, int MOST_IN_REGISTERS, bool PLACED = false, class StripOf>
void panel_of_strips(const QuantizedLinearArgs& a, int64_t panel, int num_strips, const StripOf& strip_of,
                     float* totals) {
  if constexpr (MOST_IN_REGISTERS > 0)
    if (num_strips == 1) {
      const DotStrip strip = strip_of(0);
      const auto meet = by_count<MOST_IN_REGISTERS>(
          strip.rows, [](auto rows) { return meet_in_registers<CODE, PLACED, decltype(rows)::value>; });
      return meet(a, panel, strip, totals);
    }
  const int steps = static_cast<int>(a.inner / QUANT_STEP);
  alignas(64) char pairs[DOT_BLOCK_STEPS * DOT_STEP_BYTES];
  const uint8_t* codes = a.weight + panel * a.panel_bytes();
  std::fill(totals, totals + a.rows * QUANT_PANEL, 0.0f);
  for (int step = 0; step < steps; step += DOT_BLOCK_STEPS) {
    const int count = std::min(DOT_BLOCK_STEPS, steps - step);
    for (int tile = 0; tile < 2 * count; ++tile, codes += a.tile_bytes())
      decode_tile_to_pairs<CODE, 0, PLACED>(codes, pairs + tile * (DOT_STEP_BYTES / 2));
    for (int strip = 0; strip < num_strips; ++strip) {
      const DotAhead ahead{reinterpret_cast<const char*>(codes), strip == 0};
      meet_strip(a, panel, strip_of(strip), step, count, pairs, 1.0f / PAIR_FACTOR<CODE>, ahead, totals);
    }
  }
}

}  // namespace pagebinder
#endif
