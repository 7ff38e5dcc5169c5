// Rows of what parts of a tile's keys, or calls over some of the keys, leave behind.
#pragma once

#include "attention.h"
#include "simd.h"

namespace pagebinder {

// Floats of one row of a part: maximum, sum, output padded to whole vectors.
inline int64_t partial_row_floats(const AttentionArgs& args) { return 2 + (args.head_dim_v + W - 1) / W * W; }

}  // namespace pagebinder
