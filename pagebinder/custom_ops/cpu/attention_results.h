// From accumulated rows to the op's outputs: merging the parts of a split KV range, the sink, LSE and rounding.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention_partials.h"
#include "attention_rows.h"
#include "attention_softmax.h"

namespace pagebinder {

// The result of some keys for each row: maximum (log2 units), sum of weights, unnormalised output.
struct RowResults {
  float *top, *sum, *out;
  int stride;  // floats from one row of `out` to the next
};

// Where vector i of an output row lies among its columns.
PB_INLINE int column_of(int i, int width, bool last_overlaps) {
  return last_overlaps && i * W + W > width ? width - W : i * W;
}

// Adds what earlier calls carried of a row to its result.
template <class T>
void add_carried(const TileContext<T>& c, RowResults& results, int r, const float* row, bool last_overlaps) {
  if (row[1] == 0.0f) return;
  const float top = std::max(row[0], results.sum[r] == 0.0f ? MINUS_INFINITY : results.top[r]);
  const float earlier = std::exp2(row[0] - top);
  const float here = results.sum[r] == 0.0f ? 0.0f : std::exp2(results.top[r] - top);
  float* out = results.out + r * results.stride;
  for (int i = 0; i < c.vectors_v; ++i) {
    const VF before = load<VF>(row + 2 + column_of(i, c.width_v, last_overlaps));
    store(out + i * W, load<VF>(out + i * W) * here + before * earlier);
  }
  results.sum[r] = results.sum[r] * here + row[1] * earlier;
  results.top[r] = top;
}

template <class T>
void carry(const TileContext<T>& c, const RowResults& results, int r, float* row, bool last_overlaps) {
  row[0] = results.top[r];
  row[1] = results.sum[r];
  for (int i = 0; i < c.vectors_v; ++i)
    store(row + 2 + column_of(i, c.width_v, last_overlaps), load<VF>(results.out + r * results.stride + i * W));
}

// Normalises every row together with its sink and writes it; the LSE goes without the sink. `last_overlaps`: the
// last vector of a row ends at the width of V, instead of being filled up with zeros.
template <class T>
void write_rows(const TileContext<T>& c, RowResults& results, bool last_overlaps) {
  for (int r = 0; r < c.tile.rows; ++r) {
    const int64_t token = c.token_of(r), head = c.head_of(r);
    if (c.args.carried != nullptr && c.args.carried_rows[token] >= 0) {
      const int64_t row = c.args.carried_rows[token] * c.args.num_heads + head;
      float* carried = c.args.carried + row * partial_row_floats(c.args);
      add_carried(c, results, r, carried, last_overlaps);
      if (c.args.carries_on) {
        carry(c, results, r, carried, last_overlaps);
        continue;
      }
    }
    const float top = results.top[r], sum = results.sum[r];
    float shift = top, total = sum;
    const float* sinks = c.args.sinks == nullptr ? nullptr : c.args.sinks + token * c.args.sinks_token_stride;
    if (sinks != nullptr && sinks[head] != MINUS_INFINITY) {
      const float sink = sinks[head] * LOG2_E;
      shift = std::max(top, sink);
      total = sum * std::exp2(top - shift) + std::exp2(sink - shift);
    }
    // A row that saw no key has sum 0. A NaN sum must stay NaN.
    const float factor = sum == 0.0f ? 0.0f : std::exp2(top - shift) / total;
    T* to = static_cast<T*>(c.args.out) + (token * c.args.num_heads + head) * c.width_v;
    const float* from = results.out + r * results.stride;
    for (int i = 0; i < c.vectors_v; ++i) {
      const VF x = load<VF>(from + i * W) * factor;
      const int left = c.width_v - i * W;
      if (left >= W) store_float(to + i * W, x);
      else if (last_overlaps) store_float(to + c.width_v - W, x);
      else store_float_part(to + i * W, x, left);
    }
    if (c.args.lse != nullptr)
      c.args.lse[head * c.args.num_tokens + token] = sum == 0.0f ? MINUS_INFINITY : (top + std::log2(sum)) * LN_2;
  }
}

// Adds up the parts of a split KV range: each is weighted by 2^(its maximum - the common one).
inline void merge_parts(const float* partials, int parts, int rows, int row_floats, RowResults& into) {
  for (int r = 0; r < rows; ++r) {
    const float* part = partials + static_cast<int64_t>(r) * row_floats;
    const int64_t next = static_cast<int64_t>(rows) * row_floats;
    float top = MINUS_INFINITY, sum = 0.0f;
    for (int i = 0; i < parts; ++i) top = std::max(top, part[i * next]);
    float* out = into.out + r * into.stride;
    std::memset(out, 0, (row_floats - 2) * sizeof(float));
    for (int i = 0; i < parts; ++i) {
      if (part[i * next + 1] == 0.0f) continue;
      const float weight = std::exp2(part[i * next] - top);
      sum += weight * part[i * next + 1];
      for (int d = 0; d < row_floats - 2; d += W)
        store(out + d, load<VF>(out + d) + load<VF>(part + i * next + 2 + d) * weight);
    }
    into.top[r] = top;
    into.sum[r] = sum;
  }
}

// Keeps the results of one part; whoever finishes the last part of a tile merges all. False: others are not done.
template <class T>
bool merge_if_last(const TileContext<T>& c, Plan& plan, const Job& job, int row_floats, RowResults& results) {
  const int64_t part_floats = static_cast<int64_t>(c.tile.rows) * row_floats;
  float* partials = plan.partials + c.tile.first_partial + c.kv_head * c.tile.parts * part_floats;
  float* mine = partials + job.part * part_floats;
  for (int r = 0; r < c.tile.rows; ++r, mine += row_floats) {
    mine[0] = results.top[r];
    mine[1] = results.sum[r];
    std::memcpy(mine + 2, results.out + r * results.stride, (row_floats - 2) * sizeof(float));
  }
  std::atomic<int>& finished = plan.counters[c.tile.first_counter + c.kv_head];
  if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < c.tile.parts) return false;
  merge_parts(partials, c.tile.parts, c.tile.rows, row_floats, results);
  return true;
}

}  // namespace pagebinder
