// What kernels on integer products have in common (quantized_linear_int8.cpp, quantized_linear_int16.cpp): x as integers
// of 16 bits, in strips of rows and in spans of k that share a factor, and the jobs in which strips meet panels.
//
//     x [row][span of k]   =   factor * integer          to 1 / 65,024 of the span's largest
//
// A row with a span that integers cannot hold (no numbers, or one that is far beyond the others) is left to floats.
//
// A group, k whose products are summed before a scale is put on, is at most 128 k, and at most what shares a scale of the
// weight; that may be half a step. A span is a group, or 128 k with their groups. Shifts meet the sums of what integers stand
// for, not those of x: where codes and shifts are large and cancel, as in a row of zeros, roundings of x then do, too.
//
// A kernel is a struct with
//
//     FIRST_ROWS, MOST_ROWS                      rows of the first strip and of others
//     BEGINS, MOST_PANELS                        sums that each row begins; panels of a job
//     ALL_CODES                                  are all codes served but fp8, and groups of half a step? Else int8, int4
//     LONG_SPANS                                 are spans of 128 k, whatever groups are?
//     make<CODE>(layer, strip)                   fills in a strip; false: x has a span that integers cannot hold, whose
//                                                factor is NaN then
//     meet<CODE>(run, job)                       all rows times a job's panels, written
#pragma once

#include <atomic>
#include <cmath>
#include <vector>

#include "lifted_rows.h"
#include "panel_floats.h"
#include "quantized_jobs.h"

namespace pagebinder {

constexpr int MOST_INTEGER_GROUP = 128;
constexpr int INTEGER_WORDS = QUANT_STEP / 2;    // of 32 bits, of a row and a step
constexpr int64_t SERIAL_INTEGERS = 1 << 15;     // elements of x
constexpr float LARGEST_INTEGER = 32512.0f;
constexpr float LEAST_LARGEST = 1e-30f;          // of a span's largest x, unless that is zero
constexpr float MOST_LARGEST = 256.0f;           // times the mean of the others: their errors are about those of bf16

inline bool is_integer(Code code, bool all_codes) {
  return code == Code::INT8 || code == Code::INT4 || (all_codes && code != Code::FP8);
}

// body(std::integral_constant<Code, ...>) of such a code.
template <bool ALL_CODES, class Body>
auto with_integer_code(Code code, const Body& body) {
  if constexpr (ALL_CODES) {
    if (code == Code::INT6) return body(std::integral_constant<Code, Code::INT6>());
    if (code == Code::FP4) return body(std::integral_constant<Code, Code::FP4>());
    if (code == Code::NF4) return body(std::integral_constant<Code, Code::NF4>());
    if (code == Code::IQ4) return body(std::integral_constant<Code, Code::IQ4>());
  }
  return code == Code::INT8 ? body(std::integral_constant<Code, Code::INT8>())
                            : body(std::integral_constant<Code, Code::INT4>());
}

// k of a group of integers.
inline int integer_group(const QuantizedLinearArgs& a) {
  const int64_t shared = a.has_half_steps() ? a.scale_group : a.scaled_steps() * QUANT_STEP;
  return static_cast<int>(std::min<int64_t>(shared, MOST_INTEGER_GROUP));
}

// Words [step][word][row], in the kernel's order within a step; factors [span][row]; begins [group][row][BEGINS]; of shifted
// weights sums [row][k that share a shift]. `inner`: k of a row; `group`, `span`: of those.
struct IntegerStrip {
  int64_t first_row;
  int rows, inner, group, span;
  int32_t* words;
  float* factors;
  int32_t* begins;
  float* sums;

  int groups() const { return (inner + group - 1) / group; }
};

// Sums of integers of one row, in the place of those of its x, as its groups come.
class IntegerSums {
 public:
  IntegerSums(const QuantizedLinearArgs& a, const IntegerStrip& strip, int row)
      : group_(static_cast<int>(a.scale_group)),
        to_(strip.sums == nullptr ? nullptr : strip.sums + row * (a.inner / a.scale_group)) {}

  // What is from k on, a multiple of the strip's group; `unit`: what an integer stands for.
  void add(int k, int32_t sum, float unit) {
    if (to_ == nullptr) return;
    const float value = static_cast<float>(sum) * unit;
    to_[k / group_] = k % group_ == 0 ? value : to_[k / group_] + value;
  }

 private:
  const int group_;
  float* const to_;
};

// The first strip has up to FIRST_ROWS rows. Others are alike; the last may be shorter.
template <class Kernel>
struct IntegerStrips {
  int64_t rows;
  int inner, group;
  int span = Kernel::LONG_SPANS ? MOST_INTEGER_GROUP : group;
  int64_t rest = std::max<int64_t>(rows - Kernel::FIRST_ROWS, 0);
  int others = static_cast<int>((rest + Kernel::MOST_ROWS - 1) / Kernel::MOST_ROWS);
  int most_rows = static_cast<int>((rest + others - 1) / std::max(others, 1));
  int count = (rows > 0) + others;
  int32_t* memory = nullptr;
  float* sums = nullptr;  // of shifted weights: of x [row][sums_of_row], which strips replace by those of integers
  int64_t sums_of_row = 0;

  int64_t words_of_row() const { return inner / 2; }
  int64_t groups() const { return (inner + group - 1) / group; }
  int64_t spans() const { return (inner + span - 1) / span; }
  int64_t words() const { return rows * (words_of_row() + Kernel::BEGINS * groups() + spans()); }  // of everything
  IntegerStrip operator[](int strip) const {
    const int64_t first = strip == 0 ? 0 : Kernel::FIRST_ROWS + int64_t{strip - 1} * most_rows;
    const int64_t at_most = strip == 0 ? Kernel::FIRST_ROWS : most_rows;
    int32_t* begins = memory + rows * words_of_row();
    int32_t* factors = begins + rows * groups() * Kernel::BEGINS;
    return {first, static_cast<int>(std::min(at_most, rows - first)), inner, group, span,
            memory + first * words_of_row(), reinterpret_cast<float*>(factors + first * spans()),
            begins + first * groups() * Kernel::BEGINS, sums == nullptr ? nullptr : sums + first * sums_of_row};
  }
};

// The k in [begin, end) of a row of x.
struct IntegerSpan {
  float largest;  // magnitude
  bool holds;     // can integers stand for them? Not where the largest leaves the others few bits

  IntegerSpan(const bf16* x, int begin, int end) : largest(bit_cast<float>(largest_bits(x + begin, end - begin))) {
    holds = largest == 0 || (std::isfinite(largest) && largest >= LEAST_LARGEST && leaves_bits(x, begin, end));
  }

  float to_integers() const { return holds && largest > 0 ? LARGEST_INTEGER / largest : 0.0f; }
  float unit() const { return holds ? largest / LARGEST_INTEGER : NAN; }

 private:
  bool leaves_bits(const bf16* x, int begin, int end) const {
    VF sum{};
    VI zeros{};
    for (int k = begin; k < end; k += W) {
      const VF magnitude = bit_cast<VF>(bit_cast<VU>(load_float(x + k)) & 0x7fffffffu);
      sum += magnitude, zeros -= magnitude == VF{};
    }
    const int others = end - begin - 1 - sum_of_lanes(zeros);  // that are not zero
    return others <= 0 || largest * static_cast<float>(others) <= MOST_LARGEST * (sum_of_lanes(sum) - largest);
  }
};
inline VF times_or_zero(VF x, float factor) { return factor == 0 ? VF{} : x * factor; }  // of no numbers, too

// Sums of x itself in the place of those of integers, of a row that floats will meet.
inline void sum_of_floats(const QuantizedLinearArgs& a, const IntegerStrip& strip, const bf16* x, int row) {
  if (strip.sums == nullptr) return;
  sum_groups(x, a.inner, 1, a.inner, a.scale_group, strip.sums + row * (a.inner / a.scale_group));
}

// The rows of totals [row][32] of a panel that are NaN, in floats: each by itself, as others change nothing about it.
// x: [row][inner] bf16; counts_offset: totals count codes of two levels that are larger by an offset (LevelParts).
inline void other_rows_in_floats(QuantizedLinearArgs a, const bf16* x, int64_t x_stride, int64_t rows, int64_t panel,
                                 bool counts_offset, float* totals) {
  static thread_local Buffer memory;
  const int64_t groups = counts_offset ? a.inner / a.scale_group : 0;
  float* row = memory.at_least<float>(static_cast<size_t>(a.inner + groups));
  for (int64_t r = 0; r < rows; ++r, x += x_stride, totals += QUANT_PANEL) {
    if (!std::isnan(*totals)) continue;
    for (int64_t k = 0; k < a.inner; k += W) store(row + k, load_float(x + k));
    a.x = row, a.x_stride = a.inner, a.rows = 1, a.x_sums = row + a.inner;
    panel_in_floats_of(a.code)(a, panel, totals);
    if (!counts_offset) continue;
    sum_groups(row, a.inner, 1, a.inner, a.scale_group, row + a.inner);
    add_shifts(a, panel, 0, 1, totals, LevelParts::FIRST);
  }
}

template <class Kernel>
struct IntegerRun : QuantizedRun {
  const IntegerStrips<Kernel> strips;
  std::atomic<int> next_strip{0};
  std::atomic<bool> fits{true};

  // Strips meet one panel after the other, which the second cache keeps; few rows may read panels side by side.
  IntegerRun(const QuantizedLayers& c, const IntegerStrips<Kernel>& s)
      : QuantizedRun(c, c.first().rows <= QUANT_MOST_DOT_ROWS ? Kernel::MOST_PANELS : 1), strips(s) {}
};

template <class Kernel, Code CODE>
void make_integers_worker(void* context, int) {
  auto& run = static_cast<IntegerRun<Kernel>&>(*static_cast<QuantizedRun*>(context));
  for (int strip; (strip = run.next_strip.fetch_add(1, std::memory_order_relaxed)) < run.strips.count;)
    if (!Kernel::template make<CODE>(run.args, run.strips[strip])) run.fits.store(false, std::memory_order_relaxed);
}

template <class Kernel, Code CODE>
void integer_panels_worker(void* context, int index) {
  auto& run = static_cast<IntegerRun<Kernel>&>(*static_cast<QuantizedRun*>(context));
  for (int i; (i = run.work.take(index)) < run.num_jobs;)
    Kernel::template meet<CODE>(run, run.job(i));
}

// False, and nothing was done: other codes, rows with scales or wide results, no k.
template <class Kernel>
bool multiply_integers(const QuantizedLayers& call) {
  static thread_local Buffer memory, sums;
  static thread_local std::vector<QuantizedLinearArgs> layers;
  const QuantizedLinearArgs& a = call.first();
  if (!is_integer(a.code, Kernel::ALL_CODES) || (a.has_half_steps() && !Kernel::ALL_CODES)) return false;
  if (a.x_scale != nullptr || a.wide_out || a.inner == 0) return false;
  IntegerStrips<Kernel> strips{a.rows, static_cast<int>(a.inner), integer_group(a)};
  strips.memory = memory.at_least<int32_t>(static_cast<size_t>(strips.words()));
  QuantizedLayers with_sums = call;
  if (a.is_shifted) {
    strips.sums_of_row = a.inner / a.scale_group;
    const size_t size = static_cast<size_t>(a.rows * strips.sums_of_row);
    strips.sums = std::copy_n(a.x_sums, size, sums.at_least<float>(size)) - size;
    layers.assign(call.layers, call.layers + call.num_layers);
    for (QuantizedLinearArgs& layer : layers) layer.x_sums = strips.sums;
    with_sums.layers = layers.data();
  }
  IntegerRun<Kernel> run(with_sums, strips);
  const auto make = with_integer_code<Kernel::ALL_CODES>(
      a.code, [](auto code) { return make_integers_worker<Kernel, decltype(code)::value>; });
  run.in_workers(a.rows * a.inner < SERIAL_INTEGERS, make);
  tell_next_weights(run);
  run.in_workers(false, with_integer_code<Kernel::ALL_CODES>(
      a.code, [](auto code) { return integer_panels_worker<Kernel, decltype(code)::value>; }));
  return true;
}

}  // namespace pagebinder
