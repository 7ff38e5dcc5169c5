// What the libraries of element types export (build.ELEMENT_PARTS): kernels that are many for each type, so that no
// model waits for types that it does not use. Others find them by name, see binding_elements.h.
#pragma once

#include "attention.h"

#define PAGEBINDER_EXPORT extern "C" __attribute__((visibility("default")))

PAGEBINDER_EXPORT pagebinder::JobKernel pagebinder_attention_float32();
PAGEBINDER_EXPORT pagebinder::JobKernel pagebinder_attention_bfloat16();
PAGEBINDER_EXPORT pagebinder::JobKernel pagebinder_attention_float16();

#undef PAGEBINDER_EXPORT
