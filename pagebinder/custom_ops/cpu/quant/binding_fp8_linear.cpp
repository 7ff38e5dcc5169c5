// Registers the linear layer of e4m3 activations and weights under `pagebinder_cpu`. Codes are exact in bf16, so they
// go to matrix tiles or BF16 dots as they are; scales of both sides multiply float32 sums.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <string>

#include "checks.h"
#include "direct_calls.h"
#include "new_tensor.h"
#include "num_threads.h"
#include "small_floats.h"
#include "weight_tensors.h"

namespace {

using namespace pagebinder;

constexpr int64_t X_GROUP = 128;

// Codes -> numbers of T.
template <class T>
Tensor decoded(const Tensor& codes, ScalarType type) {
  Tensor numbers = new_tensor({codes.numel()}, type);
  const auto* from = static_cast<const uint8_t*>(codes.const_data_ptr());
  T* to = static_cast<T*>(numbers.mutable_data_ptr());
  int64_t i = 0;
  for (; i + W <= codes.numel(); i += W) store_float(to + i, load_e4m3(from + i));
  for (; i < codes.numel(); ++i) store_float_part(to + i, decode_e4m3(VU{} + from[i]), 1);
  return numbers;
}

// One scale, one for each row, or one for each 128 k of each row.
void describe_x_scale(const Tensor& scale, QuantizedLinearArgs& a) {
  const int64_t last = scale.dim() - 1, groups = (a.inner + X_GROUP - 1) / X_GROUP;
  const bool is_one = scale.dim() == 1 && scale.size(0) == 1;
  const bool fits = is_one || (last >= 0 && scale.numel() == a.rows * scale.size(last) &&
                               (scale.size(last) == 1 || scale.size(last) == groups));
  PB_CHECK(fits && scale.scalar_type() == ScalarType::Float && scale.is_contiguous(),
           "x_scale must be contiguous float32 [1], [..., 1] or [..., ", groups, "]");
  a.x_scale = static_cast<const float*>(scale.const_data_ptr());
  a.x_scale_stride = is_one ? 0 : scale.size(last);
  a.x_group = is_one || scale.size(last) == 1 ? std::max<int64_t>(a.inner, X_GROUP) : X_GROUP;
}

Tensor fp8_linear(const Tensor& x, const Tensor& x_scale, const Tensor& qweight, const Tensor& scale,
                  std::optional<Tensor> bias, std::string format, ScalarType dtype) {
  PB_CHECK(starts_with(format, "fp8"), "fp8_linear takes weights in fp8, fp8_tensor, fp8_block, not ", format);
  PB_CHECK(x.scalar_type() == ScalarType::Float8_e4m3fn, "x must be float8_e4m3fn");
  QuantizedLinearArgs a{};
  describe_weight(qweight, scale, format, a);
  const std::vector<int64_t> sizes = sizes_of_result(x, a);
  describe_x_scale(x_scale, a);
  PB_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == a.columns), "bias must be [", a.columns, "]");
  const bool in_bf16 = PAGEBINDER_BF16_DOT;
  a.wide_out = !in_bf16 || dtype != ScalarType::BFloat16;
  const ScalarType of_out = a.wide_out ? ScalarType::Float : ScalarType::BFloat16;
  const Tensor codes = torch::stable::contiguous(x);
  const Tensor numbers =
      in_bf16 ? decoded<bf16>(codes, ScalarType::BFloat16) : decoded<float>(codes, ScalarType::Float);
  std::optional<Tensor> added;
  if (bias) added = torch::stable::contiguous(torch::stable::to(*bias, of_out));
  Tensor out = new_tensor(sizes, of_out);
  a.x = numbers.const_data_ptr(), a.x_stride = a.inner;
  a.bias = added ? added->const_data_ptr() : nullptr, a.out = out.mutable_data_ptr();
  a.num_threads = pagebinder::num_threads(), a.run = run_parallel;
  if (a.rows > 0) (in_bf16 ? quantized_linear_in_bf16 : quantized_linear_with_vectors)({&a});
  return torch::stable::to(out, dtype);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "fp8_linear", TORCH_BOX(&fp8_linear));
}
