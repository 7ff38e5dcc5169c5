// Hyper-connections: mixing weights of S residual streams, and their collapse.
//
//     segment  = up to 1024 channels of one stream                   K = S * C channels of a token = all segments
//     partial  [segment][row of fn, then the sum of squares][token]
//
// 1. product: jobs of (segment, 16 tokens) read the streams once: each is widened to scratch, squared for the RMS and
//    multiplied by all rows of fn, with a tile of tokens x rows of sums in registers.
// 2. weights: tokens are the lanes of a vector, so sigmoid, softmax and Sinkhorn need no shuffles; a 4 x 4 matrix stays
//    in 16 registers for all iterations. Then the streams collapse.
//
// Sums are taken in an order that depends on the sizes of a token alone: results have the same bits in any batch.
#include "hyper.h"

#include <algorithm>
#include <cmath>

#include "activations.h"

namespace pagebinder {
namespace {

constexpr int SEGMENT = 1024;
constexpr int BLOCK_TOKENS = 16;
constexpr int TILE_TOKENS = W == 16 ? 4 : 2;  // sums, loads and a spare fit the registers
constexpr int64_t SERIAL_PRODUCTS = 1 << 17;
constexpr float LOG2_E = 1.4426950408889634f;

struct Run {
  const HyperArgs& args;
  int segments_of_stream, num_segments;
  int64_t lanes;  // tokens of a row of `partial`
  float* partial;

  float* sums(int segment, int row) const {
    return partial + (static_cast<int64_t>(segment) * (args.rows + 1) + row) * lanes;
  }
};

// ---- product ---------------------------------------------------------------------------------------------------

// x[TOKENS][SEGMENT] . fn[ROWS][length] -> out[row * lanes + token]
template <int TOKENS, int ROWS, class F>
void dot_tile(const float* x, const F* fn, int64_t fn_stride, int length, float* out, int64_t lanes) {
  constexpr int COUNT = TOKENS * ROWS;
  VF sums[(COUNT + W - 1) / W * W] = {};
  int i = 0;
  const auto add = [&](auto load_row) {
    VF x_lanes[TOKENS];
    PB_UNROLL for (int t = 0; t < TOKENS; ++t) x_lanes[t] = load<VF>(x + t * SEGMENT + i);
    PB_UNROLL for (int r = 0; r < ROWS; ++r) {
      const VF row = load_row(fn + r * fn_stride + i);
      PB_UNROLL for (int t = 0; t < TOKENS; ++t) sums[r * TOKENS + t] += row * x_lanes[t];
    }
  };
  for (; i + W <= length; i += W) add([](const F* p) { return load_float(p); });
  if (i < length) add([&](const F* p) { return load_float_part(p, length - i); });
  for (int first = 0; first < COUNT; first += W) {
    float total[W];
    store(total, sum_lanes(sums + first));
    for (int k = 0; k < W && first + k < COUNT; ++k)
      out[(first + k) / TOKENS * lanes + (first + k) % TOKENS] = total[k];
  }
}

template <int TOKENS, class F>
void dot_rows(const float* x, const F* fn, int64_t fn_stride, int rows, int length, float* out, int64_t lanes) {
  const auto at = [&](int row) { return fn + row * fn_stride; };
  int r = 0;
  for (; r + 6 <= rows; r += 6) dot_tile<TOKENS, 6>(x, at(r), fn_stride, length, out + r * lanes, lanes);
  for (; r + 2 <= rows; r += 2) dot_tile<TOKENS, 2>(x, at(r), fn_stride, length, out + r * lanes, lanes);
  for (; r < rows; ++r) dot_tile<TOKENS, 1>(x, at(r), fn_stride, length, out + r * lanes, lanes);
}

// Widens `length` channels to scratch, with zeros up to a whole vector; returns the sum of their squares.
template <class T>
float widen_row(const T* x, int length, float* to) {
  VF squares[W] = {};
  for (int i = 0; i < length; i += W) {
    const VF value = i + W <= length ? load_float(x + i) : load_float_part(x + i, length - i);
    store(to + i, value);
    squares[0] += value * value;
  }
  return sum_lanes(squares)[0];
}

template <class T, class F>
void product_job(const Run& run, int64_t job) {
  const HyperArgs& a = run.args;
  alignas(64) float x[TILE_TOKENS * SEGMENT];
  const int segment = static_cast<int>(job % run.num_segments);
  const int64_t first = job / run.num_segments * BLOCK_TOKENS, end = std::min(a.tokens, first + BLOCK_TOKENS);
  const int64_t stream = segment / run.segments_of_stream;
  const int64_t channel = static_cast<int64_t>(segment % run.segments_of_stream) * SEGMENT;
  const int length = static_cast<int>(std::min<int64_t>(SEGMENT, a.channels - channel));
  const T* source = static_cast<const T*>(a.x) + stream * a.x_stream_stride + channel;
  const F* fn = static_cast<const F*>(a.fn) + stream * a.channels + channel;
  for (int64_t t = first; t < end;) {
    const int count = end - t >= TILE_TOKENS ? TILE_TOKENS : 1;
    for (int i = 0; i < count; ++i)
      run.sums(segment, a.rows)[t + i] = widen_row(source + (t + i) * a.x_token_stride, length, x + i * SEGMENT);
    float* out = run.sums(segment, 0) + t;
    if (count == 1) dot_rows<1>(x, fn, a.fn_stride, a.rows, length, out, run.lanes);
    else dot_rows<TILE_TOKENS>(x, fn, a.fn_stride, a.rows, length, out, run.lanes);
    t += count;
  }
}

// ---- weights: lanes are tokens ---------------------------------------------------------------------------------

// SIZE: the number of streams if the compiler shall know it, or 0.
template <int SIZE>
void sinkhorn(VF* comb, int streams, int iterations, float eps) {
  const int S = SIZE ? SIZE : streams;
  VF c[SIZE ? SIZE * SIZE : MAX_STREAMS * MAX_STREAMS];
  const auto normalise = [&](int line, int step) {  // S entries `step` apart
    VF sum = c[line];
    PB_UNROLL for (int i = 1; i < S; ++i) sum += c[line + i * step];
    const VF factor = 1.0f / (sum + eps);
    PB_UNROLL for (int i = 0; i < S; ++i) c[line + i * step] *= factor;
  };
  for (int i = 0; i < S * S; ++i) c[i] = comb[i];
  PB_UNROLL for (int k = 0; k < S; ++k) normalise(k, S);
  for (int n = 1; n < iterations; ++n) {
    PB_UNROLL for (int j = 0; j < S; ++j) normalise(j * S, 1);
    PB_UNROLL for (int k = 0; k < S; ++k) normalise(k, S);
  }
  for (int i = 0; i < S * S; ++i) comb[i] = c[i];
}

void softmax_row(VF* row, int S, float eps) {
  VF largest = row[0], sum{};
  for (int k = 1; k < S; ++k) largest = max(largest, row[k]);
  for (int k = 0; k < S; ++k) sum += row[k] = exp2_approx((row[k] - largest) * LOG2_E);
  const VF factor = 1.0f / sum;
  for (int k = 0; k < S; ++k) row[k] = row[k] * factor + eps;
}

// logit(row) of W tokens from `first` on: all segments, times 1 / RMS, scaled and shifted.
struct Logits {
  const Run& run;
  const int64_t first;
  VF inverse_rms;

  Logits(const Run& run, int64_t first) : run(run), first(first) {
    const HyperArgs& a = run.args;
    const VF mean = total(a.rows) / static_cast<float>(a.streams * a.channels) + a.norm_eps;
    for (int i = 0; i < W; ++i) inverse_rms[i] = 1.0f / std::sqrt(mean[i]);
  }
  VF total(int row) const {
    VF sum{};
    for (int s = 0; s < run.num_segments; ++s) sum += load<VF>(run.sums(s, row) + first);
    return sum;
  }
  VF operator()(int row, float scale) const { return total(row) * inverse_rms * scale + run.args.base[row]; }
};

void put_lanes(VF x, int count, float* to, int64_t stride) {
  for (int i = 0; i < count; ++i) to[i * stride] = x[i];
}

// pre, post and comb of `count` <= W tokens; pre stays with the caller.
void mixing_weights(const Run& run, int64_t first, int count, VF* pre) {
  const HyperArgs& a = run.args;
  const int S = static_cast<int>(a.streams);
  const Logits logit(run, first);
  for (int i = 0; i < S; ++i) pre[i] = sigmoid(logit(i, a.scale[0])) + a.eps;
  if (a.post == nullptr) return;
  for (int i = 0; i < S; ++i)
    put_lanes(2.0f * sigmoid(logit(S + i, a.scale[1])), count, a.post + first * S + i, S);
  VF comb[MAX_STREAMS * MAX_STREAMS];
  for (int i = 0; i < S * S; ++i) comb[i] = logit(2 * S + i, a.scale[2]);
  for (int j = 0; j < S; ++j) softmax_row(comb + j * S, S, a.eps);
  if (S == 4) sinkhorn<4>(comb, S, a.iterations, a.eps);
  else sinkhorn<0>(comb, S, a.iterations, a.eps);
  for (int i = 0; i < S * S; ++i) put_lanes(comb[i], count, a.comb + first * S * S + i, S * S);
}

template <class T>
void collapse(const HyperArgs& a, int64_t token, const VF* pre, int lane) {
  const T* x = static_cast<const T*>(a.x) + token * a.x_token_stride;
  T* out = static_cast<T*>(a.collapsed) + token * a.channels;
  float weights[MAX_STREAMS];
  for (int s = 0; s < a.streams; ++s) weights[s] = pre[s][lane];
  const auto sum = [&](int64_t c, auto load_lanes) {
    VF total{};
    for (int s = 0; s < a.streams; ++s) total += weights[s] * load_lanes(x + s * a.x_stream_stride + c);
    return total;
  };
  int64_t c = 0;
  for (; c + W <= a.channels; c += W) store_float(out + c, sum(c, [](const T* p) { return load_float(p); }));
  const int rest = static_cast<int>(a.channels - c);
  if (rest) store_float_part(out + c, sum(c, [&](const T* p) { return load_float_part(p, rest); }), rest);
}

template <class T, class F>
void connect(const HyperArgs& a, Buffer& scratch) {
  const int per_stream = static_cast<int>((a.channels + SEGMENT - 1) / SEGMENT);
  Run run{a, per_stream, per_stream * static_cast<int>(a.streams), a.tokens + W, nullptr};
  run.partial = scratch.at_least<float>(static_cast<size_t>(run.num_segments) * (a.rows + 1) * run.lanes);
  const bool serial = a.tokens * a.rows * a.streams * a.channels < SERIAL_PRODUCTS;
  const int64_t blocks = (a.tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  run_jobs(blocks * run.num_segments, serial, a.num_threads, a.run, [&](int64_t job) { product_job<T, F>(run, job); });
  const int64_t share = (a.tokens + a.num_threads - 1) / a.num_threads, lanes = std::min<int64_t>(W, share);
  run_jobs((a.tokens + lanes - 1) / lanes, serial, a.num_threads, a.run, [&](int64_t job) {
    VF pre[MAX_STREAMS];
    const int count = static_cast<int>(std::min(lanes, a.tokens - job * lanes));
    mixing_weights(run, job * lanes, count, pre);
    for (int i = 0; i < count; ++i) collapse<T>(a, job * lanes + i, pre, i);
  });
}

}  // namespace

void hyper_connection(const HyperArgs& a) {
  static thread_local Buffer scratch;
  with_element(a.type, [&](auto x) {
    with_element(a.fn_type, [&](auto fn) { connect<decltype(x), decltype(fn)>(a, scratch); });
  });
}

}  // namespace pagebinder
