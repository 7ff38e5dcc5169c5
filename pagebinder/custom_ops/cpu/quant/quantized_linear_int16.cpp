// Quantised linear layers on integer products of 16 bits (AVX2), see quantized_linear.h.
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
#include <atomic>
#include <cmath>

#include "decode.h"
#include "memory_streams.h"
#include "quantized_jobs.h"

namespace pagebinder {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512VNNI__)
namespace {

constexpr int MOST_ROWS = 4;                    // of a strip
constexpr int MOST_WHOLE_ROWS = 2;              // that meet both halves of a panel at once
constexpr int GROUP_STEPS = 4;
constexpr int PAIRS = QUANT_STEP / 2;           // of k, of a step
constexpr int FAR_BYTES = 4096;                 // of codes that are asked for ahead
constexpr int LANES = 8, VECTORS = TILE_COLUMNS / LANES;
constexpr int64_t SERIAL_WHOLES = 1 << 15;
constexpr float LARGEST = 32512.0f;             // whole
constexpr float LEAST = 1e-30f;                 // of a group's largest x, unless that is zero

// ---- x ---------------------------------------------------------------------------------------------------------

// Of a strip: pairs [step][pair of k][row]; factors [group][row]; where sums begin [group][row]: less what codes that are
// too large add.
struct Wholes {
  int64_t first_row;
  int rows, steps, span;
  int32_t* pairs;
  float* factors;
  int32_t* begins;

  int groups() const { return (steps + span - 1) / span; }
};

// Strips of the same length; the last may be shorter.
struct Strips {
  int64_t rows;
  int steps, span;
  int count = static_cast<int>((rows + MOST_ROWS - 1) / MOST_ROWS);
  int most_rows = static_cast<int>((rows + count - 1) / std::max(count, 1));
  int32_t* memory = nullptr;

  int64_t pairs_of_row() const { return int64_t{steps} * PAIRS; }
  int64_t groups() const { return (steps + span - 1) / span; }
  int64_t words() const { return rows * (pairs_of_row() + 2 * groups()); }  // of everything
  Wholes operator[](int strip) const {
    const int64_t first = int64_t{strip} * most_rows;
    int32_t* begins = memory + rows * pairs_of_row();
    int32_t* factors = begins + rows * groups();
    return {first, static_cast<int>(std::min<int64_t>(most_rows, rows - first)), steps, span,
            memory + first * pairs_of_row(), reinterpret_cast<float*>(factors + first * groups()),
            begins + first * groups()};
  }
};

// What codes are too large by.
template <Code CODE>
constexpr int OFFSET = CODE == Code::INT4 ? 8 : 0;

// False: x has a group that wholes cannot hold.
template <Code CODE>
bool make_wholes(const QuantizedLinearArgs& a, const Wholes& to) {
  for (int row = 0; row < to.rows; ++row) {
    const bf16* x = static_cast<const bf16*>(a.x) + (to.first_row + row) * a.x_stride;
    for (int group = 0; group < to.groups(); ++group) {
      const int begin = group * to.span, end = std::min(begin + to.span, to.steps);
      const float largest =
          bit_cast<float>(largest_magnitude(x + int64_t{begin} * QUANT_STEP, int64_t{end - begin} * QUANT_STEP));
      if (!std::isfinite(largest) || (largest > 0 && largest < LEAST)) return false;
      const float factor = largest > 0 ? LARGEST / largest : 0.0f;
      int32_t sum = 0;
      for (int step = begin; step < end; ++step) {
        int16_t whole[QUANT_STEP];
        for (int k = 0; k < QUANT_STEP; k += W) {
          const VI rounded = __builtin_convertvector(round_nearest(load_float(x + step * QUANT_STEP + k) * factor), VI);
          for (int i = 0; i < W; ++i) whole[k + i] = static_cast<int16_t>(rounded[i]), sum += rounded[i];
        }
        int32_t* pair = to.pairs + int64_t{step} * PAIRS * to.rows + row;
        for (int p = 0; p < PAIRS; ++p) std::memcpy(pair + p * to.rows, whole + 2 * p, sizeof *pair);
      }
      to.factors[group * to.rows + row] = largest / LARGEST;
      to.begins[group * to.rows + row] = -OFFSET<CODE> * sum;
    }
  }
  return true;
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

// sums += 32 k of each row times a tile.
template <Code CODE, int ROWS, bool ASKS>
PB_INLINE void add_tile(const uint8_t* tile, const int32_t* pairs, Sums<ROWS>& sums) {
  for (int line = 0; line < TILE_LINES_OF<CODE>; ++line, tile += 64) {
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

// totals [row][32] of one panel. ASKS: for codes ahead.
template <Code CODE, int ROWS, bool ASKS>
void panel_of_strip(const QuantizedLinearArgs& a, const Wholes& x, int64_t panel, float* totals) {
  const uint8_t* codes = a.weight + panel * a.panel_bytes();
  const int64_t tile = a.tile_bytes();
  alignas(64) float scales[QUANT_PANEL];
  for (int group = 0; group < x.groups(); ++group) {
    const int begin = group * x.span, end = std::min(begin + x.span, x.steps);
    scales_of(a, panel, begin, scales);
    if (ASKS) ask_for_scales(a, panel + 1, begin);
    const auto pairs_at = [&](int step) { return x.pairs + int64_t{step} * PAIRS * ROWS; };
    if constexpr (ROWS <= MOST_WHOLE_ROWS) {  // tiles in the order in which they lie
      Sums<ROWS> sums[2];
      for (auto& half : sums) begin_sums<ROWS>(x, group, half);
      for (int step = begin; step < end; ++step) {
        add_tile<CODE, ROWS, ASKS>(codes + 2 * step * tile, pairs_at(step), sums[0]);
        add_tile<CODE, ROWS, ASKS>(codes + (2 * step + 1) * tile, pairs_at(step), sums[1]);
      }
      for (int half = 0; half < 2; ++half)
        end_sums<ROWS>(x, group, scales + half * TILE_COLUMNS, sums[half], totals + half * TILE_COLUMNS);
    } else {
      for (int half = 0; half < 2; ++half) {
        Sums<ROWS> sums;
        begin_sums<ROWS>(x, group, sums);
        for (int step = begin; step < end; ++step)
          add_tile<CODE, ROWS, ASKS>(codes + (2 * step + half) * tile, pairs_at(step), sums);
        end_sums<ROWS>(x, group, scales + half * TILE_COLUMNS, sums, totals + half * TILE_COLUMNS);
      }
    }
  }
}

// ---- jobs ------------------------------------------------------------------------------------------------------

struct Run : QuantizedRun {
  const Strips strips;
  std::atomic<int> next_strip{0};
  std::atomic<bool> fits{true};

  Run(const QuantizedLayers& c, const Strips& s) : QuantizedRun(c), strips(s) {}
};

template <Code CODE>
void wholes_worker(void* context, int) {
  Run& run = static_cast<Run&>(*static_cast<QuantizedRun*>(context));
  for (int strip; (strip = run.next_strip.fetch_add(1, std::memory_order_relaxed)) < run.strips.count;)
    if (!make_wholes<CODE>(run.args, run.strips[strip])) run.fits.store(false, std::memory_order_relaxed);
}

using PanelOfStrip = void (*)(const QuantizedLinearArgs&, const Wholes&, int64_t, float*);

// `first`: the strip that reads a panel from memory.
template <Code CODE>
PanelOfStrip panel_of_strip_of(int rows, bool first) {
  static constexpr PanelOfStrip OF[2][MOST_ROWS] = {
      {panel_of_strip<CODE, 1, false>, panel_of_strip<CODE, 2, false>, panel_of_strip<CODE, 3, false>,
       panel_of_strip<CODE, 4, false>},
      {panel_of_strip<CODE, 1, true>, panel_of_strip<CODE, 2, true>, panel_of_strip<CODE, 3, true>,
       panel_of_strip<CODE, 4, true>}};
  return OF[first][rows - 1];
}

template <Code CODE>
void panel_worker(void* context, int index) {
  Run& run = static_cast<Run&>(*static_cast<QuantizedRun*>(context));
  alignas(64) float totals[2][MOST_ROWS * QUANT_PANEL];
  const float* const of[] = {totals[0], totals[1]};
  for (int i; (i = run.work.take(index)) < run.num_jobs;) {
    const QuantizedJob job = run.job(i);
    for (int strip = 0; strip < run.strips.count; ++strip) {
      const Wholes x = run.strips[strip];
      for (int part = 0; part < run.parts; ++part)
        panel_of_strip_of<CODE>(x.rows, strip == 0)(job.layer[part], x, job.panel, totals[part]);
      write_panel<bf16>(run, job, of, x.first_row, x.rows);
    }
  }
}

}  // namespace

bool quantized_linear_with_int16_products(const QuantizedLayers& call) {
  static thread_local Buffer memory;
  const QuantizedLinearArgs& a = call.first();
  if (a.code == Code::FP8 || a.x_scale != nullptr || a.wide_out) return false;
  const int steps = static_cast<int>(a.inner / QUANT_STEP);
  Strips strips{a.rows, steps, static_cast<int>(std::min<int64_t>(a.scaled_steps(), GROUP_STEPS))};
  strips.memory = memory.at_least<int32_t>(static_cast<size_t>(strips.words()));
  Run run(call, strips);
  const bool is_int8 = a.code == Code::INT8;
  run.in_workers(a.rows * a.inner < SERIAL_WHOLES, is_int8 ? wholes_worker<Code::INT8> : wholes_worker<Code::INT4>);
  if (!run.fits.load()) return false;
  tell_next_weights(run);
  run.in_workers(false, is_int8 ? panel_worker<Code::INT8> : panel_worker<Code::INT4>);
  return true;
}

#else

bool quantized_linear_with_int16_products(const QuantizedLayers&) { return false; }

#endif
}  // namespace pagebinder
