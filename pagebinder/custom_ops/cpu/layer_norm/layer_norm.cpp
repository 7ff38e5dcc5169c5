// (Residual add and) LayerNorm of rows; one thread where a step is small, as RMSNorm.
#include "layer_norm.h"

#include "norm_rows.h"
#include "thread_pool.h"

namespace pagebinder {
namespace {

constexpr int64_t SERIAL_VALUES = 1 << 13;
constexpr int64_t ROWS_AT_ONCE = 4;

// Behind the last column stand zeros, which widen_row fills the last vectors up with.
float mean_of(const float* values, int64_t columns) {
  VF sum = {};
  for (int64_t i = 0; i < columns; i += W) sum += load<VF>(values + i);
  return sum_of_lanes(sum) / static_cast<float>(columns);
}

float variance_of(const float* values, int64_t columns, float mean) {
  VF squares = {};
  int64_t i = 0;
  for (; i + W <= columns; i += W) {
    const VF difference = load<VF>(values + i) - mean;
    squares = fused(difference, difference, squares);
  }
  float sum = sum_of_lanes(squares);
  for (; i < columns; ++i) sum += (values[i] - mean) * (values[i] - mean);
  return sum / static_cast<float>(columns);
}

// A row of float32 or T as floats; null where there is none.
template <class T>
const float* as_floats(const void* row, bool wide, int64_t columns, Buffer& buffer) {
  if (row == nullptr || wide) return static_cast<const float*>(row);
  float* to = buffer.at_least<float>(static_cast<size_t>(whole_pairs(columns)));
  for_vectors(columns, [&](int64_t i, auto load) { store(to + i, load(static_cast<const T*>(row))); });
  return to;
}

template <class T>
void norm_row(const LayerNormArgs<T>& a, int64_t row, float* values, const float* weight, const float* bias) {
  const int64_t columns = a.columns;
  if (a.residual.data == nullptr) widen_row<false, T>(a.x[row], nullptr, nullptr, columns, values);
  else widen_row<true, T>(a.x[row], a.residual[row], a.total + row * columns, columns, values);
  const float mean = mean_of(values, columns);
  const float scale = 1.0f / std::sqrt(variance_of(values, columns, mean) + a.eps);
  T* out = a.out + row * columns;
  const auto normed = [&](int64_t i, auto load_row) {
    VF y = (load<VF>(values + i) - mean) * scale;
    if (weight != nullptr) y = unfused(y * load_row(weight + i));
    return bias != nullptr ? y + load_row(bias + i) : y;
  };
  int64_t i = 0;
  for (; i + W <= columns; i += W) store_float(out + i, normed(i, [](const float* p) { return load<VF>(p); }));
  const int rest = static_cast<int>(columns - i);
  if (rest > 0)
    store_float_part(out + i, normed(i, [rest](const float* p) { return load_float_part(p, rest); }), rest);
}

}  // namespace

template <class T>
void layer_norm(const LayerNormArgs<T>& args) {
  const int threads = args.rows * args.columns < SERIAL_VALUES ? 1 : args.num_threads;
  for_ranges(args.rows, ROWS_AT_ONCE, threads, [&](int64_t row, int64_t end) {
    static thread_local Buffer buffer, weights, biases;
    float* values = buffer.at_least<float>(static_cast<size_t>(whole_pairs(args.columns)));
    const float* weight = as_floats<T>(args.weight, args.wide_weight, args.columns, weights);
    const float* bias = as_floats<T>(args.bias, args.wide_bias, args.columns, biases);
    for (; row < end; ++row) norm_row(args, row, values, weight, bias);
  });
}

template void layer_norm(const LayerNormArgs<float>&);
template void layer_norm(const LayerNormArgs<bf16>&);
template void layer_norm(const LayerNormArgs<f16>&);

}  // namespace pagebinder
