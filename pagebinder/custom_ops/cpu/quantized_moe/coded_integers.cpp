// Experts in int4, int6 and int8 on integer products of 16 bits (AVX2, and with AVX-512 in vectors of 256 bits), see
// quant/panel_int16.h.
#include "narrow_vectors.h"

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

  static Ready ready(const QuantizedLinearArgs& weight, const bf16* x, int rows, float* sums) {
    static thread_local Buffer memory;
    Ready ready{x, {rows, static_cast<int>(weight.inner), integer_group(weight)}, true};
    ready.strips.sums = sums, ready.strips.sums_of_row = weight.inner / weight.scale_group;
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
    const bool counts_offset = counts_level_offset(weight);
    other_rows_in_floats(weight, ready.x, weight.inner, ready.strips.rows, panel, counts_offset, sums);
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

#if PAGEBINDER_IS_NARROW
#undef pagebinder
namespace pagebinder {
struct MoeArgs;
bool quantized_moe_experts_with_integers(const MoeArgs& a) {
  return pagebinder_narrow::quantized_moe_experts_with_integers(reinterpret_cast<const pagebinder_narrow::MoeArgs&>(a));
}
}  // namespace pagebinder
#endif
