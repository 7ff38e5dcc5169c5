// Weights of linear layers into the order of tiles, and into codes of 12 bits, and back: a panel at a time, see linear.h
// and coded_weights.h.
#include <algorithm>
#include <cstring>

#include "attention.h"
#include "coded_weights.h"
#include "linear.h"

namespace pagebinder {

// A tile is the transpose of 16 rows of W, a pair of k taken as one word.
void pack_panel(const PackedWeight& w, int64_t panel, bool unpack) {
  constexpr int LINES = 16, PAIRS = 16;
  const int64_t words_of_row = w.inner / 2;
  uint32_t* tile = static_cast<uint32_t*>(w.packed) + panel * PACKED_PANEL * words_of_row;
  for (int64_t step = 0; step < w.inner / PACKED_PANEL; ++step)
    for (int half = 0; half < 2; ++half, tile += LINES * PAIRS) {
      char* row = static_cast<char*>(w.plain) + ((panel * 2 + half) * LINES * w.plain_stride + step * 2 * PAIRS) * 2;
      uint32_t lines[LINES][PAIRS];
      for (int r = 0; r < LINES && !unpack; ++r) std::memcpy(lines[r], row + r * w.plain_stride * 2, sizeof lines[r]);
      for (int r = 0; r < LINES; ++r)
        for (int i = 0; i < PAIRS; ++i)
          if (unpack) lines[r][i] = tile[i * LINES + r];
          else tile[i * LINES + r] = lines[r][i];
      for (int r = 0; r < LINES && unpack; ++r) std::memcpy(row + r * w.plain_stride * 2, lines[r], sizeof lines[r]);
    }
}

// ---- codes -----------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t BLOCK_INNER = CODED_STEPS * PACKED_PANEL;
static_assert(BLOCK_INNER == CODED_INNER);

// A panel of a plain weight, packed, in memory of this thread.
const uint16_t* packed_panel(PackedWeight weight, int64_t panel) {
  static thread_local Buffer memory;
  const int64_t words = PACKED_PANEL * weight.inner / 2;
  weight.plain = static_cast<char*>(weight.plain) + panel * PACKED_PANEL * weight.plain_stride * 2;
  weight.packed = memory.at_least<uint32_t>(static_cast<size_t>(words));
  pack_panel(weight, 0, false);
  return static_cast<const uint16_t*>(weight.packed);
}

}  // namespace

int64_t coded_bytes_of_panel(const PackedWeight& weight, int64_t panel) {
  const uint16_t* packed = packed_panel(weight, panel);
  int most = 0;
  for (int64_t block = 0; block < weight.inner / BLOCK_INNER; ++block)
    most = std::max(most, BlockExponents(packed + block * CODED_WEIGHTS).patches);
  return coded_block_bytes(most);
}

void code_panel(const PackedWeight& weight, int64_t panel, int64_t block_bytes, uint8_t* codes) {
  const uint16_t* packed = packed_panel(weight, panel);
  for (int64_t block = 0; block < weight.inner / BLOCK_INNER; ++block)
    encode_block(packed + block * CODED_WEIGHTS, codes + block * block_bytes);
}

void decode_panel(const uint8_t* codes, int64_t block_bytes, int64_t inner, uint16_t* packed) {
  decode_blocks<0>(codes, block_bytes, inner / BLOCK_INNER, packed);
}

}  // namespace pagebinder
