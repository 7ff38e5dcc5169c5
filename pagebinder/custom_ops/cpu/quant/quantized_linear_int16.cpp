// Quantised linear layers on integer products of 16 bits (AVX2), see quantized_linear.h and panel_int16.h.
#include "panel_int16.h"

namespace pagebinder {
#if PAGEBINDER_INT16_PRODUCTS
namespace {

struct Int16Products {
  static constexpr int MOST_ROWS = MOST_STRIP_ROWS, BEGINS = 1, MOST_PANELS = 1;
  static constexpr bool HALF_STEPS = true;

  template <Code CODE>
  static bool make(const QuantizedLinearArgs& layer, const Wholes& to) { return make_wholes<CODE>(layer, to); }

  // The first strip reads panels from memory.
  template <Code CODE, int ROWS>
  static void meet(const QuantizedRun& run, const Wholes& x, const QuantizedJob& job, bool first) {
    alignas(64) float totals[2][ROWS * QUANT_PANEL];
    const auto add_of = [first](auto parts) {
      constexpr int PARTS = decltype(parts)::value;
      return first ? panel_of_strip<CODE, ROWS, true, PARTS> : panel_of_strip<CODE, ROWS, false, PARTS>;
    };
    const bool in_halves = run.args.has_half_steps();
    const auto add = in_halves ? add_of(std::integral_constant<int, 2>()) : add_of(std::integral_constant<int, 1>());
    for (int part = 0; part < run.parts; ++part) add(job.layer[part], x, job.panel, totals[part]);
    const float* const of[] = {totals[0], totals[1]};
    write_panel<bf16>(run, job, of, x.first_row, ROWS);
  }
};

}  // namespace

bool quantized_linear_with_int16_products(const QuantizedLayers& call) { return multiply_integers<Int16Products>(call); }

#else

bool quantized_linear_with_int16_products(const QuantizedLayers&) { return false; }

#endif
}  // namespace pagebinder
