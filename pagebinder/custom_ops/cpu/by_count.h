// One of several functions, made for a number that the caller knows only when it runs; and loops written out.
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

template <class Body, int... I>
inline __attribute__((always_inline)) void by_constants(std::integer_sequence<int, I...>, const Body& body) {
  (body(std::integral_constant<int, I>()), ...);
}

// body(std::integral_constant<int, i>) for 0 <= i < COUNT, written out. What an array holds at constants may be in registers,
// where that of a loop is in memory, though it is unrolled: compilers look for arrays to take apart before.
template <int COUNT, class Body>
inline __attribute__((always_inline)) void by_constants(const Body& body) {
  by_constants(std::make_integer_sequence<int, COUNT>(), body);
}

}  // namespace pagebinder
