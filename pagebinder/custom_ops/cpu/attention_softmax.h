// Online softmax (Milakov and Gimelshein, 2018) over a block of scores laid out [key][row], in units of log2.
//
// With fewer rows than lanes a vector holds several keys: lane i is key i / ROWS, row i % ROWS.
//
// A row of few (decode) has the same bits beside others as alone: the weights of keys that are W apart are one sum,
// however many keys a vector holds, and hiding a key changes nothing for the others. So tokens that are computed
// together, guessed ones for example, are what they are one by one.
#pragma once

#include "attention.h"
#include "simd.h"

namespace pagebinder {

constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.69314718055994530942f;
constexpr float MINUS_INFINITY = -__builtin_inff();

struct ScoreOptions {
  float scale;     // raw score -> log2 units, or -> argument of tanh with a soft cap
  float soft_cap;  // in log2 units, 0 = none
  bool alibi;
  const float* bias;  // of each score, laid out as scores are, in log2 units; or null
};

template <int STRIDE>
struct SoftmaxState {
  static constexpr int VECTORS = STRIDE > W ? STRIDE / W : 1;
  static constexpr int KEYS_PER_VECTOR = STRIDE < W ? W / STRIDE : 1;
  static constexpr int SUMS = STRIDE <= DOT_ROWS ? W / KEYS_PER_VECTOR : 1;  // of a lane: of keys that are W apart
  VF top[VECTORS], sum[SUMS * VECTORS];   // running maximum and sums, per lane
  VF correction[VECTORS];                 // what earlier output must be multiplied with
  VI begin[VECTORS], end[VECTORS];        // keys that the row of a lane sees
  VI position[VECTORS];                   // absolute position of the query
  VF slope[VECTORS];                      // ALiBi, in log2 units
  VI bias_at[VECTORS];                    // where the bias of the query and head begins
  VI lane_key;
  KeyRange common;                        // keys that all rows see
};

template <int DISTANCE>
PB_INLINE VF max_over_keys(VF x) {
  if constexpr (DISTANCE >= W) return x;
  else return max_over_keys<2 * DISTANCE>(max(x, rotate<DISTANCE>(x)));
}

template <int STRIDE>
PB_INLINE VI visible(const SoftmaxState<STRIDE>& state, int first_key, int v) {
  const VI key = splat_int(first_key) + state.lane_key;
  return (key >= state.begin[v]) & (key < state.end[v]);
}

// Keys that all rows see are left out.
template <int STRIDE>
PB_INLINE void hide_scores(const SoftmaxState<STRIDE>& state, int first_key, int num_keys, float* scores) {
  using State = SoftmaxState<STRIDE>;
  constexpr int KEYS = State::KEYS_PER_VECTOR;
  for (int k = 0; k < num_keys; k += KEYS) {
    if (first_key + k >= state.common.begin && first_key + k + KEYS <= state.common.end) continue;
    PB_UNROLL
    for (int v = 0; v < State::VECTORS; ++v) {
      float* at = scores + k * STRIDE + v * W;
      store(at, select(visible(state, first_key + k, v), load<VF>(at), splat(MINUS_INFINITY)));
    }
  }
}

// Scores that need nothing but a positive scale: their maxima; `finish` stays to be done.
template <int STRIDE>
PB_INLINE void plain_maxima(float scale, int num_keys, const float* scores, VF* top) {
  using State = SoftmaxState<STRIDE>;
  for (int v = 0; v < State::VECTORS; ++v) top[v] = splat(MINUS_INFINITY);
  for (int k = 0; k < num_keys; k += State::KEYS_PER_VECTOR)
    PB_UNROLL
    for (int v = 0; v < State::VECTORS; ++v) top[v] = max(load<VF>(scores + k * STRIDE + v * W), top[v]);
  for (int v = 0; v < State::VECTORS; ++v) top[v] = top[v] * scale;
}

template <int STRIDE>
PB_INLINE void finish_scores(const SoftmaxState<STRIDE>& state, const ScoreOptions& options, bool masked,
                             int first_key, int num_keys, float* scores, VF* top) {
  using State = SoftmaxState<STRIDE>;
  for (int v = 0; v < State::VECTORS; ++v) top[v] = splat(MINUS_INFINITY);
  for (int k = 0; k < num_keys; k += State::KEYS_PER_VECTOR) {
    PB_UNROLL
    for (int v = 0; v < State::VECTORS; ++v) {
      float* at = scores + k * STRIDE + v * W;
      VF x = load<VF>(at) * options.scale;
      if (options.soft_cap != 0.0f) x = tanh_approx(x) * options.soft_cap;
      const VI key = splat_int(first_key + k) + state.lane_key;
      if (options.alibi) x += state.slope[v] * __builtin_convertvector(key - state.position[v], VF);
      if (options.bias != nullptr) x += load<VF>(options.bias + k * STRIDE + v * W);
      if (masked) x = select(visible(state, first_key + k, v), x, splat(MINUS_INFINITY));
      store(at, x);
      top[v] = max(x, top[v]);
    }
  }
}

// One number per key, as the lanes of scores at key k want it.
template <int STRIDE, int... Lane>
PB_INLINE VF spread_keys(VF x, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(x, x, (Lane / STRIDE)...);
}
template <int STRIDE>
PB_INLINE VF of_keys(const float* per_key, int k) {
  if constexpr (STRIDE >= W) return splat(per_key[k]);
  else return spread_keys<STRIDE>(load<VF>(per_key + k), std::make_integer_sequence<int, W>{});
}

template <int STRIDE>
void scale_scores(const float* key_scales, int num_keys, float* scores) {
  using State = SoftmaxState<STRIDE>;
  for (int k = 0; k < num_keys; k += State::KEYS_PER_VECTOR) {
    const VF factor = of_keys<STRIDE>(key_scales, k);
    for (int v = 0; v < State::VECTORS; ++v) {
      float* at = scores + k * STRIDE + v * W;
      store(at, load<VF>(at) * factor);
    }
  }
}

#if PAGEBINDER_BF16_DOT
// exp2_approx for weights that are rounded to bf16: a degree 4 polynomial, relative error 3e-6.
PB_INLINE VF exp2_weight(VF x) {
  return exp2_by(x, [](VF f) __attribute__((always_inline)) {
    VF poly = splat(9.57010221e-3f);
    poly = poly * f + splat(5.59178591e-2f);
    poly = poly * f + splat(2.40247443e-1f);
    poly = poly * f + splat(6.93121791e-1f);
    return poly * f + splat(9.99999285e-1f);
  });
}

// Two vectors of weights, in each keys [key][row], as pairs of keys [key / 2][row].
template <int STRIDE, int... Lane>
PB_INLINE VU round_to_key_pairs(VF low, VF high, std::integer_sequence<int, Lane...>) {
  typedef uint16_t Halves __attribute__((vector_size(W * 4)));
  constexpr Halves from{((Lane / 2 / STRIDE * 2 + Lane % 2) * STRIDE + Lane / 2 % STRIDE)...};
  const __m512i halves = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(high), bit_cast<__m512>(low)));
  if constexpr (STRIDE == 1) return bit_cast<VU>(halves);
  else return bit_cast<VU>(_mm512_permutexvar_epi16(bit_cast<__m512i>(from), halves));
}
#endif

// Turns raw scores into weights in place and updates the running state. PAIRS: weights become pairs of bf16,
// (key 2i, key 2i+1) in one 32-bit word at word index i * STRIDE + row; the sum is that of the unrounded ones.
// SCALED: weights are multiplied by those of `value_scales`, after they were added up.
template <bool PAIRS, bool SCALED = false, int STRIDE>
void softmax_block(SoftmaxState<STRIDE>& state, const ScoreOptions& options, bool masked, int first_key,
                   int num_keys, float* scores, const float* value_scales = nullptr) {
  using State = SoftmaxState<STRIDE>;
  constexpr int V = State::VECTORS;
  VF top[V], shift[V];
  const bool plain = !options.alibi && options.bias == nullptr && options.soft_cap == 0.0f && options.scale > 0.0f;
  const float scale = plain ? options.scale : 1.0f;
  if (plain && masked) hide_scores(state, first_key, num_keys, scores);
  if (plain) plain_maxima<STRIDE>(scale, num_keys, scores, top);
  else finish_scores(state, options, masked, first_key, num_keys, scores, top);
  for (int v = 0; v < V; ++v) {
    top[v] = max(max_over_keys<STRIDE>(top[v]), state.top[v]);
    shift[v] = select(top[v] == splat(MINUS_INFINITY), VF{}, top[v]);
    state.correction[v] = exp2_approx(state.top[v] - shift[v]);
    state.top[v] = top[v];
    for (int i = 0; i < State::SUMS; ++i) state.sum[i * V + v] *= state.correction[v];
  }
#if PAGEBINDER_BF16_DOT
  if constexpr (PAIRS && STRIDE < W) {
    static_assert(!SCALED);
    constexpr int KEYS = State::KEYS_PER_VECTOR;
    auto weight = [&](int k) __attribute__((always_inline)) {
      const VF x = exp2_weight(load<VF>(scores + k * STRIDE) * scale - shift[0]);
      state.sum[(first_key + k) / KEYS % State::SUMS] += x;
      return x;
    };
    for (int k = 0; k < num_keys; k += 2 * KEYS) {
      const VF low = weight(k), high = k + KEYS < num_keys ? weight(k + KEYS) : VF{};
      store(scores + k / 2 * STRIDE, round_to_key_pairs<STRIDE>(low, high, std::make_integer_sequence<int, 2 * W>{}));
    }
    return;
  }
  if constexpr (PAIRS) {
    VF sum[V];
    for (int v = 0; v < V; ++v) sum[v] = state.sum[v];
    auto weight = [&](int k, int v) __attribute__((always_inline)) {
      const VF x = exp2_weight(load<VF>(scores + k * STRIDE + v * W) * scale - shift[v]);
      sum[v] += x;
      return SCALED ? x * value_scales[k] : x;
    };
    for (int k = 0; k < num_keys; k += 2) {
      PB_UNROLL
      for (int v = 0; v < V; ++v) {
        const VF even = weight(k, v), odd = weight(k + 1, v);
        store(scores + k / 2 * STRIDE + v * W, round_to_pairs(even, odd));
      }
    }
    for (int v = 0; v < V; ++v) state.sum[v] = sum[v];
    return;
  }
#endif
  for (int k = 0; k < num_keys; k += State::KEYS_PER_VECTOR) {
    VF* sum = state.sum + (first_key + k) / State::KEYS_PER_VECTOR % State::SUMS * V;
    PB_UNROLL
    for (int v = 0; v < V; ++v) {
      float* at = scores + k * STRIDE + v * W;
      const VF x = exp2_approx(load<VF>(at) * scale - shift[v]);
      sum[v] += x;
      store(at, SCALED ? x * of_keys<STRIDE>(value_scales, k) : x);
    }
  }
}

}  // namespace pagebinder
