// See mla.h. A job is one head and up to 8 tokens; the register-blocked loops are attention's.
#include "mla.h"

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "attention_rows.h"
#include "attention_values.h"

namespace pagebinder {
namespace {

// Weight elements that a thread should have to itself before another one is worth waking.
constexpr int64_t ELEMENTS_PER_THREAD = 1 << 16;

int64_t tiles_of(const HeadProductArgs& a) { return (a.num_tokens + MLA_TOKENS_AT_ONCE - 1) / MLA_TOKENS_AT_ONCE; }

struct Work {
  Buffer buffer;
  std::vector<const void*> rows;
};

// The weight rows of a head. Dots compute some rows beyond the last: those repeat it.
template <class T>
const T* const* weight_rows(const HeadProductArgs& a, int64_t head, Work& work) {
  const int64_t count = a.dotted ? a.width_out : a.width_in;
  const T* first = static_cast<const T*>(a.weight) + head * a.weight_head_stride;
  work.rows.resize(count + MAX_KEYS_AT_ONCE);
  for (int64_t i = 0; i < count + MAX_KEYS_AT_ONCE; ++i)
    work.rows[i] = first + std::min(i, count - 1) * a.weight_row_stride;
  return reinterpret_cast<const T* const*>(work.rows.data());
}

template <class T>
const T* x_row(const HeadProductArgs& a, int64_t token, int64_t head) {
  return static_cast<const T*>(a.x) + token * a.x_token_stride + head * a.x_head_stride;
}

template <class T>
T* out_row(const HeadProductArgs& a, int64_t token, int64_t head) {
  return static_cast<T*>(a.out) + token * a.out_token_stride + head * a.out_head_stride;
}

// out = sum of x[i] * row i, columns in whole vectors of which the last ends at the width.
template <class T, int TOKENS>
void add_rows(const HeadProductArgs& a, int64_t head, int64_t token, int count, Work& work) {
  const int inner = static_cast<int>(a.width_in), outer = static_cast<int>(a.width_out);
  const int vectors = (outer + W - 1) / W, stride = vectors * W;
  float* weights = work.buffer.at_least<float>(static_cast<size_t>(TOKENS) * (inner + stride));
  float* sums = weights + TOKENS * inner;
  for (int t = 0; t < TOKENS; ++t) {
    const T* from = t < count ? x_row<T>(a, token + t, head) : nullptr;
    for (int i = 0; i < inner; i += W) {
      const int left = std::min(W, inner - i);
      const VF x = from == nullptr ? VF{} : left == W ? load_float(from + i) : load_float_part(from + i, left);
      for (int lane = 0; lane < left; ++lane) weights[(i + lane) * TOKENS + t] = x[lane];
    }
  }
  const Rows<T> rows{weight_rows<T>(a, head, work), 0};
  AheadLines<T> nothing;
  add_values<TOKENS>({weights, inner, nullptr, sums, stride, true}, rows, nothing, count, outer);
  for (int t = 0; t < count; ++t) {
    T* to = out_row<T>(a, token + t, head);
    for (int i = 0; i < vectors; ++i)
      store_float(to + std::min(i * W, outer - W), load<VF>(sums + t * stride + i * W));
  }
}

// out[i] = x . row i
template <class T, int TOKENS>
void dot_rows(const HeadProductArgs& a, int64_t head, int64_t token, int count, Work& work) {
#if PAGEBINDER_BF16_DOT
  using E = std::conditional_t<PAIRED<T>, PairElements, FloatElements<T>>;
#else
  using E = FloatElements<T>;
#endif
  const int inner = static_cast<int>(a.width_in), outer = static_cast<int>(a.width_out);
  const size_t packed_floats = static_cast<size_t>(TOKENS) * (inner + 2 * W);
  float* packed = work.buffer.at_least<float>(packed_floats + TOKENS * (outer + 2 * MAX_KEYS_AT_ONCE));
  float* dots = packed + packed_floats;
  const T* x[TOKENS] = {};
  for (int t = 0; t < count; ++t) x[t] = x_row<T>(a, token + t, head);
  auto* queries = reinterpret_cast<typename E::Query*>(packed);
  pack_dot_queries<E, TOKENS>(x, count, inner, queries);
  const Rows<T> rows{weight_rows<T>(a, head, work), 0};
  AheadLines<T> nothing;
  dot_scores<E, TOKENS>(rows, nothing, outer, queries, inner, dots);
  for (int t = 0; t < count; ++t) {
    T* to = out_row<T>(a, token + t, head);
    for (int i = 0; i < outer; i += W) {
      float lanes[W];
      const int left = std::min(W, outer - i);
      for (int lane = 0; lane < left; ++lane) lanes[lane] = dots[(i + lane) * TOKENS + t];
      if (left == W) store_float(to + i, load<VF>(lanes));
      else store_float_part(to + i, load_float_part(lanes, left), left);
    }
  }
}

template <class T, int TOKENS>
void run_tile(const HeadProductArgs& a, int64_t head, int64_t token, int count, Work& work) {
  if (a.dotted) dot_rows<T, TOKENS>(a, head, token, count, work);
  else add_rows<T, TOKENS>(a, head, token, count, work);
}

struct Run {
  const HeadProductArgs& args;
  std::atomic<int64_t> next{0};
};

template <class T>
void worker(void* context, int) {
  static thread_local Work work;
  Run& run = *static_cast<Run*>(context);
  const HeadProductArgs& a = run.args;
  const int64_t tiles = tiles_of(a);
  for (int64_t job; (job = run.next.fetch_add(1, std::memory_order_relaxed)) < a.num_heads * tiles;) {
    const int64_t head = job / tiles, token = job % tiles * MLA_TOKENS_AT_ONCE;
    const int count = static_cast<int>(std::min<int64_t>(MLA_TOKENS_AT_ONCE, a.num_tokens - token));
    if (count == 1) run_tile<T, 1>(a, head, token, count, work);
    else if (count == 2) run_tile<T, 2>(a, head, token, count, work);
    else if (count <= 4) run_tile<T, 4>(a, head, token, count, work);
    else run_tile<T, 8>(a, head, token, count, work);
  }
}

template <class T>
void run_product(const HeadProductArgs& a) {
  Run run{a};
  const int64_t worth = a.num_heads * a.width_in * a.width_out / ELEMENTS_PER_THREAD;
  const int threads = static_cast<int>(std::clamp<int64_t>(worth, 1, a.num_threads));
  if (threads == 1) worker<T>(&run, 0);
  else a.run(threads, worker<T>, &run);
}

}  // namespace

const char* head_product(const HeadProductArgs& a, Element element) {
  if (a.num_tokens == 0 || a.num_heads == 0) return nullptr;
  if (a.width_in < 1 || a.width_out < 1) return "a width is 0";
  // A step of dots is up to two vectors wide, a sum at least one.
  if (a.dotted ? a.width_in < 2 * W : a.width_out < W) return "the latent is narrower than two vectors";
  with_element(element, [&](auto x) { run_product<decltype(x)>(a); });
  return nullptr;
}

}  // namespace pagebinder
