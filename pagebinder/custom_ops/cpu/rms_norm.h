// RMSNorm of rows, alone and of a sum: custom_ops/norm/rms_norm.py.
#pragma once

#include "qk_write.h"

namespace pagebinder {

// A tensor [rows, columns] whose rows are `stride` elements apart.
template <class T>
struct RowsOf {
  const T* data;
  int64_t stride;
  const T* operator[](int64_t row) const { return data + row * stride; }
};

template <class T>
struct NormRows {
  RowsOf<T> x, residual;  // residual.data: null if nothing is added
  T* total;               // [rows, columns], of x + residual
  NormTail tail;
  const void* weight;     // [columns] or null
  bool wide_weight;       // it is float32, else T
  float eps;
};

// out [count, columns]: T, or float32 where a float32 weight widens the product (tail CAST_SCALE).
template <class T, class Out>
void rms_norm(const NormRows<T>& rows, int64_t count, int64_t columns, Out* out, int num_threads);

}  // namespace pagebinder
