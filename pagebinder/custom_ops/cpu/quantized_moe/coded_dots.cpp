// Experts in 8 or 4 bits on BF16 dots. One or two rows of an expert meet codes in registers; more, in strips of up to
// 8, meet panels that were decoded into the nearest cache (quant/panel_dots.h). An element is summed in one order for
// up to two rows, in another for any number of more.
//
//     rows of a run    [strip][pair of k][row of the strip][2]
#include "coded_engine.h"
#include "quant/panel_dots.h"

namespace pagebinder {
#if PAGEBINDER_BF16_DOT
namespace {

struct DotRows {
  using Element = bf16;
  using Operand = bf16;
  using Ready = PackedRows<bf16>;
  static constexpr int GROUP = 8;  // a strip
  static constexpr LevelParts LEVEL_PARTS = LevelParts::BOTH;
  static_assert(GROUP <= DOT_MOST_ROWS);

  static void pack(const bf16* const* rows, int count, int64_t inner, bf16* to) {
    if (count == 1) {
      std::memcpy(to, rows[0], inner * sizeof(bf16));
      return;
    }
    for (int r = 0; r < count; ++r)
      for (int64_t i = 0; i < inner; i += 2) std::memcpy(to + i * count + 2 * r, rows[r] + i, 2 * sizeof(bf16));
  }

  static void put(const VF* values, int rows, int row, int64_t column, int64_t inner, bf16* to) {
    bf16 narrow[QUANT_PANEL];
    for (int v = 0; v < QUANT_PANEL / W; ++v) store_float(narrow + v * W, values[v]);
    const int first = row / GROUP * GROUP, count = std::min(GROUP, rows - first);
    to += first * inner + column * count + 2 * (row - first);
    for (int i = 0; i < QUANT_PANEL; i += 2) std::memcpy(to + i * count, narrow + i, 2 * sizeof(bf16));
  }

  template <Code CODE, int ROWS>
  static void meet_few(const QuantizedLinearArgs& weight, const uint32_t* x, int64_t panel, float* sums) {
    const uint32_t* words[ROWS];
    for (int r = 0; r < ROWS; ++r) words[r] = x + r;
    VF sum[1][ROWS][2] = {};
    const PanelOf panels[] = {{&weight, panel}};
    add_panels<CODE, ROWS, 1, ROWS>(panels, words, sum);
    for (int r = 0; r < ROWS; ++r)
      for (int half = 0; half < 2; ++half) store(sums + r * QUANT_PANEL + half * W, sum[0][r][half]);
  }

  template <Code CODE>
  static void meet_code(QuantizedLinearArgs& weight, const bf16* x, int rows, int64_t panel, float* sums) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(x);
    if (rows == 1) return meet_few<CODE, 1>(weight, words, panel, sums);
    if (rows == 2) return meet_few<CODE, 2>(weight, words, panel, sums);
    weight.rows = rows;
    panel_of_strips<CODE, GROUP>(weight, panel, (rows + GROUP - 1) / GROUP, [&](int strip) -> DotStrip {
      const int first = strip * GROUP;
      return {words + first * (weight.inner / 2), first, std::min(GROUP, rows - first)};
    }, sums);
  }

  static Ready ready(const QuantizedLinearArgs&, const bf16* x, int rows, float*) { return {x, rows}; }

  static void meet(QuantizedLinearArgs weight, const Ready& ready, int64_t panel, float* sums) {
    with_code(weight.code, [&](auto constant) {
      meet_code<decltype(constant)::value>(weight, ready.x, ready.rows, panel, sums);
    });
  }

  template <int COUNT>
  static void sum_strip(const bf16* x, int64_t inner, int64_t group, float* to) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(x);
    for (int64_t g = 0; g < inner / group; ++g) {
      float sums[COUNT] = {};
      for (int64_t pair = 0; pair < group / 2; ++pair, words += COUNT)
        for (int r = 0; r < COUNT; ++r)
          sums[r] += bit_cast<float>(words[r] << 16) + bit_cast<float>(words[r] & 0xffff0000u);
      for (int r = 0; r < COUNT; ++r) to[r * (inner / group) + g] = sums[r];
    }
  }

  static void sum_groups(const bf16* x, int rows, int64_t inner, int64_t group, float* to) {
    for (int first = 0; first < rows; first += GROUP) {
      const auto sum = by_count<GROUP>(std::min(GROUP, rows - first),
                                       [](auto count) { return sum_strip<decltype(count)::value>; });
      sum(x + first * inner, inner, group, to + first * (inner / group));
    }
  }
};

}  // namespace

bool quantized_moe_experts_with_dots(const MoeArgs& a) {
  in_pieces<bf16>(a, coded_pass<DotRows>);
  return true;
}

#else

bool quantized_moe_experts_with_dots(const MoeArgs&) { return false; }

#endif
}  // namespace pagebinder
