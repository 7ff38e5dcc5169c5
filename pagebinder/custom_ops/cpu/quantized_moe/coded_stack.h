// The weights of all experts of one projection, in 8, 6 or 4 bits: codes and scales as quant/quantized_linear.h has them,
// one expert's behind the other's. Only those of experts that some row goes to are read.
#pragma once

#include "moe/moe.h"
#include "quant/quantized_linear.h"

namespace pagebinder {

struct CodedStack {
  QuantizedLinearArgs first;       // of the first expert, without rows and result
  int64_t code_bytes, scale_bytes; // from expert to expert
  int64_t pass;                    // a number that no other pass over a model's experts has (coded_engine.h)

  QuantizedLinearArgs of(int expert) const {
    QuantizedLinearArgs a = first;
    a.weight += expert * code_bytes;
    a.scale = static_cast<const char*>(a.scale) + expert * scale_bytes;
    return a;
  }
};

// moe_experts with codes in both projections, whatever the element type of x.
void quantized_moe_experts(const MoeArgs& args);

// In bf16 on BF16 dots; false, and nothing was done, where the machine has none.
bool quantized_moe_experts_with_dots(const MoeArgs& args);

// In bf16, codes of int4, int6 and int8, on integer products of 16 bits; false, and nothing was done, where the machine
// has better ones, and for other codes.
bool quantized_moe_experts_with_integers(const MoeArgs& args);

}  // namespace pagebinder
