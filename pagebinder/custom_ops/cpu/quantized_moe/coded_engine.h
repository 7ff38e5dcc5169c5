// The engine of moe_flow.h over codes: what its jobs are made of is panels of 32 columns, which meet all rows of a run.
//
//     hidden    gates and values in two panels; of experts whose columns take turns, two neighbours, split afterwards
//     down      one panel or two
//
// Rows: how rows are packed, and how they meet a panel:
//
//     GROUP, Element, Operand                              as an engine has them; a row takes `inner` operands
//     pack(rows, count, inner, to)                         a group of rows
//     put(values, rows, row, column, inner, to)            32 columns of one of the rows of a run, rounded
//     sum_groups(x, rows, inner, group, to)                [rows][inner / group]
//     Ready, ready(weight, x, rows, sums)                  rows as panels of a weight meet them; a thread keeps one. `sums`:
//                                                          of shifted weights those of groups; what shifts are to be times
//     meet(weight, ready, panel, sums)                     sums [rows][32], scaled
#pragma once

#include <atomic>

#include "coded_stack.h"
#include "moe/moe_flow.h"
#include "quant/quantized_jobs.h"

namespace pagebinder {

struct CodedPanel {
  const CodedStack* codes = nullptr;  // null: there is no such job
  int expert;
  int64_t column;
  int width;  // columns; of a gated expert inner columns
};

// Rows that panels meet as they were packed.
template <class Operand>
struct PackedRows {
  const Operand* x;
  int rows;
};

// Rows as the panels of an expert meet them, and, of shifted weights, their sums over groups: made once for jobs of the
// same run that a thread takes one after the other.
template <class Rows>
struct PreparedRows {
  int64_t pass = 0;
  const uint8_t* weight = nullptr;
  const typename Rows::Operand* x = nullptr;
  typename Rows::Ready ready{};
  const float* sums = nullptr;

  static const PreparedRows& of(const CodedStack& stack, const QuantizedLinearArgs& weight, const typename Rows::Operand* x,
                                int rows) {
    static thread_local PreparedRows kept;
    if (kept.pass == stack.pass && kept.weight == weight.weight && kept.x == x) return kept;
    float* const sums = weight.is_shifted ? sums_of(weight, x, rows) : nullptr;
    kept = {stack.pass, weight.weight, x, Rows::ready(weight, x, rows, sums), sums};
    return kept;
  }

  static float* sums_of(const QuantizedLinearArgs& weight, const typename Rows::Operand* x, int rows) {
    static thread_local Buffer buffer;
    float* sums = buffer.at_least<float>(static_cast<size_t>(rows * (weight.inner / weight.scale_group)));
    Rows::sum_groups(x, rows, weight.inner, weight.scale_group, sums);
    return sums;
  }
};

template <class Rows>
struct CodedEngine {
  using Element = typename Rows::Element;
  using Operand = typename Rows::Operand;
  using Prepared = PreparedRows<Rows>;
  using Setup = NoSetup;
  using Panel = CodedPanel;
  static constexpr int GROUP = Rows::GROUP, PANEL = 2 * QUANT_PANEL, MOST_HIDDEN = PANEL, VECTORS = QUANT_PANEL / W;

  static int64_t operand_size(int64_t positions, int64_t inner) { return positions * inner; }

  static void pack(const Run&, const Element* const* rows, int count, int64_t inner, Operand* to) {
    Rows::pack(rows, count, inner, to);
  }

  static Panel panel(const Projection& p, int expert, int64_t column, int width) {
    return {p.codes, expert, column, static_cast<int>(std::min<int64_t>(width, p.columns - column))};
  }

  static Panel hidden_panel(const MoeArgs& a, int expert, int64_t i, int64_t width) {
    return {a.up.codes, expert, i, static_cast<int>(std::min(width, a.down.inner - i))};
  }

  // sums [rows][32] of the columns from `column` on, with bias.
  static void sums_of(const Projection& p, const QuantizedLinearArgs& weight, const Run& run, const Prepared& rows,
                      int64_t column, float* sums) {
    Rows::meet(weight, rows.ready, column / QUANT_PANEL, sums);
    if (weight.is_shifted) add_shifts(weight, run.rows, rows.sums, column / QUANT_PANEL, sums);
    if (p.bias == nullptr) return;
    const Element* from = static_cast<const Element*>(p.bias) + run.expert * p.bias_stride + column;
    VF bias[VECTORS];
    for (int v = 0; v < VECTORS; ++v) bias[v] = load_float(from + v * W);
    for (int64_t i = 0; i < int64_t{run.rows} * QUANT_PANEL; i += W)
      store(sums + i, load<VF>(sums + i) + bias[i % QUANT_PANEL / W]);
  }

  static void add_shifts(QuantizedLinearArgs weight, int rows, const float* of_groups, int64_t panel, float* sums) {
    weight.x_sums = of_groups;
    pagebinder::add_shifts(weight, panel, 0, rows, sums, Rows::LEVEL_PARTS);
  }

  // The first two panels of a row, whose columns take turns -> gates, values.
  static void split(const float* gate, const float* up, float (&to)[2][QUANT_PANEL]) {
    for (int half = 0; half < 2; ++half)
      for (int c = 0; c < QUANT_PANEL; ++c)
        to[c % 2][(half * QUANT_PANEL + c) / 2] = (half == 0 ? gate : up)[c];
  }

  // Of all rows; `up` is not read unless gated.
  static void gate_rows(const MoeArgs& a, const Run& run, int64_t column, const float* gate, const float* up,
                        Operand* to) {
    for (int r = 0; r < run.rows; ++r, gate += QUANT_PANEL, up += QUANT_PANEL) {
      alignas(64) float apart[2][QUANT_PANEL];
      const bool take_turns = a.gate.gated && a.gate.interleaved;
      if (take_turns) split(gate, up, apart);
      VF h[VECTORS], values[VECTORS] = {};
      for (int v = 0; v < VECTORS; ++v) {
        h[v] = load<VF>((take_turns ? apart[0] : gate) + v * W);
        if (a.gate.gated) values[v] = load<VF>((take_turns ? apart[1] : up) + v * W);
      }
      apply_gate(a.gate, h, values, VECTORS);
      Rows::put(h, run.rows, r, column, a.down.inner, to);
    }
  }

  static void hidden(const MoeArgs& a, const Run& run, const Operand* x, const Panel& panel, const Panel&,
                     Operand* to) {
    static thread_local Buffer buffer;
    const int64_t size = int64_t{run.rows} * QUANT_PANEL;
    float *first = buffer.at_least<float>(static_cast<size_t>(2 * size)), *second = first + size;
    const QuantizedLinearArgs weight = a.up.codes->of(run.expert);
    const Prepared& rows = Prepared::of(*a.up.codes, weight, x, run.rows);
    if (!a.gate.gated) {
      for (int64_t column = panel.column; column < panel.column + panel.width; column += QUANT_PANEL) {
        sums_of(a.up, weight, run, rows, column, first);
        gate_rows(a, run, column, first, first, to);
      }
      return;
    }
    const bool take_turns = a.gate.interleaved;
    sums_of(a.up, weight, run, rows, take_turns ? 2 * panel.column : panel.column, first);
    sums_of(a.up, weight, run, rows,
            take_turns ? 2 * panel.column + QUANT_PANEL : a.down.inner + panel.column, second);
    gate_rows(a, run, panel.column, first, second, to);
  }

  static void products(const Projection& p, const Run& run, const Operand* x, const Panel& panel, const Panel&,
                       float* y) {
    static thread_local Buffer buffer;
    float* sums = buffer.at_least<float>(static_cast<size_t>(run.rows) * QUANT_PANEL);
    const QuantizedLinearArgs weight = p.codes->of(run.expert);
    const Prepared& rows = Prepared::of(*p.codes, weight, x, run.rows);
    for (int i = 0; i < panel.width; i += QUANT_PANEL) {
      sums_of(p, weight, run, rows, panel.column + i, sums);
      for (int r = 0; r < run.rows; ++r)
        std::memcpy(y + r * PANEL + i, sums + r * QUANT_PANEL, QUANT_PANEL * sizeof(float));
    }
  }
};

// A pass over experts by such an engine.
template <class Rows>
void coded_pass(const MoeArgs& args) {
  static std::atomic<int64_t> passes{0};
  CodedStack up = *args.up.codes, down = *args.down.codes;
  up.pass = down.pass = passes.fetch_add(1, std::memory_order_relaxed) + 1;
  MoeArgs own = args;
  own.up.codes = &up, own.down.codes = &down;
  moe_pass<CodedEngine<Rows>>(own);
}

}  // namespace pagebinder
