// Numbers in texts that Python wrote, whatever the process's locale is: its own takes a comma in half of the world.
#pragma once

#include <locale.h>
#include <stdlib.h>

#include <string>

#include "checks.h"

namespace pagebinder {

// Also "inf", "nan" and numbers too small or too large for their type. Raises std::runtime_error for what is none.
inline double real_of(const std::string& text) {
  static const locale_t classic = newlocale(LC_ALL_MASK, "C", nullptr);
  char* end = nullptr;
  const double value = strtod_l(text.c_str(), &end, classic);
  PB_CHECK(!text.empty() && *end == '\0', "not a number: ", text);
  return value;
}

}  // namespace pagebinder
