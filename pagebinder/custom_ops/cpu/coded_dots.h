// Products of a few rows and a coded panel that comes from memory.
//
// With BF16 dots its lines are decoded in registers and meet the rows there. Elsewhere a block is decoded into the nearest
// cache, and beside its product most of the next one is asked for. Sums are those of the packed panel, bit for bit.
#pragma once

#include "coded_weights.h"
#include "dots.h"

namespace pagebinder {

constexpr int64_t CODES_AHEAD = 6144;  // bytes that a decoder asks for ahead

#if PAGEBINDER_BF16_DOT
constexpr int64_t NEAR_CODES = 4096, FAR_CODES = 16384;  // bytes that the nearest and the second cache are asked for ahead

// `steps` steps of ROWS rows and a panel: sums [ROWS][32].
template <int ROWS>
void multiply_coded(const DotPair* x, const char* w, int64_t block_bytes, int steps, DotResults results, float* sums) {
  constexpr int LINES = BlockDecoder::GROUP_LINES;
  VF sum[ROWS][2] = {};
  for (int block = 0; block < steps; block += CODED_STEPS, w += block_bytes) {
    BlockDecoder decoder(reinterpret_cast<const uint8_t*>(w));
    for (int step = 0; step < CODED_STEPS; ++step, x += DOT_PAIRS * ROWS) {
      if (block + step < results.rows) __builtin_prefetch(results.first + (block + step) * results.stride, 1);
      PB_UNROLL
      for (int half = 0; half < 2; ++half)
        for (int pair = 0; pair < DOT_PAIRS; pair += LINES) {
          PB_UNROLL
          for (int i = 0; i < CODED_GROUP; i += 64) {
            __builtin_prefetch(decoder.coming() + NEAR_CODES + i);
            __builtin_prefetch(decoder.coming() + FAR_CODES + i, 0, 2);
          }
          VU lines[LINES];
          decoder.next_lines(lines);
          PB_UNROLL
          for (int line = 0; line < LINES; ++line)
            PB_UNROLL
            for (int r = 0; r < ROWS; ++r) {
              const VU row = load<uint32_t>(x + (pair + line) * ROWS + r) - VU{};
              sum[r][half] = PairElements::madd(sum[r][half], row, lines[line]);
            }
        }
    }
  }
  PB_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    store(sums + r * DOT_PANEL, sum[r][0]);
    store(sums + r * DOT_PANEL + W, sum[r][1]);
  }
}
#endif

// Decodes `steps` steps of a panel, whole blocks.
inline void decode_steps(const char* w, int64_t block_bytes, int steps, char* to) {
  decode_blocks<CODES_AHEAD>(reinterpret_cast<const uint8_t*>(w), block_bytes, steps / CODED_STEPS,
                             reinterpret_cast<uint16_t*>(to));
}

// sums [rows][32] of up to DOT_MOST_ROWS rows. `next`: what is read behind the panel, or null.
inline void stream_coded(const DotPair* x, int rows, const char* w, int64_t block_bytes, int steps,
                         [[maybe_unused]] const char* next, const DotResults& results, float* sums) {
#if PAGEBINDER_BF16_DOT
  by_count<DOT_MOST_ROWS>(rows, [](auto count) { return multiply_coded<decltype(count)::value>; })(
      x, w, block_bytes, steps, results, sums);
#else
  alignas(64) char decoded[CODED_STEPS * DOT_STEP_BYTES];
  for (int step = 0; step < steps; step += CODED_STEPS, w += block_bytes, x += int64_t{CODED_STEPS} * DOT_PAIRS * rows) {
    decode_steps(w, block_bytes, CODED_STEPS, decoded);
    const char* behind = step + CODED_STEPS < steps ? w + block_bytes : next;
    const DotAhead ahead = behind == nullptr ? DotAhead{} : DotAhead{behind + CODES_AHEAD, 1, 0, results};
    multiply_near_dots_of(rows)(x, decoded, CODED_STEPS, step == 0, ahead, sums);
  }
#endif
}

}  // namespace pagebinder
