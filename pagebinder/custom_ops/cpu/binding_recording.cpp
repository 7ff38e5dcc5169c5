// Records runs of native programs and replays them, see recording.h.
#include "recording.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "checks.h"
#include "num_threads.h"

namespace pagebinder::programs {
namespace {

constexpr size_t MOST_RECORDINGS = 32;  // of a program
constexpr size_t MOST_KEYS = 32;        // seen once: no more, or each of many in turns would push another one's recording out
// Of a recording: kernels that make more take so long that the ops around them are nothing. And of all of a program.
constexpr int64_t MOST_BYTES = int64_t{8} << 20, MOST_BYTES_OF_ALL = 8 * MOST_BYTES;

enum class When { NEVER, AUTO, ALWAYS };
constexpr const char* NAMES[] = {"never", "auto", "always"};
std::atomic<When> when_recorded{When::AUTO};

int64_t address_of(AtenTensorHandle handle) {
  void* data = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data));
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(data));
}

// All that launches depend on, but for what inputs hold: where and how inputs lie, where weights do (share_memory() moves
// them in place), sizes and threads.
std::vector<int64_t> key_of(const std::vector<Tensor>& inputs, const std::vector<Tensor>& constants,
                            const std::vector<int64_t>& sizes) {
  std::vector<int64_t> key(sizes);
  key.reserve(sizes.size() + 1 + constants.size() + 12 * inputs.size());
  key.push_back(num_threads());
  for (const Tensor& tensor : constants) key.push_back(address_of(tensor.get()));
  for (const Tensor& tensor : inputs) {
    int64_t dims = 0, *shape = nullptr, *strides = nullptr;
    int32_t dtype = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &dims));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &shape));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    key.push_back(address_of(tensor.get()));
    key.push_back(dims * 256 + dtype);
    key.insert(key.end(), shape, shape + dims);
    key.insert(key.end(), strides, strides + dims);
  }
  return key;
}

uint64_t digest_of(const std::vector<int64_t>& key) {
  uint64_t digest = 0xcbf29ce484222325u;
  for (int64_t value : key) digest = (digest ^ static_cast<uint64_t>(value)) * 0x100000001b3u, digest ^= digest >> 29;
  return digest;
}

bool contains(const std::list<uint64_t>& digests, uint64_t digest) {
  return std::find(digests.begin(), digests.end(), digest) != digests.end();
}

void remember(std::list<uint64_t>& digests, uint64_t digest) {
  digests.push_front(digest);
  if (digests.size() > MOST_KEYS) digests.pop_back();
}

template <class Visit>
void for_tensors(const std::vector<Operand>& operands, const Visit& visit) {
  for (const Operand& operand : operands) {
    if (operand.is_tensor()) visit(operand);
    for_tensors(operand.items, visit);
  }
}

int64_t element_bytes_of(AtenTensorHandle handle) {
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype));
  return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
}

// Where the memory begins that a tensor is a part of.
int64_t storage_of(AtenTensorHandle handle) {
  int64_t offset = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(handle, &offset));
  return address_of(handle) - offset * element_bytes_of(handle);
}

bool is_large(const Recording& recording) { return recording.bytes() > MOST_BYTES; }

Tensor tensor_of(AtenTensorHandle handle) {
  AtenTensorHandle copy = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &copy));
  return Tensor(copy);
}

Tensor clone_of(const Tensor& tensor) {
  AtenTensorHandle clone = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_clone(tensor.get(), &clone));
  return Tensor(clone);
}

// Is a result of the run memory of the recording? Some ops return an operand although their schemas do not say so, dropout
// for example.
bool owns(const Recording& recording, const Tensor& result, const std::vector<Tensor>& inputs) {
  const int64_t storage = storage_of(result.get());
  const auto is_of = [&](const Tensor& tensor) { return storage_of(tensor.get()) == storage; };
  if (std::any_of(inputs.begin(), inputs.end(), is_of)) return false;
  return recording.memory->holds(storage) || std::any_of(recording.tensors.begin(), recording.tensors.end(), is_of);
}

}  // namespace

// A run's results are lasting; so is what reads one, and what one is a view of.
void Program::find_lasting() {
  std::vector<bool>& lasts = lasting_slots_;
  lasts.resize(static_cast<size_t>(num_slots_), false);
  for (int64_t slot : outputs_) lasts[slot] = true;
  for (bool again = true; again;) {
    again = false;
    for (Call& call : calls_) {
      const auto is_lasting_slot = [&](int64_t slot) { return slot >= 0 && lasts[slot]; };
      bool found = std::any_of(call.results.begin(), call.results.end(), is_lasting_slot);
      for_tensors(call.operands, [&](const Operand& operand) {
        found |= operand.kind != Operand::CONSTANT && operand.number >= num_inputs_ && lasts[operand.number];
      });
      if (!found || call.is_lasting) continue;
      call.is_lasting = again = true;
      for (int64_t slot : call.results)
        if (slot >= 0) lasts[slot] = true;
      if (call.may_view || call.writes)
        for_tensors(call.operands, [&](const Operand& operand) {
          if (operand.kind != Operand::CONSTANT) lasts[operand.number] = true;
        });
    }
  }
  const auto lasting = std::count_if(calls_.begin(), calls_.end(), [](const Call& call) { return call.is_lasting; });
  is_worth_it_ = 2 * static_cast<size_t>(lasting) < calls_.size();
}

std::vector<Tensor> Program::run(const std::vector<Tensor>& inputs, const std::vector<int64_t>& sizes,
                                 bool direct) const {
  PB_CHECK(static_cast<int64_t>(inputs.size()) == num_inputs_ && static_cast<int64_t>(sizes.size()) == num_sizes_,
           "a native program takes ", num_inputs_, " tensors and ", num_sizes_, " sizes, not ", inputs.size(),
           " and ", sizes.size());
  Slots slots(num_slots_, sizes, constants_);
  std::unique_lock guard(recordings_lock_, std::defer_lock);
  const When when = is_recorded_ && direct ? when_recorded.load(std::memory_order_relaxed) : When::NEVER;
  if ((when == When::ALWAYS || (when == When::AUTO && is_worth_it_)) && guard.try_lock()) {
    ++counts_.runs;
    std::vector<int64_t> key = key_of(inputs, constants_, sizes);
    bool is_wanted = false;
    if (const Recording* recording = recording_of(key, is_wanted)) {
      ++counts_.replayed;
      replay(*recording, inputs, slots);
      return take_outputs(slots);
    }
    if (is_wanted) {
      fill(slots, inputs);
      std::unique_ptr<Recording> recording = record(slots);
      std::vector<Tensor> outputs = take_outputs(slots);
      for (Tensor& output : outputs) {
        if (!owns(*recording, output, inputs)) continue;
        output = clone_of(output);
        recording->is_right = false;
      }
      recording->key = std::move(key);
      keep(std::move(recording));
      return outputs;
    }
    guard.unlock();
  }
  fill(slots, inputs);
  for (const Call& call : calls_) make_call(call, slots, direct);
  return take_outputs(slots);
}

std::string record_runs(std::string when) {
  for (int i = 0; i < 3; ++i)
    if (when == NAMES[i]) return NAMES[static_cast<int>(when_recorded.exchange(static_cast<When>(i)))];
  PB_CHECK(false, "runs are recorded \"never\", \"auto\" or \"always\", not \"", when, "\"");
}

// The recording with this key, or null; `is_wanted`: then make one, as it has been seen before.
Recording* Program::recording_of(const std::vector<int64_t>& key, bool& is_wanted) const {
  const auto found =
      std::find_if(recordings_.begin(), recordings_.end(), [&](const auto& recording) { return recording->key == key; });
  if (found != recordings_.end()) {
    recordings_.splice(recordings_.begin(), recordings_, found);
    return recordings_.front().get();
  }
  const uint64_t digest = digest_of(key);
  is_wanted = contains(seen_, digest) && !contains(refused_, digest);
  if (is_wanted) seen_.remove(digest);
  else if (!contains(seen_, digest)) remember(seen_, digest);
  return nullptr;
}

void Program::keep(std::unique_ptr<Recording> recording) const {
  const bool pays = 2 * recording->launches.count() >= recording->steps.size();  // else most is called anyway
  if (!recording->is_right || is_large(*recording) || (!pays && when_recorded != When::ALWAYS))
    return remember(refused_, digest_of(recording->key));
  counts_.bytes += recording->bytes();
  recordings_.push_front(std::move(recording));
  while (recordings_.size() > MOST_RECORDINGS || counts_.bytes > MOST_BYTES_OF_ALL) {
    counts_.bytes -= recordings_.back()->bytes();
    recordings_.pop_back();
  }
  counts_.recordings = static_cast<int64_t>(recordings_.size());
}

// ---- recording -----------------------------------------------------------------------------------------------------

std::unique_ptr<Recording> Program::record(Slots& slots) const {
  auto recording = std::make_unique<Recording>();
  std::vector<int64_t> in_use;
  for (const Call& call : calls_) {
    if (is_large(*recording)) {  // it will not be kept
      make_call(call, slots, true);
      continue;
    }
    record_call(call, slots, *recording);
    in_use.clear();
    for (AtenTensorHandle handle : slots.tensors)
      if (handle != nullptr) in_use.push_back(address_of(handle));
    recording->memory->keep(in_use);
  }
  return recording;
}

void Program::record_call(const Call& call, Slots& slots, Recording& recording) const {
  std::vector<int64_t> storages;  // of operands
  if (call.may_view)
    for_tensors(call.operands, [&](const Operand& operand) { storages.push_back(storage_of(slots.tensor_of(operand))); });
  Recording::Step step{false, 0, call, std::vector<int64_t>(call.results.size(), -1)};
  std::vector<Tensor> read;  // what the call reads that no replay has in a slot
  const auto name = [&](auto& self, std::vector<Operand>& operands) -> void {
    for (Operand& operand : operands) {
      self(self, operand.items);
      if (!operand.is_tensor() || operand.kind == Operand::CONSTANT) continue;
      if (operand.number < num_inputs_) {
        operand.kind = Operand::TENSOR;
      } else if (!lasting_slots_[operand.number]) {
        read.push_back(tensor_of(slots.tensors[operand.number]));
        operand.kind = Operand::RECORDED;
        operand.number = static_cast<int64_t>(recording.tensors.size() + read.size() - 1);
      }
    }
  };
  name(name, step.call.operands);
  const size_t before = recording.launches.count();
  if (call.is_lasting || call.direct == nullptr) {
    make_call(call, slots, true);
  } else {
    Recorder recorder{recording.launches, recording.memory};
    struct AtWork {
      explicit AtWork(Recorder* recorder) { Recorder::current() = recorder; }
      ~AtWork() { Recorder::current() = nullptr; }
    } at_work(&recorder);
    make_call(call, slots, true);
  }
  const auto is_view = [&](int64_t slot) {
    return slot < 0 || std::find(storages.begin(), storages.end(), storage_of(slots.tensors[slot])) != storages.end();
  };
  if (call.may_view && !call.is_lasting && std::all_of(call.results.begin(), call.results.end(), is_view)) return;
  step.end = recording.launches.count();
  if (step.end > before) {
    step.call = Call{};
    step.call.op = call.op, step.is_launched = true;
  } else {
    recording.tensors.insert(recording.tensors.end(), read.begin(), read.end());
    for_tensors(step.call.operands, [&](const Operand& operand) {
      if (operand.kind != Operand::CONSTANT && operand.number < num_inputs_) recording.inputs.push_back(operand.number);
    });
    for (size_t i = 0; i < call.results.size() && !call.is_lasting; ++i) {
      if (call.results[i] < 0) continue;
      const AtenTensorHandle result = slots.tensors[call.results[i]];
      int64_t numel = 0;
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(result, &numel));
      step.results[i] = static_cast<int64_t>(recording.tensors.size());
      recording.tensors.push_back(tensor_of(result));
      recording.result_bytes += numel * element_bytes_of(result);
    }
  }
  recording.steps.push_back(std::move(step));
}

// ---- replaying -----------------------------------------------------------------------------------------------------

void Program::replay(const Recording& recording, const std::vector<Tensor>& inputs, Slots& slots) const {
  slots.recorded = &recording.tensors;
  for (int64_t input : recording.inputs)
    if (slots.tensors[input] == nullptr) slots.fill(input, inputs[input]);
  size_t next = 0;
  for (const Recording::Step& step : recording.steps) {
    if (step.is_launched) {
      try {
        while (next < step.end) recording.launches.run(next++);
      } catch (const std::exception& error) {
        throw std::runtime_error(step.call.op + ": " + error.what());
      }
      continue;
    }
    make_call(step.call, slots, true);
    for (size_t i = 0; i < step.results.size(); ++i) {
      if (step.results[i] < 0) continue;
      const int64_t slot = step.call.results[i];
      STABLE_TORCH_ERROR_CODE_CHECK(
          aoti_torch_copy_(recording.tensors[step.results[i]].get(), slots.tensors[slot], 0));
      slots.drop(slot);
    }
  }
}

}  // namespace pagebinder::programs
