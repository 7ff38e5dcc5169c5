// Portable SIMD on compiler vector extensions: one source for AVX-512, AVX2, NEON and plain SSE2.
//
// VF is a vector of W floats, VI one of W int32. Only conversions and BF16 dot products use intrinsics, and each
// has a generic form, so `-march=x86-64` compiles the same kernels.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "elements.h"

namespace pagebinder {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float VF __attribute__((vector_size(W * 4)));
typedef int32_t VI __attribute__((vector_size(W * 4)));
typedef uint32_t VU __attribute__((vector_size(W * 4)));
typedef uint16_t VH __attribute__((vector_size(W * 2)));
typedef uint8_t VB __attribute__((vector_size(W)));
typedef int8_t VSB __attribute__((vector_size(W)));

#define PB_UNROLL _Pragma("GCC unroll 16")
#define PB_INLINE inline __attribute__((always_inline))

template <class To, class From>
PB_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class V, class P>
PB_INLINE V load(const P* address) {
  V value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}

template <class V, class P>
PB_INLINE void store(P* address, V value) {
  std::memcpy(address, &value, sizeof(value));
}

struct Pair { VF first, second; };

PB_INLINE VF splat(float x) { return x - VF{}; }
PB_INLINE VI splat_int(int32_t x) { return x - VI{}; }
PB_INLINE VF select(VI mask, VF yes, VF no) { return mask ? yes : no; }
// Of both: b if one of them is no number.
#if defined(__AVX512F__)
PB_INLINE VF max(VF a, VF b) { return bit_cast<VF>(_mm512_max_ps(bit_cast<__m512>(a), bit_cast<__m512>(b))); }
PB_INLINE VF min(VF a, VF b) { return bit_cast<VF>(_mm512_min_ps(bit_cast<__m512>(a), bit_cast<__m512>(b))); }
#else
PB_INLINE VF max(VF a, VF b) { return a > b ? a : b; }
PB_INLINE VF min(VF a, VF b) { return a < b ? a : b; }
#endif

// base[index] of each lane.
PB_INLINE VF gather(const float* base, VI index) {
#if defined(__AVX512F__)
  return bit_cast<VF>(_mm512_i32gather_ps(bit_cast<__m512i>(index), base, 4));
#else
  VF x;
  for (int lane = 0; lane < W; ++lane) x[lane] = base[index[lane]];
  return x;
#endif
}

// table[index] of each lane, index 0 .. 7.
PB_INLINE VF one_of_8(const float* table, VI index) {
#if defined(__AVX512F__)
  const __m512 twice = _mm512_broadcast_f32x8(_mm256_loadu_ps(table));
  return bit_cast<VF>(_mm512_permutexvar_ps(bit_cast<__m512i>(index), twice));
#elif defined(__AVX2__)
  return bit_cast<VF>(_mm256_permutevar8x32_ps(_mm256_loadu_ps(table), bit_cast<__m256i>(index)));
#else
  return gather(table, index);
#endif
}

// table[index] of each lane, index 0 .. 15.
PB_INLINE VF one_of_16(const float* table, VU index) {
#if defined(__AVX512F__)
  return bit_cast<VF>(_mm512_permutexvar_ps(bit_cast<__m512i>(index), _mm512_loadu_ps(table)));
#elif defined(__AVX2__)
  const __m256 lower = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), bit_cast<__m256i>(index));
  const __m256 upper = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), bit_cast<__m256i>(index));
  return bit_cast<VF>(_mm256_blendv_ps(lower, upper, bit_cast<__m256>(index << 28)));
#else
  return gather(table, bit_cast<VI>(index));
#endif
}

// Keeps a product from being merged with the addition behind it, which would round once instead of twice.
PB_INLINE VF unfused(VF x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

// sum += a * b, where sum is: if sums take nearly all registers, compilers that move them about spill some.
PB_INLINE void add_product(VF& sum, VF a, VF b) {
#if defined(__FMA__) && defined(__AVX2__) && !defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
  sum += a * b;
#endif
}

// Asks for the cache lines of `count` elements.
template <class T>
PB_INLINE void prefetch(const T* p, int count) {
  const char* bytes = reinterpret_cast<const char*>(p);
  const int length = count * static_cast<int>(sizeof(T));
  for (int i = 0; i < length; i += 64) __builtin_prefetch(bytes + i, 0, 3);
}

// ---- conversions -----------------------------------------------------------------------------------------

// The generic conversions take several instructions with some compilers, those of bytes some of each lane. Words to be
// narrowed have no bits above 16; bytes are the lowest of words.
#if defined(__AVX512F__)
PB_INLINE VU widen(VH x) { return bit_cast<VU>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(x))); }
PB_INLINE VH narrow(VU x) { return bit_cast<VH>(_mm512_cvtepi32_epi16(bit_cast<__m512i>(x))); }
PB_INLINE VU widen(VB x) { return bit_cast<VU>(_mm512_cvtepu8_epi32(bit_cast<__m128i>(x))); }
PB_INLINE VI widen(VSB x) { return bit_cast<VI>(_mm512_cvtepi8_epi32(bit_cast<__m128i>(x))); }
PB_INLINE VB low_bytes(VU x) { return bit_cast<VB>(_mm512_cvtepi32_epi8(bit_cast<__m512i>(x))); }
#elif defined(__AVX2__)
PB_INLINE VU widen(VH x) { return bit_cast<VU>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(x))); }
PB_INLINE VH narrow(VU x) {
  const __m256i wide = bit_cast<__m256i>(x);
  return bit_cast<VH>(_mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}
PB_INLINE VU widen(VB x) { return bit_cast<VU>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bit_cast<int64_t>(x)))); }
PB_INLINE VI widen(VSB x) { return bit_cast<VI>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bit_cast<int64_t>(x)))); }
PB_INLINE VB low_bytes(VU x) {
  const __m128i words = bit_cast<__m128i>(narrow(x & 0xffu));
  return bit_cast<VB>(_mm_cvtsi128_si64(_mm_packus_epi16(words, words)));
}
#else
PB_INLINE VU widen(VH x) { return __builtin_convertvector(x, VU); }
PB_INLINE VH narrow(VU x) { return __builtin_convertvector(x, VH); }
PB_INLINE VU widen(VB x) { return __builtin_convertvector(x, VU); }
PB_INLINE VI widen(VSB x) { return __builtin_convertvector(x, VI); }
PB_INLINE VB low_bytes(VU x) { return __builtin_convertvector(x, VB); }
#endif

#if PAGEBINDER_BF16_DOT
// Pairs (low lane, high lane) of bf16.
PB_INLINE VU pair_lanes(VH low, VH high) {
  const VU to_high = (VU{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}) << 16;
  const __m512i wide = _mm512_castsi256_si512(bit_cast<__m256i>(high));
  return bit_cast<VU>(_mm512_mask_permutexvar_epi16(bit_cast<__m512i>(widen(low)), 0xaaaaaaaau,
                                                    bit_cast<__m512i>(to_high), wide));
}
// Two rows of 2 W bf16 as pairs of a column: in each 128 bits, columns 8i .. 8i+3 in `first` and 8i+4 .. 8i+7 in `second`.
struct ColumnPairs { VU first, second; };
PB_INLINE ColumnPairs pair_columns(VU even, VU odd) {
  return {bit_cast<VU>(_mm512_unpacklo_epi16(bit_cast<__m512i>(even), bit_cast<__m512i>(odd))),
          bit_cast<VU>(_mm512_unpackhi_epi16(bit_cast<__m512i>(even), bit_cast<__m512i>(odd)))};
}
// Columns of W floats each in that order, and back: without constants that would take registers.
PB_INLINE void split_fours(VF& a, VF& b) {
  const __m512 first = bit_cast<__m512>(a), second = bit_cast<__m512>(b);
  a = bit_cast<VF>(_mm512_shuffle_f32x4(first, second, 0x88));
  b = bit_cast<VF>(_mm512_shuffle_f32x4(first, second, 0xdd));
}
PB_INLINE void join_fours(VF& a, VF& b) {
  const __m512 first = bit_cast<__m512>(a), second = bit_cast<__m512>(b);
  const __m512 low = _mm512_shuffle_f32x4(first, second, 0x44), high = _mm512_shuffle_f32x4(first, second, 0xee);
  a = bit_cast<VF>(_mm512_shuffle_f32x4(low, low, 0xd8));
  b = bit_cast<VF>(_mm512_shuffle_f32x4(high, high, 0xd8));
}
// Both as bf16, one after the other.
PB_INLINE VU narrow_both(VF first, VF second) {
  return bit_cast<VU>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(second), bit_cast<__m512>(first)));
}
PB_INLINE VU round_to_pairs(VF low, VF high) {
  const VU from = VU{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001u + 0x100000u;
  return bit_cast<VU>(_mm512_permutexvar_epi16(bit_cast<__m512i>(from), bit_cast<__m512i>(narrow_both(low, high))));
}
#endif

// The upper half of a float32, rounded to nearest even; NaN stays NaN.
PB_INLINE VU round_to_bf16(VF x) {
  VU bits = bit_cast<VU>(x);
  VU rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return bit_cast<VU>(x == x ? bit_cast<VI>(rounded) : bit_cast<VI>(bits | 0x400000u)) & 0xffff0000u;
}

// The same as 16 bits.
PB_INLINE VH to_bf16(VF x) {
#if PAGEBINDER_BF16_DOT && defined(__AVX512DQ__)
  constexpr int SUBNORMAL = 0x20;  // which the instruction takes for zeros; they are rare
  if (__builtin_expect(_mm512_fpclass_ps_mask(bit_cast<__m512>(x), SUBNORMAL) == 0, 1))
    return bit_cast<VH>(_mm512_cvtneps_pbh(bit_cast<__m512>(x)));
#endif
  return narrow(round_to_bf16(x) >> 16);
}

// The same in fewer instructions, if subnormal numbers may become zeros.
PB_INLINE VU round_to_normal_bf16(VF x) {
#if PAGEBINDER_BF16_DOT
  return widen(bit_cast<VH>(_mm512_cvtneps_pbh(bit_cast<__m512>(x)))) << 16;
#else
  return round_to_bf16(x);
#endif
}

// a * b + c, rounded once where the machine can: written out, so that every place rounds alike.
PB_INLINE VF fused(VF a, VF b, VF c) {
#if defined(__AVX512F__)
  return bit_cast<VF>(_mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
#elif defined(__FMA__) && defined(__AVX2__)
  return bit_cast<VF>(_mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

// 1 / x for x from 2^-126 to 2^126: an estimate and a Newton step where a division takes far longer.
PB_INLINE VF reciprocal(VF x) {
#if defined(__AVX512F__)
  const VF estimate = bit_cast<VF>(_mm512_rcp14_ps(bit_cast<__m512>(x)));
  return fused(fused(-x, estimate, splat(1.0f)), estimate, estimate);
#else
  return 1.0f / x;
#endif
}

PB_INLINE VF square_root(VF x) {
#if defined(__AVX512F__)
  return bit_cast<VF>(_mm512_sqrt_ps(bit_cast<__m512>(x)));
#elif defined(__AVX2__)
  return bit_cast<VF>(_mm256_sqrt_ps(bit_cast<__m256>(x)));
#else
  for (int lane = 0; lane < W; ++lane) x[lane] = __builtin_sqrtf(x[lane]);
  return x;
#endif
}

// Half precision by integer arithmetic, for machines without a conversion instruction.
PB_INLINE VF half_to_float_generic(VU h) {
  VU sign = (h & 0x8000u) << 16, rest = (h & 0x7fffu) << 13;
  VF normal = bit_cast<VF>(rest) * splat(0x1p112f);           // exact, also for subnormal halves
  VI special = bit_cast<VI>(rest >= (VU{} + 0x0f800000u));    // infinity and NaN
  VU bits = bit_cast<VU>(special ? bit_cast<VI>(rest | 0x7f800000u) : bit_cast<VI>(normal));
  return bit_cast<VF>(bits | sign);
}

PB_INLINE VU float_to_half_generic(VF x) {
  VU bits = bit_cast<VU>(x), sign = (bits >> 16) & 0x8000u;
  VF magnitude = bit_cast<VF>(bits & 0x7fffffffu);
  VU m = bit_cast<VU>(magnitude);
  VU normal = (m + 0xfffu + ((m >> 13) & 1u) - 0x38000000u) >> 13;
  VU subnormal = bit_cast<VU>(magnitude + splat(0.5f)) - 0x3f000000u;  // the addition rounds to 2^-24
  VI is_small = magnitude < splat(0x1p-14f), is_large = magnitude >= splat(65520.0f), is_nan = x != x;
  VI half = is_small ? bit_cast<VI>(subnormal) : bit_cast<VI>(normal);
  half = is_large ? splat_int(0x7c00) : half;
  half = is_nan ? splat_int(0x7e00) : half;
  return bit_cast<VU>(half) | sign;
}

PB_INLINE VF from_bf16(VH x) { return bit_cast<VF>(widen(x) << 16); }
#if PAGEBINDER_BF16_DOT
// What `narrow_both` makes, as floats again.
PB_INLINE Pair from_both(VU x) {
  const __m512i both = bit_cast<__m512i>(x);
  return {from_bf16(bit_cast<VH>(_mm512_castsi512_si256(both))),
          from_bf16(bit_cast<VH>(_mm512_extracti64x4_epi64(both, 1)))};
}
#endif
PB_INLINE VF from_f16(VH x) {
#if defined(__F16C__) && defined(__AVX512F__)
  return bit_cast<VF>(_mm512_cvtph_ps(bit_cast<__m256i>(x)));
#elif defined(__F16C__) && defined(__AVX2__)
  return bit_cast<VF>(_mm256_cvtph_ps(bit_cast<__m128i>(x)));
#else
  return half_to_float_generic(widen(x));
#endif
}
PB_INLINE VH to_f16(VF x) {
#if defined(__F16C__) && defined(__AVX512F__)
  return bit_cast<VH>(_mm512_cvtps_ph(bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && defined(__AVX2__)
  return bit_cast<VH>(_mm256_cvtps_ph(bit_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
#else
  return narrow(float_to_half_generic(x));
#endif
}

PB_INLINE VF load_float(const float* p) { return load<VF>(p); }
PB_INLINE VF load_float(const bf16* p) { return from_bf16(load<VH>(p)); }
PB_INLINE VF load_float(const f16* p) { return from_f16(load<VH>(p)); }

// Pairs of bf16 as floats, an instruction each: those at even places apart from those at odd ones.
PB_INLINE Pair apart(VU pairs) { return {bit_cast<VF>(pairs << 16), bit_cast<VF>(pairs & 0xffff0000u)}; }

PB_INLINE void store_float(float* p, VF x) { store(p, x); }
PB_INLINE void store_float(bf16* p, VF x) { store(p, to_bf16(x)); }
PB_INLINE void store_float(f16* p, VF x) { store(p, to_f16(x)); }

// First `count` < W elements; the others become zero (load) or are left alone (store).
template <class T>
PB_INLINE VF load_float_part(const T* p, int count) {
  T padded[W] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load_float(padded);
}

template <class T>
PB_INLINE void store_float_part(T* p, VF x, int count) {
  T padded[W];
  store_float(padded, x);
  std::memcpy(p, padded, count * sizeof(T));
}

// ---- elementary functions --------------------------------------------------------------------------------

PB_INLINE VF round_nearest(VF x) {
  const VF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the integer in the low mantissa bits
  return (x + magic) - magic;
}

// 2^f for a fraction in [-0.5, 0.5]: a degree 6 polynomial, fitted for least relative error (about 1e-7).
PB_INLINE VF exp2_fraction(VF f) {
  VF poly = splat(1.53533572e-4f);
  poly = poly * f + splat(1.33988762e-3f);
  poly = poly * f + splat(9.61843739e-3f);
  poly = poly * f + splat(5.55033247e-2f);
  poly = poly * f + splat(2.40226479e-1f);
  poly = poly * f + splat(6.93147203e-1f);
  return poly * f + splat(1.0f);
}

#if defined(__AVX512F__)
// 2^x, from its integer and polynomial(its fraction); 0 below -126, NaN for NaN. Where the result would be subnormal or 0
// nothing is asked of the processor: Intel's takes two hundred cycles then, and hidden keys are such.
template <class Polynomial>
PB_INLINE VF exp2_by(VF x, Polynomial polynomial) {
  const __m512 exponent = bit_cast<__m512>(x), whole = _mm512_roundscale_ps(exponent, _MM_FROUND_TO_NEAREST_INT);
  const __mmask16 normal = _mm512_cmp_ps_mask(exponent, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const VF poly = polynomial(bit_cast<VF>(_mm512_sub_ps(exponent, whole)));
  return bit_cast<VF>(_mm512_maskz_scalef_ps(normal, bit_cast<__m512>(poly), whole));
}
#endif

// 2^x for x <= 127, from its integer and its fraction; 0 for -inf and below -126, NaN for NaN.
PB_INLINE VF exp2_approx(VF x) {
#if defined(__AVX512F__)
  return exp2_by(x, [](VF f) __attribute__((always_inline)) { return exp2_fraction(f); });
#else
  VI underflow = x < splat(-126.0f);
  VF clamped = select(underflow, splat(-126.0f), x);
  VF whole = round_nearest(clamped);
  VF poly = exp2_fraction(clamped - whole);
  VI exponent = (__builtin_convertvector(whole, VI) + 127) << 23;
  return select(underflow, VF{}, poly * bit_cast<VF>(exponent));
#endif
}

// tanh: an odd polynomial near zero (no cancellation), 1 - 2 / (e^2x + 1) elsewhere.
PB_INLINE VF tanh_approx(VF x) {
  VF magnitude = bit_cast<VF>(bit_cast<VU>(x) & 0x7fffffffu);
  VF z = x * x;
  VF poly = splat(-5.70500004e-3f);
  poly = poly * z + splat(2.06391004e-2f);
  poly = poly * z + splat(-5.37397197e-2f);
  poly = poly * z + splat(1.33314423e-1f);
  poly = poly * z + splat(-3.33332820e-1f);
  VF near_zero = x + x * z * poly;
  VF bounded = select(magnitude > splat(20.0f), splat(20.0f), magnitude);
  VF far = 1.0f - 2.0f / (exp2_approx(bounded * 2.885390082f) + 1.0f);
  VF signed_far = bit_cast<VF>(bit_cast<VU>(far) | (bit_cast<VU>(x) & 0x80000000u));
  return select(magnitude < splat(0.625f), near_zero, signed_far);
}

// ---- lane shuffles ---------------------------------------------------------------------------------------

template <int Distance, class V, int... Lane>
PB_INLINE V rotate_lanes(V x, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(x, x, ((Lane + Distance) % W)...);
}
template <int Distance, class V>
PB_INLINE V rotate(V x) {
  return rotate_lanes<Distance>(x, std::make_integer_sequence<int, W>{});
}

// The sum of all lanes of a VF or VI, by halves.
template <int H = W / 2, class V>
PB_INLINE auto sum_of_lanes(V x) {
  x += rotate<H>(x);
  if constexpr (H > 1) return sum_of_lanes<H / 2>(x);
  else return x[0];
}

// result[lane] = a[lane] + a[lane ^ H] where (lane & H) == 0, the same of b elsewhere.
template <int H, int... Lane>
PB_INLINE VF fold_pair(VF a, VF b, std::integer_sequence<int, Lane...>) {
  VF kept = __builtin_shufflevector(a, b, (Lane & H ? Lane + W : Lane)...);
  VF moved = __builtin_shufflevector(a, b, (Lane & H ? (Lane ^ H) + W : (Lane ^ H))...);
  return kept + moved;
}

// Sums the lanes of W vectors: lane i of the result is the sum of x[i]. Destroys x.
template <int H = 1>
PB_INLINE VF sum_lanes(VF* x) {
  constexpr int count = W / H;  // vectors still alive; vector i holds sums of inputs i*H .. i*H+H-1
  for (int i = 0; i < count / 2; ++i)
    x[i] = fold_pair<H>(x[2 * i], x[2 * i + 1], std::make_integer_sequence<int, W>{});
  if constexpr (count > 2) return sum_lanes<2 * H>(x);
  return x[0];
}

// The lanes of a and then b: those at even places into a, at odd ones into b; and back.
template <int... Lane>
PB_INLINE void take_apart(VF& a, VF& b, std::integer_sequence<int, Lane...>) {
  const VF even = __builtin_shufflevector(a, b, (2 * Lane)...);
  b = __builtin_shufflevector(a, b, (2 * Lane + 1)...);
  a = even;
}
template <int... Lane>
PB_INLINE void put_together(VF& a, VF& b, std::integer_sequence<int, Lane...>) {
  const VF first = __builtin_shufflevector(a, b, (Lane / 2 + Lane % 2 * W)...);
  b = __builtin_shufflevector(a, b, (W / 2 + Lane / 2 + Lane % 2 * W)...);
  a = first;
}
PB_INLINE void take_apart(VF& a, VF& b) { take_apart(a, b, std::make_integer_sequence<int, W>{}); }
PB_INLINE void put_together(VF& a, VF& b) { put_together(a, b, std::make_integer_sequence<int, W>{}); }

// Butterfly step of a transposition: exchanges the lanes with bit H of a with those without it of b.
template <int H, int... Lane>
PB_INLINE void exchange_pair(VF& a, VF& b, std::integer_sequence<int, Lane...>) {
  VF first = __builtin_shufflevector(a, b, (Lane & H ? (Lane ^ H) + W : Lane)...);
  b = __builtin_shufflevector(a, b, (Lane & H ? Lane + W : (Lane ^ H))...);
  a = first;
}

// Transposes W vectors of W lanes in place: x[i][j] <-> x[j][i].
template <int H = 1>
PB_INLINE void transpose(VF* x) {
  for (int i = 0; i < W; ++i)
    if (!(i & H)) exchange_pair<H>(x[i], x[i + H], std::make_integer_sequence<int, W>{});
  if constexpr (2 * H < W) transpose<2 * H>(x);
}

// Lane i: the lanes of x[i], added up one after the other. Destroys x.
PB_INLINE VF sum_lanes_in_order(VF* x) {
  transpose(x);
  VF sum = x[0];
  for (int i = 1; i < W; ++i) sum += x[i];
  return sum;
}

}  // namespace pagebinder
