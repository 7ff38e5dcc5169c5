// Quantised linear layers on integer products of 16 bits (AVX2, and with AVX-512 in vectors of 256 bits, which is as fast on
// a Zen 4), see quantized_linear.h and panel_int16.h.
#include "narrow_vectors.h"

#include "panel_int16.h"

namespace pagebinder {
#if PAGEBINDER_INT16_PRODUCTS
namespace {

struct Int16Products {
  static constexpr int FIRST_ROWS = MOST_FIRST_ROWS, MOST_ROWS = MOST_STRIP_ROWS, BEGINS = 1, MOST_PANELS = 1;
  static constexpr bool ALL_CODES = true, LONG_SPANS = true;

  template <Code CODE>
  static bool make(const QuantizedLinearArgs& layer, const Wholes& to) { return make_wholes<CODE>(layer, to); }

  template <Code CODE>
  static void meet(const IntegerRun<Int16Products>& run, const QuantizedJob& job) {
    const auto& strips = run.strips;
    static thread_local Buffer buffer;
    const size_t size = static_cast<size_t>(strips.rows) * QUANT_PANEL;
    float* totals = buffer.at_least<float>(size * run.parts);
    for (int part = 0; part < run.parts; ++part) {
      const QuantizedLinearArgs& layer = job.layer[part];
      panel_in_integers<CODE>(layer, strips, job.panel, totals + part * size);
      if (run.fits) continue;
      const bf16* x = static_cast<const bf16*>(run.args.x);
      other_rows_in_floats(layer, x, run.args.x_stride, strips.rows, job.panel, counts_level_offset(layer),
                           totals + part * size);
    }
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

#if PAGEBINDER_IS_NARROW
#undef pagebinder
namespace pagebinder {
struct QuantizedLayers;
bool quantized_linear_with_int16_products(const QuantizedLayers& call) {
  using Layers = pagebinder_narrow::QuantizedLayers;
  return pagebinder_narrow::quantized_linear_with_int16_products(reinterpret_cast<const Layers&>(call));
}
}  // namespace pagebinder
#endif
