// Registers the quantised linear layer under `pagebinder_cpu`: matrix tiles for bf16, float32 vectors otherwise.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "quantized_linear.h"

namespace {

using pagebinder::Code;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t FP8_BLOCK = 128;

void run_parallel(int num_workers, void (*body)(void*, int), void* context) {
  torch::stable::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(context, static_cast<int>(i));
  });
}

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

// Fills in what the format says about codes and scales; throws if the tensors are not of such a format.
void describe_weight(const Tensor& qweight, const Tensor& scale, const std::string& format,
                     pagebinder::QuantizedLinearArgs& a) {
  const bool known = format == "fp8" || format == "fp8_tensor" || format == "fp8_block" || format == "int8" ||
                     format == "int4_g32" || format == "int4_g64";
  STD_TORCH_CHECK(known, "quantized_linear: unknown format ", format);
  a.code = starts_with(format, "fp8") ? Code::FP8 : format == "int8" ? Code::INT8 : Code::INT4;
  STD_TORCH_CHECK(qweight.scalar_type() == ScalarType::Byte && qweight.dim() == 4 && qweight.is_contiguous() &&
                      qweight.size(2) == 2 && qweight.size(3) == a.tile_bytes(),
                  "quantized_linear: qweight must be contiguous uint8 [N / 32, K / 32, 2, ", a.tile_bytes(), "]");
  const int64_t panels = qweight.size(0);
  a.columns = panels * pagebinder::QUANT_PANEL, a.inner = qweight.size(1) * pagebinder::QUANT_STEP;
  a.weight = static_cast<const uint8_t*>(qweight.const_data_ptr());
  a.scale = scale.const_data_ptr();
  a.scale_is_bf16 = scale.scalar_type() == ScalarType::BFloat16;
  a.scale_group = std::max<int64_t>(a.inner, pagebinder::QUANT_STEP), a.scale_panels = 1;
  std::vector<int64_t> sizes;
  if (format == "fp8_tensor") {
    sizes = {1};
  } else if (format == "fp8_block") {
    sizes = {(a.columns + FP8_BLOCK - 1) / FP8_BLOCK, (a.inner + FP8_BLOCK - 1) / FP8_BLOCK};
    a.scale_group = FP8_BLOCK, a.scale_panels = FP8_BLOCK / pagebinder::QUANT_PANEL;
    a.scale_panel_stride = sizes[1], a.scale_group_stride = 1;
  } else if (a.code == Code::INT4) {
    a.scale_group = format == "int4_g32" ? 32 : 64;
    STD_TORCH_CHECK(a.inner % a.scale_group == 0, "quantized_linear: K must be a multiple of ", a.scale_group);
    sizes = {panels, a.inner / a.scale_group, pagebinder::QUANT_PANEL};
    a.scale_is_vector = true;
    a.scale_panel_stride = sizes[1] * pagebinder::QUANT_PANEL, a.scale_group_stride = pagebinder::QUANT_PANEL;
  } else {
    sizes = {a.columns};
    a.scale_is_vector = true, a.scale_panel_stride = pagebinder::QUANT_PANEL;
  }
  bool fits = scale.dim() == static_cast<int64_t>(sizes.size()) && scale.is_contiguous();
  for (size_t i = 0; fits && i < sizes.size(); ++i) fits = scale.size(i) == sizes[i];
  STD_TORCH_CHECK(fits && (scale.scalar_type() == ScalarType::Float || (a.scale_is_bf16 && a.code == Code::INT4)),
                  "quantized_linear: scale is not that of a weight [", a.columns, ", ", a.inner, "] in ", format);
}

// x [..., K] in float32, bf16 or f16, see quantized_linear.h for the weight -> [..., N]
Tensor quantized_linear(const Tensor& x, const Tensor& qweight, const Tensor& scale, std::optional<Tensor> bias,
                        std::string format) {
  pagebinder::QuantizedLinearArgs a{};
  describe_weight(qweight, scale, format, a);
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(x.dim() > 0 && x.size(x.dim() - 1) == a.inner, "quantized_linear: x must be [..., ", a.inner, "]");
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                  "quantized_linear takes float32, bfloat16 and float16");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == a.columns && bias->scalar_type() == dtype),
                  "quantized_linear: bias must be [", a.columns, "] of x's dtype");
  std::vector<int64_t> sizes;
  a.rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) {
    sizes.push_back(x.size(d));
    a.rows *= x.size(d);
  }
  sizes.push_back(a.columns);
  a.x_stride = a.inner;
  a.num_threads = static_cast<int>(torch::stable::get_num_threads()), a.run = run_parallel;
  const auto run_in = [&](ScalarType type, bool (*run)(const pagebinder::QuantizedLinearArgs&), Tensor& out) {
    const Tensor rows = torch::stable::contiguous(torch::stable::to(x, type));
    std::optional<Tensor> added;
    if (bias) added = torch::stable::contiguous(torch::stable::to(*bias, type));
    out = torch::stable::new_empty(rows, sizes);
    a.x = rows.const_data_ptr(), a.out = out.mutable_data_ptr();
    a.bias = added ? added->const_data_ptr() : nullptr;
    return a.rows == 0 || a.columns == 0 || run(a);
  };
  Tensor out;
  if (dtype == ScalarType::BFloat16 && run_in(dtype, pagebinder::quantized_linear_with_tiles, out)) return out;
  run_in(ScalarType::Float, pagebinder::quantized_linear_with_vectors, out);
  return torch::stable::to(out, dtype);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) { m.impl("quantized_linear", TORCH_BOX(&quantized_linear)); }
