// One of several functions, made for a number that the caller knows only when it runs.
#pragma once

#include <type_traits>
#include <utility>

namespace pagebinder {

template <int... Less, class Of>
inline auto one_of(int count, std::integer_sequence<int, Less...>, Of of) {
  using Function = decltype(of(std::integral_constant<int, 1>{}));
  static constexpr Function ALL[] = {of(std::integral_constant<int, Less + 1>{})...};
  return ALL[count - 1];
}

// of(std::integral_constant<int, count>) for 1 <= count <= MOST: a lambda without captures that returns a function.
template <int MOST, class Of>
inline auto by_count(int count, Of of) {
  return one_of(count, std::make_integer_sequence<int, MOST>{}, of);
}

}  // namespace pagebinder
