// A run of a native program, to be replayed: launches of kernels, and the calls that stay calls.
//
//     linears  view  qk_norm_rope_write  paged_attention  |  aten::cos            |  linear -> logits
//     launch         launch              launch           |  called, and copied   |  called: a new tensor each time
//                                                         |  to where it lay      |
//
// Views need nothing: who reads them was told addresses. What a run returns, and what is made of that, is called each
// time and no memory of the recording, so callers may keep it. Inputs must lie where they lay (key_of).
#pragma once

#include "program.h"

#include <torch/csrc/stable/ops.h>

#include <utility>

#include "recorder.h"

#if defined(TORCH_VERSION_2_13_0) && TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
#define PB_TORCH_2_13 1  // a torch before it does not name its version
#endif
#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // torch 2.11: its former name
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace pagebinder::programs {

// Tensors and sizes of a run. Whatever a call raises, no handle is lost.
struct Program::Slots {
  std::vector<AtenTensorHandle> tensors;
  const std::vector<int64_t>& sizes;
  const std::vector<Tensor>& constants;
  const std::vector<Tensor>* recorded = nullptr;  // of a replay

  Slots(int64_t num_tensors, const std::vector<int64_t>& sizes, const std::vector<Tensor>& constants)
      : tensors(num_tensors, nullptr), sizes(sizes), constants(constants) {}
  Slots(const Slots&) = delete;
  ~Slots() {
    for (AtenTensorHandle handle : tensors)
      if (handle != nullptr) aoti_torch_delete_tensor_object(handle);
  }

  void fill(int64_t slot, const Tensor& tensor) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &tensors[slot]));
  }

  StableIValue taken(int64_t slot) { return torch::stable::detail::from(std::exchange(tensors[slot], nullptr)); }

  // A value as the dispatcher takes it, and owns it then.
  StableIValue value_of(const Operand& operand) {
    switch (operand.kind) {
      case Operand::NONE: return torch::stable::detail::from(std::nullopt);
      case Operand::TENSOR: return shared(tensors[operand.number]);
      case Operand::LAST_TENSOR: return taken(operand.number);
      case Operand::CONSTANT: return shared(constants[operand.number].get());
      case Operand::RECORDED: return shared((*recorded)[operand.number].get());
      case Operand::NUMBER: return torch::stable::detail::from(operand.number);
      case Operand::SIZE: return torch::stable::detail::from(sizes[operand.number]);
      case Operand::REAL: return torch::stable::detail::from(operand.real);
      case Operand::BOOLEAN: return torch::stable::detail::from(operand.number != 0);
      case Operand::TEXT: return torch::stable::detail::from(operand.text);
      case Operand::DTYPE: return torch::stable::detail::from(static_cast<torch::headeronly::ScalarType>(operand.number));
      case Operand::SOME: return some(value_of(operand.items[0]));
      case Operand::LIST: break;
    }
    StableListHandle list = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(operand.items.size(), &list));
    for (const Operand& item : operand.items)
      STABLE_TORCH_ERROR_CODE_CHECK(torch_list_push_back(list, value_of(item)));
    return torch::stable::detail::from(list);
  }

  AtenTensorHandle tensor_of(const Operand& operand) const {  // still theirs
    if (operand.kind == Operand::RECORDED) return (*recorded)[operand.number].get();
    return operand.kind == Operand::CONSTANT ? constants[operand.number].get() : tensors[operand.number];
  }

  void drop(int64_t slot) { aoti_torch_delete_tensor_object(std::exchange(tensors[slot], nullptr)); }

  void keep(int64_t slot, AtenTensorHandle handle) {
    if (slot < 0) aoti_torch_delete_tensor_object(handle);
    else tensors[slot] = handle;
  }

 private:
  static StableIValue shared(AtenTensorHandle handle) {
    AtenTensorHandle copy = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &copy));
    return torch::stable::detail::from(copy);
  }

  static StableIValue some(StableIValue value) {
#if PB_TORCH_2_13
    StableIValue* place = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_new_stable_ivalue(&place));
    *place = value;
#else
    StableIValue* place = new StableIValue(value);
#endif
    return torch::stable::detail::from(place);
  }
};

struct Recording {
  // What a call of the program is now: launches up to number `end`; or, of its own, the call, whose results are copied to
  // those of `tensors` that `results` names (-1: nobody reads it, or it stays in its slot).
  struct Step {
    bool is_launched = false;
    size_t end = 0;
    Call call;  // of launches: its name alone
    std::vector<int64_t> results;
  };

  std::vector<int64_t> key;
  std::vector<Step> steps;
  std::vector<int64_t> inputs;  // that calls read
  std::vector<Tensor> tensors;  // the others that they read, and where their results lay
  int64_t result_bytes = 0;     // of those results
  bool is_right = true;         // false: a result of the run is memory of the recording
  std::shared_ptr<RunMemory> memory = std::make_shared<RunMemory>();
  Launches launches;            // behind the memory, so that they are gone before it

  int64_t bytes() const { return static_cast<int64_t>(memory->total_bytes()) + result_bytes; }
};

}  // namespace pagebinder::programs
