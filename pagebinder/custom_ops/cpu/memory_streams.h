// How a processor wants to be read from.
#pragma once

namespace pagebinder {

// AMD's Zen: its own prefetcher brings lines at the rate of memory if they are read one after the other, and at half of
// it if two runs of lines take turns, however near; asking for lines costs what the prefetcher would have done with them
// (docs/measurements.md). Intel's follows several runs, and what is asked for comes earlier.
inline bool prefetcher_follows_rising_lines() {
#if defined(__x86_64__)
  static const bool is_zen = __builtin_cpu_is("amd");
  return is_zen;
#else
  return false;
#endif
}

}  // namespace pagebinder
