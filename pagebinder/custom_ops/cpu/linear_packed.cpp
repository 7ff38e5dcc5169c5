// Linear layers whose weights were packed as tiles, see linear.h.
//
//     W   [panel of 32 columns][step of 32 k][2 tiles][16 pairs of k][16 columns][2]     in memory: one long stream
//
// A job is a group of panels (of gated layers: of both) against a block of rows: x is operand A and W operand B as
// they lie, and the sums are rows of y. Sums of 2 x 2 tiles stay in registers for a block of steps, of which the second
// cache holds what x and the group have. Meanwhile the group's next block is asked for, evenly, and the lines of y
// that are written at the end.
//
// An element of y is summed in the same order whatever the number of rows and threads.
#include <algorithm>

#include "amx.h"
#include "linear.h"
#include "work_ranges.h"

namespace pagebinder {
#if PAGEBINDER_AMX
namespace {

constexpr int PANEL = PACKED_PANEL;                       // columns
constexpr int HALF = PANEL / 2;                           // columns of a tile
constexpr int PAIR = 2 * TILE_LINES;                      // rows of two tiles
constexpr int TILE_BYTES = TILE_LINES * 64, STEP_BYTES = 2 * TILE_BYTES;
constexpr int TILE_SUMS = TILE_LINES * TILE_LINES;
constexpr int BLOCK_STEPS = 32;                           // whose sums stay in registers
constexpr int64_t STREAM_AHEAD = 16384;                   // bytes
constexpr int MOST_PAIRS = 8;                             // of row tiles of a job
constexpr int MOST_GROUP = 4;                             // panels of a job
constexpr int JOBS_OF_A_THREAD = 4;                       // at least, before jobs get more panels

struct Run {
  const LinearArgs& args;
  const char* tail;                          // a copy of the last pair of row tiles, if x ends within one
  int steps, row_pairs, block_pairs, group;  // panels of a job
  LinearPanels panels;                       // groups of them
  int num_workers;
  int blocks = (row_pairs + block_pairs - 1) / block_pairs;
  WorkRanges work{blocks * panels.count(), num_workers};

  int64_t x_line() const { return args.x_stride * 2; }
  const char* rows_at(int pair) const {
    if (tail != nullptr && pair == row_pairs - 1) return tail;
    return static_cast<const char*>(args.x) + pair * PAIR * x_line();
  }
  bool gated() const { return args.gate != Activation::NONE; }
  int64_t panel_bytes() const { return static_cast<int64_t>(steps) * STEP_BYTES; }
  int64_t rows_of(int pair) const { return std::min<int64_t>(args.rows - static_cast<int64_t>(pair) * PAIR, PAIR); }
};

// One job: where its panels begin, of which rows. Plain layers have one panel, gated ones two.
struct Job {
  const LinearLayer* layer;
  int64_t column;
  const char* panel[2];
  int panels, first_pair, end_pair;
};

Job job_at(const Run& run, int index) {
  const int count = run.panels.count(), block = index / count;
  const auto [result, column] = run.panels[index % count];
  const LinearLayer* layer = run.args.layers + result;
  const auto panel_of = [&](const LinearLayer& l) {
    return static_cast<const char*>(l.weight) + column / PANEL * run.panel_bytes();
  };
  return {layer, column, {panel_of(*layer), run.gated() ? panel_of(layer[1]) : nullptr},
          static_cast<int>(std::min<int64_t>(run.group, (layer->columns - column) / PANEL)), block * run.block_pairs,
          std::min((block + 1) * run.block_pairs, run.row_pairs)};
}

// ---- sums ------------------------------------------------------------------------------------------------------

// What is asked for beside a product: in each of its steps `lines` of the panels to come and one of a row of y.
struct Ahead {
  const char *first, *second;  // of a panel, and of the other of gated layers
  int lines;
  char* out;
  int64_t stride;  // bytes
};

// Adds `steps` steps to sums[row tile][column tile], which begin as zeros if `first`: ROWS x COLUMNS is 2 x 2, 1 x 2
// or 1 x 4. x: lines that are `x_line` bytes apart. w: where each column tile begins.
template <int ROWS, int COLUMNS>
void multiply(const char* x, int64_t x_line, const char* const* w, int steps, bool first, Ahead ahead, float* sums) {
  static_assert(ROWS * COLUMNS == 4 || ROWS * COLUMNS == 2);
  constexpr bool FOUR = ROWS * COLUMNS == 4;
  tiles_meet_memory();
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    if (FOUR) _tile_zero(2);
    if (FOUR) _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + TILE_SUMS, 64);
    if (FOUR) _tile_loadd(2, sums + 2 * TILE_SUMS, 64);
    if (FOUR) _tile_loadd(3, sums + 3 * TILE_SUMS, 64);
  }
  const char *w0 = w[0], *w1 = w[1], *w2 = w[COLUMNS - 2], *w3 = w[COLUMNS - 1];
  for (int64_t at = 0; at < static_cast<int64_t>(steps) * STEP_BYTES; at += STEP_BYTES, x += TILE_STEP * 2) {
    if (ROWS == 1) {  // a stream: each step asks for one of the same panels further on
      for (int i = 0; i < STEP_BYTES; i += 64) __builtin_prefetch(w0 + at + STREAM_AHEAD + i);
      for (int i = 0; i < STEP_BYTES && COLUMNS == 4; i += 64) __builtin_prefetch(w1 + at + STREAM_AHEAD + i);
    } else {
      for (int i = 0; i < ahead.lines; ++i, ahead.first += 64) __builtin_prefetch(ahead.first, 0, 2);
      if (ahead.second != nullptr)
        for (int i = 0; i < ahead.lines; ++i, ahead.second += 64) __builtin_prefetch(ahead.second, 0, 2);
    }
    __builtin_prefetch(ahead.out, 1);  // of nothing: no harm
    ahead.out += ahead.stride;
    _tile_loadd(4, x, x_line);
    _tile_loadd(6, w0 + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1 + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (ROWS == 2) {
      _tile_loadd(5, x + TILE_LINES * x_line, x_line);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    if (COLUMNS == 4) {
      _tile_loadd(6, w2 + at, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, w3 + at, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + TILE_SUMS, 64);
  if (FOUR) _tile_stored(2, sums + 2 * TILE_SUMS, 64);
  if (FOUR) _tile_stored(3, sums + 3 * TILE_SUMS, 64);
  tiles_meet_memory();
}

// ---- results ---------------------------------------------------------------------------------------------------

PB_INLINE VF bias_of(const LinearLayer& layer, int64_t column) {
  return layer.bias == nullptr ? VF{} : load_float(static_cast<const bf16*>(layer.bias) + column);
}

// Sums [row tile][2 column tiles] -> `rows` rows of y: 32 columns of a layer, or the 16 that a gate makes of two.
void write_rows(const Run& run, const LinearLayer& layer, int64_t column, const float* sums, int64_t row, int rows) {
  const bool gated = run.gated();
  const Activation gate = run.args.gate;
  const VF bias[2] = {bias_of(layer, column), bias_of(*(&layer + gated), column + (gated ? 0 : HALF))};
  bf16* out = static_cast<bf16*>(layer.out) + row * layer.columns + column;
  for (int r = 0; r < rows; ++r, out += layer.columns) {
    const float* low = sums + r / TILE_LINES * 2 * TILE_SUMS + r % TILE_LINES * HALF;
    const VF first = load<VF>(low) + bias[0], second = load<VF>(low + TILE_SUMS) + bias[1];
    if (gated) {
      store_gated(gate, bit_cast<VF>(round_to_bf16(first)), bit_cast<VF>(round_to_bf16(second)), out);
    } else {
      store_float(out, first);
      store_float(out + HALF, second);
    }
  }
}

// ---- one job ---------------------------------------------------------------------------------------------------

class Worker {
 public:
  explicit Worker(const Run& run) : run_(run) {
    static thread_local Buffer sums;
    const int kept = run.steps > BLOCK_STEPS ? run.block_pairs * run.group : 1;  // sums wait for the next block
    sums_ = sums.at_least<float>(static_cast<int64_t>(kept) * PRODUCT_SUMS);
  }

  void run_job(const Job& job, const Job& next) {
    const auto block_at = [&](int step) {
      return Block{step, std::min(BLOCK_STEPS, run_.steps - step), step + BLOCK_STEPS >= run_.steps};
    };
    for (int step = 0; step < run_.steps; step += BLOCK_STEPS) {
      const Block block = block_at(step), after = block_at(block.last ? 0 : step + BLOCK_STEPS);
      float* sums = sums_;
      for (int pair = job.first_pair; pair < job.end_pair; ++pair)
        for (int panel = 0; panel < job.panels; ++panel) {
          run_product(job, pair, panel, block, ahead_of(block.last ? next : job, after, job, pair, panel), sums);
          if (run_.steps > BLOCK_STEPS) sums += PRODUCT_SUMS;
        }
    }
  }

 private:
  static constexpr int PRODUCT_SUMS = 8 * TILE_SUMS;

  struct Block {
    int step, steps;
    bool last;
  };

  // The share of a pair in what a panel's place in the next group needs of a block.
  Ahead ahead_of(const Job& coming, const Block& block, const Job& job, int pair, int panel) const {
    if (panel >= coming.panels) return {};
    const int64_t lines = static_cast<int64_t>(block.steps) * STEP_BYTES / 64, pairs = job.end_pair - job.first_pair;
    const int64_t begin = lines * (pair - job.first_pair) / pairs, end = lines * (pair - job.first_pair + 1) / pairs;
    const int64_t at = panel * run_.panel_bytes() + static_cast<int64_t>(block.step) * STEP_BYTES + begin * 64;
    return {coming.panel[0] + at, run_.gated() ? coming.panel[1] + at : nullptr, static_cast<int>(end - begin)};
  }

  // Rows of a pair of row tiles times a panel, or the two of gated layers, for one block of steps.
  void run_product(const Job& job, int pair, int panel, const Block& block, Ahead ahead, float* sums) {
    const int64_t at = panel * run_.panel_bytes() + static_cast<int64_t>(block.step) * STEP_BYTES;
    const int64_t column = job.column + panel * PANEL, row = static_cast<int64_t>(pair) * PAIR;
    const int rows = static_cast<int>(run_.rows_of(pair));
    const char *x = run_.rows_at(pair) + block.step * TILE_STEP * 2, *w0 = job.panel[0] + at, *w1 = job.panel[1] + at;
    if (block.last) {
      ahead.out = static_cast<char*>(job.layer->out) + (row * job.layer->columns + column) * 2;
      ahead.stride = job.layer->columns * 2;
    }
    const auto sum = [&](auto kernel, const char* const* w, float* to) {
      kernel(x, run_.x_line(), w, block.steps, block.step == 0, ahead, to);
    };
    const auto write = [&](int64_t from, const float* complete) {
      if (block.last) write_rows(run_, *job.layer, column + from, complete, row, rows);
    };
    if (!run_.gated()) {
      const char* w[2] = {w0, w0 + TILE_BYTES};
      ahead.lines = (ahead.lines + block.steps - 1) / block.steps;
      sum(rows <= TILE_LINES ? multiply<1, 2> : multiply<2, 2>, w, sums);
      write(0, sums);
    } else if (rows <= TILE_LINES) {
      const char* w[4] = {w0, w1, w0 + TILE_BYTES, w1 + TILE_BYTES};
      ahead.lines = (ahead.lines + block.steps - 1) / block.steps;
      sum(multiply<1, 4>, w, sums);
      write(0, sums), write(HALF, sums + 2 * TILE_SUMS);
    } else {
      ahead.lines = (ahead.lines + 2 * block.steps - 1) / (2 * block.steps);
      for (int half = 0; half < 2; ++half, sums += 4 * TILE_SUMS) {
        const char* w[2] = {w0 + half * TILE_BYTES, w1 + half * TILE_BYTES};
        sum(multiply<2, 2>, w, sums);
        write(half * HALF, sums);
        ahead.first += ahead.lines * block.steps * 64, ahead.second += ahead.lines * block.steps * 64;
      }
    }
  }

  const Run& run_;
  float* sums_;
};

void job_worker(void* context, int index_of_worker) {
  Run& run = *static_cast<Run*>(context);
  const FullTiles tiles(static_cast<int>(std::min<int64_t>(run.args.rows, TILE_LINES)));
  Worker worker(run);
  for (int index = run.work.take(index_of_worker), next; index < run.work.count(); index = next) {
    next = run.work.take(index_of_worker);
    worker.run_job(job_at(run, index), next < run.work.count() ? job_at(run, next) : Job{});
  }
}

}  // namespace

bool packed_weights_usable() { return tiles_usable(); }

void linear_with_packed_weights(const LinearArgs& args) {
  static thread_local Buffer last_rows;
  const int steps = static_cast<int>(args.inner / TILE_STEP);
  const int row_pairs = static_cast<int>((args.rows + PAIR - 1) / PAIR);
  const int blocks = (row_pairs + MOST_PAIRS - 1) / MOST_PAIRS, block_pairs = (row_pairs + blocks - 1) / blocks;
  int64_t columns = 0;
  for (int i = 0; i < args.num_layers; ++i) columns += args.layers[i].columns;
  const int64_t most = row_pairs == 1 ? 1 : MOST_GROUP, jobs = columns / PANEL * blocks / args.num_threads;
  const int group = static_cast<int>(std::clamp<int64_t>(jobs / JOBS_OF_A_THREAD, 1, most));
  const LinearPanels panels(args, PANEL * group);
  const bool serial = args.rows * columns * args.inner < LINEAR_SERIAL_FLOPS;
  char* tail = nullptr;
  if (args.rows > TILE_LINES && args.rows % TILE_LINES != 0) {  // tiles would read beyond x
    const int64_t first = (row_pairs - 1) * PAIR, line = args.x_stride * 2;
    tail = last_rows.at_least<char>(PAIR * line);
    for (int64_t r = first; r < args.rows; ++r)
      std::memcpy(tail + (r - first) * line, static_cast<const char*>(args.x) + r * line, args.inner * 2);
  }
  const int workers = serial ? 1 : std::min(args.num_threads, panels.count());
  Run run{args, tail, steps, row_pairs, block_pairs, group, panels, workers};
  if (run.num_workers <= 1) job_worker(&run, 0);
  else args.run(run.num_workers, job_worker, &run);
}

#else

bool packed_weights_usable() { return false; }
void linear_with_packed_weights(const LinearArgs&) {}

#endif

// A tile is the transpose of 16 rows of W, a pair of k taken as one word.
void pack_panel(const PackedWeight& w, int64_t panel, bool unpack) {
  constexpr int LINES = 16, PAIRS = 16;
  const int64_t words_of_row = w.inner / 2;
  uint32_t* tile = static_cast<uint32_t*>(w.packed) + panel * PACKED_PANEL * words_of_row;
  for (int64_t step = 0; step < w.inner / PACKED_PANEL; ++step)
    for (int half = 0; half < 2; ++half, tile += LINES * PAIRS) {
      char* row = static_cast<char*>(w.plain) + ((panel * 2 + half) * LINES * w.plain_stride + step * 2 * PAIRS) * 2;
      uint32_t lines[LINES][PAIRS];
      for (int r = 0; r < LINES && !unpack; ++r) std::memcpy(lines[r], row + r * w.plain_stride * 2, sizeof lines[r]);
      for (int r = 0; r < LINES; ++r)
        for (int i = 0; i < PAIRS; ++i)
          if (unpack) lines[r][i] = tile[i * LINES + r];
          else tile[i * LINES + r] = lines[r][i];
      for (int r = 0; r < LINES && unpack; ++r) std::memcpy(row + r * w.plain_stride * 2, lines[r], sizeof lines[r]);
    }
}

}  // namespace pagebinder
