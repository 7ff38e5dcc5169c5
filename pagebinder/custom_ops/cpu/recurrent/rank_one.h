// Tokens of a state S [Dk, Dv] that decays, takes k (x) u and answers q, for columns that registers hold:
//
//     answer = q^T (decay S)                          u = write v, or of the delta rule: write (v - k^T (decay S))
//     out    = answer + (q . k) u                     S = decay S + k (x) u
//
// One pass over S adds a token and reads both products for the next one: a chunk of n tokens takes n + 1 passes,
// and a decode two, the second of which finds S in a cache.
#pragma once

#include "heads.h"

namespace pagebinder {

constexpr int MOST_VECTORS = W == 16 ? 4 : 2;  // of columns at a time: as many as there are registers for
constexpr int ROW_STEP = 4;
constexpr int64_t PATCH_BYTES = 32 << 10;

enum class RankOne { PLAIN, DELTA, ROW_DELTA };  // ROW_DELTA: a decay for each row

// k, q [Dk]; of ROW_DELTA also `decays` and `decayed_k` [Dk], and q is decayed too. All padded to whole vectors.
struct RankOneToken {
  const float *k, *q, *decays, *decayed_k;
  float decay, write, q_dot_k;
  float* v;                    // becomes the output
};

// k^T S and q^T S of V vectors of columns. Few of them add rows up in more than one sum, which hides latency.
template <int V>
struct Products {
  static constexpr int SUMS = V == 1 ? 4 : V == 2 ? 2 : 1;
  VF of_k[SUMS][V], of_q[SUMS][V];

  static PB_INLINE VF total(const VF (*sums)[V], int i) {
    VF sum = sums[0][i];
    for (int j = 1; j < SUMS; ++j) sum += sums[j][i];
    return sum;
  }
};

// Adds token `t` with its u, if there is one, and reads the products of `next`, if there is one.
template <RankOne kind, int V, bool adds, bool reads>
PB_INLINE Products<V> pass_over(const RankOneToken& t, const VF* u, const RankOneToken& next, int64_t rows,
                                Place from, Place to) {
  Products<V> p{};
  const float *k = t.k, *decays = t.decays, *next_q = next.q;
  const float* next_k = kind == RankOne::ROW_DELTA ? next.decayed_k : next.k;
  const VF decay = splat(adds ? t.decay : 1.0f);
  for (int64_t first = 0; first < rows; first += p.SUMS) {
    PB_UNROLL for (int j = 0; j < p.SUMS; ++j) {
      const int64_t r = first + j;
      const VF kept = adds && kind == RankOne::ROW_DELTA ? splat(decays[r]) : decay;
      const VF added = splat(k[r]), of_k = splat(next_k[r]), of_q = splat(next_q[r]);
      PB_UNROLL for (int i = 0; i < V; ++i) {
        VF s = load<VF>(from.base + r * from.stride + i * W);
        if (adds) {
          s = fused(added, u[i], kept * s);
          store(to.base + r * to.stride + i * W, s);
        }
        if (reads) p.of_q[j][i] = fused(of_q, s, p.of_q[j][i]);
        if (reads && kind != RankOne::PLAIN) p.of_k[j][i] = fused(of_k, s, p.of_k[j][i]);
      }
    }
  }
  return p;
}

// The token's u from its products; the output takes v's place.
template <RankOne kind, int V>
PB_INLINE void answer(const RankOneToken& t, const Products<V>& p, VF* u) {
  const VF decay = splat(kind == RankOne::ROW_DELTA ? 1.0f : t.decay);
  PB_UNROLL for (int i = 0; i < V; ++i) {
    const VF v = load<VF>(t.v + i * W);
    u[i] = t.write * (kind == RankOne::PLAIN ? v : fused(-decay, p.total(p.of_k, i), v));
    store(t.v + i * W, fused(splat(t.q_dot_k), u[i], decay * p.total(p.of_q, i)));
  }
}

// token(i) -> RankOneToken of the columns, i in [0, n). S moves from `from` by way of `scratch` to `last`.
template <RankOne kind, int V, class Token>
void rank_one_tokens(int64_t n, int64_t rows, Place from, Place scratch, Place last, const Token& token) {
  RankOneToken t = token(0);
  Products<V> p = pass_over<kind, V, false, true>(t, nullptr, t, rows, from, from);
  VF u[V];
  for (int64_t i = 1; i < n; ++i) {
    const RankOneToken next = token(i);
    answer<kind, V>(t, p, u);
    p = pass_over<kind, V, true, true>(t, u, next, rows, from, scratch);
    t = next, from = scratch;
  }
  answer<kind, V>(t, p, u);
  pass_over<kind, V, true, false>(t, u, t, rows, from, last);
}

template <RankOne kind, class Token>
void rank_one_tokens(int64_t n, const Patch& patch, Place from, Place scratch, Place last, const Token& token) {
  const int64_t vectors = whole_vectors(patch.columns) / W, rows = (patch.rows + ROW_STEP - 1) / ROW_STEP * ROW_STEP;
  if (vectors == 4) rank_one_tokens<kind, 4>(n, rows, from, scratch, last, token);
  else if (vectors == 3) rank_one_tokens<kind, 3>(n, rows, from, scratch, last, token);
  else if (vectors == 2) rank_one_tokens<kind, 2>(n, rows, from, scratch, last, token);
  else rank_one_tokens<kind, 1>(n, rows, from, scratch, last, token);
}

// The patches of [Dk, columns]: all rows of as many columns as a pass and the nearest cache can hold.
class ColumnPatches {
 public:
  ColumnPatches(int64_t rows, int64_t columns) : rows_(rows), columns_(columns), step_(MOST_VECTORS * W) {
    while (step_ > W && rows * step_ * static_cast<int64_t>(sizeof(float)) > PATCH_BYTES) step_ /= 2;
  }
  int64_t count() const { return (columns_ + step_ - 1) / step_; }
  Patch patch(int64_t i) const { return {0, rows_, i * step_, std::min(step_, columns_ - i * step_)}; }

 private:
  const int64_t rows_, columns_;
  int64_t step_;
};

// The sum of a[i] b[i]; both are padded with zeros to whole vectors.
inline float dot(const float* a, const float* b, int64_t count) {
  VF sums{};
  for (int64_t i = 0; i < count; i += W) sums = fused(load<VF>(a + i), load<VF>(b + i), sums);
  float sum = 0.0f;
  for (int lane = 0; lane < W; ++lane) sum += sums[lane];
  return sum;
}

inline void scale_row(float* x, int64_t count, float factor) {
  for (int64_t i = 0; i < count; i += W) store(x + i, load<VF>(x + i) * factor);
}

}  // namespace pagebinder
