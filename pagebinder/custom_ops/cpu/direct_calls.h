// Ops of ours by name: what a native program (program.h) calls without the dispatcher, which would look each one up by
// its name and turn all values of the stack into others and back.
//
// Every library of kernels adds its own. GCC makes the table one for the whole process, however libraries are loaded;
// where it is not, calls of other libraries' ops go through the dispatcher.
#pragma once

#include <torch/csrc/stable/library.h>

#include <mutex>
#include <string>
#include <unordered_map>

namespace pagebinder {

// Takes its operands from the stack and leaves its results there, as the dispatcher has it.
using DirectCall = void (*)(StableIValue* stack, uint64_t num_operands, uint64_t num_results);

class DirectCalls {
 public:
  void add(const std::string& op, DirectCall call) {
    const std::lock_guard guard(lock_);
    calls_[op] = call;
  }
  DirectCall find(const std::string& op) {  // null: there is none
    const std::lock_guard guard(lock_);
    const auto found = calls_.find(op);
    return found == calls_.end() ? nullptr : found->second;
  }

 private:
  std::mutex lock_;
  std::unordered_map<std::string, DirectCall> calls_;
};

__attribute__((visibility("default"))) inline DirectCalls& direct_calls() {
  static DirectCalls calls;
  return calls;
}

inline void implement(torch::stable::detail::StableLibrary& library, const char* op, DirectCall call) {
  library.impl(op, call);
  direct_calls().add(std::string("pagebinder_cpu::") + op, call);
}

}  // namespace pagebinder
