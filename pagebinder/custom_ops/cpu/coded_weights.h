// bf16 weights in about 12 bits, without loss: 8 bits of sign and fraction as they are, and 4 bits that choose one of
// the 16 most frequent exponents of a block. Weights with another exponent are patched.
//
//     block   16 exponents | number of patches | 8 steps of packed weights (linear.h), in groups of 4 lines | patches
//     group   4 x 32 bytes of sign and fraction | 64 bytes of codes
//
// A line of a tile, 32 weights, is made by four instructions (AVX-512): bytes become words, a shift brings the line's
// codes down, a permutation looks exponents up (it reads 5 bits: both halves of the table are equal, so a neighbour's bit
// does no harm), a ternary operation puts all together. So word i of the codes has those of element i of each line. With
// AVX2 a permutation looks bytes up: halves of exponents, of 32 weights each. Twelve instructions make a line, if byte i of
// a half of the codes has those of two lines, in the order in which bytes of both halves become words. No escape is looked
// for on the way: patches, one in a thousand weights, are written over the decoded block, or over a group whose lines are met in
// registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace pagebinder {

constexpr int CODED_STEPS = 8;                              // of a block
constexpr int CODED_LINES = CODED_STEPS * 32;               // of 32 weights
constexpr int CODED_WEIGHTS = CODED_LINES * 32;
constexpr int CODED_HEADER = 64, CODED_GROUP = 192;         // bytes
constexpr int CODED_BODY = CODED_LINES / 4 * CODED_GROUP;
constexpr int CODED_EXPONENTS = 16;

#if defined(__AVX2__) && !PAGEBINDER_BF16_DOT
constexpr bool CODES_IN_BYTES = true;
// Where an element's byte is, of a line: words are put together in each half of a vector.
constexpr int coded_place(int element) { return (element & 7) | (element & 8) << 1 | (element & 16) >> 1; }
#else
constexpr bool CODES_IN_BYTES = false;
constexpr int coded_place(int element) { return element; }
#endif

struct CodedHeader {
  uint16_t exponents[CODED_EXPONENTS];  // in place: shifted by 7
  uint32_t num_patches;
  uint32_t codes_in_bytes;  // 0 or 1, for who reads codes without knowing what wrote them
};
static_assert(sizeof(CodedHeader) <= CODED_HEADER);

struct CodedPatch {
  uint16_t at, value;
};

constexpr int64_t coded_block_bytes(int64_t most_patches) {
  return (CODED_HEADER + CODED_BODY + most_patches * static_cast<int64_t>(sizeof(CodedPatch)) + 63) / 64 * 64;
}

// The exponents that a block's codes stand for, and how many weights have another one.
struct BlockExponents {
  uint8_t chosen[CODED_EXPONENTS] = {};
  int patches = 0;

  explicit BlockExponents(const uint16_t* weights) {
    uint16_t counts[256] = {};
    for (int i = 0; i < CODED_WEIGHTS; ++i) ++counts[weights[i] >> 7 & 0xff];
    patches = CODED_WEIGHTS;
    for (uint8_t& exponent : chosen) {
      int best = 0;
      for (int e = 1; e < 256; ++e)
        if (counts[e] > counts[best]) best = e;
      exponent = static_cast<uint8_t>(best);
      patches -= counts[best];
      counts[best] = 0;
    }
  }
};

// weights: a block of packed ones. `to` has room for its patches.
inline void encode_block(const uint16_t* weights, uint8_t* to) {
  const BlockExponents exponents(weights);
  CodedHeader header{};
  header.codes_in_bytes = CODES_IN_BYTES;
  int8_t code_of[256];
  std::memset(code_of, -1, sizeof code_of);
  for (int c = CODED_EXPONENTS - 1; c >= 0; --c) {
    header.exponents[c] = static_cast<uint16_t>(exponents.chosen[c] << 7);
    code_of[exponents.chosen[c]] = static_cast<int8_t>(c);
  }
  CodedPatch* patches = reinterpret_cast<CodedPatch*>(to + CODED_HEADER + CODED_BODY);
  std::memset(to + CODED_HEADER, 0, CODED_BODY);
  for (int i = 0; i < CODED_WEIGHTS; ++i) {
    const int line = i / 32, in_group = line % 4, place = coded_place(i % 32);
    uint8_t* group = to + CODED_HEADER + line / 4 * CODED_GROUP;
    const uint16_t w = weights[i];
    const int code = code_of[w >> 7 & 0xff];
    group[in_group * 32 + place] = static_cast<uint8_t>((w >> 8 & 0x80) | (w & 0x7f));
    if (code < 0) patches[header.num_patches++] = {static_cast<uint16_t>(i), w};
    else group[128 + (CODES_IN_BYTES ? in_group / 2 * 32 + place : place * 2 + in_group / 2)] |= static_cast<uint8_t>(code << line % 2 * 4);
  }
  std::memcpy(to, &header, sizeof header);
}

// Decodes a block step by step: 32 k, 1,024 weights, at a time, as a product that runs meanwhile wants them.
class BlockDecoder {
 public:
  static constexpr int GROUP_LINES = 4;

  explicit BlockDecoder(const uint8_t* block) : group_(block + CODED_HEADER) {
    CodedHeader header;
    std::memcpy(&header, block, sizeof header);
    patch_ = reinterpret_cast<const CodedPatch*>(block + CODED_HEADER + CODED_BODY);
    last_patch_ = patch_ + header.num_patches;
#if PAGEBINDER_BF16_DOT
    table_ = _mm512_broadcast_i64x4(load<__m256i>(block));
#elif defined(__AVX2__)
    uint8_t lower[CODED_EXPONENTS], upper[CODED_EXPONENTS];
    for (int c = 0; c < CODED_EXPONENTS; ++c) {
      lower[c] = static_cast<uint8_t>(header.exponents[c] & 0x80);
      upper[c] = static_cast<uint8_t>(header.exponents[c] >> 8);
    }
    lower_ = _mm256_broadcastsi128_si256(load<__m128i>(lower));
    upper_ = _mm256_broadcastsi128_si256(load<__m128i>(upper));
#else
    std::memcpy(table_, header.exponents, sizeof table_);
#endif
  }

  // The next step, packed. AHEAD: how many bytes further codes are asked for, be it behind the weight's end.
  template <int AHEAD>
  PB_INLINE void next(uint16_t* to) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      for (int i = 0; i < QUARTER_BYTES && AHEAD > 0; i += 64) __builtin_prefetch(group_ + AHEAD + i);
      next_quarter(to, quarter);
    }
  }

  // A quarter of the next step, 0 to 3 in turn.
  PB_INLINE void next_quarter(uint16_t* to, int quarter) {
    for (int line = quarter * 8; line < quarter * 8 + 8; line += 4, group_ += CODED_GROUP) decode_group(to + line * 32);
    if (quarter < 3) return;
    done_ += STEP;
    for (; patch_ < last_patch_ && patch_->at < done_; ++patch_) to[patch_->at - (done_ - STEP)] = patch_->value;
  }

#if PAGEBINDER_BF16_DOT
  // The next group, in registers.
  PB_INLINE void next_lines(VU (&lines)[GROUP_LINES]) {
    lines_of_group(lines);
    group_ += CODED_GROUP;
    done_ += GROUP_WEIGHTS;
    if (__builtin_expect(patch_ == last_patch_ || patch_->at >= done_, 1)) return;
    VU kept[GROUP_LINES] = {lines[0], lines[1], lines[2], lines[3]};  // the lines themselves stay where they are
    patch_ = patch(kept, done_ - GROUP_WEIGHTS, patch_, last_patch_);
    PB_UNROLL
    for (int line = 0; line < GROUP_LINES; ++line) lines[line] = kept[line];
  }
#endif

  // The codes that are next.
  PB_INLINE const char* coming() const { return reinterpret_cast<const char*>(group_); }

 private:
  static constexpr int GROUP_WEIGHTS = GROUP_LINES * 32;
  static constexpr int STEP = CODED_WEIGHTS / CODED_STEPS, QUARTER_BYTES = CODED_BODY / CODED_STEPS / 4;

#if PAGEBINDER_BF16_DOT
  // Memory is read in one rising order, which AMD's prefetcher wants: the codes lie behind the rest.
  PB_INLINE void lines_of_group(VU (&lines)[GROUP_LINES]) const {
    constexpr int FIRST_AND_SECOND_OR_THIRD = 0xea;
    __m256i parts[GROUP_LINES];
    PB_UNROLL
    for (int line = 0; line < GROUP_LINES; ++line) {
      parts[line] = load<__m256i>(group_ + line * 32);
      asm volatile("" : "+v"(parts[line]));  // here, not where it is used
    }
    const __m512i codes = load<__m512i>(group_ + 128);
    PB_UNROLL
    for (int line = 0; line < GROUP_LINES; ++line) {
      const __m512i index = line == 0 ? codes : _mm512_srli_epi16(codes, 4 * line);
      lines[line] = bit_cast<VU>(_mm512_ternarylogic_epi32(
          _mm512_cvtepi8_epi16(parts[line]), _mm512_set1_epi16(int16_t(0x807f)),
          _mm512_permutexvar_epi16(index, table_), FIRST_AND_SECOND_OR_THIRD));
    }
  }
  PB_INLINE void decode_group(uint16_t* to) const {
    VU lines[GROUP_LINES];
    lines_of_group(lines);
    PB_UNROLL
    for (int line = 0; line < GROUP_LINES; ++line) store(to + line * 32, lines[line]);
  }
  static __attribute__((noinline)) const CodedPatch* patch(VU* lines, int first, const CodedPatch* patch,
                                                           const CodedPatch* last) {
    for (; patch < last && patch->at < first + GROUP_WEIGHTS; ++patch)
      std::memcpy(reinterpret_cast<char*>(lines) + (patch->at - first) * 2, &patch->value, 2);
    return patch;
  }
  __m512i table_;
#elif defined(__AVX2__)
  PB_INLINE void decode_group(uint16_t* to) const {
    const __m256i nibbles = _mm256_set1_epi8(15), signs = _mm256_set1_epi8(int8_t(0x80));
    PB_UNROLL
    for (int line = 0; line < GROUP_LINES; ++line, to += 32) {
      __m256i codes = load<__m256i>(group_ + 128 + line / 2 * 32);
      if (line % 2 == 1) codes = _mm256_srli_epi16(codes, 4);
      const __m256i index = _mm256_and_si256(codes, nibbles), parts = load<__m256i>(group_ + line * 32);
      const __m256i lower = _mm256_or_si256(_mm256_shuffle_epi8(lower_, index), _mm256_andnot_si256(signs, parts));
      const __m256i upper = _mm256_or_si256(_mm256_shuffle_epi8(upper_, index), _mm256_and_si256(signs, parts));
      store(to, _mm256_unpacklo_epi8(lower, upper));
      store(to + 16, _mm256_unpackhi_epi8(lower, upper));
    }
  }
  __m256i lower_, upper_;
#else
  void decode_group(uint16_t* to) const {
    for (int i = 0; i < 4 * 32; ++i) {
      const int line = i / 32, element = i % 32, part = group_[i];
      const int code = group_[128 + element * 2 + line / 2] >> line % 2 * 4 & 15;
      to[i] = static_cast<uint16_t>((part & 0x80) << 8 | table_[code] | (part & 0x7f));
    }
  }
  uint16_t table_[CODED_EXPONENTS];
#endif
  const uint8_t* group_;
  const CodedPatch *patch_, *last_patch_;
  int done_ = 0;
};

// Blocks that lie `block_bytes` apart -> their steps, packed. AHEAD: see BlockDecoder.
template <int AHEAD>
inline void decode_blocks(const uint8_t* codes, int64_t block_bytes, int64_t count, uint16_t* to) {
  for (int64_t block = 0; block < count; ++block, codes += block_bytes) {
    BlockDecoder decoder(codes);
    for (int step = 0; step < CODED_STEPS; ++step, to += CODED_WEIGHTS / CODED_STEPS) decoder.next<AHEAD>(to);
  }
}

}  // namespace pagebinder
