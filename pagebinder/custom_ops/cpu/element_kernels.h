// What the libraries of element types export (build.ELEMENT_PARTS): kernels that are many for each type, so that no
// model waits for types that it does not use. Others find them by name, see binding_elements.h.
#pragma once

#include "linear.h"
#include "qk_write.h"

namespace pagebinder {

// Linear layers in float16, which few models are in.
struct Float16Linear {
  void (*few_rows)(const LinearArgs&);   // up to LINEAR_MOST_VECTOR_ROWS
  void (*many_rows)(const LinearArgs&);
  void (*gate_values)(Activation, f16* gate, const f16* up, int64_t count, int num_threads);
};

}  // namespace pagebinder

#define PAGEBINDER_EXPORT extern "C" __attribute__((visibility("default")))

// Attention, and what comes before it.
PAGEBINDER_EXPORT pagebinder::JobKernel pagebinder_attention_float32();
PAGEBINDER_EXPORT pagebinder::JobKernel pagebinder_attention_bfloat16();
PAGEBINDER_EXPORT pagebinder::JobKernel pagebinder_attention_float16();
PAGEBINDER_EXPORT pagebinder::QkWriteKernel<float> pagebinder_qk_write_float32();
PAGEBINDER_EXPORT pagebinder::QkWriteKernel<pagebinder::bf16> pagebinder_qk_write_bfloat16();
PAGEBINDER_EXPORT pagebinder::QkWriteKernel<pagebinder::f16> pagebinder_qk_write_float16();
PAGEBINDER_EXPORT const pagebinder::Float16Linear* pagebinder_linear_float16();

#undef PAGEBINDER_EXPORT
