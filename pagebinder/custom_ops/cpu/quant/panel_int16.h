// One panel of a quantised weight meets rows of x on integer products of 16 bits (AVX2).
//
//     x [row][group of k]   =   scale * whole          16 bits: x to 1 / 65,024 of the group's largest
//     sum [row][8 columns]  +=  the codes of a pair of k of each column  .  a pair of wholes, in every lane
//
// An instruction multiplies and adds twice as many numbers as one of floats, and a code needs one or two to be widened.
// Sums of a group are integers, exact; codes of int4 are taken as they are, 8 too large, and that times the sum of wholes
// is taken off again. Then scales are put on in float32, group by group.
//
// A group is at most 128 k, and at most what shares a scale of the weight, as for integer dot products
// (quantized_linear_int8.cpp). Up to four rows, a strip, meet codes at a time. An element of y has the same bits for any
// number of rows and threads.
#pragma once

#include "decode.h"
#include "integer_strips.h"

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512VNNI__)
#define PAGEBINDER_INT16_PRODUCTS 1
namespace pagebinder {

constexpr int MOST_STRIP_ROWS = 4;
constexpr int MOST_WHOLE_ROWS = 2;              // that meet both halves of a panel at once
constexpr int PAIRS = QUANT_HALF_STEP / 2;      // of k, of half a step
static_assert(QUANT_HALF_STEP == 2 * W);
constexpr int FAR_BYTES = 4096;                 // of codes that are asked for ahead
constexpr int LANES = 8, VECTORS = TILE_COLUMNS / LANES;

// ---- x ---------------------------------------------------------------------------------------------------------

// Words of a strip: [pair of k][row]. Sums begin with what takes off that codes are too large.
using Wholes = IntegerStrip;

// What codes are too large by.
template <Code CODE>
constexpr int OFFSET = CODE == Code::INT4 ? 8 : 0;

// False: wholes cannot hold some group, and zeros stand in its place.
template <Code CODE>
bool make_wholes(const QuantizedLinearArgs& a, const Wholes& to) {
  bool fits = true;
  for (int row = 0; row < to.rows; ++row) {
    const bf16* x = static_cast<const bf16*>(a.x) + (to.first_row + row) * a.x_stride;
    for (int group = 0; group < to.groups(); ++group) {
      const int begin = group * to.span, end = std::min(begin + to.span, to.inner);
      const float largest = largest_of_group(x, begin, end);
      const bool holds = integers_hold(largest);
      fits &= holds;
      const float factor = holds ? to_integers(largest) : 0.0f;
      __m256i sum = _mm256_setzero_si256();
      for (int k = begin; k < end; k += QUANT_HALF_STEP) {
        int32_t pairs[PAIRS];
        __m256i whole[2];
        PB_UNROLL
        for (int i = 0; i < 2; ++i) {
          const VF value = holds ? load_float(x + k + i * W) : VF{};
          whole[i] = _mm256_cvtps_epi32(bit_cast<__m256>(value * factor));
        }
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(whole[0], whole[1]));
        store(pairs, _mm256_permute4x64_epi64(_mm256_packs_epi32(whole[0], whole[1]), 0b11011000));
        int32_t* to_row = to.words + int64_t{k / 2} * to.rows + row;
        if (to.rows == 1) std::memcpy(to_row, pairs, sizeof pairs);
        else for (int p = 0; p < PAIRS; ++p) to_row[p * to.rows] = pairs[p];
      }
      to.factors[group * to.rows + row] = holds ? largest / LARGEST_INTEGER : 0.0f;
      to.begins[group * to.rows + row] = -OFFSET<CODE> * sum_of_lanes(bit_cast<VI>(sum));
    }
  }
  return fits;
}

// ---- sums ------------------------------------------------------------------------------------------------------

template <int ROWS>
using Sums = __m256i[ROWS][VECTORS];  // of a tile's 16 columns

// Codes of the pair `i` of k of each lane, as words of 16 bits.
template <Code CODE>
PB_INLINE __m256i codes_of_pair(__m256i lanes, int i) {
  if constexpr (CODE == Code::INT8) return _mm256_srai_epi16(i == 0 ? _mm256_slli_epi16(lanes, 8) : lanes, 8);
  const __m256i down = i == 0 ? lanes : _mm256_srli_epi16(lanes, 4 * i);
  return i == 3 ? down : _mm256_and_si256(down, _mm256_set1_epi16(15));
}

// sums += the k of each row that meet LINES lines of a tile.
template <Code CODE, int ROWS, bool ASKS, int LINES>
PB_INLINE void add_lines(const uint8_t* tile, const int32_t* pairs, Sums<ROWS>& sums) {
  for (int line = 0; line < LINES; ++line, tile += 64) {
    if (ASKS) __builtin_prefetch(tile + FAR_BYTES);
    __m256i lanes[VECTORS];
    PB_UNROLL
    for (int v = 0; v < VECTORS; ++v) lanes[v] = load<__m256i>(tile + v * sizeof(__m256i));
    PB_UNROLL
    for (int i = 0; i < IN_LANE<CODE> / 2; ++i, pairs += ROWS) {
      __m256i codes[VECTORS];
      PB_UNROLL
      for (int v = 0; v < VECTORS; ++v) codes[v] = codes_of_pair<CODE>(lanes[v], i);
      PB_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const __m256i pair = _mm256_set1_epi32(pairs[r]);
        PB_UNROLL
        for (int v = 0; v < VECTORS; ++v)
          sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(codes[v], pair));
      }
    }
  }
}

template <int ROWS>
PB_INLINE void begin_sums(const Wholes& x, int group, Sums<ROWS>& sums) {
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r)
    PB_UNROLL
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = _mm256_set1_epi32(x.begins[group * ROWS + r]);
}

// to [group][32]: the scales of a panel, for several strips.
inline void scales_of_panel(const QuantizedLinearArgs& a, const Wholes& x, int64_t panel, float* to) {
  for (int group = 0; group < x.groups(); ++group, to += QUANT_PANEL) scales_at(a, panel, int64_t{group} * x.span, to);
}

// totals [row][16 of 32] += sums with their scales; the first ones are all there is.
template <int ROWS>
PB_INLINE void end_sums(const Wholes& x, int group, const float* scales, const Sums<ROWS>& sums, float* totals) {
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const __m256 factor = _mm256_set1_ps(x.factors[group * ROWS + r]);
    PB_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
      float* at = totals + r * QUANT_PANEL + v * LANES;
      const __m256 total = group == 0 ? _mm256_setzero_ps() : _mm256_loadu_ps(at);
      const __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(scales + v * LANES), factor);
      _mm256_storeu_ps(at, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][v]), scale, total));
    }
  }
}

// totals [row][32] of one panel. ASKS: for codes ahead. PARTS: of a step, that have scales of their own. all_scales:
// [group][32], or null.
template <Code CODE, int ROWS, bool ASKS, int PARTS>
void panel_of_strip(const QuantizedLinearArgs& a, const Wholes& x, int64_t panel, float* totals,
                    const float* all_scales) {
  constexpr int PART = QUANT_STEP / PARTS, LINES = TILE_LINES_OF<CODE> / PARTS;
  const uint8_t* codes = a.weight + panel * a.panel_bytes();
  const int64_t tile = a.tile_bytes();
  alignas(64) float own_scales[QUANT_PANEL];
  for (int group = 0; group < x.groups(); ++group) {
    const int begin = group * x.span, end = std::min(begin + x.span, x.inner);
    const float* scales = all_scales == nullptr ? own_scales : all_scales + int64_t{group} * QUANT_PANEL;
    if (all_scales == nullptr) scales_at(a, panel, begin, own_scales);
    if (ASKS) ask_for_scales(a, panel + 1, begin);
    const auto add_half = [&](int half, int k, Sums<ROWS>& sums) __attribute__((always_inline)) {
      const uint8_t* lines = codes + (2 * (k / QUANT_STEP) + half) * tile + k % QUANT_STEP / PART * LINES * 64;
      add_lines<CODE, ROWS, ASKS, LINES>(lines, x.words + int64_t{k / 2} * ROWS, sums);
    };
    if constexpr (ROWS <= MOST_WHOLE_ROWS) {  // tiles in the order in which they lie
      Sums<ROWS> sums[2];
      for (auto& half : sums) begin_sums<ROWS>(x, group, half);
      for (int k = begin; k < end; k += PART) {
        add_half(0, k, sums[0]);
        add_half(1, k, sums[1]);
      }
      for (int half = 0; half < 2; ++half)
        end_sums<ROWS>(x, group, scales + half * TILE_COLUMNS, sums[half], totals + half * TILE_COLUMNS);
    } else {
      for (int half = 0; half < 2; ++half) {
        Sums<ROWS> sums;
        begin_sums<ROWS>(x, group, sums);
        for (int k = begin; k < end; k += PART) add_half(half, k, sums);
        end_sums<ROWS>(x, group, scales + half * TILE_COLUMNS, sums, totals + half * TILE_COLUMNS);
      }
    }
  }
}

}  // namespace pagebinder
#endif
