// Linear layers on matrix tiles, see linear.h.
//
//            K ->
//     W   +--------+--------+     one job = a panel of columns. For each block of K the panel's part of W is copied into
//   panel |  copy  |        |     tiles (rows of W are often a power of two apart, which caches do not like), and
//         +--------+--------+     meets all rows of x: 2 x 2 tiles of y^T at a time. Sums wait in scratch between
//         |        |        |     blocks of K. With one tile pair of rows there is nothing to reuse: no copy.
//
// Tiles are loaded across rows of W, but without a copy rows that come next are asked for one after the other: that is
// what memory and its prefetcher are fastest at.
//
// An element of y is summed in the same order whatever the number of rows and threads.
#include "elements.h"

#if PAGEBINDER_AMX
#include <algorithm>

#include "activations.h"
#include "amx.h"
#include "attention_scores.h"
#include "leaving_loop.h"
#include "linear.h"
#include "work_ranges.h"

namespace pagebinder {
namespace {

constexpr int MOST_PANEL = 64, DIRECT_PANEL = 32;        // columns of a panel, with and without a copy
constexpr int BLOCK_STEPS = 8;                           // tile steps of a block of K
constexpr int TILE_WORDS = TILE_LINES * TILE_LINES;      // 1 KB: a tile of any operand
constexpr int64_t SERIAL_PACKING = 1 << 15;              // elements of x

struct Run {
  const KeptLinearArgs args;
  const std::shared_ptr<Buffer> memory;
  uint32_t* const packed;  // x, in `memory`: [group of 16 rows][inner / 2][16]
  const int steps, row_pairs, panel_columns, num_workers;
  const LinearPanels panels{args, args.gate == Activation::NONE ? panel_columns : panel_columns / 2};
  WorkRanges work{panels.count(), num_workers};
  Claims results{panels.count()};
  std::atomic<int> next_group{0};

  Run(const LinearArgs& a, std::shared_ptr<Buffer> buffer, uint32_t* x, int num_steps, int pairs, int columns,
      int workers)
      : args(a), memory(std::move(buffer)), packed(x), steps(num_steps), row_pairs(pairs), panel_columns(columns),
        num_workers(workers) {}

  bool gated() const { return args.gate != Activation::NONE; }
  const uint32_t* packed_group(int group) const { return packed + static_cast<int64_t>(group) * steps * TILE_WORDS; }
};

// Columns of W that one job reads. Of gated layers, tiles of 16 columns of both take turns: a tile pair holds the same
// columns of the two, whose results are one tile.
struct Panel {
  const LinearLayer* layer[2];  // of even and odd tiles
  int64_t first;                // column of the result
  int columns;
  bool gated;

  int64_t line_bytes(int tile) const { return layer[tile % 2]->weight_stride * 2; }
  const char* row(int column, int step) const {
    const int tile = column / TILE_LINES, line = column % TILE_LINES;
    const LinearLayer& l = *layer[tile % 2];
    const int64_t at = first + (gated ? tile / 2 : tile) * TILE_LINES + line;
    return static_cast<const char*>(l.weight) + (at * l.weight_stride + step * TILE_STEP) * 2;
  }
};

Panel panel_at(const Run& run, int index) {
  if (index >= run.panels.count()) return {};
  const auto [result, column] = run.panels[index];
  const LinearLayer* layer = run.args.layers + result;
  const int share = run.gated() ? 2 : 1;  // columns of W to a column of the result
  const int64_t columns = std::min<int64_t>(run.panel_columns, (layer->columns - column) * share);
  return {{layer, layer + share - 1}, column, static_cast<int>(columns), run.gated()};
}

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
  int64_t line_bytes[2], step_bytes;
};

// Rows of W that are needed soon: as many steps of each as are multiplied meanwhile.
struct Ahead {
  const char* rows[DIRECT_PANEL];
  int count;
};

Ahead rows_ahead(const Panel& panel, int begin, int end, int step) {
  Ahead ahead;
  ahead.count = end - begin;
  const char* row = nullptr;
  for (int c = begin; c < end; ++c) {
    row = c == begin || c % TILE_LINES == 0 ? panel.row(c, step) : row + panel.line_bytes(c / TILE_LINES);
    ahead.rows[c - begin] = row;
  }
  return ahead;
}

// Adds `steps` steps to sums[column tile][row tile], which begin as zeros if `first`. ROW_TILES 1: x1 is not used.
// ORDERED: rows are asked for one after the other, else line by line of all of them, as copies will be made.
template <int ROW_TILES, bool ORDERED>
void add_steps(const Columns& w, const uint32_t* x0, const uint32_t* x1, int steps, bool first, const Ahead& ahead,
               float* sums) {
  const char* const* row = ahead.rows;
  const char *line = nullptr, *row_end = nullptr;
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
    for (int n = 0; n < ahead.count; ++n) {
      if (ORDERED && line == row_end) line = *row++, row_end = line + steps * 64;
      __builtin_prefetch(ORDERED ? line : ahead.rows[n] + i * 64, 0, 2);
      line += ORDERED ? 64 : 0;
    }
    _tile_loadd(4, w.tile[0] + i * w.step_bytes, w.line_bytes[0]);
    _tile_loadd(6, x0 + i * TILE_WORDS, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (ROW_TILES == 2) _tile_loadd(7, x1 + i * TILE_WORDS, 64);
    if (ROW_TILES == 2) _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, w.tile[1] + i * w.step_bytes, w.line_bytes[1]);
    _tile_dpbf16ps(2, 5, 6);
    if (ROW_TILES == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(2, sums + 2 * TILE_WORDS, 64);
  if (ROW_TILES == 2) _tile_stored(1, sums + TILE_WORDS, 64);
  if (ROW_TILES == 2) _tile_stored(3, sums + 3 * TILE_WORDS, 64);
}

// The panel's part of some steps -> tiles, [pair of column tiles][step][2].
void copy_block(const Panel& panel, int first_step, int steps, char* to) {
  for (int c = 0; c < panel.columns; ++c) {
    const char* from = panel.row(c, first_step);
    char* line = to + c / PAIR * BLOCK_STEPS * 2048 + c / TILE_LINES % 2 * 1024 + c % TILE_LINES * 64;
    for (int i = 0; i < steps; ++i) store(line + i * 2048, load<VF>(from + i * 64));
  }
}

// ---- results ---------------------------------------------------------------------------------------------------

PB_INLINE VF bias_of(const LinearLayer& layer, int64_t column) {
  return layer.bias == nullptr ? VF{} : load_float(static_cast<const bf16*>(layer.bias) + column);
}

// Sums [2 column tiles][row tile][16][16] of one row tile -> rows of y.
void write_tile(const LinearArgs& a, const Panel& panel, const float* sums, int pair, int64_t row) {
  VF sum[2][W];
  for (int i = 0; i < W; ++i) {
    sum[0][i] = load<VF>(sums + i * W);
    sum[1][i] = load<VF>(sums + 2 * TILE_WORDS + i * W);
  }
  transpose(sum[0]);
  transpose(sum[1]);
  const int64_t column = panel.first + pair * (panel.gated ? TILE_LINES : PAIR);
  const VF bias[2] = {bias_of(*panel.layer[0], column), bias_of(*panel.layer[1], column + (panel.gated ? 0 : W))};
  const int64_t columns = panel.layer[0]->columns;
  const int rows = static_cast<int>(std::min<int64_t>(a.rows - row, TILE_LINES));
  bf16* out = static_cast<bf16*>(panel.layer[0]->out) + row * columns + column;
  for (int r = 0; r < rows; ++r, out += columns) {
    const VF low = sum[0][r] + bias[0], high = sum[1][r] + bias[1];
    if (panel.gated) {
      store_gated(a.gate, bit_cast<VF>(round_to_bf16(low)), bit_cast<VF>(round_to_bf16(high)), out);
    } else {
      store_float(out, low);
      store_float(out + W, high);
    }
  }
}

// ---- one job ---------------------------------------------------------------------------------------------------

struct PanelScratch {
  Buffer sums, copies;
};

void run_panel(Run& run, int index, int next_index, int worker) {
  static thread_local PanelScratch scratch;
  const Panel panel = panel_at(run, index), next = panel_at(run, next_index);
  const int pairs = panel.columns / PAIR, calls = run.row_pairs * pairs;
  const bool reuse = run.row_pairs > 1;
  float* sums = scratch.sums.at_least<float>(static_cast<size_t>(run.row_pairs) * MOST_PANEL / PAIR * 4 * TILE_WORDS);
  char* copies = scratch.copies.at_least<char>(MOST_PANEL / PAIR * BLOCK_STEPS * 2048);
  const int block = reuse ? BLOCK_STEPS : run.steps;
  for (int step = 0; step < run.steps; step += block) {
    const int steps = std::min(block, run.steps - step), next_step = step + block;
    const bool last = next_step >= run.steps;
    const Panel& coming = last ? next : panel;  // whose next block is asked for, a share in each call
    if (reuse) copy_block(panel, step, steps, copies);
    tiles_meet_memory();
    for (int p = 0; p < run.row_pairs; ++p) {
      const uint32_t* x0 = run.packed_group(2 * p) + step * TILE_WORDS;
      const uint32_t* x1 = run.packed_group(2 * p + 1) + step * TILE_WORDS;
      const bool one_tile = (2 * p + 1) * TILE_LINES >= run.args.rows;
      const auto add = reuse ? (one_tile ? add_steps<1, false> : add_steps<2, false>)
                             : (one_tile ? add_steps<1, true> : add_steps<2, true>);
      for (int c = 0; c < pairs; ++c) {
        const char* tiles = copies + c * BLOCK_STEPS * 2048;
        const Columns copied{{tiles, tiles + 1024}, {64, 64}, 2048};
        const Columns direct{{panel.row(c * PAIR, 0), panel.row(c * PAIR + TILE_LINES, 0)}, {panel.line_bytes(0), panel.line_bytes(1)}, 64};
        const int call = p * pairs + c;
        const Ahead ahead = rows_ahead(coming, coming.columns * call / calls, coming.columns * (call + 1) / calls,
                                       last ? 0 : next_step);
        add(reuse ? copied : direct, x0, x1, steps, step == 0, ahead, sums + (p * 2 + c) * 4 * TILE_WORDS);
      }
    }
    tiles_meet_memory();
  }
  stand_still(worker);
  run.results.write_once(index, [&] {
    for (int p = 0; p < run.row_pairs; ++p)
      for (int c = 0; c < pairs; ++c)
        for (int half = 0; half < 2; ++half) {
          const int64_t row = p * PAIR + half * TILE_LINES;
          if (row < run.args.rows)
            write_tile(run.args, panel, sums + ((p * 2 + c) * 4 + half) * TILE_WORDS, c, row);
        }
  });
}

void panel_worker(void* context, int worker) {
  Run& run = *static_cast<Run*>(context);
  const FullTiles tiles;
  const int count = run.panels.count();
  Pace pace;
  for (int index = run.work.take(worker), next; index < count; index = next, pace.count()) {
    next = run.work.take(worker);
    run_panel(run, index, next, worker);
  }
  if (worker == 0)
    complete_jobs(count, pace, [&](int64_t i) { return run.results.is_written(i); },
                  [&](int64_t i) { run_panel(run, static_cast<int>(i), count, 0); });
}

}  // namespace

bool linear_suits_tiles(int64_t rows, int64_t columns, int64_t inner) {
  return rows <= LINEAR_MOST_ROWS && columns % LINEAR_GRAIN == 0 && inner % LINEAR_GRAIN == 0 && inner > 0 &&
         tiles_usable();
}

void linear_with_tiles(const LinearArgs& args) {
  static thread_local std::shared_ptr<Buffer> last;
  const std::shared_ptr<Buffer> memory = buffer_of_a_call(last);
  const int steps = static_cast<int>(args.inner / TILE_STEP);
  const int row_pairs = static_cast<int>((args.rows + PAIR - 1) / PAIR);
  const int panel_columns = row_pairs > 1 ? MOST_PANEL : DIRECT_PANEL;
  int64_t columns = 0;
  for (int i = 0; i < args.num_layers; ++i) columns += args.layers[i].columns;
  const bool serial = args.rows * columns * args.inner < LINEAR_SERIAL_FLOPS;
  uint32_t* x = memory->at_least<uint32_t>(static_cast<size_t>(2 * row_pairs) * steps * TILE_WORDS);
  const int workers = serial ? 1 : args.num_threads;
  const auto run = make_run<Run>(args, memory, x, steps, row_pairs, panel_columns, workers);
  if (workers <= 1 || args.rows * args.inner < SERIAL_PACKING) pack_worker(run.get(), 0);
  else run_parallel(workers, pack_worker, run.get());
  if (workers <= 1) panel_worker(run.get(), 0);
  else run_leaving(workers, panel_worker, run);
}

}  // namespace pagebinder

#else

namespace pagebinder {

struct LinearArgs;
bool linear_suits_tiles(int64_t, int64_t, int64_t) { return false; }
void linear_with_tiles(const LinearArgs&) {}

}  // namespace pagebinder

#endif
