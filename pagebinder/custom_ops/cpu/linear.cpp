// The linear layer on matrix tiles, see linear.h.
//
//            K ->
//     W   +--------+--------+     one job = PANEL columns. For each block of K the panel's part of W is copied into
//   panel |  copy  |        |     tiles (rows of W are often a power of two apart, which caches do not like), and
//         +--------+--------+     meets all rows of x: 2 x 2 tiles of y^T at a time. Sums wait in scratch between
//         |        |        |     blocks of K. With one tile pair of rows there is nothing to reuse: no copy.
//
// An element of y is summed in the same order whatever the number of rows and threads.
#include "linear.h"

#include <algorithm>

#include "amx.h"
#include "attention_scores.h"

namespace pagebinder {
#if PAGEBINDER_AMX
namespace {

constexpr int PANEL = 64;
constexpr int BLOCK_STEPS = 8;                           // tile steps of a block of K
constexpr int TILE_WORDS = TILE_LINES * TILE_LINES;      // 1 KB: a tile of any operand
constexpr int PAIR = 2 * TILE_LINES;                     // columns or rows of two tiles
constexpr int64_t SERIAL_FLOPS = 1 << 19;

struct Run {
  const LinearArgs& args;
  uint32_t* packed;  // x: [group of 16 rows][inner / 2][16]
  int steps, row_pairs, num_panels, num_workers;
  std::atomic<int> next_group{0}, next_panel{0};

  const uint32_t* packed_group(int group) const { return packed + static_cast<int64_t>(group) * steps * TILE_WORDS; }
};

void pack_group(const Run& run, int group) {
  const LinearArgs& a = run.args;
  const int first = group * TILE_LINES, rows = std::min(static_cast<int>(a.rows) - first, TILE_LINES);
  const bf16* x[TILE_LINES];
  for (int r = 0; r < rows; ++r) x[r] = static_cast<const bf16*>(a.x) + (first + r) * a.x_stride;
  uint32_t* to = run.packed + static_cast<int64_t>(group) * run.steps * TILE_WORDS;
  pack_lane_queries<PairElements>(x, rows, static_cast<int>(a.inner), TILE_LINES, reinterpret_cast<bf16*>(to));
}

void pack_worker(void* context, int) {
  Run& run = *static_cast<Run*>(context);
  const int groups = static_cast<int>((run.args.rows + TILE_LINES - 1) / TILE_LINES);
  for (int group; (group = run.next_group.fetch_add(1, std::memory_order_relaxed)) < groups;)
    pack_group(run, group);
}

// ---- sums ------------------------------------------------------------------------------------------------------

// Operand A of two tiles of columns: where they begin, from one line to the next, from one step to the next.
struct Columns {
  const char* tile[2];
  int64_t line_bytes, step_bytes;
};

// Lines of W that are needed soon: line i of `count` columns is asked for in step i.
struct Ahead {
  const char* first;
  int64_t column_bytes;
  int count;
};

// Adds `steps` steps to sums[column tile][row tile], which begin as zeros if `first`. ROW_TILES 1: x1 is not used.
template <int ROW_TILES>
void add_steps(const Columns& w, const uint32_t* x0, const uint32_t* x1, int steps, bool first,
                         const Ahead& ahead, float* sums) {
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(2, sums + 2 * TILE_WORDS, 64);
    if (ROW_TILES == 2) _tile_loadd(1, sums + TILE_WORDS, 64);
    if (ROW_TILES == 2) _tile_loadd(3, sums + 3 * TILE_WORDS, 64);
  }
  for (int i = 0; i < steps; ++i) {
    for (int c = 0; c < ahead.count; ++c) __builtin_prefetch(ahead.first + c * ahead.column_bytes + i * 64, 0, 2);
    _tile_loadd(4, w.tile[0] + i * w.step_bytes, w.line_bytes);
    _tile_loadd(6, x0 + i * TILE_WORDS, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (ROW_TILES == 2) _tile_loadd(7, x1 + i * TILE_WORDS, 64);
    if (ROW_TILES == 2) _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, w.tile[1] + i * w.step_bytes, w.line_bytes);
    _tile_dpbf16ps(2, 5, 6);
    if (ROW_TILES == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(2, sums + 2 * TILE_WORDS, 64);
  if (ROW_TILES == 2) _tile_stored(1, sums + TILE_WORDS, 64);
  if (ROW_TILES == 2) _tile_stored(3, sums + 3 * TILE_WORDS, 64);
}

const char* weight_at(const LinearArgs& a, int64_t column, int step) {
  return static_cast<const char*>(a.weight) + (column * a.weight_stride + step * TILE_STEP) * 2;
}

// Weight [PANEL columns][steps of a block] -> tiles, [pair of column tiles][step][2].
void copy_block(const LinearArgs& a, int64_t column, int columns, int first_step, int steps, char* to) {
  for (int c = 0; c < columns; ++c) {
    const char* from = weight_at(a, column + c, first_step);
    char* line = to + c / PAIR * BLOCK_STEPS * 2048 + c / TILE_LINES % 2 * 1024 + c % TILE_LINES * 64;
    for (int i = 0; i < steps; ++i) store(line + i * 2048, load<VF>(from + i * 64));
  }
}

// ---- results ---------------------------------------------------------------------------------------------------

PB_INLINE VF bias_of(const LinearArgs& a, int64_t column) {
  return a.bias == nullptr ? VF{} : load_float(static_cast<const bf16*>(a.bias) + column);
}

// Sums [2 column tiles][row tile][16][16] of one row tile -> rows of y.
void write_tile(const LinearArgs& a, const float* sums, int64_t column, int64_t row) {
  VF low[W], high[W];
  for (int i = 0; i < W; ++i) {
    low[i] = load<VF>(sums + i * W);
    high[i] = load<VF>(sums + 2 * TILE_WORDS + i * W);
  }
  transpose(low);
  transpose(high);
  const VF bias[2] = {bias_of(a, column), bias_of(a, column + W)};
  const int rows = static_cast<int>(std::min<int64_t>(a.rows - row, TILE_LINES));
  bf16* out = static_cast<bf16*>(a.out) + row * a.columns + column;
  for (int r = 0; r < rows; ++r, out += a.columns)
    store(out, _mm512_cvtne2ps_pbh(bit_cast<__m512>(high[r] + bias[1]), bit_cast<__m512>(low[r] + bias[0])));
}

// ---- one job ---------------------------------------------------------------------------------------------------

struct PanelScratch {
  Buffer sums, copies;
};

// What to ask for during one of `calls` shares of a block: a share of the next block, which is in the next panel
// after the last block of this one.
Ahead share_of_next(const Run& run, int64_t column, int64_t next_column, int step, int call, int calls) {
  const LinearArgs& a = run.args;
  if (step >= run.steps) {
    column = next_column;
    step = 0;
  }
  const int columns = static_cast<int>(std::clamp<int64_t>(a.columns - column, 0, PANEL));
  const int begin = columns * call / calls, end = columns * (call + 1) / calls;
  return {weight_at(a, column + begin, step), a.weight_stride * 2, end - begin};
}

void run_panel(const Run& run, PanelScratch& scratch, int64_t column, int64_t next_column) {
  const LinearArgs& a = run.args;
  const int columns = static_cast<int>(std::min<int64_t>(PANEL, a.columns - column)), pairs = columns / PAIR;
  const bool reuse = run.row_pairs > 1;
  float* sums = scratch.sums.at_least<float>(static_cast<size_t>(run.row_pairs) * PANEL / PAIR * 4 * TILE_WORDS);
  char* copies = scratch.copies.at_least<char>(PANEL / PAIR * BLOCK_STEPS * 2048);
  const int block = reuse ? BLOCK_STEPS : run.steps;
  for (int step = 0; step < run.steps; step += block) {
    const int steps = std::min(block, run.steps - step);
    if (reuse) copy_block(a, column, columns, step, steps, copies);
    tiles_meet_memory();
    for (int p = 0; p < run.row_pairs; ++p) {
      const uint32_t* x0 = run.packed_group(2 * p) + step * TILE_WORDS;
      const uint32_t* x1 = run.packed_group(2 * p + 1) + step * TILE_WORDS;
      for (int c = 0; c < pairs; ++c) {
        const char* tiles = copies + c * BLOCK_STEPS * 2048;
        const char* rows = weight_at(a, column + c * PAIR, 0);
        const Columns copied{{tiles, tiles + 1024}, 64, 2048};
        const Columns direct{{rows, rows + TILE_LINES * a.weight_stride * 2}, a.weight_stride * 2, 64};
        const int calls = run.row_pairs * pairs;
        const Ahead ahead = share_of_next(run, column, next_column, step + block, p * pairs + c, calls);
        const bool one_tile = (2 * p + 1) * TILE_LINES >= a.rows;
        const auto add = one_tile ? add_steps<1> : add_steps<2>;
        add(reuse ? copied : direct, x0, x1, steps, step == 0, ahead, sums + (p * 2 + c) * 4 * TILE_WORDS);
      }
    }
    tiles_meet_memory();
  }
  for (int p = 0; p < run.row_pairs; ++p)
    for (int c = 0; c < pairs; ++c)
      for (int half = 0; half < 2; ++half) {
        const int64_t row = p * PAIR + half * TILE_LINES;
        if (row < a.rows) write_tile(a, sums + ((p * 2 + c) * 4 + half) * TILE_WORDS, column + c * PAIR, row);
      }
}

void panel_worker(void* context, int) {
  static thread_local PanelScratch scratch;
  Run& run = *static_cast<Run*>(context);
  const FullTiles tiles;
  const auto take = [&run] { return run.next_panel.fetch_add(1, std::memory_order_relaxed); };
  for (int panel = take(), next; panel < run.num_panels; panel = next) {
    next = take();
    run_panel(run, scratch, static_cast<int64_t>(panel) * PANEL, static_cast<int64_t>(next) * PANEL);
  }
}

void for_workers(Run& run, void (*worker)(void*, int)) {
  if (run.num_workers <= 1) worker(&run, 0);
  else run.args.run(run.num_workers, worker, &run);
}

}  // namespace

bool linear_suits_tiles(int64_t rows, int64_t columns, int64_t inner) {
  return rows <= LINEAR_MOST_ROWS && columns % LINEAR_GRAIN == 0 && inner % LINEAR_GRAIN == 0 && inner > 0 &&
         tiles_usable();
}

void linear_with_tiles(const LinearArgs& args) {
  static thread_local Buffer packed;
  const int steps = static_cast<int>(args.inner / TILE_STEP);
  const int row_pairs = static_cast<int>((args.rows + PAIR - 1) / PAIR);
  const int num_panels = static_cast<int>((args.columns + PANEL - 1) / PANEL);
  const bool serial = args.rows * args.columns * args.inner < SERIAL_FLOPS;
  uint32_t* x = packed.at_least<uint32_t>(static_cast<size_t>(2 * row_pairs) * steps * TILE_WORDS);
  Run run{args, x, steps, row_pairs, num_panels, serial ? 1 : std::min(args.num_threads, num_panels)};
  for_workers(run, pack_worker);
  for_workers(run, panel_worker);
}

#else

bool linear_suits_tiles(int64_t, int64_t, int64_t) { return false; }
void linear_with_tiles(const LinearArgs&) {}

#endif
}  // namespace pagebinder
