// Rows of latent caches: how one entry of a page is encoded and decoded, for every layout of latent/layouts.py.
//
//     kind                 page of n entries                                              quantised together
//     F32 BF16 F16         n rows of `width` elements, `row_bytes` apart                  -
//     FP8_V4     (584 B)   n * [nope e4m3 | rope bf16], then n * [UE8M0 ... 0 to 8 B]     64
//     FP8_V32    (656 B)   n * [nope e4m3 | nope/128 fp32 scales | rope bf16]             128
//     FP8_INDEX  (132 B)   n * [width e4m3], then n fp32 scales that are powers of two    the row
//     FP4_INDEX   (68 B)   n * [width / 2 nibbles, even element low], then n * [UE8M0]    32
//
// How to use it:
//
//     RowLayout rows = plain_rows(RowKind::BF16, width, entries, row_bytes);              // or
//     RowLayout rows = quantised_rows(RowKind::FP8_V4, width, rope, page_bytes);          // entries follow
//     const char* error = rows.problem();                  // null, or why such rows cannot be
//     decode_row(rows, page, entry, out);                  // out [width], float or bf16
//     round_row(rows, row); encode_row(rows, page, entry, row);     // row [width] float
//
// An index query is quantised by the rule of the keys it meets. `encode_fp8` / `encode_fp4` give codes and scales;
// `requantised` gives the values that the codes stand for, for a score in float32.
//
// A page is any address; nothing is assumed about alignment. No function writes behind its row: widths that are
// quantised are multiples of 16 (W is 4, 8 or 16), the others have a tail.
#pragma once

#include "small_floats.h"

namespace pagebinder {

enum class RowKind { F32, BF16, F16, FP8_V4, FP8_V32, FP8_INDEX, FP4_INDEX };

constexpr int V4_BLOCK = 64, V32_BLOCK = 128, FP4_BLOCK = 32;

struct RowLayout {
  RowKind kind;
  int width, nope, rope;   // width = nope + rope; rope channels are kept in bf16 (0 for index and plain rows)
  int64_t entries;         // n
  int64_t row_bytes;       // from one row to the next
  int64_t scale_bytes;     // per entry, behind all rows of the page; 0 if there are none there

  bool is_plain() const { return kind == RowKind::F32 || kind == RowKind::BF16 || kind == RowKind::F16; }
  int64_t row_at(int64_t entry) const { return entry * row_bytes; }
  int64_t scales_at(int64_t entry) const { return entries * row_bytes + entry * scale_bytes; }

  // Null, or why such rows cannot be.
  const char* problem() const {
    if (width <= 0 || rope < 0 || nope <= 0) return "a row must be wider than its rope_dim";
    if (entries <= 0) return "a page must hold at least one entry";
    if (rope % 2 != 0) return "rope_dim must be even";
    if (kind == RowKind::FP8_V4 && nope % V4_BLOCK != 0) return "fp8_v4 needs width - rope_dim in multiples of 64";
    if (kind == RowKind::FP8_V32 && nope % V32_BLOCK != 0) return "fp8_v32 needs width - rope_dim in multiples of 128";
    if (kind == RowKind::FP8_INDEX && (rope != 0 || width % 16 != 0))
      return "fp8_index needs a width in multiples of 16 and rope_dim 0";
    if (kind == RowKind::FP4_INDEX && (rope != 0 || width % FP4_BLOCK != 0))
      return "fp4_index needs a width in multiples of 32 and rope_dim 0";
    return nullptr;
  }
};

inline RowLayout plain_rows(RowKind kind, int width, int64_t entries, int64_t row_bytes) {
  return {kind, width, width, 0, entries, row_bytes, 0};
}

inline RowLayout quantised_rows(RowKind kind, int width, int rope, int64_t page_bytes) {
  RowLayout r{kind, width, width - rope, rope, 0, 0, 0};
  switch (kind) {
    case RowKind::FP8_V4:
      r.row_bytes = r.nope + 2 * rope;
      r.scale_bytes = (r.nope / V4_BLOCK + 7) / 8 * 8;
      break;
    case RowKind::FP8_V32: r.row_bytes = r.nope + r.nope / V32_BLOCK * 4 + 2 * rope; break;
    case RowKind::FP8_INDEX:
      r.row_bytes = width;
      r.scale_bytes = 4;
      break;
    case RowKind::FP4_INDEX:
      r.row_bytes = width / 2;
      r.scale_bytes = width / FP4_BLOCK;
      break;
    default: break;
  }
  const int64_t entry_bytes = r.row_bytes + r.scale_bytes;
  r.entries = entry_bytes > 0 ? page_bytes / entry_bytes : 0;
  return r;
}

// ---- blocks ----------------------------------------------------------------------------------------------------

// x [count] * factor -> e4m3. count is a multiple of 16.
inline void scale_to_e4m3(const float* x, int count, float factor, uint8_t* out) {
  for (int i = 0; i < count; i += W) store_e4m3(out + i, load<VF>(x + i) * factor);
}

// One block by the UE8M0 rule; returns e, its scale is 2^e.
inline int encode_fp8(const float* x, int count, uint8_t* out) {
  const int e = fp8_exponent(largest_magnitude(x, count));
  scale_to_e4m3(x, count, inverse_power(e), out);
  return e;
}

// One block of 32 to 16 bytes; returns the UE8M0 byte.
inline uint8_t encode_fp4(const float* x, uint8_t* out) {
  const float amax = largest_magnitude(x, FP4_BLOCK);
  uint32_t codes[FP4_BLOCK];
  const bool finite = amax == amax;
  const int e = finite ? fp4_exponent(amax) : 0;
  for (int i = 0; i < FP4_BLOCK; i += W) store(codes + i, encode_e2m1(load<VF>(x + i) * inverse_power(e)));
  for (int i = 0; i < FP4_BLOCK; i += 2) out[i / 2] = static_cast<uint8_t>(codes[i] | codes[i + 1] << 4);
  return finite ? static_cast<uint8_t>(e + 127) : 255;
}

template <class Out>
inline void decode_fp8(const uint8_t* codes, int count, float scale, Out* out) {
  for (int i = 0; i < count; i += W) store_float(out + i, load_e4m3(codes + i) * scale);
}

template <class Out>
inline void decode_fp4(const uint8_t* codes, float scale, Out* out) {
  float values[FP4_BLOCK];
  for (int i = 0; i < FP4_BLOCK / 2; ++i) {
    values[2 * i] = E2M1_VALUES[codes[i] & 15];
    values[2 * i + 1] = E2M1_VALUES[codes[i] >> 4];
  }
  for (int i = 0; i < FP4_BLOCK; i += W) store_float(out + i, load<VF>(values + i) * scale);
}

template <class To, class From>
inline void convert_elements(const From* from, int count, To* to) {
  int i = 0;
  for (; i + W <= count; i += W) store_float(to + i, load_float(from + i));
  if (i < count) store_float_part(to + i, load_float_part(from + i, count - i), count - i);
}

// ---- rows ------------------------------------------------------------------------------------------------------

// What is quantised is rounded to bfloat16 before; plain rows are rounded when they are stored.
inline void round_row(const RowLayout& r, float* row) {
  if (r.is_plain()) return;
  int i = 0;
  for (; i + W <= r.width; i += W) store(row + i, through_bf16(load<VF>(row + i)));
  for (; i < r.width; ++i) row[i] = through_bf16(row[i]);
}

// row [width], already rounded, into its place.
inline void encode_row(const RowLayout& r, uint8_t* page, int64_t entry, const float* row) {
  uint8_t* to = page + r.row_at(entry);
  uint8_t* scales = page + r.scales_at(entry);
  switch (r.kind) {
    case RowKind::F32: convert_elements(row, r.width, reinterpret_cast<float*>(to)); break;
    case RowKind::BF16: convert_elements(row, r.width, reinterpret_cast<bf16*>(to)); break;
    case RowKind::F16: convert_elements(row, r.width, reinterpret_cast<f16*>(to)); break;
    case RowKind::FP8_V4:
      std::memset(scales, 0, r.scale_bytes);
      for (int i = 0; i < r.nope; i += V4_BLOCK)
        scales[i / V4_BLOCK] = static_cast<uint8_t>(encode_fp8(row + i, V4_BLOCK, to + i) + 127);
      convert_elements(row + r.nope, r.rope, reinterpret_cast<bf16*>(to + r.nope));
      break;
    case RowKind::FP8_V32: {
      uint8_t* scale_at = to + r.nope;
      for (int i = 0; i < r.nope; i += V32_BLOCK, scale_at += 4) {
        float scale = largest_magnitude(row + i, V32_BLOCK) / E4M3_MAX;
        if (scale < 0x1p-126f) scale = 0x1p-126f;
        for (int j = i; j < i + V32_BLOCK; j += W) store_e4m3(to + j, load<VF>(row + j) / scale);
        std::memcpy(scale_at, &scale, 4);
      }
      convert_elements(row + r.nope, r.rope, reinterpret_cast<bf16*>(scale_at));
      break;
    }
    case RowKind::FP8_INDEX: {
      const float scale = power_of_two(encode_fp8(row, r.width, to));
      std::memcpy(scales, &scale, 4);
      break;
    }
    case RowKind::FP4_INDEX:
      for (int i = 0; i < r.width; i += FP4_BLOCK) scales[i / FP4_BLOCK] = encode_fp4(row + i, to + i / 2);
      break;
  }
}

// Entry of a page -> out [width], float or bf16.
template <class Out>
inline void decode_row(const RowLayout& r, const uint8_t* page, int64_t entry, Out* out) {
  const uint8_t* from = page + r.row_at(entry);
  const uint8_t* scales = page + r.scales_at(entry);
  switch (r.kind) {
    case RowKind::F32: convert_elements(reinterpret_cast<const float*>(from), r.width, out); break;
    case RowKind::BF16: convert_elements(reinterpret_cast<const bf16*>(from), r.width, out); break;
    case RowKind::F16: convert_elements(reinterpret_cast<const f16*>(from), r.width, out); break;
    case RowKind::FP8_V4:
      for (int i = 0; i < r.nope; i += V4_BLOCK)
        decode_fp8(from + i, V4_BLOCK, decode_ue8m0(scales[i / V4_BLOCK]), out + i);
      convert_elements(reinterpret_cast<const bf16*>(from + r.nope), r.rope, out + r.nope);
      break;
    case RowKind::FP8_V32: {
      const uint8_t* scale_at = from + r.nope;
      for (int i = 0; i < r.nope; i += V32_BLOCK, scale_at += 4)
        decode_fp8(from + i, V32_BLOCK, load<float>(scale_at), out + i);
      convert_elements(reinterpret_cast<const bf16*>(scale_at), r.rope, out + r.nope);
      break;
    }
    case RowKind::FP8_INDEX: decode_fp8(from, r.width, load<float>(scales), out); break;
    case RowKind::FP4_INDEX:
      for (int i = 0; i < r.width; i += FP4_BLOCK)
        decode_fp4(from + i / 2, decode_ue8m0(scales[i / FP4_BLOCK]), out + i);
      break;
  }
}

// The values that an index query [width] keeps when it is quantised like the keys; `row` is rounded to bf16 before.
inline void requantised(const RowLayout& keys, float* row) {
  round_row(keys, row);
  uint8_t codes[V32_BLOCK];
  if (keys.kind == RowKind::FP4_INDEX) {
    for (int i = 0; i < keys.width; i += FP4_BLOCK) decode_fp4(codes, decode_ue8m0(encode_fp4(row + i, codes)), row + i);
  } else if (keys.kind == RowKind::FP8_INDEX) {
    const float amax = largest_magnitude(row, keys.width);
    const int e = fp8_exponent(amax);
    for (int i = 0; i < keys.width; i += W)
      store(row + i, decode_e4m3(encode_e4m3(load<VF>(row + i) * inverse_power(e))) * power_of_two(e));
  }
}

// ---- a cache of pages ------------------------------------------------------------------------------------------

struct LatentPages {
  RowLayout rows;
  uint8_t* base;
  int64_t num_blocks, block_bytes;  // from one page to the next

  uint8_t* page(int64_t block) const { return base + block * block_bytes; }
};

// Numbers of any float type.
struct FloatData {
  RowKind type;  // F32, BF16 or F16
  const void* base;

  void to_float(int64_t offset, int count, float* out) const {
    if (type == RowKind::F32) convert_elements(static_cast<const float*>(base) + offset, count, out);
    else if (type == RowKind::BF16) convert_elements(static_cast<const bf16*>(base) + offset, count, out);
    else convert_elements(static_cast<const f16*>(base) + offset, count, out);
  }
};

}  // namespace pagebinder
