// Tensors of latent caches for bindings: checks them and describes them as the kernels want it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>

#include "checks.h"
#include "latent_rows.h"

namespace pagebinder {

inline RowKind float_kind(const torch::stable::Tensor& t, const char* name) {
  using torch::headeronly::ScalarType;
  if (t.scalar_type() == ScalarType::Float) return RowKind::F32;
  if (t.scalar_type() == ScalarType::BFloat16) return RowKind::BF16;
  PB_CHECK(t.scalar_type() == ScalarType::Half, name, " must be float32, bfloat16 or float16");
  return RowKind::F16;
}

inline bool has_dense_rows(const torch::stable::Tensor& t) {
  return t.numel() == 0 || t.size(t.dim() - 1) == 1 || t.stride(t.dim() - 1) == 1;
}

inline RowKind layout_kind(const std::string& layout) {
  if (layout == "fp8_v4") return RowKind::FP8_V4;
  if (layout == "fp8_v32") return RowKind::FP8_V32;
  if (layout == "fp8_index") return RowKind::FP8_INDEX;
  PB_CHECK(layout == "fp4_index", "unknown layout ", layout);
  return RowKind::FP4_INDEX;
}

// cache [N, n, width] of a float type (layout "plain") or [N, page bytes] uint8; throws what does not fit.
inline LatentPages latent_pages(const torch::stable::Tensor& cache, const std::string& layout, int64_t width,
                            int64_t rope_dim) {
  LatentPages pages{};
  PB_CHECK(cache.dim() >= 2 && has_dense_rows(cache), "the last stride of cache must be 1");
  if (layout == "plain") {
    PB_CHECK(cache.dim() == 3, "a plain cache is [N, n, D] of a float type");
    PB_CHECK(cache.size(2) == width, "a cache row is ", cache.size(2), " wide, not ", width);
    const RowKind kind = float_kind(cache, "a plain cache");
    const int64_t element_bytes = static_cast<int64_t>(cache.element_size());
    pages.rows = plain_rows(kind, static_cast<int>(width), cache.size(1), cache.stride(1) * element_bytes);
    pages.block_bytes = cache.stride(0) * element_bytes;
  } else {
    const RowKind kind = layout_kind(layout);
    PB_CHECK(cache.dim() == 2 && cache.scalar_type() == torch::headeronly::ScalarType::Byte, "an ", layout,
             " cache is [N, page bytes] uint8");
    pages.rows = quantised_rows(kind, static_cast<int>(width), static_cast<int>(rope_dim), cache.size(1));
    pages.block_bytes = cache.stride(0);
  }
  const char* problem = pages.rows.problem();
  PB_CHECK(problem == nullptr, problem);
  pages.base = static_cast<uint8_t*>(cache.mutable_data_ptr());
  pages.num_blocks = cache.size(0);
  return pages;
}

}  // namespace pagebinder
