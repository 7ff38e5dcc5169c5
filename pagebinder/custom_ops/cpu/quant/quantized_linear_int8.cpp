// Quantised linear layers on integer dot products (AVX-512 VNNI), see quantized_linear.h.
//
//     x [row][group of k]   =   scale (256 high + low)            two digits of 8 bits: x to 1 / 65,024 of the group's largest
//     sum[row][digit][16 columns]  +=  four codes of each column, unsigned  .  four digits, in every lane
//
// Codes of int8 and int4 are operands as they lie, but for their sign or nibble, where BF16 dots want each of them as a
// bf16 and sum half as many at a time. Sums of a group are integers, exact; the offset of unsigned codes is taken off
// again (offset times the sum of digits), then digits and scales are put together in float32, group by group.
//
// A group is at most 128 k, and at most what shares a scale of the weight. What its digits leave out is below 1 / 128 of
// what bf16 had left out of the group's largest x. Up to eight rows, a strip, meet codes at a time. An element of y has the
// same bits for any number of rows and threads.
#include "quantized_linear.h"

#include <atomic>
#include <cmath>

#include "decode.h"
#include "work_ranges.h"

namespace pagebinder {
#if defined(__AVX512VNNI__) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
namespace {

constexpr int MOST_ROWS = 8;                    // of a strip
constexpr int GROUP_STEPS = 4;
constexpr int WORDS = QUANT_STEP / 4;           // of four digits, of a step
constexpr int AHEAD_BYTES = 4096;
constexpr int64_t SERIAL_FLOPS = 1 << 19, SERIAL_DIGITS = 1 << 15;
constexpr float LARGEST = 32512.0f;             // of both digits together
constexpr float LEAST = 1e-30f;                 // of a group's largest x, unless that is zero

// ---- x ---------------------------------------------------------------------------------------------------------

// Of a strip: words [step][word][row][high, low]; factors [group][row]; sums of digits [group][row][high, low].
struct Digits {
  int64_t first_row;
  int rows, steps, span;
  int32_t* words;
  float* factors;
  int32_t* sums;

  int groups() const { return (steps + span - 1) / span; }
};

// Strips of the same length; the last may be shorter.
struct Strips {
  int64_t rows;
  int steps, span;
  int count = static_cast<int>((rows + MOST_ROWS - 1) / MOST_ROWS);
  int most_rows = static_cast<int>((rows + count - 1) / std::max(count, 1));
  int32_t* memory = nullptr;

  int64_t words_of_row() const { return int64_t{steps} * WORDS * 2; }
  int64_t groups() const { return (steps + span - 1) / span; }
  int64_t words() const { return rows * (words_of_row() + 3 * groups()); }  // of everything
  Digits operator[](int strip) const {
    const int64_t first = int64_t{strip} * most_rows;
    int32_t* sums = memory + rows * words_of_row();
    int32_t* factors = sums + rows * groups() * 2;
    return {first, static_cast<int>(std::min<int64_t>(most_rows, rows - first)), steps, span,
            memory + first * words_of_row(), reinterpret_cast<float*>(factors + first * groups()),
            sums + first * groups() * 2};
  }
};

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

// False: x has a group that digits cannot hold.
template <Code CODE>
bool make_digits(const QuantizedLinearArgs& a, const Digits& d) {
  for (int row = 0; row < d.rows; ++row) {
    const bf16* x = static_cast<const bf16*>(a.x) + (d.first_row + row) * a.x_stride;
    for (int group = 0; group < d.groups(); ++group) {
      const int begin = group * d.span, end = std::min(begin + d.span, d.steps);
      VU most{};
      for (int k = begin * QUANT_STEP; k < end * QUANT_STEP; k += W) {
        const VU magnitude = bit_cast<VU>(load_float(x + k)) & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
      }
      uint32_t bits = 0;
      for (int i = 0; i < W; ++i) bits = std::max<uint32_t>(bits, most[i]);  // no number is larger than infinity here
      const float largest = bit_cast<float>(bits);
      if (!std::isfinite(largest) || (largest > 0 && largest < LEAST)) return false;
      const float factor = largest > 0 ? LARGEST / largest : 0.0f;
      int32_t sum_high = 0, sum_low = 0;
      for (int step = begin; step < end; ++step) {
        Bytes high, low;
        for (int half = 0; half < QUANT_STEP / W; ++half) {
          const VF value = load_float(x + step * QUANT_STEP + half * W) * factor;
          const __m512i whole = _mm512_cvtps_epi32(bit_cast<__m512>(value));
          const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
          const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8));
          store(reinterpret_cast<char*>(&high) + half * W, _mm512_cvtepi32_epi8(upper));
          store(reinterpret_cast<char*>(&low) + half * W, _mm512_cvtepi32_epi8(lower));
          sum_high += _mm512_reduce_add_epi32(upper), sum_low += _mm512_reduce_add_epi32(lower);
        }
        int32_t words[2][WORDS];
        store(words[0], in_order<CODE>(high));
        store(words[1], in_order<CODE>(low));
        int32_t* to = d.words + (int64_t{step} * WORDS * d.rows + row) * 2;
        for (int i = 0; i < WORDS; ++i, to += 2 * d.rows) to[0] = words[0][i], to[1] = words[1][i];
      }
      const int at = group * d.rows + row;
      d.factors[at] = largest / LARGEST;
      d.sums[2 * at] = sum_high, d.sums[2 * at + 1] = sum_low;
    }
  }
  return true;
}

// ---- sums ------------------------------------------------------------------------------------------------------

// Of few rows even and odd words are summed apart: a sum waits for the one before.
constexpr int chains(int rows) { return rows <= 2 ? 2 : 1; }

template <int ROWS>
using Sums = __m512i[chains(ROWS)][ROWS][2];

template <int ROWS>
PB_INLINE void add_word(__m512i codes, const int32_t* words, int word, Sums<ROWS>& sums) {
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r)
    PB_UNROLL
    for (int digit = 0; digit < 2; ++digit) {
      __m512i& to = sums[word % chains(ROWS)][r][digit];
      to = _mm512_dpbusd_epi32(to, codes, _mm512_set1_epi32(words[(word * ROWS + r) * 2 + digit]));
    }
}

// One tile: 32 k of 16 columns.
template <Code CODE, int ROWS>
PB_INLINE void add_tile(const uint8_t* codes, const int32_t* words, Sums<ROWS>& sums) {
  constexpr int LINES = CODE == Code::INT8 ? 8 : 4;
  const __m512i sign = _mm512_set1_epi8(int8_t(0x80)), nibble = _mm512_set1_epi8(15);
  PB_UNROLL
  for (int line = 0; line < LINES; ++line) {
    __builtin_prefetch(codes + AHEAD_BYTES + line * 64, 0, 3);
    const __m512i at = load<__m512i>(codes + line * 64);
    if constexpr (CODE == Code::INT8) {
      add_word<ROWS>(_mm512_xor_si512(at, sign), words, line, sums);
    } else {
      add_word<ROWS>(_mm512_and_si512(at, nibble), words, 2 * line, sums);
      add_word<ROWS>(_mm512_and_si512(_mm512_srli_epi16(at, 4), nibble), words, 2 * line + 1, sums);
    }
  }
}

// totals [row][half] of one panel.
template <Code CODE, int ROWS>
void add_panel(const QuantizedLinearArgs& a, const Digits& d, int64_t panel, VF (&totals)[ROWS][2]) {
  constexpr int OFFSET = CODE == Code::INT8 ? 128 : 8;
  const uint8_t* codes = a.weight + panel * a.panel_bytes();
  const int64_t tile_bytes = a.tile_bytes();
  for (int group = 0; group < d.groups(); ++group) {
    const int begin = group * d.span, end = std::min(begin + d.span, d.steps);
    alignas(64) float scales[QUANT_PANEL];
    scales_of(a, panel, begin, scales);
    PB_UNROLL
    for (int half = 0; half < 2; ++half) {
      Sums<ROWS> sums = {};
      for (int step = begin; step < end; ++step)
        add_tile<CODE, ROWS>(codes + (2 * step + half) * tile_bytes, d.words + int64_t{step} * WORDS * ROWS * 2, sums);
      PB_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const int at = group * ROWS + r;
        VF value[2];
        PB_UNROLL
        for (int digit = 0; digit < 2; ++digit) {
          __m512i sum = sums[0][r][digit];
          if (chains(ROWS) == 2) sum = _mm512_add_epi32(sum, sums[chains(ROWS) - 1][r][digit]);
          sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(OFFSET * d.sums[2 * at + digit]));
          value[digit] = bit_cast<VF>(_mm512_cvtepi32_ps(sum));
        }
        totals[r][half] += (value[0] * 256.0f + value[1]) * (load<VF>(scales + half * W) * d.factors[at]);
      }
    }
  }
}

struct Run {
  const QuantizedLinearArgs& args;
  const Strips strips;
  int num_panels, num_workers;
  WorkRanges work{num_panels, num_workers};
  std::atomic<int> next_strip{0};
  std::atomic<bool> fits{true};
};

template <Code CODE>
void digits_worker(void* context, int) {
  Run& run = *static_cast<Run*>(context);
  for (int strip; (strip = run.next_strip.fetch_add(1, std::memory_order_relaxed)) < run.strips.count;)
    if (!make_digits<CODE>(run.args, run.strips[strip])) run.fits.store(false, std::memory_order_relaxed);
}

template <Code CODE, int ROWS>
void meet_strip(const QuantizedLinearArgs& a, const Digits& digits, int64_t panel) {
  const bf16* bias = static_cast<const bf16*>(a.bias);
  VF totals[ROWS][2] = {};
  add_panel<CODE, ROWS>(a, digits, panel, totals);
  for (int r = 0; r < ROWS; ++r)
    for (int half = 0; half < 2; ++half) {
      const int64_t column = panel * QUANT_PANEL + half * W;
      const VF added = bias == nullptr ? VF{} : load_float(bias + column);
      store_float(static_cast<bf16*>(a.out) + (digits.first_row + r) * a.columns + column, totals[r][half] + added);
    }
}

using MeetStrip = void (*)(const QuantizedLinearArgs&, const Digits&, int64_t);

template <Code CODE, int... Less>
MeetStrip meet_strip_of(int rows, std::integer_sequence<int, Less...>) {
  static constexpr MeetStrip OF[] = {meet_strip<CODE, Less + 1>...};
  return OF[rows - 1];
}

template <Code CODE>
void panel_worker(void* context, int index) {
  Run& run = *static_cast<Run*>(context);
  for (int panel; (panel = run.work.take(index)) < run.num_panels;)
    for (int strip = 0; strip < run.strips.count; ++strip) {
      const Digits digits = run.strips[strip];
      meet_strip_of<CODE>(digits.rows, std::make_integer_sequence<int, MOST_ROWS>{})(run.args, digits, panel);
    }
}

}  // namespace

bool quantized_linear_with_int8_dots(const QuantizedLinearArgs& args) {
  static thread_local Buffer memory;
  const bool served = args.rows <= QUANT_MOST_DOT_ROWS || !quantized_linear_has_tiles();
  if (!served || args.code == Code::FP8 || args.x_scale != nullptr || args.wide_out) return false;
  const int steps = static_cast<int>(args.inner / QUANT_STEP);
  Strips strips{args.rows, steps, static_cast<int>(std::min<int64_t>(args.scaled_steps(), GROUP_STEPS))};
  strips.memory = memory.at_least<int32_t>(static_cast<size_t>(strips.words()));
  const int num_panels = static_cast<int>(args.columns / QUANT_PANEL);
  const bool serial = args.rows * args.columns * args.inner < SERIAL_FLOPS, is_int8 = args.code == Code::INT8;
  Run run{args, strips, num_panels, serial ? 1 : std::min(args.num_threads, num_panels)};
  const auto in_workers = [&](bool alone, void (*body)(void*, int)) {
    if (alone) body(&run, 0);
    else args.run(run.num_workers, body, &run);
  };
  in_workers(run.num_workers <= 1 || args.rows * args.inner < SERIAL_DIGITS,
             is_int8 ? digits_worker<Code::INT8> : digits_worker<Code::INT4>);
  if (!run.fits.load()) return false;
  tell_next_weights(args, run.num_workers);
  in_workers(run.num_workers <= 1, is_int8 ? panel_worker<Code::INT8> : panel_worker<Code::INT4>);
  return true;
}

#else

bool quantized_linear_with_int8_dots(const QuantizedLinearArgs&) { return false; }

#endif
}  // namespace pagebinder
