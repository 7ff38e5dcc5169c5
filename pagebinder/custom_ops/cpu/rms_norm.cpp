// (Residual add and) RMSNorm of rows; one thread below SERIAL_VALUES, so a decode step of few requests wakes nobody.
#include "norm_rows.h"
#include "thread_pool.h"

namespace pagebinder {
namespace {

constexpr int64_t SERIAL_VALUES = 1 << 13;
constexpr int64_t ROWS_AT_ONCE = 4;

}  // namespace

template <class T, class Out>
void rms_norm(const NormRows<T>& rows, int64_t count, int64_t columns, Out* out, int num_threads) {
  const int threads = count * columns < SERIAL_VALUES ? 1 : num_threads;
  for_ranges(count, ROWS_AT_ONCE, threads, [&](int64_t row, int64_t end) {
    static thread_local Buffer buffer;
    float* values = buffer.at_least<float>(static_cast<size_t>(whole_pairs(columns)));
    for (; row < end; ++row) norm_row(rows, row, columns, values, out + row * columns);
  });
}

template void rms_norm(const NormRows<float>&, int64_t, int64_t, float*, int);
template void rms_norm(const NormRows<bf16>&, int64_t, int64_t, bf16*, int);
template void rms_norm(const NormRows<bf16>&, int64_t, int64_t, float*, int);
template void rms_norm(const NormRows<f16>&, int64_t, int64_t, f16*, int);
template void rms_norm(const NormRows<f16>&, int64_t, int64_t, float*, int);

}  // namespace pagebinder
