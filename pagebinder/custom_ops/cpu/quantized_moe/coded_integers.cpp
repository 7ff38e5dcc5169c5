// Experts in int4, int6 and int8 on integer products of 16 bits (AVX2), see quant/panel_int16.h.
#include "coded_engine.h"
#include "quant/panel_int16.h"

namespace pagebinder {
#if PAGEBINDER_INT16_PRODUCTS
namespace {

struct StripSizes {  // what IntegerStrips asks of a kernel
  static constexpr int FIRST_ROWS = MOST_FIRST_ROWS, MOST_ROWS = MOST_STRIP_ROWS, BEGINS = 1;
  static constexpr bool LONG_SPANS = true;
};

struct IntegerRows {
  using Element = bf16;
  using Operand = bf16;  // [row][inner]
  static constexpr int GROUP = MOST_FIRST_ROWS;
  static constexpr LevelParts LEVEL_PARTS = LevelParts::SECOND;

  struct Ready {
    const bf16* x;
    IntegerStrips<StripSizes> strips;
    bool fits;  // or some row has a span that integers cannot hold
  };

  static void pack(const bf16* const* rows, int count, int64_t inner, bf16* to) {
    for (int r = 0; r < count; ++r) std::memcpy(to + r * inner, rows[r], inner * sizeof(bf16));
  }

  static void put(const VF* values, int, int row, int64_t column, int64_t inner, bf16* to) {
    for (int v = 0; v < QUANT_PANEL / W; ++v) store_float(to + row * inner + column + v * W, values[v]);
  }

  static bool make(QuantizedLinearArgs weight, const Ready& ready) {
    weight.x = ready.x, weight.x_stride = weight.inner;
    bool fits = true;
    const auto make =
        with_integer_code<true>(weight.code, [](auto code) { return make_wholes<decltype(code)::value>; });
    for (int strip = 0; strip < ready.strips.count; ++strip) fits &= make(weight, ready.strips[strip]);
    return fits;
  }

  static Ready ready(const QuantizedLinearArgs& weight, const bf16* x, int rows) {
    static thread_local Buffer memory;
    Ready ready{x, {rows, static_cast<int>(weight.inner), integer_group(weight)}, true};
    ready.strips.memory = memory.at_least<int32_t>(static_cast<size_t>(ready.strips.words()));
    ready.fits = make(weight, ready);
    return ready;
  }

  static void meet(const QuantizedLinearArgs& weight, const Ready& ready, int64_t panel, float* sums) {
    using Strips = IntegerStrips<StripSizes>;
    const auto panel_of = with_integer_code<true>(
        weight.code, [](auto code) { return panel_in_integers<decltype(code)::value, Strips>; });
    panel_of(weight, ready.strips, panel, sums);
    if (ready.fits) return;
    for (int64_t row = 0; row < ready.strips.rows; ++row)
      if (const bf16* x = ready.x + row * weight.inner; !fits(ready.strips, x))
        meet_floats(weight, x, panel, sums + row * QUANT_PANEL);
  }

  static bool fits(const IntegerStrips<StripSizes>& strips, const bf16* x) {
    for (int begin = 0; begin < strips.inner; begin += strips.span)
      if (!integers_hold(largest_of_span(x, begin, std::min(begin + strips.span, strips.inner)))) return false;
    return true;
  }

  // A row by itself: what others in its run hold changes nothing.
  static void meet_floats(const QuantizedLinearArgs& weight, const bf16* row, int64_t panel, float* sums) {
    static thread_local Buffer memory;
    float* x = memory.at_least<float>(static_cast<size_t>(weight.inner));
    for (int64_t i = 0; i < weight.inner; i += W) store(x + i, load_float(row + i));
    panel_of_rows_in_floats(weight, x, 1, panel, sums);
    if (weight.is_shifted && weight.scale_kind == ScaleKind::LEVELS) add_level_offset(weight, x, panel, sums);
  }

  // What sums of wholes begin with, and those of floats do not.
  static void add_level_offset(QuantizedLinearArgs weight, const float* x, int64_t panel, float* sums) {
    static thread_local Buffer memory;
    float* of_groups = memory.at_least<float>(static_cast<size_t>(weight.inner / weight.scale_group));
    pagebinder::sum_groups(x, weight.inner, 1, weight.inner, weight.scale_group, of_groups);
    weight.x_sums = of_groups;
    add_shifts(weight, panel, 0, 1, sums, LevelParts::FIRST);
  }

  static void sum_groups(const bf16* x, int rows, int64_t inner, int64_t group, float* to) {
    pagebinder::sum_groups(x, inner, rows, inner, group, to);
  }
};

}  // namespace

bool quantized_moe_experts_with_integers(const MoeArgs& a) {
  if (!is_integer(a.up.codes->first.code, true) || !is_integer(a.down.codes->first.code, true)) return false;
  in_pieces<bf16>(a, coded_pass<IntegerRows>);
  return true;
}

#else

bool quantized_moe_experts_with_integers(const MoeArgs&) { return false; }

#endif
}  // namespace pagebinder
