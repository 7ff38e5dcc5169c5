// A reader of JSON, as small as step_plan.json allows: no escapes but \" \\ \/ \n \t, numbers as double.
#pragma once

#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

struct Json {
  enum class Kind { null, boolean, number, string, list, object } kind = Kind::null;
  double number = 0;  // also 0 or 1 of a boolean
  std::string string;
  std::vector<Json> list;
  std::map<std::string, Json> object;

  bool has(const std::string& key) const { return object.count(key) > 0; }
  const Json& operator[](const std::string& key) const {
    const auto found = object.find(key);
    if (found == object.end()) throw std::runtime_error("step_plan.json has no \"" + key + "\"");
    return found->second;
  }
  int64_t integer() const { return static_cast<int64_t>(number); }

  static Json parse(const std::string& text) {
    size_t at = 0;
    Json value = value_at(text, at);
    skip(text, at);
    if (at != text.size()) fail(at);
    return value;
  }

 private:
  [[noreturn]] static void fail(size_t at) { throw std::runtime_error("no JSON at byte " + std::to_string(at)); }
  static char skip(const std::string& text, size_t& at) {
    while (at < text.size() && std::string(" \t\r\n").find(text[at]) != std::string::npos) ++at;
    return at < text.size() ? text[at] : '\0';
  }
  static bool take(const std::string& text, size_t& at, char wanted) {
    if (skip(text, at) != wanted) return false;
    ++at;
    return true;
  }
  static std::string string_at(const std::string& text, size_t& at) {
    if (!take(text, at, '"')) fail(at);
    std::string result;
    for (; at < text.size() && text[at] != '"'; ++at) {
      if (text[at] != '\\') {
        result += text[at];
        continue;
      }
      if (++at == text.size() || std::string("\"\\/nt").find(text[at]) == std::string::npos) fail(at);
      result += text[at] == 'n' ? '\n' : text[at] == 't' ? '\t' : text[at];
    }
    if (!take(text, at, '"')) fail(at);
    return result;
  }
  static Json value_at(const std::string& text, size_t& at) {
    Json value;
    const char first = skip(text, at);
    if (take(text, at, '{')) {
      value.kind = Kind::object;
      for (bool more = !take(text, at, '}'); more;) {
        const std::string key = string_at(text, at);
        if (!take(text, at, ':')) fail(at);
        value.object[key] = value_at(text, at);
        more = take(text, at, ',');
        if (!more && !take(text, at, '}')) fail(at);
      }
    } else if (take(text, at, '[')) {
      value.kind = Kind::list;
      for (bool more = !take(text, at, ']'); more;) {
        value.list.push_back(value_at(text, at));
        more = take(text, at, ',');
        if (!more && !take(text, at, ']')) fail(at);
      }
    } else if (first == '"') {
      value.kind = Kind::string;
      value.string = string_at(text, at);
    } else if (text.compare(at, 4, "true") == 0 || text.compare(at, 5, "false") == 0) {
      value.kind = Kind::boolean;
      value.number = text[at] == 't';
      at += text[at] == 't' ? 4 : 5;
    } else if (text.compare(at, 4, "null") == 0) {
      at += 4;
    } else {
      char* end = nullptr;
      value.kind = Kind::number;
      value.number = std::strtod(text.c_str() + at, &end);
      if (end == text.c_str() + at) fail(at);
      at = static_cast<size_t>(end - text.c_str());
    }
    return value;
  }
};
