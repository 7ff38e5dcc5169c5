// Experts whose weights are packed (linear/packed_weights.py), on BF16 dots: a panel of 32 columns is a stream of memory
// that up to 14 rows meet at once; more rows meet it again from the second cache.
//
//     x, hidden   [strip of up to 14 rows of an expert][pair of k][row][2]            see dots.h
#include "dots.h"
#include "moe_flow.h"

namespace pagebinder {
#if PAGEBINDER_BF16_DOT
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
  using Operand = uint32_t;
  using Setup = NoSetup;
  using Panel = DotPanel;
  static constexpr int GROUP = DOT_MOST_ROWS, PANEL = 2 * DOT_PANEL;

  static int64_t operand_size(int64_t positions, int64_t inner) { return positions * (inner / 2); }

  // Lines of 16 words, a line for each row -> [word][row], 16 words of all rows.
  static PB_INLINE void put_words(VF* line, int rows, uint32_t* to) {
    const __mmask16 lanes = static_cast<__mmask16>((1u << rows) - 1);
    transpose(line);
    PB_UNROLL
    for (int p = 0; p < W; ++p) _mm512_mask_storeu_ps(to + p * rows, lanes, bit_cast<__m512>(line[p]));
  }

  static void pack(const Run&, const bf16* const* rows, int count, int64_t inner, uint32_t* to) {
    static_assert(W >= GROUP);
    for (int64_t pair = 0; pair < inner / 2; pair += W, to += W * count) {
      VF line[W];
      PB_UNROLL
      for (int r = 0; r < W; ++r) line[r] = load<VF>(reinterpret_cast<const char*>(rows[std::min(r, count - 1)] + 2 * pair));
      put_words(line, count, to);
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
  static void for_strips(const Run& run, const Panel& panel, const Panel& next, const uint32_t* x, int64_t inner,
                         const F& f) {
    alignas(64) float sums[2][STRIP_SUMS];
    const int steps = static_cast<int>(inner / DOT_PANEL);
    for (int first = 0; first < run.rows; first += GROUP) {
      const int rows = std::min(GROUP, run.rows - first);
      const uint32_t* strip = x + operand_size(first, inner);
      for (int p = 0; p < panel.count; ++p) {
        const char *w = panel.first[p], *behind = p + 1 < panel.count ? panel.first[p + 1] : next.first[0];
        if (first > 0) multiply_dots_of(rows)(strip, w, steps, true, {}, sums[p]);
        else stream_dots(strip, rows, w, steps, behind, sums[p]);
      }
      f(first, rows, sums);
    }
  }

  static PB_INLINE VF bias_of(const Projection& p, int expert, int64_t column) {
    return p.bias == nullptr ? VF{} : load_float(static_cast<const bf16*>(p.bias) + expert * p.bias_stride + column);
  }

  static void hidden(const MoeArgs& a, const Run& run, const uint32_t* x, const Panel& panel, const Panel& next,
                     uint32_t* to) {
    const int64_t I = a.down.inner;
    for_strips(run, panel, next, x, a.up.inner, [&](int first, int rows, const float (*sums)[STRIP_SUMS]) {
      uint32_t* strip = to + operand_size(first, I);
      for (int p = 0; p < (a.gate.gated ? 1 : panel.count); ++p) {
        const int64_t column = panel.column + p * DOT_PANEL;
        VF line[W];
        for (int r = 0; r < W; ++r) {
          const int row = std::min(r, rows - 1);
          VF gate[2], up[2];
          for (int half = 0; half < 2; ++half) {
            const int64_t at = row * DOT_PANEL + half * W;
            gate[half] = load<VF>(sums[p] + at) + bias_of(a.up, run.expert, column + half * W);
            up[half] = a.gate.gated ? load<VF>(sums[1] + at) + bias_of(a.up, run.expert, I + column + half * W) : VF{};
          }
          if (r < rows) apply_gate(a.gate, gate, up, 2);
          alignas(64) bf16 rounded[2 * W];
          store_float(rounded, gate[0]), store_float(rounded + W, gate[1]);
          line[r] = load<VF>(reinterpret_cast<const char*>(rounded));
        }
        put_words(line, rows, strip + column / 2 * rows);
      }
    });
  }

  static void products(const Projection& p, const Run& run, const uint32_t* x, const Panel& panel, const Panel& next,
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

bool reads_packed_experts() { return true; }
void moe_experts_dots(const MoeArgs& a) { in_pieces<bf16>(a, moe_pass<Dots>); }

#else

bool reads_packed_experts() { return false; }
void moe_experts_dots(const MoeArgs&) {}

#endif
}  // namespace pagebinder
