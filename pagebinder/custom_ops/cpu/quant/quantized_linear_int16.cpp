// Quantised linear layers on integer products of 16 bits (AVX2), see quantized_linear.h and panel_int16.h.
#include "panel_int16.h"

namespace pagebinder {
#if PAGEBINDER_INT16_PRODUCTS
namespace {

// Of a job's panel, for strips of any number of rows.
float* scales_of_part(int part, int groups) {
  static thread_local Buffer kept[2];
  return kept[part].at_least<float>(static_cast<size_t>(groups) * QUANT_PANEL);
}

struct Int16Products {
  static constexpr int MOST_ROWS = MOST_STRIP_ROWS, BEGINS = 1, MOST_PANELS = 1;
  static constexpr bool HALF_STEPS = true;

  template <Code CODE>
  static bool make(const QuantizedLinearArgs& layer, const Wholes& to) { return make_wholes<CODE>(layer, to); }

  // The first strip reads panels from memory, and leaves scales to the others.
  template <Code CODE, int ROWS>
  static void meet(const QuantizedRun& run, const Wholes& x, const QuantizedJob& job, bool first) {
    alignas(64) float totals[2][ROWS * QUANT_PANEL];
    const auto add_of = [first](auto parts) {
      constexpr int PARTS = decltype(parts)::value;
      return first ? panel_of_strip<CODE, ROWS, true, PARTS> : panel_of_strip<CODE, ROWS, false, PARTS>;
    };
    const bool in_halves = run.args.has_half_steps();
    const auto add = in_halves ? add_of(std::integral_constant<int, 2>()) : add_of(std::integral_constant<int, 1>());
    for (int part = 0; part < run.parts; ++part) {
      float* scales = nullptr;
      if (run.args.rows > MOST_ROWS) {
        scales = scales_of_part(part, x.groups());
        if (first) scales_of_panel(job.layer[part], x, job.panel, scales);
      }
      add(job.layer[part], x, job.panel, totals[part], scales);
    }
    float* const of[] = {totals[0], totals[1]};
    write_panel<bf16>(run, job, of, x.first_row, ROWS);
  }
};

}  // namespace

bool quantized_linear_with_int16_products(const QuantizedLayers& call) { return multiply_integers<Int16Products>(call); }

#else

bool quantized_linear_with_int16_products(const QuantizedLayers&) { return false; }

#endif
}  // namespace pagebinder
