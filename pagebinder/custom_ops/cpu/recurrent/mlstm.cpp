// The matrix memory of xLSTM, see recurrent/mlstm.py. The normaliser is one more column, of values 1.
#include <cmath>

#include "rank_one.h"

namespace pagebinder {
namespace {

// A chunk: k and q [CHUNK, Dk], values and 1 [CHUNK, Dv + 1], forget, write, q . k and m [CHUNK]; then the last m.
class Memory {
 public:
  explicit Memory(const MlstmArgs& a)
      : a_(a), patches_(a.key_width, a.value_width + 1), keys_(whole_vectors(a.key_width)),
        values_(whole_vectors(a.value_width + 1)) {}

  int64_t num_patches() const { return patches_.count(); }
  Patch patch(int64_t i) const { return patches_.patch(i); }
  int64_t row_step() const { return ROW_STEP; }
  int64_t chunk_floats() const { return CHUNK * (2 * keys_ + values_ + 4) + 1; }

  void begin(int64_t, const float* state, float* chunk) const {
    *last_m(chunk) = state == nullptr ? 0.0f : state[a_.key_width * a_.cache.strides[1] + last_column()];
  }

  void end(int64_t, float* state, float* chunk) const {
    float* row = state + a_.key_width * a_.cache.strides[1];
    for (int64_t c = 0; c < a_.value_width; ++c) row[c * a_.cache.strides[2]] = 0.0f;
    row[last_column()] = *last_m(chunk);
  }

  void prepare(int64_t row, int64_t n, int64_t head, float* chunk) const {
    for (int64_t i = 0; i < n; ++i) {
      const Token t = token_of(i, chunk);
      read_row(a_.k, row + i, head, 0, a_.key_width, t.k);
      read_row(a_.q, row + i, head, 0, a_.key_width, t.q);
      scale_row(t.q, keys_, a_.scale);
      std::fill_n(t.v, values_, 0.0f);
      read_row(a_.v, row + i, head, 0, a_.value_width, t.v);
      t.v[a_.value_width] = 1.0f;
      const float input = read_value(a_.igate, row + i, head);
      const float kept = *last_m(chunk) - softplus(splat(-read_value(a_.fgate, row + i, head)))[0];
      const float m = std::max(kept, input);
      *t.forget = std::exp(kept - m), *t.write = std::exp(input - m), *t.m = *last_m(chunk) = m;
      *t.q_dot_k = dot(t.q, t.k, keys_);
    }
  }

  void tokens(int64_t n, const Patch& patch, Place from, Place scratch, Place last, float* chunk) const {
    rank_one_tokens<RankOne::PLAIN>(n, patch, from, scratch, last, [&](int64_t i) {
      const Token t = token_of(i, chunk);
      return RankOneToken{t.k, t.q, nullptr, nullptr, *t.forget, *t.write, *t.q_dot_k, t.v + patch.column};
    });
  }

  void finish(int64_t row, int64_t n, int64_t head, float* chunk) const {
    for (int64_t i = 0; i < n; ++i) {
      const Token t = token_of(i, chunk);
      const float divisor = std::max(std::abs(t.v[a_.value_width]), std::exp(-*t.m)) + a_.eps;
      scale_row(t.v, values_, 1.0f / divisor);
      write_row(a_.out, row + i, head, 0, a_.value_width, t.v);
    }
  }

 private:
  struct Token {
    float *k, *q, *v, *forget, *write, *q_dot_k, *m;
  };

  const MlstmArgs& a_;
  const ColumnPatches patches_;
  const int64_t keys_, values_;

  Token token_of(int64_t i, float* chunk) const {
    float *key_rows = chunk + i * 2 * keys_, *v = chunk + CHUNK * 2 * keys_ + i * values_;
    float* numbers = chunk + CHUNK * (2 * keys_ + values_) + 4 * i;
    return {key_rows, key_rows + keys_, v, numbers, numbers + 1, numbers + 2, numbers + 3};
  }

  float* last_m(float* chunk) const { return chunk + CHUNK * (2 * keys_ + values_ + 4); }
  int64_t last_column() const { return a_.value_width * a_.cache.strides[2]; }
};

}  // namespace

const char* mlstm(const MlstmArgs& a) {
  return run_heads(a.step, a.cache, a.out, a.heads, a.heads * a.key_width * a.value_width, Memory(a));
}

}  // namespace pagebinder
