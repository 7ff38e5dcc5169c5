// RoPE by itself, where no cache write takes it in: custom_ops/rope/rope.py.
#pragma once

#include <cstdint>

#include "elements.h"

namespace pagebinder::rope {

enum class Style { HALF, CHUNKED, EVERY_TWO, INTERLEAVED, DEINTERLEAVED };

constexpr int MOST_DIMS = 4;  // of x, but for its channels

// A tensor [a, b, c, d, channels], strides of 0 where it is repeated.
struct Operand {
  const void* data;
  Element type;
  int64_t strides[MOST_DIMS], channel_stride;
};

struct Args {
  Style style;
  Operand x, cos, sin;
  int64_t sizes[MOST_DIMS], width;  // width: channels of x
  void* out;                        // contiguous
  Element type;                     // of the result: products and their sum are rounded to it
  int num_threads;
};

void run(const Args& args);

}  // namespace pagebinder::rope
