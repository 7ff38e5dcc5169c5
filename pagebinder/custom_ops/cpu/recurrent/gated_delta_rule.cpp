// Linear attention that overwrites what it remembers, see recurrent/gated_delta_rule.py.
#include <cmath>

#include "rank_one.h"

namespace pagebinder {
namespace {

// A chunk: k and q [CHUNK, Dk], v [CHUNK, Dv], decay, beta and q . k [CHUNK]; with a decay per row also decays and
// decayed k [CHUNK, Dk]. Rows are padded to whole vectors.
template <RankOne kind>
class Delta {
 public:
  explicit Delta(const GatedDeltaRuleArgs& a)
      : a_(a), patches_(a.key_width, a.value_width), keys_(whole_vectors(a.key_width)),
        values_(whole_vectors(a.value_width)) {}

  int64_t num_patches() const { return patches_.count(); }
  Patch patch(int64_t i) const { return patches_.patch(i); }
  int64_t row_step() const { return ROW_STEP; }
  int64_t chunk_floats() const { return CHUNK * (4 * keys_ + values_ + 3); }

  void begin(int64_t, const float*, float*) const {}
  void end(int64_t, float*, float*) const {}

  void prepare(int64_t row, int64_t n, int64_t head, float* chunk) const {
    for (int64_t i = 0; i < n; ++i) {
      const Token t = token_of(i, chunk);
      const int64_t key_head = head / a_.group;
      read_row(a_.k, row + i, key_head, 0, a_.key_width, t.k);
      read_row(a_.q, row + i, key_head, 0, a_.key_width, t.q);
      read_row(a_.v, row + i, head, 0, a_.value_width, t.v);
      if (a_.normalise) {
        scale_row(t.k, keys_, norm_factor(t.k));
        scale_row(t.q, keys_, norm_factor(t.q));
      }
      scale_row(t.q, keys_, a_.scale);
      *t.q_dot_k = dot(t.q, t.k, keys_);
      *t.beta = read_value(a_.beta, row + i, head);
      if constexpr (kind == RankOne::ROW_DELTA) decay_rows(t, row + i, head);
      else *t.decay = std::exp(read_value(a_.g, row + i, head));
    }
  }

  void tokens(int64_t n, const Patch& patch, Place from, Place scratch, Place last, float* chunk) const {
    rank_one_tokens<kind>(n, patch, from, scratch, last, [&](int64_t i) {
      const Token t = token_of(i, chunk);
      return RankOneToken{t.k, t.q, t.decays, t.decayed_k, *t.decay, *t.beta, *t.q_dot_k, t.v + patch.column};
    });
  }

  void finish(int64_t row, int64_t n, int64_t head, float* chunk) const {
    for (int64_t i = 0; i < n; ++i) write_row(a_.out, row + i, head, 0, a_.value_width, token_of(i, chunk).v);
  }

 private:
  struct Token {
    float *k, *q, *decays, *decayed_k, *v, *decay, *beta, *q_dot_k;
  };

  const GatedDeltaRuleArgs& a_;
  const ColumnPatches patches_;
  const int64_t keys_, values_;

  Token token_of(int64_t i, float* chunk) const {
    float *key_rows = chunk + i * 4 * keys_, *v = chunk + CHUNK * 4 * keys_ + i * values_;
    float* numbers = chunk + CHUNK * (4 * keys_ + values_) + 3 * i;
    return {key_rows, key_rows + keys_, key_rows + 2 * keys_, key_rows + 3 * keys_, v, numbers, numbers + 1,
            numbers + 2};
  }

  float norm_factor(const float* x) const { return 1.0f / std::sqrt(dot(x, x, keys_) + a_.norm_eps); }

  void decay_rows(const Token& t, int64_t row, int64_t head) const {
    read_row(a_.g, row, head, 0, a_.key_width, t.decays);
    for (int64_t i = 0; i < keys_; i += W) {
      const VF decay = exp_approx(load<VF>(t.decays + i));
      store(t.decays + i, decay);
      store(t.decayed_k + i, decay * load<VF>(t.k + i));
      store(t.q + i, decay * load<VF>(t.q + i));
    }
  }
};

template <RankOne kind>
const char* run(const GatedDeltaRuleArgs& a) {
  return run_heads(a.step, a.cache, a.out, a.heads, a.heads * a.key_width * a.value_width, Delta<kind>(a));
}

}  // namespace

const char* gated_delta_rule(const GatedDeltaRuleArgs& a) {
  return a.row_decay ? run<RankOne::ROW_DELTA>(a) : run<RankOne::DELTA>(a);
}

}  // namespace pagebinder
