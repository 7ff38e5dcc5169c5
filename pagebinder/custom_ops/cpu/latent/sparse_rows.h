// Rows of requests in a paged cache of any layout, for the kernels that read rows here and there.
#pragma once

#include <cstdint>

#include "latent_rows.h"

namespace pagebinder {

// Where a row lies: its page and its number there.
struct RowPlace {
  const uint8_t* page;
  int64_t entry;
};

// Row `i` of request r is row i % n of block table[r][i / n], n = pages.rows.entries.
struct PagedRows {
  LatentPages pages;
  const int32_t* table;  // null: there is no such cache
  int64_t table_stride, max_blocks;

  // False: the row is beyond the table, or its block does not exist.
  PB_INLINE bool find(int64_t request, uint32_t row, RowPlace& place) const {
    const uint32_t n = static_cast<uint32_t>(pages.rows.entries), block = row / n;
    if (block >= max_blocks) return false;
    const int64_t id = table[request * table_stride + block];
    if (id < 0 || id >= pages.num_blocks) return false;
    place = {pages.page(id), row - block * n};
    return true;
  }

  // The bytes of a row, which are not those to the next one where a cache is a view of a larger arena.
  int row_bytes() const {
    const RowLayout& r = pages.rows;
    return r.is_plain() ? r.width * (r.kind == RowKind::F32 ? 4 : 2) : static_cast<int>(r.row_bytes);
  }

  PB_INLINE void ask_for(const RowPlace& place) const {
    prefetch(place.page + pages.rows.row_at(place.entry), row_bytes());
  }
};

// ---- decoding: quantised rows become bfloat16, which loses something for FP8_V32 only ----------------------------

#if defined(__AVX512BW__) && defined(__AVX512F__)
// E4M3 by table: magnitudes 0..127 as bfloat16, 0x7f is NaN.
struct E4m3Table {
  uint16_t words[128];
  E4m3Table() {
    for (uint32_t code = 0; code < 128; ++code)
      words[code] = static_cast<uint16_t>(bit_cast<uint32_t>(decode_e4m3(VU{} + code)[0]) >> 16);
  }
};

// 32 codes at a time, as words whose exponents are raised by `e`; `e` must leave all results normal.
class E4m3Decoder {
 public:
  E4m3Decoder() {
    static const E4m3Table table;
    for (int i = 0; i < 4; ++i) table_[i] = _mm512_loadu_si512(table.words + 32 * i);
  }
  PB_INLINE __m512i decode(const uint8_t* codes, int e) const {
    const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
    const __m512i low = _mm512_permutex2var_epi16(table_[0], magnitude, table_[1]);
    const __m512i high = _mm512_permutex2var_epi16(table_[2], magnitude, table_[3]);
    const __m512i value = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40)), low, high);
    // Zero and NaN have no exponent to raise.
    const __m512i before = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1));
    const __mmask32 scales = _mm512_cmplt_epu16_mask(before, _mm512_set1_epi16(0x7e));
    const __m512i raise = _mm512_set1_epi16(static_cast<int16_t>(e * 128));
    const __m512i scaled = _mm512_mask_add_epi16(value, scales, value, raise);
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0x80)), 8);
    return _mm512_or_si512(scaled, sign);
  }

 private:
  __m512i table_[4];
};

// Magnitudes of E4M3 lie between 2^-9 and 2^9.
inline bool leaves_normal(int e) { return e > -110 && e < 110; }

// The E4M3 part of a row by table. False: nothing is written, a scale is extreme or it is no power of two.
inline bool decode_powers(const RowLayout& layout, const uint8_t* from, const uint8_t* scales, bf16* out) {
  if (layout.nope % 32 != 0) return false;
  const bool index = layout.kind == RowKind::FP8_INDEX;
  const int block = index ? layout.nope : V4_BLOCK;
  int exponents[64];
  if (layout.nope > block * 64) return false;
  for (int i = 0; i * block < layout.nope; ++i) {
    exponents[i] = (index ? static_cast<int>(load<uint32_t>(scales) >> 23) : scales[i]) - 127;
    if (!leaves_normal(exponents[i]) || (index && load<uint32_t>(scales) << 9 != 0)) return false;
  }
  const E4m3Decoder decoder;
  for (int i = 0; i < layout.nope; i += 32)
    _mm512_storeu_si512(out + i, decoder.decode(from + i, exponents[i / block]));
  return true;
}
#else
inline bool decode_powers(const RowLayout&, const uint8_t*, const uint8_t*, bf16*) { return false; }
#endif

inline void decode_place(const RowLayout& layout, const RowPlace& place, float* to) {
  decode_row(layout, place.page, place.entry, to);
  if (layout.kind == RowKind::FP8_V32) round_row(layout, to);
}

inline void decode_place(const RowLayout& layout, const RowPlace& place, bf16* to) {
  const uint8_t* from = place.page + layout.row_at(place.entry);
  if (layout.kind == RowKind::BF16) {
    std::memcpy(to, from, layout.width * sizeof(bf16));
    return;
  }
  const bool powers = layout.kind == RowKind::FP8_V4 || layout.kind == RowKind::FP8_INDEX;
  if (powers && decode_powers(layout, from, place.page + layout.scales_at(place.entry), to))
    std::memcpy(to + layout.nope, from + layout.nope, layout.rope * sizeof(bf16));
  else decode_row(layout, place.page, place.entry, to);
}

// ---- positions -------------------------------------------------------------------------------------------------

// Floor of (p + 1) / ratio: entries that a query at p >= -1 sees.
inline int64_t visible_entries(int64_t p, int64_t ratio) { return p < 0 ? 0 : (p + 1) / ratio; }

}  // namespace pagebinder
