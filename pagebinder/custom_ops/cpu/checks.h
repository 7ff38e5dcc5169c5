// Checks of operands. Each use of torch's STD_TORCH_CHECK makes functions of its own, a quarter of the time in which
// bindings compile.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace pagebinder {

// A piece of a message: text that outlives the check, or a number.
struct Word {
  const char* text = nullptr;
  int64_t number = 0;

  Word(const char* t) : text(t) {}
  Word(const std::string& t) : text(t.c_str()) {}
  Word(int64_t n) : number(n) {}
  Word(int n) : number(n) {}
  Word(size_t n) : number(static_cast<int64_t>(n)) {}
};

[[noreturn]] __attribute__((noinline, cold)) inline void fail(std::initializer_list<Word> words) {
  std::string message;
  for (const Word& word : words) message += word.text != nullptr ? std::string(word.text) : std::to_string(word.number);
  throw std::runtime_error(message);
}

}  // namespace pagebinder

// Throws std::runtime_error, its message the words after the condition.
#define PB_CHECK(condition, ...)                                                 \
  do {                                                                           \
    if (__builtin_expect(!(condition), 0)) ::pagebinder::fail({__VA_ARGS__});    \
  } while (false)
