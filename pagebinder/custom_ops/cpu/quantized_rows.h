// Rows of a quantised K/V cache: one byte a value, and how attention reads them.
//
//     row   | K: D codes | V: Dv codes | scale of K, of V |     float32; no scales where they are fixed per head
//
// A code is read as its value / UNIT, exactly, whatever float type it becomes: E4M3 is moved into the bits of a half,
// whose exponent counts from another number. UNIT and the scale are one factor, of the scores (K) and weights (V).
#pragma once

#include <type_traits>

#include "attention_scores.h"
#include "simd.h"
#include "small_floats.h"

namespace pagebinder {

struct f8e4m3 { uint8_t bits; };
struct f8e5m2 { uint8_t bits; };
struct i8 { uint8_t bits; };

template <class S>
constexpr bool QUANTISED = std::is_same<S, f8e4m3>::value || std::is_same<S, f8e5m2>::value ||
                           std::is_same<S, i8>::value;
template <class S>
constexpr float UNIT = std::is_same<S, f8e4m3>::value ? 256.0f : 1.0f;

// ---- codes to numbers ------------------------------------------------------------------------------------------

// Two vectors of codes, in neighbouring lanes of 16 bits while they are moved about.
typedef int8_t VS2 __attribute__((vector_size(W * 2)));
typedef int16_t VSH2 __attribute__((vector_size(W * 4)));

#if defined(__AVX512F__) && defined(__AVX512BW__)
PB_INLINE VSH2 widen_signed(VS2 x) { return bit_cast<VSH2>(_mm512_cvtepi8_epi16(bit_cast<__m256i>(x))); }
PB_INLINE Pair halves_to_floats(VSH2 x) {
  const __m512i bits = bit_cast<__m512i>(x);
  return {bit_cast<VF>(_mm512_cvtph_ps(_mm512_castsi512_si256(bits))),
          bit_cast<VF>(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1)))};
}
#elif defined(__AVX2__) && defined(__F16C__)
PB_INLINE VSH2 widen_signed(VS2 x) { return bit_cast<VSH2>(_mm256_cvtepi8_epi16(bit_cast<__m128i>(x))); }
PB_INLINE Pair halves_to_floats(VSH2 x) {
  const __m256i bits = bit_cast<__m256i>(x);
  return {bit_cast<VF>(_mm256_cvtph_ps(_mm256_castsi256_si128(bits))),
          bit_cast<VF>(_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1)))};
}
#else
PB_INLINE VSH2 widen_signed(VS2 x) { return __builtin_convertvector(x, VSH2); }
PB_INLINE Pair halves_to_floats(VSH2 x) {
  f16 halves[2 * W];
  store(halves, x);
  return {load_float(halves), load_float(halves + W)};
}
#endif

// S s eeee mmm of E4M3 -> s 0 eeee mmm 0000000 of a half, and of E5M2 its upper byte.
PB_INLINE Pair decode(f8e4m3, VS2 codes) { return halves_to_floats((widen_signed(codes) << 7) & int16_t(0xbf80)); }
PB_INLINE Pair decode(f8e5m2, VS2 codes) { return halves_to_floats(widen_signed(codes) << 8); }
PB_INLINE Pair decode(i8, VS2 codes) {
  VSB halves[2];
  std::memcpy(halves, &codes, sizeof(codes));
  return {__builtin_convertvector(widen(halves[0]), VF), __builtin_convertvector(widen(halves[1]), VF)};
}

template <class S, class = std::enable_if_t<QUANTISED<S>>>
PB_INLINE VF load_float(const S* p) {
  uint8_t codes[2 * W] = {};
  std::memcpy(codes, p, W);
  return decode(S{}, load<VS2>(codes)).first;
}

// Several vectors at once.
template <class S, int COUNT>
PB_INLINE void load_pairs(const S* p, VF (&x)[COUNT]) {
  PB_UNROLL
  for (int i = 0; i + 1 < COUNT; i += 2) {
    const Pair pair = decode(S{}, load<VS2>(p + i * W));
    x[i] = pair.first, x[i + 1] = pair.second;
  }
  if (COUNT % 2 == 1) x[COUNT - 1] = load_float(p + (COUNT - 1) * W);
}
template <int COUNT> PB_INLINE void load_floats(const f8e4m3* p, VF (&x)[COUNT]) { load_pairs(p, x); }
template <int COUNT> PB_INLINE void load_floats(const f8e5m2* p, VF (&x)[COUNT]) { load_pairs(p, x); }
template <int COUNT> PB_INLINE void load_floats(const i8* p, VF (&x)[COUNT]) { load_pairs(p, x); }

// How dots read codes, see FloatElements.
template <class S>
struct CodeElements : PairedFloats {
  using Key = S;
  static PB_INLINE Pair load_key(const Key* p) { return decode(S{}, load<VS2>(p)); }
};

// Codes have at most 8 significant bits: nothing is lost.
template <class T>
PB_INLINE void store_pair(T* p, Pair x) {
  store_float(p, x.first);
  store_float(p + W, x.second);
}
#if PAGEBINDER_BF16_DOT
PB_INLINE void store_pair(bf16* p, Pair x) {
  store(p, _mm512_cvtne2ps_pbh(bit_cast<__m512>(x.second), bit_cast<__m512>(x.first)));
}
#endif

// ---- rows ------------------------------------------------------------------------------------------------------

// Rows of `width` codes as numbers of another type, `stride` elements apart.
template <class S, class T>
void decode_rows(Rows<S> rows, int num_rows, int width, T* decoded, int64_t stride) {
  for (int k = 0; k < num_rows; ++k, decoded += stride) {
    const S* from = rows[k];
    int d = 0;
    for (; d + 2 * W <= width; d += 2 * W) store_pair(decoded + d, decode(S{}, load<VS2>(from + d)));
    for (; d < width; d += W) {
      const int count = width - d < W ? width - d : W;
      store_float_part(decoded + d, load_float_part(from + d, count), count);
    }
  }
}

// The factors of scores and of weights for each key: `fixed` (K's, V's), or those at the end of its row.
template <class S>
void read_scales(Rows<S> rows, int num_keys, int width, const float* fixed, float* of_k, float* of_v) {
  for (int k = 0; k < num_keys; ++k) {
    float scales[2];
    std::memcpy(scales, fixed != nullptr ? static_cast<const void*>(fixed) : rows[k] + width, sizeof(scales));
    of_k[k] = scales[0] * UNIT<S>;
    of_v[k] = scales[1] * UNIT<S>;
  }
}

}  // namespace pagebinder
