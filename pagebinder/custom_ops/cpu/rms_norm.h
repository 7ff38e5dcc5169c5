// RMSNorm of rows, alone and of a sum: custom_ops/norm/rms_norm.py.
#pragma once

#include "norm_rows.h"

namespace pagebinder {

// out [count, columns]: T, or float32 where a float32 weight widens the product (tail CAST_SCALE).
template <class T, class Out>
void rms_norm(const NormRows<T>& rows, int64_t count, int64_t columns, Out* out, int num_threads);

}  // namespace pagebinder
