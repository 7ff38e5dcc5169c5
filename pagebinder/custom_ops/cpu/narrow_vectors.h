// The first include of a source whose kernels are written for AVX2: where the machine has AVX-512, everything behind it is
// compiled for vectors of 8 floats all the same, in a namespace of its own, as inline functions of both widths are linked
// into one library. What knows nothing of vectors is shared: threads, and the weights that they ask for ahead.
//
//     #include "narrow_vectors.h"
//     #include "..."
//     namespace pagebinder { bool kernel(const Args&) {...} }      with AVX-512 pagebinder_narrow's
//     #if PAGEBINDER_IS_NARROW
//     #undef pagebinder
//     namespace pagebinder { bool kernel(const Args&) {...} }      which calls that one: both have the same Args, of
//     #endif                                                       numbers and pointers
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX2__) && defined(__FMA__)
#define PAGEBINDER_IS_NARROW 1

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "next_weights.h"

#if defined(__AVX512VNNI__)
#define PAGEBINDER_NARROW_VNNI 1
#endif
// Tells headers which vectors to use; the compiler goes on using all instructions and registers.
#undef __AVX512F__
#undef __AVX512BW__
#undef __AVX512VL__
#undef __AVX512DQ__
#undef __AVX512BF16__
#undef __AVX512FP16__
#undef __AVX512VNNI__
#undef __AMX_TILE__
#undef __AMX_BF16__

namespace pagebinder_narrow {
using namespace ::pagebinder;
}
#define pagebinder pagebinder_narrow
#endif
