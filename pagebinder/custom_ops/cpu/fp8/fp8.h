// Rows of activations -> e4m3 codes and float32 scales: custom_ops/fp8/quant.py, fused.py.
//
//     source of rows            a row in float32, every rounding made           codes and scale of the row
//     PlainRows                 x                                        --+
//     NormRows                  (x + residual,) RMSNorm                  --+--> amax --> x / scale --> e4m3
//     GatedRows                 act(gate) * up                           --+
//
// A row stays in the cache of the core that makes it. What a row becomes depends on that row alone, but for a dynamic
// scale of the whole tensor: then all rows are made twice, once for the largest value.
#pragma once

#include "activations.h"
#include "attention.h"
#include "norm_rows.h"

namespace pagebinder {

enum class Granularity { TENSOR, TOKEN, GROUP };
constexpr int64_t FP8_GROUP = 128;  // values that share a scale of GROUP

struct Fp8Output {
  Granularity granularity;
  int64_t rows, columns;
  uint8_t* codes;     // [rows, columns]
  float* scales;      // [1], [rows] or [rows, ceil(columns / FP8_GROUP)]
  bool is_static;     // TENSOR: the scale is there already
  int num_threads;
  ParallelRun run;
};

template <class T>
struct PlainRows {
  RowsOf<T> x;
};

template <class T>
struct GatedRows {
  RowsOf<T> gate, up;
  Activation activation;
};

template <class Rows>
void quantise(const Fp8Output& out, const Rows& rows);

}  // namespace pagebinder
