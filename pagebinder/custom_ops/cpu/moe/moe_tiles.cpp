// Experts of bf16 where the machine has matrix tiles: those with many rows on tiles, those with few on vectors, which
// read weights faster.
#include "moe_tiles.h"
#include "moe_vectors.h"

namespace pagebinder {
#if PAGEBINDER_AMX
namespace {

constexpr int FEW_ROWS = 4;

template <bool TRANSPOSED>
struct TilesOrVectors {
  using Many = Tiles<TRANSPOSED>;
  using Elements = std::conditional_t<TRANSPOSED, FloatElements<bf16>, PairElements>;
  using Few = Vectors<bf16, Elements, TRANSPOSED>;
  using Element = bf16;
  using Operand = typename Many::Operand;  // of few rows: room for Few's
  using FewOperand = typename Few::Operand;
  using Setup = typename Many::Setup;
  static constexpr int GROUP = Many::GROUP, PANEL = Many::PANEL, MOST_HIDDEN = PANEL;
  static_assert(Few::PANEL == PANEL && FEW_ROWS * sizeof(FewOperand) <= GROUP * sizeof(bf16));

  struct Panel {
    typename Many::Panel many;
    typename Few::Panel few;
  };

  static bool is_few(const Run& run) { return run.rows <= FEW_ROWS; }
  static const FewOperand* few(const Operand* x) { return reinterpret_cast<const FewOperand*>(x); }
  static int64_t operand_size(int64_t positions, int64_t inner) { return Many::operand_size(positions, inner); }

  static void pack(const Run& run, const bf16* const* rows, int count, int64_t inner, Operand* to) {
    if (is_few(run)) Few::pack(run, rows, count, inner, reinterpret_cast<FewOperand*>(to));
    else Many::pack(run, rows, count, inner, to);
  }

  static Panel panel(const Projection& p, int expert, int64_t column, int width) {
    return {Many::panel(p, expert, column, width), Few::panel(p, expert, column, width)};
  }

  static Panel hidden_panel(const MoeArgs& a, int expert, int64_t i, int64_t width) {
    return {Many::hidden_panel(a, expert, i), Few::hidden_panel(a, expert, i, width)};
  }

  static void hidden(const MoeArgs& a, const Run& run, const Operand* x, const Panel& panel, const Panel& next,
                     Operand* to) {
    if (is_few(run)) Few::hidden(a, run, few(x), panel.few, next.few, reinterpret_cast<FewOperand*>(to));
    else Many::hidden(a, run, x, panel.many, next.many, to);
  }

  static void products(const Projection& p, const Run& run, const Operand* x, const Panel& panel, const Panel& next,
                       float* y) {
    if (is_few(run)) Few::products(p, run, few(x), panel.few, next.few, y);
    else Many::products(p, run, x, panel.many, next.many, y);
  }
};

}  // namespace

bool tiles_suit(Element type, const Projection& p) {
  return type == Element::BF16 && p.columns % PAIR == 0 && p.inner % TILE_STEP == 0 && p.inner > 0 && tiles_usable();
}

void moe_experts_tiles(const MoeArgs& a) {
  in_pieces<bf16>(a, a.transposed ? moe_pass<TilesOrVectors<true>> : moe_pass<TilesOrVectors<false>>);
}

void expert_linear_tiles(const ExpertLinearArgs& a) {
  in_pieces<bf16>(a, a.transposed ? linear_pass<TilesOrVectors<true>> : linear_pass<TilesOrVectors<false>>);
}

#else

bool tiles_suit(Element, const Projection&) { return false; }
void moe_experts_tiles(const MoeArgs&) {}
void expert_linear_tiles(const ExpertLinearArgs&) {}

#endif
}  // namespace pagebinder
