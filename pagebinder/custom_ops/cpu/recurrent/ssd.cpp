// The state space recurrence of Mamba-2, see recurrent/ssd.py.
#include <cmath>

#include "heads.h"

namespace pagebinder {
namespace {

// Adds one token to W rows of a state [P, S]: S = decay S + added (x) B, y = S C. added and y [W], B and C [S].
void add_token(const float* b, const float* c, float decay, const float* added, int64_t width, Place from, Place to,
               float* y) {
  constexpr int ROWS = 4;  // that share what is loaded of B and C
  VF sums[W];
  for (int first = 0; first < W; first += ROWS) {
    VF sum[ROWS]{}, scale[ROWS];
    PB_UNROLL for (int i = 0; i < ROWS; ++i) scale[i] = splat(added[first + i]);
    for (int64_t s = 0; s < width; s += W) {
      const VF b_lanes = load<VF>(b + s), c_lanes = load<VF>(c + s);
      PB_UNROLL for (int i = 0; i < ROWS; ++i) {
        const VF old = load<VF>(from.base + (first + i) * from.stride + s);
        const VF now = fused(scale[i], b_lanes, decay * old);
        store(to.base + (first + i) * to.stride + s, now);
        sum[i] = fused(now, c_lanes, sum[i]);
      }
    }
    PB_UNROLL for (int i = 0; i < ROWS; ++i) sums[first + i] = sum[i];
  }
  store(y, sum_lanes(sums));
}

// A chunk: B and C [CHUNK, S], x, dt x and y [CHUNK, P], dt and decay [CHUNK]; rows padded to whole vectors.
class StateSpace {
 public:
  explicit StateSpace(const SsdArgs& a)
      : a_(a), width_(whole_vectors(a.width)), values_(whole_vectors(a.head_width)) {}

  int64_t num_patches() const { return values_ / W; }
  Patch patch(int64_t i) const { return {i * W, std::min<int64_t>(W, a_.head_width - i * W), 0, a_.width}; }
  int64_t row_step() const { return W; }
  int64_t chunk_floats() const { return CHUNK * (2 * width_ + 3 * values_ + 2); }

  void begin(int64_t, const float*, float*) const {}
  void end(int64_t, float*, float*) const {}

  void prepare(int64_t row, int64_t n, int64_t head, float* chunk) const {
    const Chunk c = split(chunk);
    time_steps(row, n, head, c);
    for (int64_t i = 0; i < n; ++i) {
      read_row(a_.b, row + i, head / a_.group, 0, a_.width, c.b + i * width_);
      read_row(a_.c, row + i, head / a_.group, 0, a_.width, c.c + i * width_);
      float* x = c.x + i * values_;
      read_row(a_.x, row + i, head, 0, a_.head_width, x);
      for (int64_t p = 0; p < values_; p += W) store(c.added + i * values_ + p, load<VF>(x + p) * c.dt[i]);
    }
  }

  void tokens(int64_t n, const Patch& patch, Place from, Place scratch, Place last, float* chunk) const {
    const Chunk c = split(chunk);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = i * values_ + patch.row;
      const Place to = i + 1 == n ? last : scratch;
      add_token(c.b + i * width_, c.c + i * width_, c.decay[i], c.added + at, width_, from, to, c.y + at);
      from = to;
    }
  }

  void finish(int64_t row, int64_t n, int64_t head, float* chunk) const {
    const Chunk c = split(chunk);
    const float skip = a_.d.base == nullptr ? 0.0f : read_value(a_.d, head, 0);
    for (int64_t i = 0; i < n; ++i) {
      float *y = c.y + i * values_, *x = c.x + i * values_;
      if (a_.d.base != nullptr)
        for (int64_t p = 0; p < values_; p += W) store(y + p, fused(splat(skip), load<VF>(x + p), load<VF>(y + p)));
      write_row(a_.out, row + i, head, 0, a_.head_width, y);
    }
  }

 private:
  struct Chunk {
    float *b, *c, *x, *added, *y, *dt, *decay;
  };

  const SsdArgs& a_;
  const int64_t width_, values_;

  Chunk split(float* f) const {
    float *x = f + CHUNK * 2 * width_, *dt = x + CHUNK * 3 * values_;
    return {f, f + CHUNK * width_, x, x + CHUNK * values_, x + CHUNK * 2 * values_, dt, dt + CHUNK};
  }

  void time_steps(int64_t row, int64_t n, int64_t head, const Chunk& c) const {
    const float rate = read_value(a_.a, head, 0);
    const VF bias = splat(a_.dt_bias.base == nullptr ? 0.0f : read_value(a_.dt_bias, head, 0));
    for (int64_t i = 0; i < n; ++i) c.dt[i] = read_value(a_.dt, row + i, head);
    for (int64_t i = 0; i < n; i += W) {
      VF dt = load<VF>(c.dt + i) + bias;
      if (a_.dt_softplus) dt = softplus(dt);
      dt = max(dt, splat(a_.dt_min));
      dt = select(dt < splat(a_.dt_max), dt, splat(a_.dt_max));
      store(c.dt + i, dt);
      store(c.decay + i, exp_approx(dt * rate));
    }
  }
};

}  // namespace

const char* ssd(const SsdArgs& a) {
  return run_heads(a.step, a.cache, a.out, a.heads, a.heads * a.head_width * a.width, StateSpace(a));
}

}  // namespace pagebinder
