// Norm of query and key heads, RoPE and the write to the KV cache in one pass over the heads, see qk_write.h.
//
// Heads with norms are widened to float32 once and stay in scratch, as many as a vector has lanes: their norms are one
// division and one root. Others are turned where they lie. Every rounding of the separate ops is made.
#pragma once

#include "neighbours.h"
#include "norm_rows.h"
#include "qk_write.h"

namespace pagebinder {
namespace qk_heads {

constexpr int64_t SERIAL_CHANNELS = 1 << 14;
constexpr int64_t TOKENS_A_TURN = 4;

// `to` is filled up to a whole pair of vectors, with zeros.
template <class T>
PB_INLINE void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + WW <= count; i += WW) store_pair(to + i, load_pair(from + i));
  if (i < count) store_pair(to + i, load_pair(LastColumns<T>(from + i, count - i).values));
}

// Neighbours taken apart: the first ones of `count` pairs, the second ones, each filled up as above.
template <class T>
void widen_apart(const T* from, int64_t count, float* first, float* second) {
  const auto put = [&](int64_t i, const T* at) {
    const Pair pair = load_neighbours(at);
    store(first + i, pair.first), store(second + i, pair.second);
  };
  int64_t i = 0;
  for (; i + W <= count; i += W) put(i, from + 2 * i);
  if (i < count) put(i, LastColumns<T>(from + 2 * i, 2 * (count - i)).values), i += W;
  for (; i < whole_pairs(count); i += W) store(first + i, VF{}), store(second + i, VF{});
}

// Of a pair of vectors, the first `count` elements.
template <class T>
PB_INLINE void store_part(T* to, NarrowPair<T> x, int64_t count) {
  if (count >= WW) return store_pair(to, x);
  T all[WW];
  store_pair(all, x);
  std::memcpy(to, all, static_cast<size_t>(count) * sizeof(T));
}

// The same of neighbours, so many of each.
template <class T>
PB_INLINE void store_apart(T* to, Pair first, Pair second, int64_t count) {
  T part[2 * WW], *all = count >= WW ? to : part;
  store_neighbours(all, first.first, second.first);
  store_neighbours(all + WW, first.second, second.second);
  if (count < WW) std::memcpy(to, part, 2 * static_cast<size_t>(count) * sizeof(T));
}

// What one token's heads have in common, as float32: [first channels | second ones] of the pairs that turn, each
// filled up to whole pairs of vectors. A head and the weights of its norm have the other channels behind them.
struct Angles {
  const float* cos[2];
  const float* sin[2];
};

// Scratch of one thread: angles and weights widened, W heads, and a key as it is before it becomes codes.
template <class T>
struct Scratch {
  float *cos, *sin, *q_weight, *k_weight, *heads;
  T* key;

  Scratch(Buffer& buffer, int64_t stride) {
    float* at = buffer.at_least<float>(static_cast<size_t>((5 + W) * stride));
    for (float** part : {&cos, &sin, &q_weight, &k_weight}) *part = at, at += stride;
    heads = at;
    key = reinterpret_cast<T*>(at + W * stride);
  }
};

template <class T>
class Heads {
 public:
  Heads(const QkWriteArgs<T>& args, Buffer& buffer)
      : a_(args), half_(args.turned / 2), rest_(args.head_dim - args.turned), padded_(whole_pairs(half_)),
        all_(2 * padded_ + whole_pairs(rest_)), scratch_(buffer, all_),
        where_they_lie_(a_.tail == NormTail::ABSENT && half_ == padded_) {
    if (a_.q_weight != nullptr) widen_head(a_.q_weight, scratch_.q_weight);
    if (a_.k_weight != nullptr) widen_head(a_.k_weight, scratch_.k_weight);
    const auto choose = [&](auto tail) {
      constexpr NormTail TAIL = decltype(tail)::value;
      turn_ = a_.in_float32 ? &Heads::turn<TAIL, true> : &Heads::turn<TAIL, false>;
    };
    if (a_.tail == NormTail::ABSENT) choose(Tail<NormTail::ABSENT>());
    else with_tail(a_.tail, choose);
  }

  void token(int64_t t) const {
    widen_angles(a_.cos, a_.cos_stride, t, scratch_.cos);
    widen_angles(a_.sin, a_.sin_stride, t, scratch_.sin);
    const Source queries{a_.q + t * a_.q_token_stride, a_.q_head_stride, a_.num_heads, scratch_.q_weight};
    T* out = a_.out + t * a_.num_heads * a_.head_dim;
    turn_heads(queries, [&](int64_t h) { return out + h * a_.head_dim; }, [](int64_t) {});
    const int64_t slot = a_.slot_mapping[t];
    if (slot < 0) return;
    char* rows = a_.cache + slot / a_.block_size * a_.cache_block_stride + slot % a_.block_size * a_.cache_slot_stride;
    const Source keys{a_.k + t * a_.k_token_stride, a_.k_head_stride, a_.num_kv_heads, scratch_.k_weight};
    const auto key_of = [&](int64_t g) {
      return a_.encode == nullptr ? reinterpret_cast<T*>(rows + g * a_.cache_head_stride) : scratch_.key;
    };
    turn_heads(keys, key_of, [&](int64_t g) {
      const T* v = a_.v + t * a_.v_token_stride + g * a_.v_head_stride;
      if (a_.encode == nullptr) std::memcpy(key_of(g) + a_.head_dim, v, a_.head_dim_v * sizeof(T));
      else a_.encode(a_, g, scratch_.key, v, rows + g * a_.cache_head_stride);
    });
  }

 private:
  template <class U>
  void widen_pairs(const U* from, float* to) const {
    if (a_.neighbours) return widen_apart(from, half_, to, to + padded_);
    widen(from, half_, to);
    widen(from + half_, half_, to + padded_);
  }

  void widen_head(const T* from, float* to) const {
    widen_pairs(from, to);
    widen(from + 2 * half_, rest_, to + 2 * padded_);
  }

  void widen_angles(const void* table, int64_t stride, int64_t t, float* to) const {
    const auto widen_row = [&](const auto* row) {
      if (!a_.column_per_pair) return widen_pairs(row, to);
      widen(row, half_, to);
      widen(row, half_, to + padded_);
    };
    if (a_.wide_angles) widen_row(static_cast<const float*>(table) + t * stride);
    else widen_row(static_cast<const T*>(table) + t * stride);
  }

  // A token's queries or keys, and the weight of their norm.
  struct Source {
    const T* first;
    int64_t stride, count;
    const float* weight;
  };

  // Norms and turns head h of all into to(h), and calls then(h).
  template <class To, class Then>
  void turn_heads(const Source& from, To to, Then then) const {
    for (int64_t first = 0; first < from.count; first += W) {
      float scales[W] = {};
      const int64_t end = std::min<int64_t>(first + W, from.count);
      const auto wide = [&](int64_t h) { return scratch_.heads + (h - first) * all_; };
      for (int64_t h = first; h < end && !where_they_lie_; ++h) widen_head(from.first + h * from.stride, wide(h));
      if (a_.tail != NormTail::ABSENT) find_scales(end - first, scales);
      for (int64_t h = first; h < end; ++h) {
        (this->*turn_)({from.first + h * from.stride, wide(h), scales[h - first], from.weight}, to(h));
        then(h);
      }
    }
  }

  // What the norm multiplies each head with.
  void find_scales(int64_t count, float* scales) const {
    VF squares[W] = {};
    for (int64_t h = 0; h < count; ++h)
      for (int64_t i = 0; i < all_; i += W) {
        const VF x = load<VF>(scratch_.heads + h * all_ + i);
        squares[h] = fused(x, x, squares[h]);
      }
    store(scales, 1.0f / square_root(sum_lanes_in_order(squares) / static_cast<float>(a_.head_dim) + a_.eps));
  }

  // A head where it lies and widened, what its norm multiplies it with, and the norm's weight.
  struct Head {
    const T* x;
    const float* wide;
    float scale;
    const float* weight;
  };

  // The forms of this are the only ones that a norm and angles have: all else is compiled once a type.
  template <NormTail TAIL, bool IN_FLOAT32>
  void turn(const Head& head, T* to) const {
    constexpr bool HAS_NORM = TAIL != NormTail::ABSENT;
    const auto normed = [&](int64_t i) __attribute__((always_inline)) {
      const Pair x = load_pair(head.wide + i);
      if constexpr (!HAS_NORM) return x;
      else return rounded<T>(weighted<T>(Tail<TAIL>(), x * head.scale, load_pair(head.weight + i)));
    };
    turn_pairs<HAS_NORM, IN_FLOAT32>(head.x, normed, to);
    T* rest = to + 2 * half_;
    if (!HAS_NORM) {
      std::memcpy(rest, head.x + 2 * half_, static_cast<size_t>(rest_) * sizeof(T));
      return;
    }
    for (int64_t i = 0; i < rest_; i += WW) store_part(rest + i, narrowed<T>(normed(2 * padded_ + i)), rest_ - i);
  }

  template <bool HAS_NORM, bool IN_FLOAT32, class Normed>
  PB_INLINE void turn_pairs(const T* head, const Normed& normed, T* to) const {
    const auto product = [](Pair x, const float* angle) __attribute__((always_inline)) {
      const Pair exact = unfused(x * load_pair(angle));
      return IN_FLOAT32 ? exact : rounded<T>(exact);
    };
    const Angles angles{{scratch_.cos, scratch_.cos + padded_}, {scratch_.sin, scratch_.sin + padded_}};
    for (int64_t i = 0; i < half_; i += WW) {
      Pair first, second;
      if (HAS_NORM || !where_they_lie_) {
        first = normed(i), second = normed(padded_ + i);
      } else if (a_.neighbours) {
        const Pair low = load_neighbours(head + 2 * i), high = load_neighbours(head + 2 * i + WW);
        first = {low.first, high.first}, second = {low.second, high.second};
      } else {
        first = load_pair(head + i), second = load_pair(head + half_ + i);
      }
      const Pair low = product(first, angles.cos[0] + i) - product(second, angles.sin[0] + i);
      const Pair high = product(second, angles.cos[1] + i) + product(first, angles.sin[1] + i);
      if (a_.neighbours) {
        store_apart(to + 2 * i, low, high, half_ - i);
      } else {
        store_part(to + i, narrowed<T>(low), half_ - i);
        store_part(to + half_ + i, narrowed<T>(high), half_ - i);
      }
    }
  }

  const QkWriteArgs<T>& a_;
  const int64_t half_, rest_, padded_, all_;
  const Scratch<T> scratch_;
  const bool where_they_lie_;  // are heads read there, without a copy in float32?
  void (Heads::*turn_)(const Head& head, T* to) const;
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

}  // namespace qk_heads

// Null, or what is wrong with the slots.
template <class T>
const char* qk_norm_rope_write(const QkWriteArgs<T>& args) {
  using namespace qk_heads;
  const int64_t num_slots = args.num_blocks * args.block_size;
  for (int64_t t = 0; t < args.num_tokens; ++t)
    if (args.slot_mapping[t] >= num_slots) return "a slot in slot_mapping lies outside kv_cache";
  HeadsRun<T> run{args};
  const int64_t channels = args.num_tokens * (args.num_heads + args.num_kv_heads) * args.head_dim;
  if (args.num_threads <= 1 || channels < SERIAL_CHANNELS) heads_worker<T>(&run, 0);
  else args.run(args.num_threads, heads_worker<T>, &run);
  return nullptr;
}

}  // namespace pagebinder
