// The likeliest token of a row of logits.
#pragma once

#include <cstdint>

namespace pagebinder {

// The first of the largest of x [vocab]; -1 if there is a NaN.
template <class T> int64_t first_largest(const T* x, int64_t vocab);

}  // namespace pagebinder
