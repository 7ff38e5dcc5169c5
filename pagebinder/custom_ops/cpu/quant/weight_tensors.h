// What bindings of quantised linear layers share: a weight's tensors, checked and described as the kernels want them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <vector>

#include "checks.h"
#include "quantized_linear.h"
#include "thread_pool.h"

namespace pagebinder {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t FP8_BLOCK = 128;

inline bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

// How many weights of a row share a scale in "int4_g64", "int8_g64" or, with a shift, "uint4_g64"; 0: it is no such format.
inline int64_t group_of_integers(const std::string& format) {
  for (const char* kind : {"int4_g", "uint4_g", "int8_g", "uint8_g"})
    for (const int64_t group : {16, 32, 64, 128})
      if (format == kind + std::to_string(group)) return group;
  for (const char* kind : {"int6_g", "uint6_g"})
    for (const int64_t group : {16, 32})
      if (format == kind + std::to_string(group)) return group;
  return 0;
}

// Fills in what the format says about codes and scales; throws if the tensors are not of such a format. Of a stack, whose
// tensors have a dimension in front (`stacked` is 1, else 0), that is what it says about the first weight.
inline void describe_weight(const Tensor& qweight, const Tensor& scale, const std::string& format,
                            QuantizedLinearArgs& a, int64_t stacked = 0) {
  const bool is_shifted = starts_with(format, "uint");
  const bool is_nvfp4 = format == "nvfp4", is_nf4 = format == "nf4_g64", is_iq4 = format == "iq4_g32";
  const int64_t group = format == "mxfp4" || is_iq4 ? QUANT_STEP
                        : is_nvfp4                  ? QUANT_HALF_STEP
                        : is_nf4                    ? 64
                                                    : group_of_integers(format);
  const bool known = format == "fp8" || format == "fp8_tensor" || format == "fp8_block" || format == "int8" || group != 0;
  PB_CHECK(known, "unknown format ", format);
  a.code = starts_with(format, "fp8")                          ? Code::FP8
           : format == "mxfp4" || is_nvfp4                     ? Code::FP4
           : is_nf4                                            ? Code::NF4
           : is_iq4                                            ? Code::IQ4
           : format.find("int8") != std::string::npos          ? Code::INT8
           : format.find("int6") != std::string::npos          ? Code::INT6
                                                               : Code::INT4;
  PB_CHECK(qweight.scalar_type() == ScalarType::Byte && qweight.dim() == stacked + 4 && qweight.is_contiguous() &&
               qweight.size(stacked + 2) == 2 && qweight.size(stacked + 3) == a.tile_bytes(),
           "qweight must be contiguous uint8 [N / 32, K / 32, 2, ", a.tile_bytes(), "]");
  const int64_t panels = qweight.size(stacked);
  a.columns = panels * QUANT_PANEL, a.inner = qweight.size(stacked + 1) * QUANT_STEP;
  a.weight = static_cast<const uint8_t*>(qweight.const_data_ptr());
  a.scale = scale.const_data_ptr();
  const ScalarType type = scale.scalar_type();
  a.scale_kind = type == ScalarType::BFloat16 ? ScaleKind::BF16
                 : type == ScalarType::Half   ? ScaleKind::F16
                 : type != ScalarType::Byte   ? ScaleKind::F32
                 : is_nvfp4                   ? ScaleKind::LEVELS_E4M3
                                              : ScaleKind::LEVELS;
  a.scale_group = std::max<int64_t>(a.inner, QUANT_STEP), a.scale_panels = 1;
  std::vector<int64_t> sizes;
  if (format == "fp8_tensor") {
    sizes = {1};
  } else if (format == "fp8_block") {
    sizes = {(a.columns + FP8_BLOCK - 1) / FP8_BLOCK, (a.inner + FP8_BLOCK - 1) / FP8_BLOCK};
    a.scale_group = FP8_BLOCK, a.scale_panels = FP8_BLOCK / QUANT_PANEL;
    a.scale_panel_stride = sizes[1], a.scale_group_stride = 1;
  } else if (group != 0) {
    a.scale_group = group;
    PB_CHECK(a.inner % a.scale_group == 0, "K must be a multiple of ", a.scale_group);
    sizes = {panels, a.inner / a.scale_group, QUANT_PANEL};
    if (is_shifted) sizes.insert(sizes.end() - 1, 2);
    a.scale_is_vector = true, a.is_shifted = is_shifted;
    a.scale_group_stride = is_shifted ? 2 * QUANT_PANEL : QUANT_PANEL;
    a.scale_panel_stride = sizes[1] * a.scale_group_stride;
    a.scale_group_bits = __builtin_ctzll(static_cast<unsigned long long>(group));
    if (has_levels(a.scale_kind)) {
      PB_CHECK(a.inner % LEVEL_SPAN == 0, "K must be a multiple of ", LEVEL_SPAN, " where scales have two levels");
      a.level_bytes = a.number_bytes() + LEVEL_SPAN / group * a.scale_group_stride;
      sizes = {panels, a.inner / LEVEL_SPAN, a.level_bytes};
      a.scale_panel_stride = sizes[1] * sizes[2];
    }
  } else {
    sizes = {a.columns};
    a.scale_is_vector = true, a.scale_panel_stride = QUANT_PANEL;
  }
  bool fits = scale.dim() == stacked + static_cast<int64_t>(sizes.size()) && scale.is_contiguous() &&
              (stacked == 0 || scale.size(0) == qweight.size(0));
  for (size_t i = 0; fits && i < sizes.size(); ++i) fits = scale.size(stacked + i) == sizes[i];
  PB_CHECK(fits && (type == ScalarType::Float || (a.scale_kind != ScaleKind::F32 && group != 0)),
           "scale is not that of a weight [", a.columns, ", ", a.inner, "] in ", format);
}

// The sizes of y for x [..., K], and the number of rows of both.
inline std::vector<int64_t> sizes_of_result(const Tensor& x, QuantizedLinearArgs& a) {
  PB_CHECK(x.dim() > 0 && x.size(x.dim() - 1) == a.inner, "x must be [..., ", a.inner, "]");
  std::vector<int64_t> sizes;
  a.rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) {
    sizes.push_back(x.size(d));
    a.rows *= x.size(d);
  }
  sizes.push_back(a.columns);
  return sizes;
}

}  // namespace pagebinder
