// Experts in 8 or 4 bits, in float32 with vectors of any width. How many rows share a panel changes nothing about how
// one of them is summed.
#include "coded_engine.h"
#include "quant/panel_floats.h"

namespace pagebinder {
namespace {

template <class T>
struct FloatRows {
  using Element = T;
  using Operand = float;  // [row][inner]
  using Ready = PackedRows<float>;
  static constexpr int GROUP = 4;
  static constexpr LevelParts LEVEL_PARTS = LevelParts::BOTH;

  static void pack(const T* const* rows, int count, int64_t inner, float* to) {
    for (int r = 0; r < count; ++r, to += inner)
      for (int64_t i = 0; i < inner; i += W) store(to + i, load_float(rows[r] + i));
  }

  static void put(const VF* values, int, int row, int64_t column, int64_t inner, float* to) {
    T narrow[W];
    for (int v = 0; v < QUANT_PANEL / W; ++v) {
      store_float(narrow, values[v]);
      store(to + row * inner + column + v * W, load_float(narrow));
    }
  }

  static Ready ready(const QuantizedLinearArgs&, const float* x, int rows, float*) { return {x, rows}; }

  static void meet(QuantizedLinearArgs weight, const Ready& ready, int64_t panel, float* sums) {
    const auto [x, rows] = ready;
    static thread_local Buffer buffer;
    float lowering[FLOAT_FEW_ROWS];
    weight.x = x, weight.rows = rows, weight.x_stride = weight.inner;
    if (meets_lifted_rows(weight.code, rows)) {
      float* lifted = buffer.at_least<float>(static_cast<size_t>(rows * weight.inner));
      rows_for_codes(weight.code, x, weight.inner, rows, weight.inner, weight.inner, lifted, lowering);
      weight.x = lifted, weight.lowering = lowering;
    }
    panel_in_floats_of(weight.code)(weight, panel, sums);
  }

  static void sum_groups(const float* x, int rows, int64_t inner, int64_t group, float* to) {
    pagebinder::sum_groups(x, inner, rows, inner, group, to);
  }
};

template <class T>
void run_in(const MoeArgs& a) { in_pieces<T>(a, coded_pass<FloatRows<T>>); }

}  // namespace

void quantized_moe_experts(const MoeArgs& a) {
  const auto in_halves = [](const Projection& p) {
    return p.codes->first.has_half_steps() || p.codes->first.code == Code::INT6;
  };
  if (a.type == Element::BF16 && !in_halves(a.up) && !in_halves(a.down) && quantized_moe_experts_with_dots(a)) return;
  if (a.type == Element::BF16 && quantized_moe_experts_with_integers(a)) return;
  with_element(a.type, [&](auto x) { run_in<decltype(x)>(a); });
}

}  // namespace pagebinder
