// y = x W^T (+ bias) in bf16 on matrix tiles, for few to some hundred rows, from the weight as it lies in memory.
//
//     y^T [column][row]  =  W [column][K]  x  x pairs [K/2][row]
//
// Rows of W are operand A without any packing, so no second copy of a weight exists; x is packed once a call.
#pragma once

#include "attention.h"

namespace pagebinder {

constexpr int LINEAR_GRAIN = 32;  // columns and K must be multiples of this
constexpr int64_t LINEAR_MOST_ROWS = 128;  // beyond, oneDNN is as fast or faster (docs/measurements.md)

struct LinearArgs {
  int64_t rows, columns, inner;
  const void* x;        // [rows, inner] bf16
  int64_t x_stride;
  const void* weight;   // [columns, inner] bf16
  int64_t weight_stride;
  const void* bias;     // [columns] bf16 or null
  void* out;            // [rows, columns] bf16 contiguous
  int num_threads;
  ParallelRun run;
};

// Are the sizes such, and does this machine have tiles?
bool linear_suits_tiles(int64_t rows, int64_t columns, int64_t inner);
void linear_with_tiles(const LinearArgs& args);

}  // namespace pagebinder
