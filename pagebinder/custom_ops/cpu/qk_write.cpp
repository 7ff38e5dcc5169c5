// Norm of query and key heads, RoPE and the write to the KV cache in one pass over the heads, see qk_write.h.
//
// A head is widened to float32 once and stays in scratch; every rounding of the separate ops is made on the way.
#include "qk_write.h"

#include <cmath>

#include "norm_rows.h"

namespace pagebinder {
namespace {

constexpr int64_t SERIAL_CHANNELS = 1 << 14;
constexpr int64_t TOKENS_A_TURN = 4;

int64_t whole_vectors(int64_t count) { return (count + W - 1) / W * W; }

// `to` is filled up to a whole vector, with zeros.
template <class T>
void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(to + i, load_float(from + i));
  if (i < count) store(to + i, load_float_part(from + i, static_cast<int>(count - i)));
}

template <class T>
void narrow(const float* from, int64_t count, T* to) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store_float(to + i, load<VF>(from + i));
  if (i < count) store_float_part(to + i, load<VF>(from + i), static_cast<int>(count - i));
}

// What one token's heads have in common, as float32: [first half | second half] of the channels that turn, each filled
// up to whole vectors. A head and the weights of its norm have the other channels behind them.
struct Angles {
  const float* cos[2];
  const float* sin[2];
};

// Scratch of one thread: angles and weights widened, a head, and a key as it is before it becomes codes.
template <class T>
struct Scratch {
  float *cos, *sin, *q_weight, *k_weight, *head;
  T* key;

  Scratch(Buffer& buffer, int64_t stride) {
    float* at = buffer.at_least<float>(static_cast<size_t>(6 * stride));
    for (float** part : {&cos, &sin, &q_weight, &k_weight, &head}) *part = at, at += stride;
    key = reinterpret_cast<T*>(at);
  }
};

template <class T>
class Heads {
 public:
  Heads(const QkWriteArgs<T>& args, Buffer& buffer)
      : a_(args), half_(args.turned / 2), rest_(args.head_dim - args.turned), padded_(whole_vectors(half_)),
        all_(2 * padded_ + whole_vectors(rest_)), scratch_(buffer, all_) {
    if (a_.q_weight != nullptr) widen_head(a_.q_weight, scratch_.q_weight);
    if (a_.k_weight != nullptr) widen_head(a_.k_weight, scratch_.k_weight);
  }

  void token(int64_t t) const {
    const Angles angles{{scratch_.cos, scratch_.cos + padded_}, {scratch_.sin, scratch_.sin + padded_}};
    widen_angles(a_.cos, a_.cos_stride, t, scratch_.cos);
    widen_angles(a_.sin, a_.sin_stride, t, scratch_.sin);
    for (int64_t h = 0; h < a_.num_heads; ++h)
      turn(a_.q + t * a_.q_token_stride + h * a_.q_head_stride, scratch_.q_weight, angles,
           a_.out + (t * a_.num_heads + h) * a_.head_dim);
    const int64_t slot = a_.slot_mapping[t];
    if (slot < 0) return;
    char* row = a_.cache + slot / a_.block_size * a_.cache_block_stride + slot % a_.block_size * a_.cache_slot_stride;
    for (int64_t g = 0; g < a_.num_kv_heads; ++g, row += a_.cache_head_stride) {
      T* key = a_.encode == nullptr ? reinterpret_cast<T*>(row) : scratch_.key;
      const T* v = a_.v + t * a_.v_token_stride + g * a_.v_head_stride;
      turn(a_.k + t * a_.k_token_stride + g * a_.k_head_stride, scratch_.k_weight, angles, key);
      if (a_.encode == nullptr) std::memcpy(key + a_.head_dim, v, a_.head_dim_v * sizeof(T));
      else a_.encode(a_, g, key, v, row);
    }
  }

 private:
  void widen_head(const T* from, float* to) const {
    widen(from, half_, to);
    widen(from + half_, half_, to + padded_);
    widen(from + 2 * half_, rest_, to + 2 * padded_);
  }

  void widen_angles(const void* table, int64_t stride, int64_t t, float* to) const {
    const auto widen_row = [&](const auto* row) {
      widen(row, half_, to);
      widen(a_.column_per_pair ? row : row + half_, half_, to + padded_);
    };
    if (a_.wide_angles) widen_row(static_cast<const float*>(table) + t * stride);
    else widen_row(static_cast<const T*>(table) + t * stride);
  }

  // One head: x normed and turned.
  void turn(const T* from, const float* weight, const Angles& angles, T* to) const {
    float* x = scratch_.head;
    widen_head(from, x);
    if (a_.tail != NormTail::ABSENT) norm(x, weight);
    for (int64_t i = 0; i < padded_; i += W) {
      const VF first = load<VF>(x + i), second = load<VF>(x + padded_ + i);
      store(x + i, product(first, angles.cos[0] + i) - product(second, angles.sin[0] + i));
      store(x + padded_ + i, product(second, angles.cos[1] + i) + product(first, angles.sin[1] + i));
    }
    narrow(x, half_, to);
    narrow(x + padded_, half_, to + half_);
    narrow(x + 2 * padded_, rest_, to + 2 * half_);
  }

  PB_INLINE VF product(VF x, const float* angles) const {
    const VF exact = unfused(x * load<VF>(angles));
    return a_.wide_angles ? exact : rounded<T>(exact);
  }

  void norm(float* x, const float* weight) const {
    VF squares = {};
    for (int64_t i = 0; i < all_; i += W) squares += load<VF>(x + i) * load<VF>(x + i);
    float sum = 0;
    for (int i = 0; i < W; ++i) sum += squares[i];
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(a_.head_dim) + a_.eps);
    for (int64_t i = 0; i < all_; i += W) store(x + i, tail_of(load<VF>(x + i) * scale, weight + i));
  }

  PB_INLINE VF tail_of(VF normed, const float* weight) const {
    switch (a_.tail) {
      case NormTail::CAST_SCALE: return rounded<T>(rounded<T>(normed) * load<VF>(weight));
      case NormTail::SCALE_CAST: return rounded<T>(unfused(normed) * load<VF>(weight));
      case NormTail::OFFSET: return rounded<T>(unfused(normed) * (load<VF>(weight) + 1.0f));
      default: return rounded<T>(normed);
    }
  }

  const QkWriteArgs<T>& a_;
  const int64_t half_, rest_, padded_, all_;
  const Scratch<T> scratch_;
};

template <class T>
struct HeadsRun {
  const QkWriteArgs<T>& args;
  std::atomic<int64_t> next{0};
};

template <class T>
void heads_worker(void* context, int) {
  static thread_local Buffer buffer;
  HeadsRun<T>& run = *static_cast<HeadsRun<T>*>(context);
  const Heads<T> heads(run.args, buffer);
  for (int64_t t; (t = run.next.fetch_add(TOKENS_A_TURN, std::memory_order_relaxed)) < run.args.num_tokens;)
    for (int64_t i = t; i < run.args.num_tokens && i < t + TOKENS_A_TURN; ++i) heads.token(i);
}

}  // namespace

template <class T>
const char* qk_norm_rope_write(const QkWriteArgs<T>& args) {
  const int64_t num_slots = args.num_blocks * args.block_size;
  for (int64_t t = 0; t < args.num_tokens; ++t)
    if (args.slot_mapping[t] >= num_slots) return "a slot in slot_mapping lies outside kv_cache";
  HeadsRun<T> run{args};
  const int64_t channels = args.num_tokens * (args.num_heads + args.num_kv_heads) * args.head_dim;
  if (args.num_threads <= 1 || channels < SERIAL_CHANNELS) heads_worker<T>(&run, 0);
  else args.run(args.num_threads, heads_worker<T>, &run);
  return nullptr;
}

template const char* qk_norm_rope_write<float>(const QkWriteArgs<float>&);
template const char* qk_norm_rope_write<bf16>(const QkWriteArgs<bf16>&);
template const char* qk_norm_rope_write<f16>(const QkWriteArgs<f16>&);

}  // namespace pagebinder
