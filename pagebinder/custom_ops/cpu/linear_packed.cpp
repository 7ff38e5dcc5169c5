// Linear layers whose weights were packed as tiles, see linear.h.
//
//     W   [panel of 32 columns][step of 32 k][2 tiles][16 pairs of k][16 columns][2]     in memory: one long stream
//
// A job is a group of panels (of gated layers: of both) against a block of rows: x is operand A, W operand B as it
// lies, and the sums are rows of y. Sums of 2 x 2 tiles stay in registers for a block of steps, of which the second
// cache holds what x and the group have. Meanwhile the group's next block is asked for, evenly, and the lines of y
// that are written at the end.
//
// One or two tiles of rows read a panel once: all of its steps in a row, asked for some KB ahead. (Two tiles of rows
// and gated layers would need more sums than there are tiles.) Panels of coded weights are decoded into the worker's
// memory, then a step ahead of its product, else a block of steps for all rows of the job.
//
// Each product asks for the tiles of a later step, a few lines at a time between its own loads: asked for at once,
// they would hold up the loads behind them (docs/measurements.md). For that, more than a tile of rows lies as tiles,
// too: a worker copies a block of rows while its first panel meets it.
//
// An element of y is summed in the same order whatever the number of rows and threads.
#include "elements.h"

#if PAGEBINDER_AMX
#include <algorithm>
#include <optional>

#include "activations.h"
#include "amx.h"
#include "coded_weights.h"
#include "packed_jobs.h"

namespace pagebinder {
namespace {

constexpr int HALF = PANEL / 2;                           // columns of a tile
constexpr int PAIR = 2 * TILE_LINES;                      // rows of two tiles
constexpr int TILE_BYTES = TILE_LINES * 64, TILE_SUMS = TILE_LINES * TILE_LINES;
static_assert(STEP_BYTES == 2 * TILE_BYTES);
constexpr int BLOCK_STEPS = 32;                           // whose sums stay in registers
constexpr int64_t STREAM_AHEAD = 2 * STEP_BYTES;          // of a panel that comes from memory
constexpr int64_t TILES_AHEAD = 2 * STEP_BYTES;           // of x, and of a panel in the second cache
constexpr int QUARTER = STEP_BYTES / 4;                   // of a step, asked for at once
constexpr int64_t CODES_AHEAD = 6144;                     // bytes
constexpr int MOST_PAIRS = 8;                             // of row tiles of a job
constexpr int MOST_CODED_PAIRS = 16;                      // more, as each job decodes its panels
constexpr int MOST_GROUP = 4;                             // panels of a job

struct Run : PackedRun {
  const std::shared_ptr<Buffer> tail;  // a copy of the last pair of row tiles, if x ends within one, else null

  Run(const LinearArgs& a, const PackedShape& shape, std::shared_ptr<Buffer> last_rows)
      : PackedRun(a, shape), tail(std::move(last_rows)) {}

  int64_t x_line() const { return args.x_stride * 2; }
  const char* rows_at(int pair) const {
    if (tail != nullptr && pair == strips - 1) return tail->at_least<char>(0);
    return static_cast<const char*>(args.x) + pair * PAIR * x_line();
  }
  int64_t rows_of(int pair) const { return std::min<int64_t>(args.rows - static_cast<int64_t>(pair) * PAIR, PAIR); }
};

// ---- sums ------------------------------------------------------------------------------------------------------

// A pair of row tiles: rows of x, of which FRESH products make the tiles [step][2 tiles][16][32] that others read.
struct PairOfRows {
  const char* lines;
  int64_t line;  // bytes from one to the next
  char* tiles;
};

// What is asked for beside a product: in each of its steps `lines` of the panels to come and one of a row of y.
struct Ahead {
  const char *first, *second;  // of a panel, and of the other of gated layers
  int lines;                   // a multiple of four
  char* out;
  int64_t stride;  // bytes
};

// Operand A of a step in tile 4, of the lower rows in tile 5. FRESH: keeps it as a tile.
template <bool FRESH>
PB_INLINE void load_rows(const PairOfRows& x, int step) {
  char* tile = x.tiles + static_cast<int64_t>(step) * STEP_BYTES;
  if (FRESH) _tile_loadd(4, x.lines + step * TILE_STEP * 2, x.line);
  if (FRESH) _tile_stored(4, tile, 64);
  else _tile_loadd(4, tile, 64);
}
template <bool FRESH>
PB_INLINE void load_lower_rows(const PairOfRows& x, int step) {
  char* tile = x.tiles + static_cast<int64_t>(step) * STEP_BYTES + TILE_BYTES;
  if (FRESH) _tile_loadd(5, x.lines + TILE_LINES * x.line + step * TILE_STEP * 2, x.line);
  if (FRESH) _tile_stored(5, tile, 64);
  else _tile_loadd(5, tile, 64);
}

// Adds `steps` steps of ROWS row tiles and two column tiles to sums[row tile][column tile], which begin as zeros if
// `first`. low, high: the column tiles of the first step.
template <int ROWS, bool FRESH>
void multiply(const PairOfRows& x, const char* low, const char* high, int steps, bool first, Ahead ahead, float* sums) {
  tiles_meet_memory();
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    if (ROWS == 2) _tile_zero(2);
    if (ROWS == 2) _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + TILE_SUMS, 64);
    if (ROWS == 2) _tile_loadd(2, sums + 2 * TILE_SUMS, 64);
    if (ROWS == 2) _tile_loadd(3, sums + 3 * TILE_SUMS, 64);
  }
  const int lines = ahead.lines / 4;
  for (int step = 0; step < steps; ++step, low += STEP_BYTES, high += STEP_BYTES) {
    const auto ask_quarter = [&](int quarter) __attribute__((always_inline)) {
      prefetch((quarter < 2 ? low : high) + TILES_AHEAD + quarter % 2 * QUARTER, QUARTER);
      if (!FRESH && (ROWS == 2 || quarter < 2))
        prefetch(x.tiles + static_cast<int64_t>(step) * STEP_BYTES + TILES_AHEAD + quarter * QUARTER, QUARTER);
      for (int i = 0; i < lines; ++i, ahead.first += 64) __builtin_prefetch(ahead.first, 0, 2);
      if (ahead.second != nullptr)
        for (int i = 0; i < lines; ++i, ahead.second += 64) __builtin_prefetch(ahead.second, 0, 2);
      tiles_meet_memory();
    };
    __builtin_prefetch(ahead.out, 1);  // of nothing: no harm
    ahead.out += ahead.stride;
    ask_quarter(0);
    load_rows<FRESH>(x, step);
    _tile_loadd(6, low, 64);
    ask_quarter(1);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, high, 64);
    ask_quarter(2);
    _tile_dpbf16ps(1, 4, 7);
    if (ROWS == 2) load_lower_rows<FRESH>(x, step);
    ask_quarter(3);
    if (ROWS == 2) _tile_dpbf16ps(2, 5, 6);
    if (ROWS == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + TILE_SUMS, 64);
  if (ROWS == 2) _tile_stored(2, sums + 2 * TILE_SUMS, 64);
  if (ROWS == 2) _tile_stored(3, sums + 3 * TILE_SUMS, 64);
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

// One or two tiles of rows read a panel once, step by step. `get_ready` is called for each step, DELAY steps before it
// is multiplied, `ask_quarter` in between.
struct StoredPanel {
  static constexpr int DELAY = 0;
  const char* first;

  PB_INLINE void get_ready(int) const {}
  PB_INLINE void ask_quarter(int step, int quarter) const {
    prefetch(step_at(step) + STREAM_AHEAD + quarter * QUARTER, QUARTER);
  }
  PB_INLINE const char* step_at(int step) const { return first + static_cast<int64_t>(step) * STEP_BYTES; }
};

// A step is decoded while the one before meets x.
struct CodedPanel {
  static constexpr int DELAY = 1, RING = 4;  // steps
  const uint8_t* first;
  int64_t block_bytes;
  uint16_t* ring;
  std::optional<BlockDecoder> decoder{};

  PB_INLINE void get_ready(int step) {
    if (step % CODED_STEPS == 0) decoder.emplace(first + step / CODED_STEPS * block_bytes);
    decoder->next<CODES_AHEAD>(ring + step % RING * STEP_WEIGHTS);
  }
  PB_INLINE void ask_quarter(int, int) const {}
  PB_INLINE const char* step_at(int step) const {
    return reinterpret_cast<const char*>(ring + step % RING * STEP_WEIGHTS);
  }
};

class Worker {
 public:
  Worker(Run& run, int number) : run_(run), number_(number) {
    static thread_local Buffer sums, decoded, tiles;
    const int kept = run.steps > BLOCK_STEPS ? run.block_strips * run.group : 1;  // sums wait for the next block
    sums_ = sums.at_least<float>(static_cast<int64_t>(kept) * PRODUCT_SUMS);
    if (run.coded()) decoded_ = decoded.at_least<char>(run.group * 2 * DECODED_PANEL);
    if (run.args.rows > TILE_LINES) tiles_ = tiles.at_least<char>(run.block_strips * run.panel_bytes());
  }

  void run_job(const PackedJob& job, const PackedJob& next) {
    const bool fresh = job.first_strip != kept_pair_;
    kept_pair_ = job.first_strip;
    if (run_.args.rows <= TILE_LINES) return stream_job<1>(job, fresh);
    if (run_.args.rows <= PAIR && (run_.coded() || !run_.gated())) return stream_job<2>(job, fresh);
    const auto block_at = [&](int step) {
      return Block{step, std::min(BLOCK_STEPS, run_.steps - step), step + BLOCK_STEPS >= run_.steps};
    };
    for (int step = 0; step < run_.steps; step += BLOCK_STEPS) {
      const Block block = block_at(step), after = block_at(block.last ? 0 : step + BLOCK_STEPS);
      float* sums = sums_;
      if (run_.coded()) decode(job, block);
      for (int pair = job.first_strip; pair < job.end_strip; ++pair)
        for (int panel = 0; panel < job.panels; ++panel) {
          const Ahead ahead = ahead_of(block.last ? next : job, after, job, pair, panel);
          run_product(job, pair, panel, fresh && panel == 0, block, ahead, sums);
          if (run_.steps > BLOCK_STEPS) sums += PRODUCT_SUMS;
        }
    }
  }

 private:
  static constexpr int PRODUCT_SUMS = 8 * TILE_SUMS;
  static constexpr int64_t DECODED_PANEL = static_cast<int64_t>(BLOCK_STEPS) * STEP_BYTES;

  struct Block {
    int step, steps;
    bool last;
  };

  PairOfRows rows_of(const PackedJob& job, int pair) const {
    return {run_.rows_at(pair), run_.x_line(), tiles_ + (pair - job.first_strip) * run_.panel_bytes()};
  }

  // Where a block of coded weights begins, of a panel of the job or of its gated partner.
  const uint8_t* codes_at(const PackedJob& job, int panel, int which, int step) const {
    const LinearLayer& layer = job.layer[which];
    return reinterpret_cast<const uint8_t*>(job.panel[which]) + panel * run_.panel_bytes_of(layer) +
           step / CODED_STEPS * layer.coded_bytes;
  }

  // The block of all panels of a job -> decoded_ [panel][of gated layers two][step]
  void decode(const PackedJob& job, const Block& block) {
    for (int panel = 0; panel < job.panels; ++panel)
      for (int which = 0; which <= run_.gated(); ++which) {
        uint16_t* to = reinterpret_cast<uint16_t*>(decoded_ + (panel * 2 + which) * DECODED_PANEL);
        for (int step = block.step; step < block.step + block.steps; step += CODED_STEPS) {
          BlockDecoder decoder(codes_at(job, panel, which, step));
          for (int i = 0; i < CODED_STEPS; ++i, to += STEP_WEIGHTS) decoder.next<CODES_AHEAD>(to);
        }
      }
  }

  // One or two tiles of rows times a panel, or times the two of gated layers: a single tile reads stored ones side by
  // side, coded ones come one after the other.
  template <int ROWS>
  void stream_job(const PackedJob& job, bool fresh) {
    constexpr int64_t SECOND_HALF = ROWS * 2 * TILE_SUMS;
    float* sums = sums_;
    const auto stream = [&](auto panel, int64_t column_tile) {
      if (ROWS == 1 || fresh) stream_panels<ROWS, 1, true>(job, panel, panel, sums, column_tile);
      else stream_panels<ROWS, 1, false>(job, panel, panel, sums, column_tile);
    };
    const auto coded = [&](int which) {
      uint16_t* ring = reinterpret_cast<uint16_t*>(decoded_);
      return CodedPanel{codes_at(job, 0, which, 0), job.layer[which].coded_bytes, ring};
    };
    const StoredPanel stored{job.panel[0]}, other{job.panel[1]};
    if (!run_.gated()) {
      if (run_.coded()) stream(coded(0), TILE_SUMS);
      else stream(stored, TILE_SUMS);
    } else if (run_.coded()) {
      stream(coded(0), SECOND_HALF);
      sums += TILE_SUMS, fresh = false;
      stream(coded(1), SECOND_HALF);
    } else if constexpr (ROWS == 1) {
      stream_panels<1, 2, true>(job, stored, other, sums, SECOND_HALF);
    }
    write_product(job, job.first_strip, 0, sums_, run_.gated() ? SECOND_HALF : 0);
  }

  // Sums of row tile r and column tile c go to sums[2 r TILE_SUMS + c column_tile], of two panels those of the `other`
  // one tile behind. A single tile of rows is read as it lies.
  template <int ROWS, int PANELS, bool FRESH, class Panel>
  void stream_panels(const PackedJob& job, Panel panel, Panel other, float* sums, int64_t column_tile) {
    constexpr bool FOUR = ROWS * PANELS == 2;  // sums
    const PairOfRows x = rows_of(job, job.first_strip);
    _tile_zero(0);
    _tile_zero(1);
    if (FOUR) _tile_zero(2);
    if (FOUR) _tile_zero(3);
    const auto multiply_step = [&](int step) __attribute__((always_inline)) {
      const char* w = panel.step_at(step);
      const auto ask_quarter = [&](const Panel& of, int quarter) __attribute__((always_inline)) {
        of.ask_quarter(step, quarter);
        if (!FRESH) prefetch(x.tiles + static_cast<int64_t>(step) * STEP_BYTES + TILES_AHEAD + quarter * QUARTER, QUARTER);
        tiles_meet_memory();
      };
      ask_quarter(panel, 0);
      if (ROWS == 1) _tile_loadd(4, x.lines + step * TILE_STEP * 2, x.line);
      else load_rows<FRESH>(x, step);
      _tile_loadd(6, w, 64);
      ask_quarter(panel, 1);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + TILE_BYTES, 64);
      ask_quarter(panel, 2);
      _tile_dpbf16ps(1, 4, 7);
      if (ROWS == 2) load_lower_rows<FRESH>(x, step);
      ask_quarter(panel, 3);
      if (ROWS == 2) _tile_dpbf16ps(2, 5, 6);
      if (ROWS == 2) _tile_dpbf16ps(3, 5, 7);
      if (PANELS == 1) return;
      w = other.step_at(step);
      ask_quarter(other, 0);
      _tile_loadd(6, w, 64);
      ask_quarter(other, 1);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, w + TILE_BYTES, 64);
      ask_quarter(other, 2);
      _tile_dpbf16ps(3, 4, 7);
      ask_quarter(other, 3);
    };
    const char* out = static_cast<const char*>(job.layer->out) + job.column * 2;
    for (int step = 0; step < run_.steps; ++step) {
      if (step < run_.args.rows) __builtin_prefetch(out + step * job.layer->columns * 2, 1);
      panel.get_ready(step);
      if (step >= Panel::DELAY) multiply_step(step - Panel::DELAY);
    }
    if (Panel::DELAY > 0) multiply_step(run_.steps - Panel::DELAY);
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + column_tile, 64);
    float* second = sums + (ROWS == 2 ? 2 * TILE_SUMS : TILE_SUMS);
    if (FOUR) _tile_stored(2, second, 64);
    if (FOUR) _tile_stored(3, second + column_tile, 64);
    tiles_meet_memory();
  }

  // Writes a panel's columns of a pair of row tiles, if nobody else did. second_half: of gated layers, where the sums of
  // the other 16 columns begin.
  void write_product(const PackedJob& job, int pair, int panel, const float* sums, int64_t second_half) {
    const int64_t column = job.column + panel * PANEL, row = static_cast<int64_t>(pair) * PAIR;
    const int rows = static_cast<int>(run_.rows_of(pair));
    stand_still(number_);
    run_.products.write_once(run_.product_of(job, pair, panel), [&] {
      write_rows(run_, *job.layer, column, sums, row, rows);
      if (second_half > 0) write_rows(run_, *job.layer, column + HALF, sums + second_half, row, rows);
    });
  }

  // The share of a pair in what a panel's place in the next group needs of a block. The first pairs ask for all of it.
  Ahead ahead_of(const PackedJob& coming, const Block& block, const PackedJob& job, int pair, int panel) const {
    if (panel >= coming.panels) return {};
    if (run_.coded() && run_.block_strips > MOST_PAIRS) return {};  // so much x leaves the cache no room for codes
    const int halves = run_.gated() ? 2 : 1;
    const char* first[2] = {};
    int64_t most = 0;
    for (int which = 0; which < halves; ++which) {
      const LinearLayer& layer = coming.layer[which];
      const int64_t lines = run_.bytes_of(layer, block.steps) / 64;
      const int64_t least = std::max<int64_t>(lines / (4 * halves * block.steps), 1);  // pairs that it takes
      const int64_t pairs = std::min<int64_t>(job.end_strip - job.first_strip, least), number = pair - job.first_strip;
      if (number >= pairs) return {};
      const int64_t begin = lines * number / pairs, end = lines * (number + 1) / pairs;
      const int64_t at = panel * run_.panel_bytes_of(layer) + run_.bytes_of(layer, block.step);
      first[which] = coming.panel[which] + at + begin * 64;
      most = std::max(most, end - begin);
    }
    return {first[0], first[1], static_cast<int>(most)};
  }

  // Rows of a pair of row tiles times a panel, or the two of gated layers, for one block of steps.
  void run_product(const PackedJob& job, int pair, int panel, bool fresh, const Block& block, Ahead ahead, float* sums) {
    const int64_t at = panel * run_.panel_bytes() + static_cast<int64_t>(block.step) * STEP_BYTES;
    const int64_t column = job.column + panel * PANEL, row = static_cast<int64_t>(pair) * PAIR;
    const bool single = run_.rows_of(pair) <= TILE_LINES;  // one tile of rows
    PairOfRows x = rows_of(job, pair);
    x.lines += block.step * TILE_STEP * 2, x.tiles += static_cast<int64_t>(block.step) * STEP_BYTES;
    const char *w0 = job.panel[0] + at, *w1 = job.panel[1] + at;
    if (run_.coded()) w0 = decoded_ + panel * 2 * DECODED_PANEL, w1 = w0 + DECODED_PANEL;
    if (block.last) {
      ahead.out = static_cast<char*>(job.layer->out) + (row * job.layer->columns + column) * 2;
      ahead.stride = job.layer->columns * 2;
    }
    const int halves = run_.gated() ? 2 : 1;
    ahead.lines = ((ahead.lines + halves * block.steps - 1) / (halves * block.steps) + 3) / 4 * 4;
    const auto sum = [&](const char* low, const char* high, bool is_fresh, float* to) {
      const auto kernel = single ? (is_fresh ? multiply<1, true> : multiply<1, false>)
                                 : (is_fresh ? multiply<2, true> : multiply<2, false>);
      kernel(x, low, high, block.steps, block.step == 0, ahead, to);
    };
    const int64_t second_half = run_.gated() ? (single ? 2 : 4) * TILE_SUMS : 0;  // where its sums begin
    if (!run_.gated()) {
      sum(w0, w0 + TILE_BYTES, fresh, sums);
    } else {
      sum(w0, w1, fresh, sums);
      ahead.first += ahead.lines * block.steps * 64, ahead.second += ahead.lines * block.steps * 64;
      sum(w0 + TILE_BYTES, w1 + TILE_BYTES, false, sums + second_half);
    }
    if (block.last) write_product(job, pair, panel, sums, second_half);
  }

  Run& run_;
  const int number_;
  float* sums_;
  char* decoded_ = nullptr;
  char* tiles_ = nullptr;  // of the rows of a job
  int kept_pair_ = -1;     // the first of those rows
};

void job_worker(void* context, int number) {
  Run& run = *static_cast<Run*>(context);
  const FullTiles tiles(static_cast<int>(std::min<int64_t>(run.args.rows, TILE_LINES)));
  Worker worker(run, number);
  run_jobs(run, number, [&](const PackedJob& job, const PackedJob& next) { worker.run_job(job, next); });
}

}  // namespace

void packed_linear_with_tiles(const LinearArgs& args) {
  static thread_local std::shared_ptr<Buffer> last;
  const int most_pairs = args.layers[0].coded_bytes > 0 ? MOST_CODED_PAIRS : MOST_PAIRS;
  const PackedShape shape = packed_shape(args, PAIR, most_pairs, args.rows <= PAIR ? 1 : MOST_GROUP);
  std::shared_ptr<Buffer> tail;
  if (args.rows > TILE_LINES && args.rows % TILE_LINES != 0) {  // tiles would read beyond x
    const int64_t first = (shape.strips - 1) * PAIR, line = args.x_stride * 2;
    tail = buffer_of_a_call(last);
    char* rows = tail->at_least<char>(PAIR * line);
    for (int64_t r = first; r < args.rows; ++r)
      std::memcpy(rows + (r - first) * line, static_cast<const char*>(args.x) + r * line, args.inner * 2);
  }
  run_packed(make_run<Run>(args, shape, std::move(tail)), job_worker);
}

}  // namespace pagebinder

#else

namespace pagebinder {

struct LinearArgs;
void packed_linear_with_tiles(const LinearArgs&) {}

}  // namespace pagebinder

#endif
