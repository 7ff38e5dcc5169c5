// Element types of operands, and which products of the machine the compiler may use: what bindings and kernels both know.
// No intrinsics here, whose header takes longest of all to read.
#pragma once

#include <cstdint>

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define PAGEBINDER_BF16_DOT 1
#else
#define PAGEBINDER_BF16_DOT 0
#endif

#if PAGEBINDER_BF16_DOT && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define PAGEBINDER_AMX 1
#else
#define PAGEBINDER_AMX 0
#endif

namespace pagebinder {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

}  // namespace pagebinder
