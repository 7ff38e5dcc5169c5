// Makes rows in float32 and quantises them, see fp8.h.
#include <algorithm>
#include <atomic>

#include "fp8/fp8.h"
#include "small_floats.h"

namespace pagebinder {
namespace {

constexpr int64_t SERIAL_VALUES = 1 << 15;
constexpr int64_t ROWS_AT_ONCE = 4;
constexpr float MIN_SCALE = 0x1p-126f;

// ---- rows in float32 -------------------------------------------------------------------------------------------

template <class T>
void make_row(const PlainRows<T>& rows, int64_t row, int64_t columns, float* to) {
  const T* x = rows.x[row];
  for_vectors(columns, [&](int64_t i, auto lanes) { store(to + i, lanes(x)); });
}

template <class T>
void make_row(const GatedRows<T>& rows, int64_t row, int64_t columns, float* to) {
  const T *gate = rows.gate[row], *up = rows.up[row];
  for_vectors(columns, [&](int64_t i, auto lanes) {
    store(to + i, rounded<T>(rounded<T>(activate(rows.activation, lanes(gate))) * lanes(up)));
  });
}

// ---- codes -----------------------------------------------------------------------------------------------------

// The bits of the largest magnitude: they are in the order of magnitudes, and those of a NaN above all.
uint32_t amax_bits(const float* x, int64_t begin, int64_t end) {
  VU most{};
  for (int64_t i = begin; i < end; i += W) {
    const VU bits = bit_cast<VU>(magnitude_of(load<VF>(x + i)));
    most = select_bits(bits > most, bits, most);
  }
  uint32_t amax = 0;
  for (int lane = 0; lane < W; ++lane) amax = std::max(amax, most[lane]);
  return amax;
}

float scale_of(uint32_t amax) {
  const float scale = bit_cast<float>(amax) / E4M3_MAX;
  return scale < MIN_SCALE ? MIN_SCALE : scale;
}

void encode(const float* x, int64_t begin, int64_t end, float scale, uint8_t* codes) {
  int64_t i = begin;
  for (; i + W <= end; i += W) store_e4m3(codes + i, load<VF>(x + i) / scale);
  if (i < end) {
    uint8_t rest[W];
    store_e4m3(rest, load<VF>(x + i) / scale);
    std::memcpy(codes + i, rest, end - i);
  }
}

void encode_row(const Fp8Output& out, int64_t row, const float* x) {
  uint8_t* codes = out.codes + row * out.columns;
  if (out.granularity == Granularity::TENSOR) return encode(x, 0, out.columns, *out.scales, codes);
  const int64_t group = out.granularity == Granularity::TOKEN ? out.columns : FP8_GROUP;
  float* scale = out.scales + row * ((out.columns + group - 1) / group);
  for (int64_t begin = 0; begin < out.columns; begin += group, ++scale) {
    const int64_t end = std::min(begin + group, out.columns);
    *scale = scale_of(amax_bits(x, begin, end));
    encode(x, begin, end, *scale, codes);
  }
}

// ---- threads ---------------------------------------------------------------------------------------------------

template <class Rows>
struct Run {
  const Fp8Output& out;
  const Rows& rows;
  bool finds_amax;
  std::atomic<int64_t> next{0};
  std::atomic<uint32_t> amax{0};

  void found(uint32_t bits) {
    uint32_t before = amax.load(std::memory_order_relaxed);
    while (bits > before && !amax.compare_exchange_weak(before, bits, std::memory_order_relaxed)) {}
  }
};

template <class Rows>
void worker(void* context, int) {
  static thread_local Buffer buffer;
  Run<Rows>& run = *static_cast<Run<Rows>*>(context);
  const int64_t columns = run.out.columns;
  float* x = buffer.at_least<float>(static_cast<size_t>(whole_pairs(columns)));
  for (int64_t first; (first = run.next.fetch_add(ROWS_AT_ONCE, std::memory_order_relaxed)) < run.out.rows;)
    for (int64_t row = first; row < std::min(first + ROWS_AT_ONCE, run.out.rows); ++row) {
      make_row(run.rows, row, columns, x);
      if (run.finds_amax) run.found(amax_bits(x, 0, columns));
      else encode_row(run.out, row, x);
    }
}

template <class Rows>
uint32_t pass_over(const Fp8Output& out, const Rows& rows, bool finds_amax) {
  Run<Rows> run{out, rows, finds_amax};
  if (out.num_threads <= 1 || out.rows * out.columns < SERIAL_VALUES) worker<Rows>(&run, 0);
  else out.run(out.num_threads, worker<Rows>, &run);
  return run.amax;
}

}  // namespace

template <class Rows>
void quantise(const Fp8Output& out, const Rows& rows) {
  if (out.granularity == Granularity::TENSOR && !out.is_static) *out.scales = scale_of(pass_over(out, rows, true));
  pass_over(out, rows, false);
}

#define PB_QUANTISE(T)                                             \
  template void quantise(const Fp8Output&, const PlainRows<T>&);   \
  template void quantise(const Fp8Output&, const NormRows<T>&);    \
  template void quantise(const Fp8Output&, const GatedRows<T>&);
PB_QUANTISE(float)
PB_QUANTISE(bf16)
PB_QUANTISE(f16)

}  // namespace pagebinder
