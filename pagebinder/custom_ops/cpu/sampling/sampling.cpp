// One row of logits -> one token, without sorting: see sampling.h.
//
//    logits -> x, float32 in scratch, penalised -> the largest x of each block of 64 tokens, and of all
//    top-k, top-p: weights (1, or mass) summed by bins of y; the bin in which the limit lies is searched exactly
//    draw: blocks that hold nothing kept, or nothing that any noise could lift above the best score, are skipped
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace pagebinder {
namespace {

constexpr int64_t BLOCK = 64;
constexpr int LANES = 16;           // counters of a block
constexpr float MOST_NOISE = 32;    // -log2(e) is below it, for every word
constexpr float LEAST_SCORE = -5;   // y - log2(e) of the likeliest token is above it
constexpr float MASS_BITS = 30;
constexpr int NUM_BINS = 1024;
constexpr float BINS_A_BIT = 32;

// What is kept: tokens above y, and of those at y the ones up to `token`.
struct Cut {
  float y;
  int32_t token;

  PB_INLINE VI keeps(VF values, int64_t first_token) const {
    const VI tokens = lane_numbers() + static_cast<int32_t>(first_token);
    return (values > splat(y)) | ((values == splat(y)) & (tokens <= splat_int(token)));
  }
};
constexpr int32_t EVERY_TOKEN = std::numeric_limits<int32_t>::max();

struct Member {
  float y;
  int32_t token;
  uint32_t weight;

  bool operator<(const Member& other) const { return y > other.y || (y == other.y && token < other.token); }
};

// Memory of a thread, kept between rows.
struct Scratch {
  std::vector<float> x, most;
  std::vector<uint64_t> penalised;
  std::vector<Member> members;
};

class Row {
 public:
  template <class T>
  Row(const Draw<T>& draw, Scratch& scratch)
      : scratch_(scratch), vocab_(draw.vocab), blocks_((vocab_ + BLOCK - 1) / BLOCK), scale_(draw.scale) {
    scratch_.x.resize(blocks_ * BLOCK), scratch_.most.resize(blocks_);
    x_ = scratch_.x.data(), most_ = scratch_.most.data();
    for (int64_t i = 0; i < blocks_ * BLOCK; i += W)
      store(x_ + i, i < vocab_ ? load_filled(draw.logits, i, vocab_) : splat(-INFINITE));
    if (draw.penalty != 1.0f) penalise(draw.seen, draw.num_seen, draw.penalty);
  }

  const float* logits() const { return x_; }

  // Finds the largest logits; false if there is a NaN.
  bool find_largest() {
    VF sums[AT_ONCE] = {};
    largest_ = -INFINITE;
    for (int64_t b = 0; b < blocks_; ++b) {
      VF most = splat(-INFINITE);
      PB_UNROLL
      for (int i = 0; i < BLOCK; i += W) {
        const VF x = load<VF>(x_ + b * BLOCK + i);
        sums[i / W % AT_ONCE] += x, most = max(x, most);
      }
      most_[b] = largest_lane(most);
      largest_ = std::max(largest_, most_[b]);
    }
    for (int64_t b = 0; b < blocks_; ++b) most_[b] = y_of(splat(most_[b]))[0];  // scaling keeps the order
    return !may_hide_nan(sums) || !has_nan(x_, blocks_ * BLOCK);
  }

  bool is_empty() const { return largest_ == -INFINITE; }

  // The first ranks of what `cut` keeps: up to the one whose weight makes their sum reach limit(sum of all).
  template <class Weigh, class Limit>
  Cut first_ranks(Cut cut, Weigh weigh, Limit limit) const {
    uint64_t bins[NUM_BINS] = {}, before = 0, total = 0;
    each_kept(cut, [&](int64_t, VF y, VI kept) {
      const VI bin = bin_of(y), weight = kept & weigh(y);
      for (int lane = 0; lane < W; ++lane) bins[bin[lane]] += static_cast<uint32_t>(weight[lane]);
    });
    for (const uint64_t weight : bins) total += weight;
    const uint64_t needed = limit(total);
    int bin = 0;
    while (before + bins[bin] < needed) before += bins[bin++];
    auto& members = scratch_.members;
    members.clear();
    each_kept(cut, [&](int64_t i, VF y, VI kept) {
      kept &= bin_of(y) == bin;
      if (!any_lane(kept)) return;
      const VI weight = weigh(y);
      for (int lane = 0; lane < W; ++lane)
        if (kept[lane]) members.push_back({y[lane], static_cast<int32_t>(i + lane), static_cast<uint32_t>(weight[lane])});
    });
    auto first = members.begin(), last = members.end();  // the last rank to keep lies between
    while (last - first > 1) {
      const auto middle = first + (last - first) / 2;
      std::nth_element(first, middle, last);
      uint64_t sum = before;
      for (auto member = first; member != middle; ++member) sum += member->weight;
      if (sum >= needed) last = middle;
      else before = sum, first = middle;
    }
    return {first->y, first->token};
  }

  // The kept token of the best score.
  int64_t draw(Cut cut, Stream stream) const {
    float best = LEAST_SCORE, scores[BLOCK];
    uint32_t words[BLOCK];
    int64_t token = 0;
    for (int64_t b = 0; b < blocks_; ++b) {
      if (most_[b] < cut.y || most_[b] + MOST_NOISE < best) continue;
      const int64_t first = b * BLOCK;
      VI may_win{};
      for (int lane = 0; lane < LANES; lane += W) {
        VU four[4];
        philox4x32(stream, static_cast<uint32_t>(b * LANES + lane), four);
        PB_UNROLL
        for (int j = 0; j < 4; ++j) {
          const int at = j * LANES + lane;
          store(words + at, four[j]);
          may_win |= y_at(first + at) - least_log2_noise(four[j]) > splat(best);
        }
      }
      if (!any_lane(may_win)) continue;
      for (int i = 0; i < BLOCK; i += W) {
        const VF y = y_at(first + i), score = y - log2_noise(load<VU>(words + i));
        store(scores + i, select(cut.keeps(y, first + i), score, splat(-INFINITE)));
      }
      for (int i = 0; i < BLOCK; ++i)
        if (scores[i] > best) best = scores[i], token = first + i;
    }
    return token;
  }

 private:
  void penalise(const int64_t* seen, int64_t count, float penalty) {
    auto& done = scratch_.penalised;
    done.assign(blocks_, 0);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = seen[i];
      uint64_t& word = done[token / BLOCK];
      const uint64_t bit = uint64_t{1} << (token % BLOCK);
      if (!(word & bit)) x_[token] = x_[token] > 0 ? x_[token] / penalty : x_[token] * penalty;
      word |= bit;
    }
  }

  // Infinite logits: the largest ones stay at 0.
  PB_INLINE VF y_of(VF x) const {
    return select(x == splat(largest_), VF{}, unfused((x - splat(largest_)) * splat(scale_)));
  }
  PB_INLINE VF y_at(int64_t i) const { return y_of(load<VF>(x_ + i)); }

  static PB_INLINE VI bin_of(VF y) {
    const VF bin = y * -BINS_A_BIT, last = splat(NUM_BINS - 1);
    return __builtin_convertvector(select(bin < last, bin, last), VI);
  }

  template <class Body>
  PB_INLINE void each_kept(Cut cut, Body body) const {
    for (int64_t b = 0; b < blocks_; ++b) {
      if (most_[b] < cut.y) continue;
      for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; i += W) {
        const VF y = y_at(i);
        const VI kept = cut.keeps(y, i);
        if (any_lane(kept)) body(i, y, kept);
      }
    }
  }

  Scratch& scratch_;
  int64_t vocab_, blocks_;
  float scale_, largest_ = -INFINITE;
  float *x_, *most_;  // [blocks * BLOCK], [blocks]: the largest x, then the largest y of a block
};

// 2^y in whole units of 2^-30, rounded down, for y <= 0.
PB_INLINE VI mass_of(VF y) {
  constexpr float POLYNOMIAL[] = {1.53533572e-4f, 1.33988762e-3f, 9.61843739e-3f, 5.55033247e-2f,
                                  2.40226479e-1f, 6.93147203e-1f, 1.0f};
  const VF bounded = max(y, splat(-MASS_BITS - 1)), whole = round_nearest(bounded);
  const VI power = (__builtin_convertvector(whole, VI) + (127 + static_cast<int>(MASS_BITS))) << 23;
  return __builtin_convertvector(polynomial(bounded - whole, POLYNOMIAL) * bit_cast<VF>(power), VI);
}

}  // namespace

template <class T>
int64_t sample_token(const Draw<T>& draw) {
  static thread_local Scratch scratch;
  if (draw.top_k == 1 && draw.penalty == 1.0f) return first_largest(draw.logits, draw.vocab);
  Row row(draw, scratch);
  if (draw.top_k == 1) return first_largest(row.logits(), draw.vocab);
  if (!row.find_largest()) return -1;
  if (row.is_empty()) return 0;
  Cut cut{-INFINITE, EVERY_TOKEN};
  if (draw.top_k < static_cast<double>(draw.vocab))
    cut = row.first_ranks(cut, [](VF) { return splat_int(1); },
                          [&](uint64_t) { return static_cast<uint64_t>(draw.top_k); });
  if (draw.top_p < 1) {
    if (cut.y < -MASS_BITS) cut = {-MASS_BITS, EVERY_TOKEN};  // what is below has no mass
    cut = row.first_ranks(cut, mass_of, [&](uint64_t total) {
      return static_cast<uint64_t>(std::ceil(draw.top_p * static_cast<double>(total)));
    });
  }
  if (cut.y < draw.min_y) cut = {draw.min_y, EVERY_TOKEN};
  return row.draw(cut, draw.stream);
}

template int64_t sample_token<float>(const Draw<float>&);
template int64_t sample_token<bf16>(const Draw<bf16>&);
template int64_t sample_token<f16>(const Draw<f16>&);

}  // namespace pagebinder
