// Kernels of an element type, which are in a library of its own (element_kernels.h).
//
// Who loads such a library does it with RTLD_GLOBAL, at any time before the first call: it is found by what it exports.
// Where Python is, a missing one is built and loaded then and there.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <atomic>
#include <string>

#include "binding_attention.h"
#include "checks.h"
#include "element_kernels.h"

namespace pagebinder {

// The address of an exported function, or null.
inline void* exported(const std::string& name) { return dlsym(RTLD_DEFAULT, name.c_str()); }

// What pagebinder_<kernels>_<type>() returns.
template <class Kernels>
Kernels load_kernels(const char* kernels, const char* type) {
  const std::string name = std::string("pagebinder_") + kernels + "_" + type;
  void* function = exported(name);
  if (function == nullptr) {
    StableIValue stack = torch::stable::detail::from(std::string(type));
    const bool called = aoti_torch_call_dispatcher("pagebinder_cpu::load_part", "", &stack) == 0;
    std::string problem = "there is no Python to build them";
    if (called) problem = torch::stable::detail::to<std::string>(stack);
    function = exported(name);
    PB_CHECK(function != nullptr, "the kernels of ", kernels, " for ", type, " are not loaded (", problem,
             "); a program without Python loads kernels/", type, ".so of its artefact with RTLD_GLOBAL");
  }
  return reinterpret_cast<Kernels (*)()>(function)();
}

// The same, asked for once.
template <class Kernels>
Kernels load_once(std::atomic<Kernels>& found, const char* kernels, const char* type) {
  Kernels loaded = found.load(std::memory_order_acquire);
  if (loaded == nullptr) {
    loaded = load_kernels<Kernels>(kernels, type);
    found.store(loaded, std::memory_order_release);
  }
  return loaded;
}

inline const Float16Linear& float16_linear() {
  static std::atomic<const Float16Linear*> found;
  return *load_once(found, "linear", "float16");
}

constexpr const char* TYPE_NAMES[] = {"float32", "bfloat16", "float16"};
// Which of them; float16 also stands for what is none.
inline int type_index(ScalarType type) { return type == ScalarType::Float ? 0 : type == ScalarType::BFloat16 ? 1 : 2; }

// T: the type that `type` says.
template <class T>
QkWriteKernel<T> qk_write_kernel(ScalarType type) {
  static std::atomic<QkWriteKernel<T>> found;
  return load_once(found, "qk_write", TYPE_NAMES[type_index(type)]);
}

// Paged attention of q's element type; null or what is wrong with the arguments.
inline const char* attend(ScalarType type, const AttentionArgs& args) {
  static std::atomic<JobKernel> found[3];
  const int index = type_index(type);
  if (index == 2 && type != ScalarType::Half) return "q must be float32, bfloat16 or float16";
  return run_attention(args, index == 0 ? 4 : 2, load_once(found[index], "attention", TYPE_NAMES[index]));
}

inline void attend_or_throw(ScalarType type, const AttentionArgs& args, const char* name) {
  const char* error = attend(type, args);
  PB_CHECK(error == nullptr, name, ": ", error);
}

}  // namespace pagebinder
