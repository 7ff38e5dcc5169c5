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

// The element type of a tensor that is passed on as a pointer.
enum class Element : uint8_t { F32, BF16, F16, BOOL };  // BOOL: of pointwise programs alone

// use(T{}) with its C++ type, which must be one of floats.
template <class Use>
inline __attribute__((always_inline)) auto with_element(Element element, Use&& use) {
  if (element == Element::F32) return use(float{});
  if (element == Element::BF16) return use(bf16{});
  return use(f16{});
}

}  // namespace pagebinder
