// Matrix tiles (Intel AMX): eight registers of 16 rows x 64 bytes and a product of two of them, C += A B.
//
//     C [16, 16] float32     A [16, 32] bf16, rows as in memory     B [16, 16] pairs of bf16: (row 2i, row 2i+1)
//
// Compiled in where the compiler targets a machine with AMX; whether this process may use the tiles is asked at
// run time, because the system must grant the memory that their state takes in a context switch.
#pragma once

#include "simd.h"

#if PAGEBINDER_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pagebinder {

constexpr int TILE_LINES = 16;  // rows of a tile, and columns of C
constexpr int TILE_STEP = 32;   // elements that one product sums over
constexpr int PAIR = 2 * TILE_LINES;       // columns or rows of two tiles
constexpr int64_t MOST_X = 1 << 20;        // bytes of rows that stay in the second cache, half of it, while panels pass

// May this process use the tiles? The processor has them, the system saves their state and grants it.
inline bool tiles_usable() {
  static const bool usable = [] {
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, TILE_STATES = 3u << 17;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILE)) != (BF16 | TILE)) return false;
    if ((_xgetbv(0) & TILE_STATES) != TILE_STATES) return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  }();
  return usable;
}

// All eight tiles at full size while it lives; whatever was configured before comes back (tile contents do not).
// With fewer `lines`, tiles 0 to 5 have only those: for C and A of few rows.
class FullTiles {
 public:
  explicit FullTiles(int lines = TILE_LINES) {
    Config config{};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.bytes_per_row[i] = 64;
      config.rows[i] = static_cast<uint8_t>(i < 6 ? lines : TILE_LINES);
    }
    asm volatile("sttilecfg %0" : "=m"(before_));
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~FullTiles() { asm volatile("ldtilecfg %0" : : "m"(before_)); }
  FullTiles(const FullTiles&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
  };
  Config before_;
};

// The compiler does not know that tile loads and stores touch memory: this stands where vectors and tiles meet.
PB_INLINE void tiles_meet_memory() { asm volatile("" ::: "memory"); }

}  // namespace pagebinder
#endif
