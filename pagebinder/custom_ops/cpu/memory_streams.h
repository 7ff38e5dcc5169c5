// How a processor wants to be read from.
//
// AMD's Zen: its own prefetcher brings lines at the rate of memory if they are read one after the other, and at half of
// it if two runs of lines, 1 KB apart, take turns; what is asked for too fast seems to be dropped (docs/measurements.md).
// Intel's follows several runs, and what is asked for comes earlier. Either way sums have the same bits.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace pagebinder {

constexpr int64_t NEAR_X_BYTES = 16384;  // of x that the nearest cache holds beside a stream of weights

// $PAGEBINDER_RISING_READS, 1 or 0, says otherwise: for tests, and to try it on another processor.
inline bool prefetcher_follows_rising_lines() {
  static const bool rising = [] {
    const char* said = std::getenv("PAGEBINDER_RISING_READS");
    if (said != nullptr && (said[0] == '0' || said[0] == '1') && said[1] == '\0') return said[0] == '1';
#if defined(__x86_64__)
    return __builtin_cpu_is("amd") != 0;
#else
    return false;
#endif
  }();
  return rising;
}

}  // namespace pagebinder
