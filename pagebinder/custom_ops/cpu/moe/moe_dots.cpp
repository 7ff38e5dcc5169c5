// Experts whose weights are packed (linear/packed_weights.py), or packed and coded, on BF16 dots or floats: a panel of 32
// columns is a stream of memory that a strip of rows meets at once; more rows meet it again from the second cache, decoded.
//
//     x, hidden   [strip of rows of an expert][pair of k][row][2]            see dots.h
#include "coded_dots.h"
#include "moe_flow.h"

namespace pagebinder {
namespace {

constexpr int STRIP_SUMS = DOT_MOST_ROWS * DOT_PANEL;

// Neighbouring panels of a job. Of gated experts the first have gates, those of the second part their values.
struct DotPanel {
  const char* first[2] = {};  // of each part, or null
  int64_t column = 0;
  int count = 0;              // of each part
  int64_t bytes = 0, coded_bytes = 0;  // of a panel; of a block of codes, or 0
};

struct Dots {
  using Element = bf16;
  using Operand = DotPair;
  using Setup = NoSetup;
  using Panel = DotPanel;
  static constexpr int GROUP = DOT_MOST_ROWS, PANEL = 2 * DOT_PANEL, VECTORS = DOT_PANEL / W;
  static constexpr int MOST_PANELS = 8, MOST_HIDDEN = MOST_PANELS * DOT_PANEL;

  static int64_t operand_size(int64_t positions, int64_t inner) { return positions * (inner / 2); }

  static void pack(const Run&, const bf16* const* rows, int count, int64_t inner, DotPair* to) {
    for (int64_t k = 0; k < inner; k += 2 * DOT_PAIRS, to += DOT_PAIRS * count) {
      const bf16* from[GROUP];
      for (int r = 0; r < count; ++r) from[r] = rows[r] + k;
      put_pairs(from, count, to);
    }
  }

  // ---- panels --------------------------------------------------------------------------------------------------

  static int64_t panel_bytes(const Projection& p) {
    return p.coded_bytes > 0 ? p.inner / (CODED_STEPS * DOT_PANEL) * p.coded_bytes : p.inner * (DOT_STEP_BYTES / DOT_PANEL);
  }

  static const char* panel_at(const Projection& p, int expert, int64_t column) {
    return static_cast<const char*>(p.weight) + (expert * p.columns + column) / DOT_PANEL * panel_bytes(p);
  }

  static Panel panel(const Projection& p, int expert, int64_t column, int width) {
    const int count = static_cast<int>(std::min<int64_t>(width, p.columns - column)) / DOT_PANEL;
    return {{panel_at(p, expert, column)}, column, count, panel_bytes(p), p.coded_bytes};
  }

  static Panel hidden_panel(const MoeArgs& a, int expert, int64_t i, int width) {
    Panel panel = Dots::panel(a.up, expert, i, static_cast<int>(std::min<int64_t>(width, a.down.inner - i)));
    if (a.gate.gated) panel.first[1] = panel_at(a.up, expert, a.down.inner + i);
    return panel;
  }

  // ---- products ------------------------------------------------------------------------------------------------

  // Calls f(first row, rows, column, sums, sums of the second part) for each strip and panel, sums [row][32]. A single
  // strip reads part after part, as they lie. Of several, the first reads a panel of each part, which the second cache
  // keeps for the others, and asks for the next one.
  template <class F>
  static void for_strips(const Run& run, const Panel& panel, const Panel& next, const DotPair* x, int64_t inner,
                         const F& f) {
    alignas(64) float sums[MOST_PANELS][STRIP_SUMS];
    const int steps = static_cast<int>(inner / DOT_PANEL), parts = panel.first[1] == nullptr ? 1 : 2;
    const bool single = run.rows <= GROUP;
    const int together = single ? panel.count : 1, count = parts * together;
    for (int begin = 0; begin < panel.count; begin += together) {
      const char* weights[MOST_PANELS + 1];
      for (int i = 0; i < count; ++i)
        weights[i] = panel.first[i / together] + (begin + i % together) * panel.bytes;
      weights[count] = begin + together < panel.count ? panel.first[0] + (begin + together) * panel.bytes : next.first[0];
      if (panel.coded_bytes > 0 && !single) decode(panel, steps, weights, count);
      for (int first = 0; first < run.rows; first += GROUP) {
        const int rows = std::min(GROUP, run.rows - first);
        const DotPair* strip = x + operand_size(first, inner);
        for (int i = 0; i < count; ++i)
          if (panel.coded_bytes > 0 && single)
            stream_coded(strip, rows, weights[i], panel.coded_bytes, steps, weights[i + 1], {}, sums[i]);
          else if (panel.coded_bytes > 0 || first > 0)
            multiply_dots_of(rows)(strip, weights[i], steps, true, {}, sums[i]);
          else stream_dots(strip, rows, weights[i], steps, weights[i + 1], {}, sums[i]);
        for (int i = 0; i < together; ++i)
          f(first, rows, panel.column + (begin + i) * DOT_PANEL, sums[i], sums[(parts - 1) * together + i]);
      }
    }
  }

  // Replaces panels by what they stand for, in memory of this thread.
  static void decode(const Panel& panel, int steps, const char** weights, int count) {
    static thread_local Buffer decoded;
    char* to = decoded.at_least<char>(static_cast<size_t>(count) * steps * DOT_STEP_BYTES);
    for (int i = 0; i < count; ++i, to += int64_t{steps} * DOT_STEP_BYTES) {
      decode_steps(weights[i], panel.coded_bytes, steps, to);
      weights[i] = to;
    }
  }

  static PB_INLINE VF bias_of(const Projection& p, int expert, int64_t column) {
    return p.bias == nullptr ? VF{} : load_float(static_cast<const bf16*>(p.bias) + expert * p.bias_stride + column);
  }

  static void hidden(const MoeArgs& a, const Run& run, const DotPair* x, const Panel& panel, const Panel& next,
                     DotPair* to) {
    const int64_t I = a.down.inner;
    for_strips(run, panel, next, x, a.up.inner,
               [&](int first, int rows, int64_t column, const float* gates, const float* values) {
      alignas(64) bf16 rounded[GROUP][DOT_PANEL];
      const bf16* of_row[GROUP];
      for (int r = 0; r < rows; ++r) {
        VF gate[VECTORS], up[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
          const int64_t at = r * DOT_PANEL + v * W;
          gate[v] = load<VF>(gates + at) + bias_of(a.up, run.expert, column + v * W);
          up[v] = a.gate.gated ? load<VF>(values + at) + bias_of(a.up, run.expert, I + column + v * W) : VF{};
        }
        apply_gate(a.gate, gate, up, VECTORS);
        for (int v = 0; v < VECTORS; ++v) store_float(rounded[r] + v * W, gate[v]);
        of_row[r] = rounded[r];
      }
      put_pairs(of_row, rows, to + operand_size(first, I) + column / 2 * rows);
    });
  }

  static void products(const Projection& p, const Run& run, const DotPair* x, const Panel& panel, const Panel& next,
                       float* y) {
    for_strips(run, panel, next, x, p.inner,
               [&](int first, int rows, int64_t column, const float* sums, const float*) {
      for (int c = 0; c < DOT_PANEL; c += W) {
        const VF bias = bias_of(p, run.expert, column + c);
        for (int r = 0; r < rows; ++r)
          store(y + (first + r) * PANEL + column - panel.column + c, load<VF>(sums + r * DOT_PANEL + c) + bias);
      }
    });
  }
};

}  // namespace

bool reads_packed_experts() { return DOTS_PAY; }
void moe_experts_dots(const MoeArgs& a) { in_pieces<bf16>(a, moe_pass<Dots>); }

}  // namespace pagebinder
