// Experts whose weights are packed (linear/packed_weights.py), on BF16 dots or floats: a panel of 32 columns is a stream
// of memory that a strip of rows meets at once; more rows meet it again from the second cache.
//
//     x, hidden   [strip of rows of an expert][pair of k][row][2]            see dots.h
#include "dots.h"
#include "moe_flow.h"

namespace pagebinder {
namespace {

constexpr int STRIP_SUMS = DOT_MOST_ROWS * DOT_PANEL;

// The columns of a job: one or two panels of 32. Of gated experts the first has gates, the second values.
struct DotPanel {
  const char* first[2] = {};
  int64_t column = 0;
  int count = 0;
};

struct Dots {
  using Element = bf16;
  using Operand = DotPair;
  using Setup = NoSetup;
  using Panel = DotPanel;
  static constexpr int GROUP = DOT_MOST_ROWS, PANEL = 2 * DOT_PANEL, VECTORS = DOT_PANEL / W;

  static int64_t operand_size(int64_t positions, int64_t inner) { return positions * (inner / 2); }

  static void pack(const Run&, const bf16* const* rows, int count, int64_t inner, DotPair* to) {
    for (int64_t k = 0; k < inner; k += 2 * DOT_PAIRS, to += DOT_PAIRS * count) {
      const bf16* from[GROUP];
      for (int r = 0; r < count; ++r) from[r] = rows[r] + k;
      put_pairs(from, count, to);
    }
  }

  // ---- panels --------------------------------------------------------------------------------------------------

  static const char* panel_at(const Projection& p, int expert, int64_t column) {
    return static_cast<const char*>(p.weight) + (expert * p.expert_stride + column * p.inner) * int64_t{sizeof(bf16)};
  }

  static Panel panel(const Projection& p, int expert, int64_t column, int width) {
    const int count = static_cast<int>(std::min<int64_t>(width, p.columns - column)) / DOT_PANEL;
    return {{panel_at(p, expert, column), count > 1 ? panel_at(p, expert, column + DOT_PANEL) : nullptr}, column, count};
  }

  static Panel hidden_panel(const MoeArgs& a, int expert, int64_t i) {
    if (!a.gate.gated) return panel(a.up, expert, i, PANEL);
    return {{panel_at(a.up, expert, i), panel_at(a.up, expert, a.down.inner + i)}, i, 2};
  }

  // ---- products ------------------------------------------------------------------------------------------------

  // Calls f(first row, rows, sums [panel][row][32]) for each strip. The first reads panels from memory and asks for what
  // it reads next.
  template <class F>
  static void for_strips(const Run& run, const Panel& panel, const Panel& next, const DotPair* x, int64_t inner,
                         const F& f) {
    alignas(64) float sums[2][STRIP_SUMS];
    const int steps = static_cast<int>(inner / DOT_PANEL);
    for (int first = 0; first < run.rows; first += GROUP) {
      const int rows = std::min(GROUP, run.rows - first);
      const DotPair* strip = x + operand_size(first, inner);
      for (int p = 0; p < panel.count; ++p) {
        const char *w = panel.first[p], *behind = p + 1 < panel.count ? panel.first[p + 1] : next.first[0];
        if (first > 0) multiply_dots_of(rows)(strip, w, steps, true, {}, sums[p]);
        else stream_dots(strip, rows, w, steps, behind, {}, sums[p]);
      }
      f(first, rows, sums);
    }
  }

  static PB_INLINE VF bias_of(const Projection& p, int expert, int64_t column) {
    return p.bias == nullptr ? VF{} : load_float(static_cast<const bf16*>(p.bias) + expert * p.bias_stride + column);
  }

  static void hidden(const MoeArgs& a, const Run& run, const DotPair* x, const Panel& panel, const Panel& next,
                     DotPair* to) {
    const int64_t I = a.down.inner;
    for_strips(run, panel, next, x, a.up.inner, [&](int first, int rows, const float (*sums)[STRIP_SUMS]) {
      DotPair* strip = to + operand_size(first, I);
      for (int p = 0; p < (a.gate.gated ? 1 : panel.count); ++p) {
        const int64_t column = panel.column + p * DOT_PANEL;
        alignas(64) bf16 rounded[GROUP][DOT_PANEL];
        const bf16* of_row[GROUP];
        for (int r = 0; r < rows; ++r) {
          VF gate[VECTORS], up[VECTORS];
          for (int v = 0; v < VECTORS; ++v) {
            const int64_t at = r * DOT_PANEL + v * W;
            gate[v] = load<VF>(sums[p] + at) + bias_of(a.up, run.expert, column + v * W);
            up[v] = a.gate.gated ? load<VF>(sums[1] + at) + bias_of(a.up, run.expert, I + column + v * W) : VF{};
          }
          apply_gate(a.gate, gate, up, VECTORS);
          for (int v = 0; v < VECTORS; ++v) store_float(rounded[r] + v * W, gate[v]);
          of_row[r] = rounded[r];
        }
        put_pairs(of_row, rows, strip + column / 2 * rows);
      }
    });
  }

  static void products(const Projection& p, const Run& run, const DotPair* x, const Panel& panel, const Panel& next,
                       float* y) {
    for_strips(run, panel, next, x, p.inner, [&](int first, int rows, const float (*sums)[STRIP_SUMS]) {
      for (int c = 0; c < panel.count * DOT_PANEL; c += W) {
        const VF bias = bias_of(p, run.expert, panel.column + c);
        for (int r = 0; r < rows; ++r)
          store(y + (first + r) * PANEL + c, load<VF>(sums[c / DOT_PANEL] + r * DOT_PANEL + c % DOT_PANEL) + bias);
      }
    });
  }
};

}  // namespace

bool reads_packed_experts() { return DOTS_PAY; }
void moe_experts_dots(const MoeArgs& a) { in_pieces<bf16>(a, moe_pass<Dots>); }

}  // namespace pagebinder
