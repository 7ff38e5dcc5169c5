// Tiles of codes -> bf16 pairs for matrix tiles, or floats. Layout: quantized_linear.h.
//
//     FP8   e4m3 without subnormals (they are never stored), so a number is its bits moved into place
//     INT8  two's complement
//     INT4  value + 8
//     INT6  value + 32, of groups of half a step or one
//     FP4   e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
//     NF4   quantiles of a normal distribution, between -1 and 1; pairs are rounded to bf16
//     IQ4   integers between -127 and 113
#pragma once

#include "amx.h"
#include "quantized_linear.h"
#include "small_floats.h"

namespace pagebinder {

constexpr int TILE_COLUMNS = 16;

// Dettmers et al. 2023, QLoRA; the very float32 that bitsandbytes has.
constexpr float NF4_VALUES[16] = {
    -1.0f,                -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
// Of llama.cpp's IQ4_NL and IQ4_XS.
constexpr float IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// What the codes of a table stand for.
template <Code CODE>
constexpr const float (&TABLE)[16] = CODE == Code::FP4 ? E2M1_VALUES : CODE == Code::NF4 ? NF4_VALUES : IQ4_VALUES;

// ---- floats ----------------------------------------------------------------------------------------------------

// Codes of a lane, and lines of a tile.
template <Code CODE>
constexpr int IN_LANE = has_4_bits(CODE) || CODE == Code::INT6 ? 8 : 4;
template <Code CODE>
constexpr int TILE_LINES_OF = QUANT_STEP / IN_LANE<CODE>;

// Lines of 6 bits are those of the lower ones. Where line `line` of a tile, or of half of one, begins, and its upper bits.
template <Code CODE>
constexpr int line_at(int line) {
  return CODE == Code::INT6 ? line / 2 * (tile_bytes_of(CODE) / 2) + line % 2 * 64 : line * 64;
}
constexpr int upper_line_at(int line) { return line / 2 * (tile_bytes_of(Code::INT6) / 2) + 2 * 64; }

// Floats are the codes' values over this. The largest FP8 code, 448, would leave sums of large x no room.
template <Code CODE>
constexpr float FLOAT_UNIT = CODE == Code::FP8 ? 256.0f : 1.0f;

// Code `i` of each lane, in the order of k.
template <Code CODE>
PB_INLINE VF decode_lanes(VU lanes, int i) {
  if constexpr (CODE == Code::INT4) {
    const VU codes = lanes >> (i % 2 * 16 + i / 2 * 4) & 15u;
    return __builtin_convertvector(bit_cast<VI>(codes) - 8, VF);
  } else if constexpr (CODE == Code::FP4) {
    const VU codes = lanes >> (i % 2 * 16 + i / 2 * 4);
    return bit_cast<VF>(bit_cast<VU>(one_of_8(E2M1_VALUES, bit_cast<VI>(codes & 7u))) | (codes & 8u) << 28);
  } else if constexpr (is_of_table(CODE)) {
    return one_of_16(TABLE<CODE>, lanes >> (i % 2 * 16 + i / 2 * 4) & 15u);
  } else {
    const VI top = bit_cast<VI>(lanes << (24 - (i % 2 * 16 + i / 2 * 8)));
    if constexpr (CODE == Code::INT8) return __builtin_convertvector(top >> 24, VF);
    // Where bits belong: the exponent's bias is 7 instead of 127, and zero stays zero.
    return bit_cast<VF>(bit_cast<VU>(top >> 4) & 0x87f00000u) * (0x1p120f / FLOAT_UNIT<CODE>);
  }
}

// The codes of each lane, in the order of k; those of FP8 times 2^-120, as they are only placed, two at a time.
template <Code CODE>
PB_INLINE void place_lanes(VU lanes, VF (&codes)[IN_LANE<CODE>]) {
  if constexpr (CODE == Code::FP8) {
    typedef int16_t Words __attribute__((vector_size(W * 4)));
    const Words upper = bit_cast<Words>(lanes), both[] = {upper << 8, upper};
    PB_UNROLL
    for (int i = 0; i < 2; ++i) {
      const Pair placed = apart(bit_cast<VU>((both[i] >> 4) & static_cast<int16_t>(0x87f0)));
      codes[2 * i] = placed.first, codes[2 * i + 1] = placed.second;
    }
  } else {
    PB_UNROLL
    for (int i = 0; i < IN_LANE<CODE>; ++i) codes[i] = decode_lanes<CODE>(lanes, i);
  }
}

// The codes of vector `v` of line `line` of a tile.
template <Code CODE>
PB_INLINE void place_line(const uint8_t* tile, int line, int v, VF (&codes)[IN_LANE<CODE>]) {
  const VU lanes = load<VU>(tile + line_at<CODE>(line) + v * W * 4);
  if constexpr (CODE == Code::INT6) {
    // Those of this line from bits 0 and 16 on.
    const VU upper = load<VU>(tile + upper_line_at(line) + v * W * 4) >> (line % 2 * 8);
    PB_UNROLL
    for (int i = 0; i < IN_LANE<CODE>; ++i) {
      const VU low = lanes >> (i % 2 * 16 + i / 2 * 4) & 15u, high = upper >> (i % 2 * 16 + i / 2 * 2) & 3u;
      codes[i] = __builtin_convertvector(bit_cast<VI>(low | high << 4) - 32, VF);
    }
  } else {
    place_lanes<CODE>(lanes, codes);
  }
}

// A tile -> floats [32 k][16 columns].
template <Code CODE>
PB_INLINE void decode_tile_to_floats(const uint8_t* from, float* to) {
  for (int line = 0; line < TILE_LINES_OF<CODE>; ++line)
    for (int column = 0; column < TILE_COLUMNS; column += W) {
      VF codes[IN_LANE<CODE>];
      if constexpr (CODE == Code::FP8) {  // not only placed
        const VU lanes = load<VU>(from + line_at<CODE>(line) + column * 4);
        PB_UNROLL
        for (int i = 0; i < IN_LANE<CODE>; ++i) codes[i] = decode_lanes<CODE>(lanes, i);
      } else {
        place_line<CODE>(from, line, column / W, codes);
      }
      PB_UNROLL
      for (int i = 0; i < IN_LANE<CODE>; ++i) store(to + (line * IN_LANE<CODE> + i) * TILE_COLUMNS + column, codes[i]);
    }
}

// Scales of the columns of a panel, for what begins at `k`, as 32 floats.
inline void scales_at(const QuantizedLinearArgs& a, int64_t panel, int64_t k, float* to) {
  PanelScales scales;
  if (a.scale_is_vector) scales = load_scales(a, panel, k);
  else for (VF& each : scales.of) each = splat(static_cast<const float*>(a.scale)[scales_begin(a, panel, k)]);
  for (int v = 0; v < QUANT_PANEL / W; ++v) store(to + v * W, scales.of[v]);
}

inline void scales_of(const QuantizedLinearArgs& a, int64_t panel, int64_t step, float* to) {
  scales_at(a, panel, step * QUANT_STEP, to);
}

// Asks memory for the scales of what begins at `k`: a line for each group, in a stream beside that of the codes.
inline void ask_for_scales(const QuantizedLinearArgs& a, int64_t panel, int64_t k) {
  if (has_levels(a.scale_kind)) return __builtin_prefetch(Levels(a, panel, k).narrow, 0, 2);
  __builtin_prefetch(static_cast<const char*>(a.scale) + scales_begin(a, panel, k) * scale_bytes(a.scale_kind), 0, 2);
}

// ---- bf16 pairs ------------------------------------------------------------------------------------------------

#if PAGEBINDER_BF16_DOT
// Pairs are the codes' values times this.
template <Code CODE>
constexpr float PAIR_FACTOR = CODE == Code::INT8 ? 0x1p24f : 1.0f;

// e4m3 codes in the upper byte of each word -> bf16 times 2^-120: a bias of 7 stands where one of 127 belongs. The smallest
// number becomes 2^-126, which is normal.
PB_INLINE __m512i fp8_pairs_placed(__m512i upper) {
  return _mm512_and_si512(_mm512_srai_epi16(upper, 4), _mm512_set1_epi16(int16_t(0x87f0)));
}

// The same -> bf16: the exponent's bias changes by 120, and zero stays zero.
PB_INLINE __m512i fp8_pairs(__m512i upper) {
  const __m512i placed = fp8_pairs_placed(upper);
  const __mmask32 nonzero = _mm512_test_epi16_mask(placed, _mm512_set1_epi16(0x7ff0));
  return _mm512_mask_add_epi16(placed, nonzero, placed, _mm512_set1_epi16(120 << 7));
}

// int8 in the upper byte of each lane -> float times 2^24; below its upper half there are zeros.
PB_INLINE __m512i int8_float(__m512i upper) { return bit_cast<__m512i>(_mm512_cvtepi32_ps(upper)); }
PB_INLINE __m512i int8_pairs(__m512i even, __m512i odd) {
  return _mm512_or_si512(_mm512_srli_epi32(int8_float(even), 16), int8_float(odd));
}

// Lines of pairs that a line of codes becomes.
template <Code CODE>
constexpr int CODE_LINES = has_4_bits(CODE) ? 4 : 2;

// A line of codes -> lines of pairs. PLACED: of FP8, pairs that are only placed.
template <Code CODE, bool PLACED = false>
PB_INLINE void pairs_of_line(__m512i codes, __m512i (&pairs)[CODE_LINES<CODE>]) {
  if constexpr (CODE == Code::FP8) {
    const __m512i lower = _mm512_slli_epi16(codes, 8);
    pairs[0] = PLACED ? fp8_pairs_placed(lower) : fp8_pairs(lower);
    pairs[1] = PLACED ? fp8_pairs_placed(codes) : fp8_pairs(codes);
  } else if constexpr (CODE == Code::INT8) {
    // Byte 1, or 2, of each lane to its top, zeros below.
    const __m512i lanes = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04000000, 0x08000000, 0x0c000000));
    const __m512i byte_1 = _mm512_add_epi32(lanes, _mm512_set1_epi32(0x01808080));
    const __m512i byte_2 = _mm512_add_epi32(lanes, _mm512_set1_epi32(0x02808080));
    const __m512i top = _mm512_set1_epi32(int32_t(0xff000000));
    pairs[0] = int8_pairs(_mm512_slli_epi32(codes, 24), _mm512_shuffle_epi8(codes, byte_2));
    pairs[1] = int8_pairs(_mm512_shuffle_epi8(codes, byte_1), _mm512_and_si512(codes, top));
  } else {
    // A permutation looks at the lower 5 bits of a word: of two equal halves of a table, bit 4 does not matter.
    constexpr VH INTEGERS = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                             0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    constexpr VH E2M1 = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                         0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    constexpr VH IQ4 = {0xc2fe, 0xc2d0, 0xc2a6, 0xc282, 0xc244, 0xc20c, 0xc1b0, 0xc120,
                        0x3f80, 0x4150, 0x41c8, 0x4218, 0x4254, 0x428a, 0x42b2, 0x42e2};
    constexpr VH NF4 = {0xbf80, 0xbf32, 0xbf06, 0xbeca, 0xbe92, 0xbe3d, 0xbdba, 0x0000,
                        0x3da3, 0x3e25, 0x3e7c, 0x3ead, 0x3ee2, 0x3f10, 0x3f39, 0x3f80};
    constexpr VH VALUES =
        CODE == Code::INT4 ? INTEGERS : CODE == Code::FP4 ? E2M1 : CODE == Code::NF4 ? NF4 : IQ4;
    const __m512i table = _mm512_broadcast_i64x4(bit_cast<__m256i>(VALUES));
    PB_UNROLL
    for (int i = 0; i < 4; ++i)
      pairs[i] = _mm512_permutexvar_epi16(i == 0 ? codes : _mm512_srli_epi16(codes, 4 * i), table);
  }
}

// Calls visit(line, pairs) for the 16 lines of pairs of a tile. AHEAD: how many bytes further codes are asked for, be it
// behind the weight's end.
template <Code CODE, int AHEAD, bool PLACED = false, class Visit>
PB_INLINE void decode_tile(const uint8_t* from, const Visit& visit) {
  PB_UNROLL
  for (int line = 0; line < TILE_LINES_OF<CODE>; ++line) {
    __builtin_prefetch(from + AHEAD + line * 64, 0, 3);
    __m512i pairs[CODE_LINES<CODE>];
    pairs_of_line<CODE, PLACED>(load<__m512i>(from + line * 64), pairs);
    PB_UNROLL
    for (int i = 0; i < CODE_LINES<CODE>; ++i) visit(line * CODE_LINES<CODE> + i, pairs[i]);
  }
}

// A tile -> 16 lines of pairs in memory.
template <Code CODE, int AHEAD, bool PLACED = false>
PB_INLINE void decode_tile_to_pairs(const uint8_t* from, char* to) {
  decode_tile<CODE, AHEAD, PLACED>(from, [to](int line, __m512i pairs) { store(to + line * 64, pairs); });
}
#endif

}  // namespace pagebinder
