// What a native program's run asked kernels to do, to be done again without the ops around them.
//
//     op    checks operands, makes a tensor for the result, describes both to the kernel    ->  launch([=] { kernel(args); })
//     run   op op op ...           record:  each launch is also kept        replay:  launch launch launch ...
//
// A binding that leaves all its work at run time to launch() can be replayed: what it captured are addresses, which stay
// right while the inputs lie where they lay. Others are called again, as ops.
//
// Results of a recorded run lie in memory of its own (RunMemory), which a later call gets as soon as nobody reads what
// was there: the same in each replay, as order and lifetimes are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace pagebinder {

class RunMemory {
 public:
  ~RunMemory() {
    for (const Block& block : blocks_) std::free(block.data);
  }

  // For a tensor; aligned as torch's.
  void* take(size_t bytes) {
    bytes = (std::max<size_t>(bytes, 1) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    Block* best = nullptr;
    for (Block& block : blocks_)
      if (!block.taken && block.bytes >= bytes && (best == nullptr || block.bytes < best->bytes)) best = &block;
    if (best == nullptr || best->bytes / 4 > bytes) {  // a small tensor leaves large blocks to others
      void* data = std::aligned_alloc(ALIGNMENT, bytes);
      if (data == nullptr) throw std::bad_alloc();
      blocks_.push_back({static_cast<char*>(data), bytes, false});
      best = &blocks_.back(), total_bytes_ += bytes;
    }
    best->taken = true;
    return best->data;
  }

  // Others may have what none of these addresses lies in.
  void keep(const std::vector<int64_t>& in_use) {
    for (Block& block : blocks_)
      block.taken = block.taken && std::any_of(in_use.begin(), in_use.end(), [&](int64_t at) { return block.holds(at); });
  }

  bool holds(int64_t address) const {
    return std::any_of(blocks_.begin(), blocks_.end(), [&](const Block& block) { return block.holds(address); });
  }

  size_t total_bytes() const { return total_bytes_; }

 private:
  static constexpr size_t ALIGNMENT = 64;
  struct Block {
    char* data;
    size_t bytes;
    bool taken;

    bool holds(int64_t address) const {
      const auto begin = static_cast<int64_t>(reinterpret_cast<intptr_t>(data));
      return address >= begin && address < begin + static_cast<int64_t>(bytes);
    }
  };

  std::vector<Block> blocks_;
  size_t total_bytes_ = 0;
};

// Calls of kernels, one after the other in memory: between two of them a step's weights have gone through all caches.
class Launches {
 public:
  Launches() = default;
  Launches(const Launches&) = delete;
  ~Launches() {
    for (const Launch& launch : launches_) launch.destroy(launch.what);
  }

  template <class What>
  void add(const What& what) {
    static_assert(alignof(What) <= alignof(std::max_align_t));
    void* place = room_for(sizeof(What));
    new (place) What(what);
    launches_.push_back({[](void* it) { (*static_cast<What*>(it))(); },
                         [](void* it) { static_cast<What*>(it)->~What(); }, place});
  }

  size_t count() const { return launches_.size(); }
  void run(size_t number) const { launches_[number].run(launches_[number].what); }

 private:
  static constexpr size_t CHUNK = 1 << 16;
  struct Launch { void (*run)(void*); void (*destroy)(void*); void* what; };

  void* room_for(size_t bytes) {
    bytes = (bytes + alignof(std::max_align_t) - 1) / alignof(std::max_align_t) * alignof(std::max_align_t);
    if (bytes > left_) {
      left_ = std::max(bytes, CHUNK);
      chunks_.push_back(std::make_unique<std::byte[]>(left_));
      next_ = chunks_.back().get();
    }
    void* place = next_;
    next_ += bytes, left_ -= bytes;
    return place;
  }

  std::vector<Launch> launches_;
  std::vector<std::unique_ptr<std::byte[]>> chunks_;
  std::byte* next_ = nullptr;
  size_t left_ = 0;
};

// While a program records: where launches of this thread go, and where its tensors lie.
struct Recorder {
  Launches& launches;
  const std::shared_ptr<RunMemory>& memory;

  // The one at work in this thread, or null. GCC makes it one for all libraries of kernels, as direct_calls().
  __attribute__((visibility("default"))) static Recorder*& current() {
    static thread_local Recorder* recorder = nullptr;
    return recorder;
  }
};

// Does it now, and again in each replay of the run that is recorded, if one is. `what` captures by value. Not again if it
// reads copies that the op made of operands: then the op is called again.
template <class What>
void launch(What what, bool reads_copies = false) {
  Recorder* recorder = Recorder::current();
  if (recorder != nullptr && !reads_copies) recorder->launches.add(what);
  what();
}

// For launches whose helpers may come back late: what they read exists as long as this.
inline std::shared_ptr<void> kept_with_memory(std::shared_ptr<void> operands) {
  Recorder* recorder = Recorder::current();
  if (recorder == nullptr) return operands;
  using Both = std::pair<std::shared_ptr<void>, std::shared_ptr<RunMemory>>;
  return std::make_shared<Both>(std::move(operands), recorder->memory);
}

}  // namespace pagebinder
