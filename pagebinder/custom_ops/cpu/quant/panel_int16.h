// One panel of a quantised weight meets rows of x on integer products of 16 bits (AVX2).
//
//     x [row][span of k]    =   factor * whole          16 bits: x to 1 / 65,024 of the span's largest
//     sum [row][8 columns]  +=  the codes of a pair of k of each column  .  a pair of wholes, in every lane
//
// An instruction multiplies and adds twice as many numbers as one of floats, and a code needs one or two to be widened, one
// of 6 bits four, one of a table two to five; of one or two rows fewer, where there are products of bytes (digit_products.h). Sums of a group are integers, exact. Codes of int4 and int6 are taken as they
// are, 8 and 32 too large, and numbers of tables are made positive where bytes hold them: that times the sum of wholes is
// taken off again. Shifts of two levels put some of it back, so all that is what a sum begins with. Then, in float32, groups
// are added up with their scales, of two levels the bytes, and spans with factors and numbers.
//
// A span is 128 k, a group at most that, and at most what shares a scale of the weight. Up to four rows meet codes in
// registers. They leave them, widened, in the nearest cache, where other rows meet them in strips of six. An element of y
// has the same bits for any number of rows and threads.
#pragma once

#include "by_count.h"
#include "decode.h"
#include "integer_strips.h"

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define PAGEBINDER_INT16_PRODUCTS 1
#include "digit_products.h"

namespace pagebinder {

constexpr int MOST_STRIP_ROWS = 6, MOST_FIRST_ROWS = 4;
constexpr int MOST_WHOLE_ROWS = 2;              // that meet both halves of a panel at once
constexpr int PAIRS = QUANT_HALF_STEP / 2;      // of k, of half a step
static_assert(QUANT_HALF_STEP == 2 * W);
template <Code CODE>
constexpr int FAR_BYTES = CODE == Code::INT8 ? 16384 : 4096;  // of codes that are asked for ahead
constexpr int LANES = 8, VECTORS = TILE_COLUMNS / LANES;

// ---- codes -----------------------------------------------------------------------------------------------------

// What codes are too large by, and what they are times. Those of fp4 are twice the numbers; 914 times the numbers of nf4
// are integers to 0.04 %, a third of what bf16 is off.
template <Code CODE>
constexpr int OFFSET = CODE == Code::INT4 ? 8 : CODE == Code::INT6 ? 32 : CODE == Code::FP4 ? 12 : CODE == Code::IQ4 ? 127 : 0;
constexpr float NF4_WHOLES = 914.0f;
template <Code CODE>
constexpr float WHOLE_UNIT = CODE == Code::FP4 ? 0.5f : CODE == Code::NF4 ? 1.0f / NF4_WHOLES : 1.0f;

// What a code of a table stands for, plus OFFSET and over WHOLE_UNIT, in bytes.
struct CodeBytes {
  alignas(16) uint8_t of[16];
};
template <Code CODE>
constexpr CodeBytes bytes_of_wholes(int shift) {
  CodeBytes bytes{};
  for (int i = 0; i < 16; ++i) {
    const float value = TABLE<CODE>[i] / WHOLE_UNIT<CODE>;
    const int whole = static_cast<int>(value < 0 ? value - 0.5f : value + 0.5f) + OFFSET<CODE>;
    bytes.of[i] = static_cast<uint8_t>(whole >> shift & 255);
  }
  return bytes;
}
template <Code CODE>
constexpr CodeBytes LOWER_WHOLES = bytes_of_wholes<CODE>(0);
template <Code CODE>
constexpr CodeBytes UPPER_WHOLES = bytes_of_wholes<CODE>(8);

// ---- x ---------------------------------------------------------------------------------------------------------

// Words of a strip: [pair of k][row]; or digits.
using Wholes = IntegerStrip;

// Shifts of two levels count codes larger than they are.
inline bool counts_level_offset(const QuantizedLinearArgs& a) { return a.is_shifted && a.scale_kind == ScaleKind::LEVELS; }

// What a sum of wholes is times in the beginning of a group's sums.
template <Code CODE>
int beginning_of(const QuantizedLinearArgs& a, bool of_digits) {
  const int offset = OFFSET<CODE> + (of_digits ? DIGIT_OFFSET<CODE> : 0);
  return (counts_level_offset(a) ? static_cast<int>(level_offset(has_4_bits(CODE) ? 4 : 8)) : 0) - offset;
}

// The k in [begin, end) of a row of x as wholes, from `to_row` on; returns their sum. factor 0: all are zero.
template <Code CODE>
int32_t make_wholes_of_group(const bf16* x, int begin, int end, float factor, int rows, bool of_digits, int32_t* to_row) {
  __m256i sum = _mm256_setzero_si256();
  for (int k = begin; k < end; k += QUANT_HALF_STEP, to_row += PAIRS * rows) {
    __m256i whole[2];
    PB_UNROLL
    for (int i = 0; i < 2; ++i) {
      const VF value = times_or_zero(load_float(x + k + i * W), factor);
      whole[i] = _mm256_cvtps_epi32(bit_cast<__m256>(value));
    }
    sum = _mm256_add_epi32(sum, _mm256_add_epi32(whole[0], whole[1]));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole[0], whole[1]), 0b11011000);
    int32_t pairs[PAIRS];
    store(pairs, words);
    if (of_digits) store_digits<CODE>(words, rows, to_row);
    else if (rows == 1) std::memcpy(to_row, pairs, sizeof pairs);
    else for (int p = 0; p < PAIRS; ++p) to_row[p * rows] = pairs[p];
  }
  return sum_of_lanes(bit_cast<VI>(sum));
}

// False: integers cannot hold some span. Zeros stand in its place, and a factor that makes no number of its row's sums.
template <Code CODE>
bool make_wholes(const QuantizedLinearArgs& a, const Wholes& to) {
  const bool of_digits = is_of_digits<CODE>(to);
  const int32_t beginning = beginning_of<CODE>(a, of_digits);
  bool all_fit = true;
  for (int row = 0; row < to.rows; ++row) {
    bool fits = true;
    const bf16* x = static_cast<const bf16*>(a.x) + (to.first_row + row) * a.x_stride;
    float* factor = to.factors + row;
    int32_t* begins = to.begins + row;
    IntegerSums sums(a, to, row);
    for (int span = 0; span < to.inner; span += to.span, factor += to.rows) {
      const int end = std::min(span + to.span, to.inner);
      const IntegerSpan numbers(x, span, end);
      fits &= numbers.holds;
      *factor = numbers.unit() * WHOLE_UNIT<CODE>;
      for (int k = span; k < end; k += to.group, begins += to.rows) {
        int32_t* words = to.words + int64_t{k / 2} * to.rows + (of_digits ? 2 * row : row);
        const int32_t sum = make_wholes_of_group<CODE>(x, k, std::min(k + to.group, end), numbers.to_integers(), to.rows,
                                                       of_digits, words);
        *begins = beginning * sum;
        sums.add(k, sum, numbers.unit());
      }
    }
    all_fit &= fits;
    if (!fits) sum_of_floats(a, to, x, row);
  }
  return all_fit;
}

// ---- scales ----------------------------------------------------------------------------------------------------

// Scales of a panel, of one group after the other; of two levels the bytes.
struct GroupScales {
  const QuantizedLinearArgs& weight;
  const int64_t panel;
  const ScaleKind kind = weight.scale_kind;
  const int64_t stride = weight.scale_group_stride * scale_bytes(kind);      // in bytes, from group to group
  const int64_t next_panel = weight.scale_panel_stride * scale_bytes(kind);  // in bytes
  const int group = static_cast<int>(weight.scale_group);                    // k that share one

  // Those of the group that begins at k, a multiple of 128.
  const char* at(int k) const {
    if (has_levels(kind)) return reinterpret_cast<const char*>(Levels(weight, panel, k).narrow);
    return static_cast<const char*>(weight.scale) + panel * next_panel + k / group * stride;
  }

  template <class T>
  static PB_INLINE __m256 floats(const char* at, int v) {
    return bit_cast<__m256>(load_float(reinterpret_cast<const T*>(at) + v * LANES));
  }
  // Of LANES columns.
  PB_INLINE __m256 load(const char* at, int v) const {
    switch (kind) {
      case ScaleKind::F32: return floats<float>(at, v);
      case ScaleKind::BF16: return floats<bf16>(at, v);
      case ScaleKind::F16: return floats<f16>(at, v);
      case ScaleKind::LEVELS_E4M3:
        return bit_cast<__m256>(load_e4m3_over_256(reinterpret_cast<const uint8_t*>(at) + v * LANES));
      default: {
        __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at + v * LANES));
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
      }
    }
  }
};

// ---- sums ------------------------------------------------------------------------------------------------------

// Of 16 columns.
template <int ROWS>
using Sums = __m256i[ROWS][VECTORS];
template <int ROWS>
using Totals = __m256[ROWS][VECTORS];

// sum += the products of pairs. Where it stands: a compiler that makes trees of such sums spills most of them.
PB_INLINE void add_products(__m256i& sum, __m256i codes, __m256i pair) {
#if PAGEBINDER_NARROW_VNNI
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(pair));
#else
  __m256i products;
  asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(codes), "x"(pair));
#endif
}

template <int ROWS>
PB_INLINE void begin_sums(const int32_t* begins, Sums<ROWS>& sums) {
  by_constants<ROWS>([&](auto r) __attribute__((always_inline)) { sums[r][0] = sums[r][1] = _mm256_set1_epi32(begins[r]); });
}

template <int ROWS>
PB_INLINE void add_pair(const __m256i (&codes)[VECTORS], const int32_t* pairs, Sums<ROWS>& sums) {
  by_constants<ROWS>([&](auto r) __attribute__((always_inline)) {
    const __m256i pair = _mm256_set1_epi32(pairs[r]);
    add_products(sums[r][0], codes[0], pair);
    add_products(sums[r][1], codes[1], pair);
  });
}

// totals of a span += sums of a group with their scales, of two levels the integers.
template <int ROWS>
PB_INLINE void add_group(const __m256 (&scale)[VECTORS], const Sums<ROWS>& sums, Totals<ROWS>& totals) {
  by_constants<ROWS>([&](auto r) __attribute__((always_inline)) {
    totals[r][0] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][0]), scale[0], totals[r][0]);
    totals[r][1] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][1]), scale[1], totals[r][1]);
  });
}

// to [row][16 of 32] += a span's totals times factors, and of two levels the numbers, else null; the first ones are all.
template <int ROWS>
PB_INLINE void add_span(const Totals<ROWS>& totals, const float* factors, const float* numbers, bool first, float* to) {
  by_constants<ROWS>([&](auto r) __attribute__((always_inline)) {
    const __m256 factor = _mm256_set1_ps(factors[r]);
    by_constants<VECTORS>([&](auto v) __attribute__((always_inline)) {
      float* at = to + r * QUANT_PANEL + v * LANES;
      __m256 sum = totals[r][v];
      if (numbers != nullptr) sum = _mm256_mul_ps(sum, _mm256_loadu_ps(numbers + v * LANES));
      _mm256_storeu_ps(at, _mm256_fmadd_ps(sum, factor, first ? _mm256_setzero_ps() : _mm256_loadu_ps(at)));
    });
  });
}

// What a line of codes of a table stands for, as words of 16 bits: of 4 pairs of k.
template <Code CODE>
PB_INLINE void look_up(__m256i lanes, __m256i (&words)[4]) {
  const __m256i nibbles = _mm256_set1_epi8(15), lower_bytes = _mm256_set1_epi16(255);
  const auto find = [](const CodeBytes& bytes, __m256i index) __attribute__((always_inline)) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(bytes.of)), index);
  };
  by_constants<2>([&](auto odd) __attribute__((always_inline)) {
    const __m256i index = _mm256_and_si256(odd ? _mm256_srli_epi16(lanes, 4) : lanes, nibbles);
    const __m256i lower = find(LOWER_WHOLES<CODE>, index);
    words[odd] = _mm256_and_si256(lower, lower_bytes), words[2 + odd] = _mm256_srli_epi16(lower, 8);
    if constexpr (OFFSET<CODE> == 0) {  // words are not bytes
      const __m256i upper = find(UPPER_WHOLES<CODE>, index);
      words[odd] = _mm256_or_si256(words[odd], _mm256_slli_epi16(upper, 8));
      words[2 + odd] = _mm256_or_si256(words[2 + odd], _mm256_andnot_si256(lower_bytes, upper));
    }
  });
}

// Codes of the pair `i` of k of each lane, as words of 16 bits.
template <Code CODE>
PB_INLINE __m256i codes_of_pair(__m256i lanes, int i) {
  if constexpr (CODE == Code::INT8) return _mm256_srai_epi16(i == 0 ? _mm256_slli_epi16(lanes, 8) : lanes, 8);
  const __m256i down = i == 0 ? lanes : _mm256_srli_epi16(lanes, 4 * i);
  return i == 3 ? down : _mm256_and_si256(down, _mm256_set1_epi16(15));
}
// Of the upper bits of half a tile those of pair `pair`, where codes have them.
template <int PAIR>
PB_INLINE __m256i upper_bits_of_pair(__m256i upper) {
  const __m256i placed = PAIR < 2 ? _mm256_slli_epi16(upper, 4 - 2 * PAIR) : _mm256_srli_epi16(upper, 2 * PAIR - 4);
  return _mm256_and_si256(placed, _mm256_set1_epi16(0x30));
}

// Calls visit(pair of k, codes) for LINES lines of a tile; codes further on are asked for.
template <Code CODE, int LINES, class Visit>
PB_INLINE void visit_pairs(const uint8_t* tile, const Visit& visit) {
  constexpr int IN_LINE = IN_LANE<CODE> / 2;
  if constexpr (CODE == Code::INT6) {
    static_assert(LINES == 2, "half a tile");
    for (int line = 0; line < 3; ++line) __builtin_prefetch(tile + line * 64 + FAR_BYTES<CODE>);
    by_constants<LINES * IN_LINE>([&](auto pair) __attribute__((always_inline)) {
      __m256i codes[VECTORS];
      by_constants<VECTORS>([&](auto v) __attribute__((always_inline)) {
        const __m256i lanes = load<__m256i>(tile + (pair / IN_LINE * VECTORS + v) * sizeof(__m256i));
        const __m256i upper = load<__m256i>(tile + upper_line_at(0) + v * sizeof(__m256i));
        codes[v] = _mm256_or_si256(codes_of_pair<CODE>(lanes, pair % IN_LINE), upper_bits_of_pair<pair>(upper));
      });
      visit(pair, codes);
    });
    return;
  }
  for (int line = 0; line < LINES; ++line, tile += 64) {
    __builtin_prefetch(tile + FAR_BYTES<CODE>);
    __m256i lanes[VECTORS];
    PB_UNROLL
    for (int v = 0; v < VECTORS; ++v) lanes[v] = load<__m256i>(tile + v * sizeof(__m256i));
    if constexpr (is_of_table(CODE)) {
      __m256i words[VECTORS][IN_LINE];
      by_constants<VECTORS>([&](auto v) __attribute__((always_inline)) { look_up<CODE>(lanes[v], words[v]); });
      by_constants<IN_LINE>([&](auto i) __attribute__((always_inline)) {
        const __m256i codes[] = {words[0][i], words[1][i]};
        visit(line * IN_LINE + i, codes);
      });
      continue;
    }
    PB_UNROLL
    for (int i = 0; i < IN_LINE; ++i) {
      __m256i codes[VECTORS];
      PB_UNROLL
      for (int v = 0; v < VECTORS; ++v) codes[v] = codes_of_pair<CODE>(lanes[v], i);
      visit(line * IN_LINE + i, codes);
    }
  }
}

// Of two levels the numbers of a panel's columns from k on, in `to`; else null.
inline const float* numbers_of_span(const QuantizedLinearArgs& a, int64_t panel, int k, float (&to)[QUANT_PANEL]) {
  if (!has_levels(a.scale_kind)) return nullptr;
  const Levels levels(a, panel, k);
  PB_UNROLL
  for (int v = 0; v < QUANT_PANEL / W; ++v) store(to + v * W, levels.upper(v * W));
  return to;
}

// What the first strip leaves of a span to the others: widened codes [half][pair of k][column][k of the pair], scales
// [group][32], numbers [32] or null.
struct WideSpan {
  static constexpr int MOST_GROUPS = MOST_INTEGER_GROUP / QUANT_HALF_STEP, HALF_WORDS = MOST_INTEGER_GROUP * TILE_COLUMNS;
  alignas(64) int16_t codes[2][HALF_WORDS];
  alignas(64) float scales[MOST_GROUPS][QUANT_PANEL];
  alignas(64) float kept_numbers[QUANT_PANEL];
  const float* numbers;
  int begin, end;

  const float* numbers_of(int half) const { return numbers == nullptr ? nullptr : numbers + half * TILE_COLUMNS; }
};

// ---- other strips ----------------------------------------------------------------------------------------------

// The sums of a strip over `count` pairs of k of 16 columns.
template <int ROWS>
PB_INLINE void sum_pairs(const int16_t* codes, const int32_t* pairs, int count, const int32_t* begins, Sums<ROWS>& sums) {
  begin_sums<ROWS>(begins, sums);
  for (int i = 0; i < count; ++i, codes += 2 * TILE_COLUMNS, pairs += ROWS) {
    const __m256i both[] = {load<__m256i>(codes), load<__m256i>(codes + 2 * LANES)};
    add_pair<ROWS>(both, pairs, sums);
  }
}

// totals [row][32] of a strip += a span.
template <int ROWS>
void meet_span(const Wholes& x, const WideSpan& span, float* totals) {
  for (int half = 0; half < 2; ++half) {
    Totals<ROWS> of_span = {};
    const int32_t* begins = x.begins + int64_t{span.begin / x.group} * ROWS;
    for (int k = span.begin, i = 0; k < span.end; k += x.group, ++i, begins += ROWS) {
      const int16_t* codes = span.codes[half] + (k - span.begin) * TILE_COLUMNS;
      const int32_t* pairs = x.words + int64_t{k / 2} * ROWS;
      Sums<ROWS> sums;
      sum_pairs<ROWS>(codes, pairs, std::min(x.group, span.end - k) / 2, begins, sums);
      const float* scales = span.scales[i] + half * TILE_COLUMNS;
      const __m256 scale[] = {_mm256_load_ps(scales), _mm256_load_ps(scales + LANES)};
      add_group<ROWS>(scale, sums, of_span);
    }
    const int column = half * TILE_COLUMNS;
    add_span<ROWS>(of_span, x.factors + span.begin / x.span * ROWS,
                   span.numbers_of(half), span.begin == 0, totals + column);
  }
}

// ---- a panel, and the first strip ------------------------------------------------------------------------------

// totals [row][16 of 32] of the first strip += a span, of some halves. PARTS: of a step, that have scales of their own.
// KEEPS: for other strips.
template <Code CODE, int ROWS, int PARTS, int HALVES, bool KEEPS>
PB_INLINE void meet_codes(const Wholes& x, const uint8_t* codes, const GroupScales& scales, int first, WideSpan& span,
                          float* totals) {
  constexpr int PART = QUANT_STEP / PARTS, LINES = TILE_LINES_OF<CODE> / PARTS, TILE = tile_bytes_of(CODE);
  constexpr int PART_BYTES = TILE / PARTS;
  constexpr bool DIGITS = HAS_DIGITS<CODE> && ROWS <= MOST_DIGIT_ROWS && !KEEPS;
  Totals<ROWS> of_span[HALVES] = {};
  const char* at = scales.at(span.begin);
  const int32_t* begins = x.begins + int64_t{span.begin / x.group} * ROWS;
  for (int group = span.begin, i = 0; group < span.end; group += x.group, at += scales.stride, begins += ROWS, ++i) {
    __builtin_prefetch(at + scales.next_panel, 0, 2);
    Sums<ROWS> sums[HALVES];
    DigitSums<ROWS> digit_sums[HALVES];
    by_constants<HALVES>([&](auto half) __attribute__((always_inline)) {
      if constexpr (DIGITS) begin_digits<ROWS>(begins, digit_sums[half]);
      else begin_sums<ROWS>(begins, sums[half]);
    });
    for (int k = group; k < std::min(group + x.group, span.end); k += PART)
      by_constants<HALVES>([&](auto half) __attribute__((always_inline)) {
        const uint8_t* lines = codes + (k / QUANT_STEP * 2 + first + half) * TILE + k % QUANT_STEP / PART * PART_BYTES;
        const int32_t* pairs = x.words + int64_t{k / 2} * ROWS;
        if constexpr (DIGITS)
          return visit_fours<CODE, LINES, FAR_BYTES<CODE>>(
              lines, [&](int word, const auto& of_four) __attribute__((always_inline)) {
                add_digits<ROWS>(of_four, pairs + word * 2 * ROWS, digit_sums[half]);
              });
        int16_t* kept = span.codes[first + half] + (k - span.begin) * TILE_COLUMNS;
        visit_pairs<CODE, LINES>(lines, [&](int pair, const auto& of_pair) __attribute__((always_inline)) {
          add_pair<ROWS>(of_pair, pairs + pair * ROWS, sums[half]);
          if (!KEEPS) return;
          store(kept + 2 * pair * TILE_COLUMNS, of_pair[0]);
          store(kept + (2 * pair + 1) * TILE_COLUMNS, of_pair[1]);
        });
      });
    by_constants<HALVES>([&](auto half) __attribute__((always_inline)) {
      const int v = (first + half) * VECTORS;
      const __m256 scale[] = {scales.load(at, v), scales.load(at, v + 1)};
      if constexpr (DIGITS) join_digits<ROWS>(digit_sums[half], sums[half]);
      add_group<ROWS>(scale, sums[half], of_span[half]);
      if (KEEPS) for (int j = 0; j < VECTORS; ++j) _mm256_store_ps(span.scales[i] + (v + j) * LANES, scale[j]);
    });
  }
  by_constants<HALVES>([&](auto half) __attribute__((always_inline)) {
    add_span<ROWS>(of_span[half], x.factors + span.begin / x.span * ROWS, span.numbers_of(first + half), span.begin == 0,
                   totals + (first + half) * TILE_COLUMNS);
  });
}

// totals [row][32] of one panel and all strips.
template <Code CODE, int ROWS, int PARTS, bool KEEPS, class Strips>
void panel_of_strips(const QuantizedLinearArgs& a, const Strips& strips, int64_t panel, float* totals) {
  constexpr int HALVES = ROWS <= MOST_WHOLE_ROWS ? 2 : 1;  // at once, tiles in the order in which they lie
  const uint8_t* codes = a.weight + panel * a.panel_bytes();
  const GroupScales scales{a, panel};
  const Wholes first = strips[0];
  WideSpan span;
  for (int begin = 0; begin < strips.inner; begin += strips.span) {
    span.begin = begin, span.end = std::min(begin + strips.span, strips.inner);
    span.numbers = numbers_of_span(a, panel, begin, span.kept_numbers);
    for (int half = 0; half < 2; half += HALVES)
      meet_codes<CODE, ROWS, PARTS, HALVES, KEEPS>(first, codes, scales, half, span, totals);
    for (int i = 1; KEEPS && i < strips.count; ++i) {
      const Wholes x = strips[i];
      const auto meet = by_count<MOST_STRIP_ROWS>(x.rows, [](auto rows) { return meet_span<decltype(rows)::value>; });
      meet(x, span, totals + x.first_row * QUANT_PANEL);
    }
  }
}

template <Code CODE, class Strips>
void panel_in_integers(const QuantizedLinearArgs& a, const Strips& strips, int64_t panel, float* totals) {
  const auto meet = [&](auto parts) {
    constexpr int PARTS = decltype(parts)::value;
    if (strips.count > 1) return panel_of_strips<CODE, MOST_FIRST_ROWS, PARTS, true>(a, strips, panel, totals);
    const auto panel_of = by_count<MOST_FIRST_ROWS>(static_cast<int>(strips.rows), [](auto rows) {
      return panel_of_strips<CODE, decltype(rows)::value, PARTS, false, Strips>;
    });
    panel_of(a, strips, panel, totals);
  };
  if constexpr (CODE == Code::INT6) return meet(std::integral_constant<int, 2>());
  else if constexpr (CODE == Code::NF4 || CODE == Code::IQ4) return meet(std::integral_constant<int, 1>());
  else a.has_half_steps() ? meet(std::integral_constant<int, 2>()) : meet(std::integral_constant<int, 1>());
}

}  // namespace pagebinder
#endif
