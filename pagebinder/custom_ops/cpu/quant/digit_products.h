// One or two rows of x meet codes on products of bytes (VNNI), in place of products of 16 bits (panel_int16.h): codes are
// taken four to a lane as they lie, where words of 16 bits are two, so that they take half as long to be widened.
//
//     whole of x    =  256 high + low                             two digits of 8 bits
//     sum [digit]  +=  four codes, unsigned  .  four digits       and sums of both make that of wholes again
//
// Sums are the same integers, so an element of y has the bits that products of 16 bits give it.
//
// Digits lie where pairs do:   [four k][row][high, low]   in the order in which a lane has its codes.
#pragma once

#include "by_count.h"
#include "decode.h"
#include "integer_strips.h"

namespace pagebinder {

// Of codes of 6 bits a byte is put together by an instruction that not all have.
#if PAGEBINDER_NARROW_VNNI && defined(__AVX512VBMI__)
template <Code CODE>
constexpr bool HAS_DIGITS = CODE == Code::INT8 || CODE == Code::INT4 || CODE == Code::INT6;
#elif PAGEBINDER_NARROW_VNNI
template <Code CODE>
constexpr bool HAS_DIGITS = CODE == Code::INT8 || CODE == Code::INT4;
#else
template <Code CODE>
constexpr bool HAS_DIGITS = false;
#endif
constexpr int MOST_DIGIT_ROWS = 2;
constexpr int DIGIT_VECTORS = TILE_COLUMNS / 8;
// What unsigned codes are larger by, besides their offset.
template <Code CODE>
constexpr int DIGIT_OFFSET = CODE == Code::INT8 ? 128 : 0;

// Are the rows of a strip, the first of few, met as digits?
template <Code CODE>
bool is_of_digits(const IntegerStrip& x) {
  return HAS_DIGITS<CODE> && x.first_row == 0 && x.rows <= MOST_DIGIT_ROWS;
}

// 16 wholes as digits, from those of the row's first four k on.
template <Code CODE>
PB_INLINE void store_digits(__m256i wholes, int rows, int32_t* to) {
  const __m256i upper = _mm256_srai_epi16(_mm256_add_epi16(wholes, _mm256_set1_epi16(128)), 8);
  const __m256i lower = _mm256_sub_epi16(wholes, _mm256_slli_epi16(upper, 8));
  const __m128i order = CODE == Code::INT8 ? _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)
                                           : _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  int32_t words[2][4];
  const auto put = [&](__m256i x, int32_t* at) __attribute__((always_inline)) {
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    store(at, _mm_shuffle_epi8(bytes, order));
  };
  put(upper, words[0]), put(lower, words[1]);
  for (int i = 0; i < 4; ++i, to += 2 * rows) to[0] = words[0][i], to[1] = words[1][i];
}

// Sums of 16 columns over digits.
template <int ROWS>
using DigitSums = __m256i[ROWS][DIGIT_VECTORS][2];

template <int ROWS>
PB_INLINE void begin_digits(const int32_t* begins, DigitSums<ROWS>& sums) {
  by_constants<ROWS>([&](auto r) __attribute__((always_inline)) {
    for (int v = 0; v < DIGIT_VECTORS; ++v)
      sums[r][v][0] = _mm256_setzero_si256(), sums[r][v][1] = _mm256_set1_epi32(begins[r]);
  });
}

template <int ROWS>
PB_INLINE void add_digits(const __m256i (&codes)[DIGIT_VECTORS], const int32_t* digits, DigitSums<ROWS>& sums) {
  by_constants<2 * ROWS>([&](auto i) __attribute__((always_inline)) {
    const __m256i digit = _mm256_set1_epi32(digits[i]);
    by_constants<DIGIT_VECTORS>([&](auto v) __attribute__((always_inline)) {
      asm("vpdpbusd %2, %1, %0" : "+v"(sums[i / 2][v][i % 2]) : "v"(codes[v]), "v"(digit));
    });
  });
}

// to [row][vector]: what both digits come to.
template <int ROWS>
PB_INLINE void join_digits(const DigitSums<ROWS>& sums, __m256i (&to)[ROWS][DIGIT_VECTORS]) {
  by_constants<ROWS>([&](auto r) __attribute__((always_inline)) {
    for (int v = 0; v < DIGIT_VECTORS; ++v)
      to[r][v] = _mm256_add_epi32(_mm256_slli_epi32(sums[r][v][0], 8), sums[r][v][1]);
  });
}

#if defined(__AVX512VBMI__)
// Of a line's lanes of 6-bit codes the upper bits of four k, in place; HIGH: of those in upper nibbles of the lower bits.
template <int LINE, bool HIGH>
PB_INLINE __m256i upper_bits_of_four(__m256i upper) {
  constexpr auto at = [](int byte) constexpr {  // where eight bits begin whose bits 4 and 5 are those of this byte's code
    const int k = 8 * LINE + 2 * HIGH + (byte % 2 * 4) + byte % 4 / 2, field = k % 2 * 8 + k / 2;
    return static_cast<char>((byte / 4 * 32 + 2 * field - 4) & 63);
  };
  const __m256i from = _mm256_set1_epi64x(static_cast<int64_t>(
      uint64_t(at(0)) | uint64_t(at(1)) << 8 | uint64_t(at(2)) << 16 | uint64_t(at(3)) << 24 | uint64_t(at(4)) << 32 |
      uint64_t(at(5)) << 40 | uint64_t(at(6)) << 48 | uint64_t(at(7)) << 56));
  return _mm256_and_si256(_mm256_multishift_epi64_epi8(from, upper), _mm256_set1_epi8(0x30));
}
#endif

// Calls visit(word, codes of four k) for LINES lines of a tile; codes further on are asked for.
template <Code CODE, int LINES, int FAR_BYTES, class Visit>
PB_INLINE void visit_fours(const uint8_t* tile, const Visit& visit) {
  const __m256i nibbles = _mm256_set1_epi8(15);
  const auto lanes_of = [tile](int line, int v) __attribute__((always_inline)) {
    return load<__m256i>(tile + line * 64 + v * sizeof(__m256i));
  };
  if constexpr (CODE == Code::INT6) __builtin_prefetch(tile + LINES * 64 + FAR_BYTES);
  by_constants<LINES>([&](auto line) __attribute__((always_inline)) {
    __builtin_prefetch(tile + line * 64 + FAR_BYTES);
    __m256i first[DIGIT_VECTORS], second[DIGIT_VECTORS];
    by_constants<DIGIT_VECTORS>([&](auto v) __attribute__((always_inline)) {
      const __m256i lanes = lanes_of(line, v);
      if constexpr (CODE == Code::INT8) {
        first[v] = _mm256_xor_si256(lanes, _mm256_set1_epi8(-128));
      } else {
        first[v] = _mm256_and_si256(lanes, nibbles);
        second[v] = _mm256_and_si256(_mm256_srli_epi16(lanes, 4), nibbles);
      }
#if defined(__AVX512VBMI__)
      if constexpr (CODE == Code::INT6) {
        const __m256i upper = lanes_of(LINES, v);
        first[v] = _mm256_or_si256(first[v], upper_bits_of_four<line, false>(upper));
        second[v] = _mm256_or_si256(second[v], upper_bits_of_four<line, true>(upper));
      }
#endif
    });
    if constexpr (CODE == Code::INT8) return visit(line, first);
    visit(2 * line, first);
    visit(2 * line + 1, second);
  });
}

}  // namespace pagebinder
