// A run of a graph's calls as data, called one after the other without Python: runtime/executables/native_text.py
// writes it down.
//
//     pagebinder_cpu::linear  2  T12 K3        op, where its results go, its operands:
//                                              T tensor 12 | K constant 3 | L tensor 12, which nobody reads later
//
// A tensor of a run has a slot, which owns a handle from the call that makes it to the last that reads it. Sizes
// are numbers that a run is given.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "direct_calls.h"

namespace pagebinder::programs {

using torch::stable::Tensor;

// An operand of a call. `number` is a slot, the place of a constant or a size, a number or a boolean.
struct Operand {
  enum Kind { NONE, TENSOR, LAST_TENSOR, CONSTANT, NUMBER, SIZE, REAL, BOOLEAN, TEXT, DTYPE, LIST, SOME };
  Kind kind = NONE;
  int64_t number = 0;
  double real = 0;
  std::string text;
  std::vector<Operand> items;  // of a list; of SOME the one value of an argument that may be None

  bool is_tensor() const { return kind == TENSOR || kind == LAST_TENSOR || kind == CONSTANT; }
};

struct Call {
  std::string op, overload;
  std::vector<Operand> operands;
  bool returns_list = false;       // `results` are the list's elements
  std::vector<int64_t> results;    // slots, -1: dropped
  DirectCall direct = nullptr;     // what to call instead of asking the dispatcher for `op`
  bool is_view = false;            // aten::view, which a contiguous tensor needs no dispatcher for
};

class Program {
 public:
  // Raises std::runtime_error for text that is not a program's.
  Program(const std::string& text, std::vector<Tensor> constants);

  // Inputs have the first slots. Raises what a call raises, with the op's name. direct: ops of ours are called without
  // the dispatcher, so nobody who listens to it, a profiler, hears of them.
  std::vector<Tensor> run(const std::vector<Tensor>& inputs, const std::vector<int64_t>& sizes, bool direct) const;

 private:
  struct Slots;
  void make_call(const Call& call, Slots& slots, bool direct) const;
  bool view(const Call& call, Slots& slots) const;

  std::vector<Call> calls_;
  std::vector<int64_t> outputs_;
  std::vector<Tensor> constants_;
  int64_t num_inputs_ = 0, num_sizes_ = 0, num_slots_ = 0;
  size_t deepest_stack_ = 1;
};

}  // namespace pagebinder::programs
