// A run of a graph's calls as data, called one after the other without Python: runtime/executables/native_text.py
// writes it down.
//
//     pagebinder_cpu::linear  2  T12 K3        op, where its results go, its operands:
//                                              T tensor 12 | K constant 3 | L tensor 12, which nobody reads later
//
// A tensor of a run has a slot, which owns a handle from the call that makes it to the last that reads it. Sizes
// are numbers that a run is given.
//
// A run whose inputs lie where those of an earlier one lay, in the same form, is recorded, and from then on replayed
// (recording.h).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "direct_calls.h"

namespace pagebinder::programs {

using torch::stable::Tensor;

// An operand of a call. `number` is a slot, the place of a constant or a size, a number or a boolean.
struct Operand {
  enum Kind { NONE, TENSOR, LAST_TENSOR, CONSTANT, NUMBER, SIZE, REAL, BOOLEAN, TEXT, DTYPE, LIST, SOME, RECORDED };
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
  bool may_view = false;           // results may be views of operands, and then it does nothing else
  bool writes = false;             // results are operands that it writes into
  bool is_lasting = false;         // results of a run, or made from them: never recorded
  std::vector<int64_t> results;    // slots, -1: dropped
  DirectCall direct = nullptr;     // what to call instead of asking the dispatcher for `op`
  bool is_view = false;            // aten::view, which a contiguous tensor needs no dispatcher for
};

struct Recording;

// How often a program was run, and how: `replayed` of the `runs`, by `recordings`, which hold `bytes` of memory. Read
// without the lock, which a thread may hold that fork() left behind.
struct RunCounts { std::atomic<int64_t> runs{0}, replayed{0}, recordings{0}, bytes{0}; };

// Are runs recorded and replayed, whatever the program: "never", "auto" (where it pays) or "always" (for tests). Returns
// what held before.
std::string record_runs(std::string when);

class Program {
 public:
  // Raises std::runtime_error for text that is not a program's.
  Program(const std::string& text, std::vector<Tensor> constants);
  ~Program();

  // Inputs have the first slots. Raises what a call raises, with the op's name. direct: ops of ours are called without
  // the dispatcher, so nobody who listens to it, a profiler, hears of them; and the run may be one that is replayed.
  std::vector<Tensor> run(const std::vector<Tensor>& inputs, const std::vector<int64_t>& sizes, bool direct) const;
  const RunCounts& counts() const { return counts_; }

 private:
  struct Slots;
  void fill(Slots& slots, const std::vector<Tensor>& inputs) const;
  void make_call(const Call& call, Slots& slots, bool direct) const;
  bool view(const Call& call, Slots& slots) const;
  std::vector<Tensor> take_outputs(const Slots& slots) const;

  void find_lasting();
  Recording* recording_of(const std::vector<int64_t>& key, bool& is_wanted) const;
  std::unique_ptr<Recording> record(Slots& slots) const;
  void keep(std::unique_ptr<Recording> recording) const;
  void record_call(const Call& call, Slots& slots, Recording& recording) const;
  void replay(const Recording& recording, const std::vector<Tensor>& inputs, Slots& slots) const;

  std::vector<Call> calls_;
  std::vector<int64_t> outputs_;
  std::vector<Tensor> constants_;
  int64_t num_inputs_ = 0, num_sizes_ = 0, num_slots_ = 0;
  size_t deepest_stack_ = 1;
  bool is_recorded_ = true, is_worth_it_ = true;
  std::vector<bool> lasting_slots_;  // of results of calls that are lasting

  mutable std::mutex recordings_lock_;  // whoever finds it taken runs without
  mutable std::list<std::unique_ptr<Recording>> recordings_;  // the last one used comes first
  mutable std::list<uint64_t> seen_, refused_;                // digests of keys, the last ones
  mutable RunCounts counts_;
};

}  // namespace pagebinder::programs
