// Quantised linear layers on integer dot products (AVX-512 VNNI), see quantized_linear.h.
//
//     x [row][group of k]   =   scale (256 high + low)            two digits of 8 bits: x to 1 / 65,024 of the group's largest
//     sum[half of a panel][row][digit]  +=  four codes of each of 16 columns, unsigned  .  four digits, in every lane
//
// Codes of int8 and int4 are operands as they lie, but for their sign or nibble, where BF16 dots want each of them as a
// bf16 and sum half as many at a time. Sums of a group are integers, exact; the offset of unsigned codes is taken off
// again (offset times the sum of digits), then digits and scales are put together in float32, group by group.
//
// A group is at most 128 k, and at most what shares a scale of the weight. What its digits leave out is below 1 / 128 of
// what bf16 had left out of the group's largest x. Up to eight rows, a strip, meet codes at a time. An element of y has the
// same bits for any number of rows and threads.
#include "by_count.h"
#include "decode.h"
#include "integer_strips.h"
#include "memory_streams.h"

namespace pagebinder {
#if defined(__AVX512VNNI__) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
namespace {

constexpr int WORDS = QUANT_STEP / 4;           // of four digits, of a step
constexpr int FAR_BYTES = 8192, NEAR_BYTES = 1024;  // that the second cache and the nearest one are asked for ahead

// ---- x ---------------------------------------------------------------------------------------------------------

// Words of a strip: [step][word][row][high, low]. Sums begin [group][row][high, low] with what takes off that the offset of
// the codes adds.
using Digits = IntegerStrip;
static_assert(2 * WORDS == INTEGER_WORDS);

typedef int8_t Bytes __attribute__((vector_size(QUANT_STEP)));

// Digits of 32 k in the order in which a line of codes has them.
template <Code CODE>
PB_INLINE Bytes in_order(Bytes x) {
  if constexpr (CODE == Code::INT8)
    return __builtin_shufflevector(x, x, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15, 16, 18, 17, 19, 20, 22, 21,
                                   23, 24, 26, 25, 27, 28, 30, 29, 31);
  else
    return __builtin_shufflevector(x, x, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 16, 20, 17, 21, 18, 22, 19,
                                   23, 24, 28, 25, 29, 26, 30, 27, 31);
}

template <Code CODE>
constexpr int OFFSET = CODE == Code::INT8 ? 128 : 8;  // of codes that are taken as unsigned

// False: integers cannot hold some group. Zeros stand in its place, and a factor that makes no number of its row's sums.
template <Code CODE>
bool make_digits(const QuantizedLinearArgs& a, const Digits& d) {
  bool all_fit = true;
  for (int row = 0; row < d.rows; ++row) {
    bool fits = true;
    const bf16* x = static_cast<const bf16*>(a.x) + (d.first_row + row) * a.x_stride;
    IntegerSums sums(a, d, row);
    for (int group = 0; group < d.groups(); ++group) {
      const int begin = group * d.group, end = std::min(begin + d.group, d.inner);
      const IntegerSpan numbers(x, begin, end);
      const float factor = numbers.to_integers();
      fits &= numbers.holds;
      __m512i sum_high{}, sum_low{};
      for (int step = begin / QUANT_STEP; step < end / QUANT_STEP; ++step) {
        Bytes high, low;
        for (int half = 0; half < QUANT_STEP / W; ++half) {
          const VF value = times_or_zero(load_float(x + step * QUANT_STEP + half * W), factor);
          const __m512i whole = _mm512_cvtps_epi32(bit_cast<__m512>(value));
          const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
          const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8));
          store(reinterpret_cast<char*>(&high) + half * W, _mm512_cvtepi32_epi8(upper));
          store(reinterpret_cast<char*>(&low) + half * W, _mm512_cvtepi32_epi8(lower));
          sum_high = _mm512_add_epi32(sum_high, upper), sum_low = _mm512_add_epi32(sum_low, lower);
        }
        int32_t words[2][WORDS];
        store(words[0], in_order<CODE>(high));
        store(words[1], in_order<CODE>(low));
        int32_t* to = d.words + (int64_t{step} * WORDS * d.rows + row) * 2;
        for (int i = 0; i < WORDS; ++i, to += 2 * d.rows) to[0] = words[0][i], to[1] = words[1][i];
      }
      const int at = group * d.rows + row;
      const int32_t high = _mm512_reduce_add_epi32(sum_high), low = _mm512_reduce_add_epi32(sum_low);
      d.factors[at] = numbers.unit();
      d.begins[2 * at] = -OFFSET<CODE> * high;
      d.begins[2 * at + 1] = -OFFSET<CODE> * low;
      sums.add(begin, 256 * high + low, d.factors[at]);
    }
    all_fit &= fits;
    if (!fits) sum_of_floats(a, d, x, row);
  }
  return all_fit;
}

// ---- sums ------------------------------------------------------------------------------------------------------

// Halves of a panel that meet a word of digits at a time, and chains of sums: of few rows and panels even and odd words
// are summed apart, as a sum waits for the one before.
constexpr int halves_of(int rows) { return rows <= 4 ? 2 : 1; }
constexpr int chains_of(int rows, int panels) { return rows * panels <= 2 ? 2 : 1; }

template <int ROWS, int CHAINS>
using Sums = __m512i[CHAINS][halves_of(ROWS)][ROWS][2];

// Four codes of each column of some halves, and a word of digits.
template <int ROWS, int CHAINS>
PB_INLINE void add_word(const __m512i (&codes)[halves_of(ROWS)], const int32_t* words, int word,
                        Sums<ROWS, CHAINS>& sums) {
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r)
    PB_UNROLL
    for (int digit = 0; digit < 2; ++digit) {
      const __m512i digits = _mm512_set1_epi32(words[(word * ROWS + r) * 2 + digit]);
      for (int half = 0; half < halves_of(ROWS); ++half) {
        __m512i& to = sums[word % CHAINS][half][r][digit];
        to = _mm512_dpbusd_epi32(to, codes[half], digits);
      }
    }
}

// A line of codes; of int4 in two chains, the odd ones stay in their upper nibble.
template <Code CODE, int ROWS, int CHAINS>
struct Line {
  __m512i even[halves_of(ROWS)], odd[halves_of(ROWS)];  // odd: of int4

  PB_INLINE void take(int half, __m512i codes) {
    const __m512i sign = _mm512_set1_epi8(int8_t(0x80)), nibble = _mm512_set1_epi8(15);
    if constexpr (CODE == Code::INT8) {
      even[half] = _mm512_xor_si512(codes, sign);
    } else {
      even[half] = _mm512_and_si512(codes, nibble);
      odd[half] = CHAINS == 2 ? _mm512_andnot_si512(nibble, codes)
                              : _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
    }
  }
  PB_INLINE void add(const int32_t* words, int line, Sums<ROWS, CHAINS>& sums) const {
    if constexpr (CODE == Code::INT8) {
      add_word<ROWS, CHAINS>(even, words, line, sums);
    } else {
      add_word<ROWS, CHAINS>(even, words, 2 * line, sums);
      add_word<ROWS, CHAINS>(odd, words, 2 * line + 1, sums);
    }
  }
};

// A prefetcher that follows rising lines is not far enough ahead where a line takes long.
template <Code CODE, int ROWS>
constexpr bool ASKS_FOR_RISING = CODE == Code::INT4 || ROWS > 2;

// One step: 32 k of the columns of some halves. RISING: lines are read in the order in which they lie (memory_streams.h),
// those of the first half wait in registers; else half by half in turns, asked for ahead, FAR: of the second cache, too.
template <Code CODE, int ROWS, bool RISING, int CHAINS, bool FAR>
PB_INLINE void add_step(const uint8_t* codes, const int32_t* words, Sums<ROWS, CHAINS>& sums) {
  constexpr int HALVES = halves_of(ROWS), LINES = CODE == Code::INT8 ? 8 : 4, TILE = LINES * 64;
  __m512i first[LINES];
  PB_UNROLL
  for (int line = 0; line < LINES && RISING; ++line) {
    for (int half = 0; half < HALVES && ASKS_FOR_RISING<CODE, ROWS>; ++half)
      __builtin_prefetch(codes + half * TILE + line * 64 + FAR_BYTES, 0, 2);
    first[line] = load<__m512i>(codes + line * 64);
    asm volatile("" : "+v"(first[line]));  // here, not where it is used
  }
  PB_UNROLL
  for (int line = 0; line < LINES; ++line) {
    Line<CODE, ROWS, CHAINS> both;
    for (int half = 0; half < HALVES; ++half) {
      const uint8_t* at = codes + half * TILE + line * 64;
      if (!RISING) {
        if (FAR) __builtin_prefetch(at + FAR_BYTES, 0, 2);
        __builtin_prefetch(at + NEAR_BYTES, 0, 3);
      }
      both.take(half, RISING && half == 0 ? first[line] : load<__m512i>(at));
    }
    both.add(words, line, sums);
  }
}

// What the chains of a sum come to.
template <Code CODE, int ROWS, int CHAINS>
PB_INLINE __m512i sum_of(const Sums<ROWS, CHAINS>& sums, int half, int row, int digit) {
  if constexpr (CHAINS == 1) return sums[0][half][row][digit];
  const __m512i odd = sums[CHAINS - 1][half][row][digit];
  return _mm512_add_epi32(sums[0][half][row][digit], CODE == Code::INT4 ? _mm512_srai_epi32(odd, 4) : odd);
}

// totals [panel][row][half] of panels that are read side by side.
template <Code CODE, int ROWS, int PANELS, bool RISING>
void add_panels(const PanelOf (&panels)[PANELS], const Digits& d, VF (&totals)[PANELS][ROWS][2]) {
  constexpr int HALVES = halves_of(ROWS), CHAINS = chains_of(ROWS, PANELS);
  const QuantizedLinearArgs& a = *panels[0].weight;
  const int64_t tile_bytes = a.tile_bytes();
  for (int group = 0; group < d.groups(); ++group) {
    const int begin = group * d.group / QUANT_STEP, end = std::min((group + 1) * d.group, d.inner) / QUANT_STEP;
    alignas(64) float scales[PANELS][QUANT_PANEL];
    for (int p = 0; p < PANELS; ++p) scales_of(*panels[p].weight, panels[p].panel, begin, scales[p]);
    if (RISING) ask_for_scales(a, panels[0].panel + 1, int64_t{begin} * QUANT_STEP);
    for (int first = 0; first < 2; first += HALVES) {
      Sums<ROWS, CHAINS> sums[PANELS] = {};
      PB_UNROLL
      for (int i = 0; i < PANELS * HALVES * ROWS * 2; ++i)
        sums[i / (2 * ROWS * HALVES)][0][i / (2 * ROWS) % HALVES][i / 2 % ROWS][i % 2] =
            _mm512_set1_epi32(d.begins[group * ROWS * 2 + i % (2 * ROWS)]);
      for (int step = begin; step < end; ++step)
        PB_UNROLL
        for (int p = 0; p < PANELS; ++p)
          add_step<CODE, ROWS, RISING, CHAINS, PANELS == 1>(
              panels[p].weight->weight + panels[p].panel * a.panel_bytes() + (2 * step + first) * tile_bytes,
              d.words + int64_t{step} * WORDS * ROWS * 2, sums[p]);
      PB_UNROLL
      for (int p = 0; p < PANELS; ++p)
        for (int half = 0; half < HALVES; ++half) {
          const VF scale = load<VF>(scales[p] + (first + half) * W);
          PB_UNROLL
          for (int r = 0; r < ROWS; ++r) {
            const __m512i high = sum_of<CODE, ROWS, CHAINS>(sums[p], half, r, 0);
            const __m512i low = sum_of<CODE, ROWS, CHAINS>(sums[p], half, r, 1);
            const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);  // below 2^30
            totals[p][r][first + half] +=
                bit_cast<VF>(_mm512_cvtepi32_ps(whole)) * (scale * d.factors[group * ROWS + r]);
          }
        }
    }
  }
}

struct Int8Dots {
  static constexpr int FIRST_ROWS = 8, MOST_ROWS = 8, BEGINS = 2, MOST_PANELS = 2;
  static constexpr bool ALL_CODES = false, LONG_SPANS = false;

  template <Code CODE>
  static bool make(const QuantizedLinearArgs& layer, const Digits& to) { return make_digits<CODE>(layer, to); }

  template <Code CODE>
  static void meet(const IntegerRun<Int8Dots>& run, const QuantizedJob& job) {
    for (int strip = 0; strip < run.strips.count; ++strip) {
      const Digits x = run.strips[strip];
      const auto meet = by_count<MOST_ROWS>(x.rows, [](auto rows) { return &meet_strip<CODE, decltype(rows)::value>; });
      meet(run, x, job);
    }
  }

  // Two panels side by side where rows are few and the prefetcher follows two.
  template <Code CODE, int ROWS>
  static void meet_strip(const IntegerRun<Int8Dots>& run, const Digits& digits, const QuantizedJob& job) {
    constexpr bool STREAMS = halves_of(ROWS) == 2;  // one half at a time is read in order anyway
    const bool rising = prefetcher_follows_rising_lines();
    meet_panels<ROWS>(run, job, digits.first_row, !rising, [&](const auto& panels, auto& totals) {
      constexpr int PANELS = static_cast<int>(std::extent_v<std::remove_reference_t<decltype(panels)>>);
      constexpr bool STREAM = PANELS == 1 && STREAMS;
      const auto add = rising && STREAM ? add_panels<CODE, ROWS, PANELS, STREAM> : add_panels<CODE, ROWS, PANELS, false>;
      add(panels, digits, totals);
      if (run.fits) return;
      const bf16* x = static_cast<const bf16*>(run.args.x) + digits.first_row * run.args.x_stride;
      for (int p = 0; p < PANELS; ++p)
        other_rows_in_floats(*panels[p].weight, x, run.args.x_stride, ROWS, panels[p].panel, false,
                             reinterpret_cast<float*>(totals[p]));
    });
  }
};

}  // namespace

bool quantized_linear_with_int8_dots(const QuantizedLayers& call) {
  const bool served = call.first().rows <= QUANT_MOST_DOT_ROWS || !quantized_linear_has_tiles();
  return served && multiply_integers<Int8Dots>(call);
}

#else

bool quantized_linear_with_int8_dots(const QuantizedLayers&) { return false; }

#endif
}  // namespace pagebinder
