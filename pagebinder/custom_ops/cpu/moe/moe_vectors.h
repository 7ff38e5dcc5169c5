// Experts on vectors, for any element type and size.
//
//     as stored     [E, columns, K]   lanes run along k; W sums of columns x rows at a time, a vector for each
//     transposed    [E, K, columns]   lanes are columns, values of a row are broadcast
//
// A row of an expert's input is widened once, when it is packed; its length is padded with zeros to whole vectors.
// How many rows are handled together changes nothing about how one of them is summed.
#pragma once

#include "attention_scores.h"
#include "memory_streams.h"
#include "moe_flow.h"

namespace pagebinder {

constexpr int MOST_ROWS = W == 16 ? 4 : 2;  // together, by the number of registers
constexpr int ROW_BLOCK = 32;               // rows whose sums wait for the gate
constexpr int BLOCK_K = 32;                 // of transposed weights that stay in the cache for all rows

// The columns of one job. Gated experts have a second range, of values.
template <class T>
struct VectorPanel {
  const T *first = nullptr, *second = nullptr;  // null: there is no such job
  int64_t line;                                 // elements from column to column; from k to k if transposed
  int64_t column;
  int width;
};

// E: how packed rows and weights meet, see attention_scores.h.
template <class T, class E, bool TRANSPOSED, int PANEL_COLUMNS = TRANSPOSED ? 512 : 64>
struct Vectors {
  using Element = T;
  using Operand = typename E::Query;  // [position][pitch]
  using Setup = NoSetup;
  using Panel = VectorPanel<T>;
  static constexpr int GROUP = MOST_ROWS, PANEL = PANEL_COLUMNS, MOST_HIDDEN = PANEL;

  static int64_t pitch(int64_t inner) { return (inner + E::STEP - 1) / E::STEP * E::STEP; }
  static int64_t operand_size(int64_t positions, int64_t inner) { return positions * pitch(inner); }

  // Writes `count` <= W values at column i of a row and zeros behind the last of `inner`.
  static PB_INLINE void put(Operand* row, int64_t i, VF x, int count, int64_t inner) {
    if constexpr (E::PER_LANE == 2) {
      store_float_part(row + i, x, count);
    } else {
      T narrow[W];
      store_float(narrow, x);
      store_float_part(row + i, load_float(narrow), count);
    }
    if (i + count == inner) std::memset(row + inner, 0, (pitch(inner) - inner) * sizeof(Operand));
  }

  static void pack(const Run&, const T* const* rows, int count, int64_t inner, Operand* to) {
    for (int r = 0; r < count; ++r, to += pitch(inner))
      for (int64_t i = 0; i < inner; i += W) {
        const int here = static_cast<int>(std::min<int64_t>(W, inner - i));
        put(to, i, here == W ? load_float(rows[r] + i) : load_float_part(rows[r] + i, here), here, inner);
      }
  }

  // ---- panels --------------------------------------------------------------------------------------------------

  static const T* column_at(const Projection& p, int expert, int64_t column) {
    const int64_t offset = TRANSPOSED ? column : column * p.line_stride;
    return static_cast<const T*>(p.weight) + expert * p.expert_stride + offset;
  }

  static Panel panel(const Projection& p, int expert, int64_t column, int width) {
    width = static_cast<int>(std::min<int64_t>(width, p.columns - column));
    return {column_at(p, expert, column), nullptr, p.line_stride, column, width};
  }

  static Panel hidden_panel(const MoeArgs& a, int expert, int64_t i, int64_t width) {
    if (!a.gate.gated) return panel(a.up, expert, i, static_cast<int>(width));
    const int64_t I = a.down.inner, step = a.gate.interleaved ? 2 : 1;
    const int64_t second = a.gate.interleaved ? 2 * i + 1 : I + i;
    return {column_at(a.up, expert, step * i), column_at(a.up, expert, second),
            TRANSPOSED ? a.up.line_stride : step * a.up.line_stride, i,
            static_cast<int>(std::min(width, I - i))};
  }

  // ---- products ------------------------------------------------------------------------------------------------

  // Vectors of sums, row after row, as numbers.
  template <int ROWS>
  static PB_INLINE void put_sums(VF (&sum)[W], float* y) {
    constexpr int COLUMNS = W / ROWS;
    float lanes[W];
    store(lanes, sum_lanes(sum));
    for (int r = 0; r < ROWS; ++r) std::memcpy(y + r * PANEL, lanes + r * COLUMNS, COLUMNS * sizeof(float));
  }

  // dot_block with the columns one after the other, for processors whose prefetcher follows nothing else; same sums.
  template <int ROWS>
  static void dot_block_rising(const T* first, int64_t line, int last, const Operand* x, int64_t inner, float* y) {
    constexpr int COLUMNS = W / ROWS;
    const int64_t row = pitch(inner), whole = inner / E::STEP * E::STEP;
    VF sum[W] = {};
    for (int c = 0; c < COLUMNS && c <= last; ++c) {
      const T* column = first + c * line;
      VF of_column[ROWS] = {};
      const auto add = [&](typename E::Vec weights, int64_t i) {
        PB_UNROLL for (int r = 0; r < ROWS; ++r)
          of_column[r] = E::madd(of_column[r], weights, E::load_query(x + r * row + i));
      };
      for (int64_t i = 0; i < whole; i += E::STEP) add(E::load_key(column + i), i);
      if (whole < inner) {
        T padded[E::STEP] = {};
        std::memcpy(padded, column + whole, (inner - whole) * sizeof(T));
        add(E::load_key(padded), whole);
      }
      PB_UNROLL for (int r = 0; r < ROWS; ++r) sum[r * COLUMNS + c] = of_column[r];
    }
    put_sums<ROWS>(sum, y);
  }

  // ROWS rows and W / ROWS columns, of which the last are `last` again where there are fewer.
  template <int ROWS>
  static void dot_block(const T* first, int64_t line, int last, const T* ahead, const Operand* x, int64_t inner,
                        float* y) {
    constexpr int COLUMNS = W / ROWS;
    const int64_t row = pitch(inner), whole = inner / E::STEP * E::STEP;
    const T* column[COLUMNS];
    PB_UNROLL for (int c = 0; c < COLUMNS; ++c) column[c] = first + std::min(c, last) * line;
    VF sum[W] = {};
    const auto add = [&](const auto& weights, int64_t i) {
      PB_UNROLL for (int r = 0; r < ROWS; ++r) {
        const auto values = E::load_query(x + r * row + i);
        PB_UNROLL for (int c = 0; c < COLUMNS; ++c)
          sum[r * COLUMNS + c] = E::madd(sum[r * COLUMNS + c], weights[c], values);
      }
    };
    typename E::Vec weights[COLUMNS];
    for (int64_t i = 0; i < whole; i += E::STEP) {
      if (ahead != nullptr)
        for (int c = 0; c < COLUMNS; ++c) __builtin_prefetch(ahead + c * line + i, 0, 2);
      PB_UNROLL for (int c = 0; c < COLUMNS; ++c) weights[c] = E::load_key(column[c] + i);
      add(weights, i);
    }
    if (whole < inner) {
      for (int c = 0; c < COLUMNS; ++c) {
        T padded[E::STEP] = {};
        std::memcpy(padded, column[c] + whole, (inner - whole) * sizeof(T));
        weights[c] = E::load_key(padded);
      }
      add(weights, whole);
    }
    put_sums<ROWS>(sum, y);
  }

  // Adds `count` k to the sums of ROWS rows and W / ROWS vectors of columns, `width` columns at most.
  template <int ROWS>
  static void lanes_block(const T* first, int64_t line, int width, const Operand* x, int64_t row, int count,
                          bool begins, Fetch& fetch, int lines, float* y) {
    constexpr int VECTORS = W / ROWS;
    const int vectors = (std::min(width, VECTORS * W) + W - 1) / W;
    VF sum[ROWS][VECTORS] = {};
    if (!begins)
      PB_UNROLL for (int r = 0; r < ROWS; ++r)
        PB_UNROLL for (int v = 0; v < VECTORS; ++v)
          if (v < vectors) sum[r][v] = load<VF>(y + r * PANEL + v * W);
    const auto add = [&](auto get) {
      for (int k = 0; k < count; ++k) {
        const T* from = first + k * line;
        fetch.ask(lines);
        VF values[ROWS];
        PB_UNROLL for (int r = 0; r < ROWS; ++r) values[r] = splat(x[r * row + k]);
        PB_UNROLL for (int v = 0; v < VECTORS; ++v) {
          const VF weights = get(from + v * W, width - v * W);
          PB_UNROLL for (int r = 0; r < ROWS; ++r) sum[r][v] += values[r] * weights;
        }
      }
    };
    if (width >= VECTORS * W) add([](const T* p, int) { return load_float(p); });
    else add([](const T* p, int rest) {
      return rest >= W ? load_float(p) : rest > 0 ? load_float_part(p, rest) : VF{};
    });
    PB_UNROLL for (int r = 0; r < ROWS; ++r)
      PB_UNROLL for (int v = 0; v < VECTORS; ++v)
        if (v < vectors) store(y + r * PANEL + v * W, sum[r][v]);
  }

  // Calls f(rows that are handled together, first of them).
  template <class F>
  static void for_rows(int rows, const F& f) {
    int r = 0;
    for (; r + MOST_ROWS <= rows; r += MOST_ROWS) f(std::integral_constant<int, MOST_ROWS>{}, r);
    if (MOST_ROWS == 4 && r + 2 <= rows) f(std::integral_constant<int, 2>{}, r), r += 2;
    if (r < rows) f(std::integral_constant<int, 1>{}, r);
  }

  // y [row][PANEL] = rows of x times `width` columns from `first` on. `ahead`: those that are read next, or null.
  static void multiply(const T* first, int64_t line, int width, const T* ahead, const Operand* x, int rows,
                       int64_t inner, float* y) {
    if constexpr (TRANSPOSED) multiply_transposed(first, line, width, ahead, x, rows, inner, y);
    else multiply_stored(first, line, width, ahead, x, rows, inner, y);
  }

  static void multiply_stored(const T* first, int64_t line, int width, const T* ahead, const Operand* x, int rows,
                              int64_t inner, float* y) {
    const int64_t x_bytes = std::min(rows, MOST_ROWS) * pitch(inner) * sizeof(Operand);
    const bool rising = prefetcher_follows_rising_lines() && rows <= MOST_ROWS && x_bytes <= NEAR_X_BYTES;
    for (int c = 0; c < width; c += W)  // columns that stay in the cache for all rows
      for_rows(rows, [&](auto count, int r) {
        constexpr int ROWS = decltype(count)::value;
        for (int b = c; b < std::min(width, c + W); b += W / ROWS) {
          if (rising) {
            dot_block_rising<ROWS>(first + b * line, line, width - b - 1, x + r * pitch(inner), inner, y + r * PANEL + b);
            continue;
          }
          const T* following = b + W < width ? first + (b + W) * line : ahead;
          if (b + W >= width && ahead != nullptr) following += (b - c) * line;
          dot_block<ROWS>(first + b * line, line, width - b - 1, r == 0 ? following : nullptr, x + r * pitch(inner),
                          inner, y + r * PANEL + b);
        }
      });
  }

  static void multiply_transposed(const T* first, int64_t line, int width, const T* ahead, const Operand* x, int rows,
                                  int64_t inner, float* y) {
    const int64_t row = pitch(inner);
    const int row_lines = (width * static_cast<int>(sizeof(T)) + 63) / 64;
    for (int64_t k = 0; k < inner; k += BLOCK_K) {
      const int count = static_cast<int>(std::min<int64_t>(BLOCK_K, inner - k));
      const T* following = k + count < inner ? first + (k + count) * line : ahead;
      Fetch fetch(following, nullptr, line * sizeof(T), BLOCK_K, row_lines);
      for_rows(rows, [&](auto together, int r) {
        constexpr int ROWS = decltype(together)::value, COLUMNS = W / ROWS * W;
        const int parts = (width + COLUMNS - 1) / COLUMNS;
        const int lines = r == 0 ? (fetch.lines() + parts * count - 1) / (parts * count) : 0;
        for (int c = 0; c < width; c += COLUMNS)
          lanes_block<ROWS>(first + k * line + c, line, width - c, x + r * row + k, row, count, k == 0, fetch, lines,
                            y + r * PANEL + c);
      });
    }
  }

  // ---- results -------------------------------------------------------------------------------------------------

  // y += bias, at every `step`th of the bias' columns
  static void add_bias(const Projection& p, int expert, int64_t column, int step, int width, int rows, float* y) {
    if (p.bias == nullptr) return;
    const T* from = static_cast<const T*>(p.bias) + expert * p.bias_stride + column;
    float bias[PANEL] = {};
    for (int c = 0; c < width; ++c) bias[c] = load_float_part(from + c * step, 1)[0];
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < width; c += W)
        store(y + r * PANEL + c, load<VF>(y + r * PANEL + c) + load<VF>(bias + c));
  }

  // Columns that take turns: the even ones stay in front, the odd ones go to `odd`.
  static void split(float* y, float* odd, int width, int rows) {
    for (int r = 0; r < rows; ++r, y += PANEL, odd += PANEL)
      for (int c = 0; c < width; ++c) {
        odd[c] = y[2 * c + 1];
        y[c] = y[2 * c];
      }
  }

  static void hidden(const MoeArgs& a, const Run& run, const Operand* x, const Panel& panel, const Panel& next,
                     Operand* to) {
    alignas(64) float gate[ROW_BLOCK * PANEL], up[ROW_BLOCK * PANEL];
    const int64_t C = a.up.inner, I = a.down.inner;
    const bool take_turns = a.gate.gated && a.gate.interleaved;
    const int step = take_turns ? 2 : 1, width = panel.width;
    for (int row = 0; row < run.rows; row += ROW_BLOCK) {
      const int rows = std::min(ROW_BLOCK, run.rows - row);
      const Operand* from = x + operand_size(row, C);
      if (TRANSPOSED && take_turns) {
        multiply(panel.first, panel.line, 2 * width, row == 0 ? next.first : nullptr, from, rows, C, gate);
        split(gate, up, width, rows);
      } else {
        const T *second = panel.second, *ahead = row == 0 ? next.first : nullptr;
        multiply(panel.first, panel.line, width, second != nullptr && row == 0 ? second : ahead, from, rows, C, gate);
        if (second != nullptr) multiply(second, panel.line, width, ahead, from, rows, C, up);
      }
      add_bias(a.up, run.expert, panel.column * step, step, width, rows, gate);
      if (a.gate.gated)
        add_bias(a.up, run.expert, take_turns ? 2 * panel.column + 1 : I + panel.column, step, width, rows, up);
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < width; c += W) {
          VF h = load<VF>(gate + r * PANEL + c);
          const VF value = a.gate.gated ? load<VF>(up + r * PANEL + c) : VF{};
          apply_gate(a.gate, &h, &value, 1);
          put(to + operand_size(row + r, I), panel.column + c, h, std::min(W, width - c), I);
        }
    }
  }

  static void products(const Projection& p, const Run& run, const Operand* x, const Panel& panel, const Panel& next,
                       float* y) {
    multiply(panel.first, panel.line, panel.width, next.first, x, run.rows, p.inner, y);
    add_bias(p, run.expert, panel.column, 1, panel.width, run.rows, y);
  }
};

template <class T>
struct ElementsOf { using type = FloatElements<T>; };
#if PAGEBINDER_BF16_DOT
template <>
struct ElementsOf<bf16> { using type = PairElements; };
#endif

template <class T>
using AsStored = Vectors<T, typename ElementsOf<T>::type, false>;
template <class T>
using Transposed = Vectors<T, FloatElements<T>, true>;

template <class T>
void moe_experts_of(const MoeArgs& a) {
  in_pieces<T>(a, a.transposed ? moe_pass<Transposed<T>> : moe_pass<AsStored<T>>);
}

template <class T>
void expert_linear_of(const ExpertLinearArgs& a) {
  in_pieces<T>(a, a.transposed ? linear_pass<Transposed<T>> : linear_pass<AsStored<T>>);
}

}  // namespace pagebinder
