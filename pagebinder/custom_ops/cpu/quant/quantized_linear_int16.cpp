// Quantised linear layers on integer products of 16 bits (AVX2), see quantized_linear.h and panel_int16.h.
#include "panel_int16.h"

namespace pagebinder {
#if PAGEBINDER_INT16_PRODUCTS
namespace {

struct Int16Products {
  static constexpr int FIRST_ROWS = MOST_FIRST_ROWS, MOST_ROWS = MOST_STRIP_ROWS, BEGINS = 1, MOST_PANELS = 1;
  static constexpr bool HALF_STEPS = true, LONG_SPANS = true;

  template <Code CODE>
  static bool make(const QuantizedLinearArgs& layer, const Wholes& to) { return make_wholes<CODE>(layer, to); }

  template <Code CODE>
  static void meet(const QuantizedRun& run, const IntegerStrips<Int16Products>& strips, const QuantizedJob& job) {
    static thread_local Buffer buffer;
    const size_t size = static_cast<size_t>(strips.rows) * QUANT_PANEL;
    float* totals = buffer.at_least<float>(size * run.parts);
    for (int part = 0; part < run.parts; ++part)
      panel_in_integers<CODE>(job.layer[part], strips, job.panel, totals + part * size);
    float* const of[] = {totals, totals + (run.parts - 1) * size};
    write_panel<bf16>(run, job, of, 0, strips.rows, LevelParts::SECOND);
  }
};

}  // namespace

bool quantized_linear_with_int16_products(const QuantizedLayers& call) { return multiply_integers<Int16Products>(call); }

#else

bool quantized_linear_with_int16_products(const QuantizedLayers&) { return false; }

#endif
}  // namespace pagebinder
