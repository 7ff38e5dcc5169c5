// LayerNorm of rows, alone and of a sum: custom_ops/norm/layer_norm.py.
#pragma once

#include "rms_norm.h"

namespace pagebinder {

template <class T>
struct LayerNormArgs {
  RowsOf<T> x, residual;                         // residual.data: null if nothing is added
  T* total;                                      // [rows, columns], of x + residual
  const void *weight, *bias;                     // [columns] or null
  bool wide_weight, wide_bias;                   // they are float32, else T
  float eps;
  T* out;                                        // [rows, columns]
  int64_t rows, columns;
  int num_threads;
};

template <class T>
void layer_norm(const LayerNormArgs<T>& args);

}  // namespace pagebinder
