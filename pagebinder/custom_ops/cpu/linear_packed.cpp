// Linear layers whose weights were packed as tiles, see linear.h.
//
//     W   [panel of 32 columns][step of 32 k][2 tiles][16 pairs of k][16 columns][2]     in memory: one long stream
//     x   [block of steps][pair of row tiles][step][2 tiles][16 rows][32 k]               copied by each worker
//
// A job is a group of panels (of gated layers: of both) against some pairs of row tiles: x is operand A, W operand B as
// it lies, and the sums are rows of y. It goes by blocks of 16 steps. A panel's block stays in the nearest cache while all
// pairs meet it: x passes from the second cache by loads that leave no copy in the nearest one. (Loads of two operands
// from the second cache take twice as long as the products.) Sums wait for the next block in memory, those of a whole panel
// become results beside the products of the next one. A job's results are written at its end, some lines of memory of each
// row: rows of y lie in other pages, and a line of each at a time costs a third of the products.
//
// Meanwhile the next block is asked for, evenly, in four places of it side by side: the processor's prefetcher reads each
// run of lines at most 20 lines ahead, which is a third of what memory gives (docs/measurements.md).
//
// One or two tiles of rows read a panel once: all of its steps in a row, of one tile two panels side by side, of two
// while the next panel is asked for in eight places, x is packed and the results of the panel before are written. Panels of
// coded weights are decoded into the worker's memory: then a step beside the product of the one before, else a block of
// steps for all rows of the job.
//
// An element of y is summed in the same order whatever the number of rows and threads.
#include "elements.h"

#if PAGEBINDER_AMX
#include <algorithm>
#include <cstring>
#include <optional>
#include <type_traits>

#include "activations.h"
#include "amx.h"
#include "coded_weights.h"
#include "packed_jobs.h"

namespace pagebinder {
namespace {

constexpr int HALF = PANEL / 2;                           // columns of a tile
constexpr int TILE_BYTES = TILE_LINES * 64, TILE_SUMS = TILE_LINES * TILE_LINES;
constexpr int PAIR_SUMS = 4 * TILE_SUMS;                  // of a pair and a panel: [row tile][column tile][16][16]
static_assert(STEP_BYTES == 2 * TILE_BYTES);
constexpr int BLOCK_STEPS = 2 * CODED_STEPS;
// Of panels that come from memory. They are asked for only so far ahead that the processor's own prefetching takes over:
// from some KB on, both would take turns in fetching lines that the other one leaves out.
constexpr int64_t STREAM_AHEAD = STEP_BYTES / 2, CODES_STREAM_AHEAD = 1024;
constexpr int RUNS = 4, STREAM_RUNS = 8;                  // of a block of a panel, of a whole one: asked for side by side
constexpr int QUARTER = STEP_BYTES / 4;                   // of a step, asked for at once
constexpr int CODED_QUARTER = CODED_BODY / CODED_STEPS / 4;
constexpr int64_t CODES_AHEAD = 4096;                     // bytes
constexpr int MOST_PAIRS = 8;                             // of row tiles of a job
constexpr int PART_BLOCKS = static_cast<int>(MOST_X / 2 / (BLOCK_STEPS * STEP_BYTES));  // of K, of larger ones: of all pairs
constexpr int MOST_GROUP = 8;                             // panels of a job, both of gated layers counted

struct Run : PackedRun {
  using PackedRun::PackedRun;

  // Of K: what all panels of a job meet before the rest. All steps, if the second cache holds x of so many.
  const int part_steps = int64_t{block_strips} * panel_bytes() <= MOST_X
                             ? steps
                             : std::max(PART_BLOCKS / block_strips, 1) * BLOCK_STEPS;
  // The results of a panel wait while the next one is multiplied, sums of a part for the next part.
  int panels_of_sums() const { return part_steps == steps ? 2 : std::max(group, 2); }

  int halves() const { return gated() ? 2 : 1; }
  int rows_of(int pair) const {
    return static_cast<int>(std::min<int64_t>(args.rows - static_cast<int64_t>(pair) * PAIR, PAIR));
  }
};

// ---- results ---------------------------------------------------------------------------------------------------

// Sums of a job's rows and a panel, of gated layers of both, that become rows of y: one now and then, beside the products
// of the next panel, whose tiles leave the units of vectors idle.
class Results {
 public:
  // Sums begin with the first pair of row tiles, results [row][`stride`] at `out`.
  void begin(const Run& run, const LinearLayer* layer, int64_t column, const float* sums, const float* others, bf16* out,
             int64_t stride, int rows) {
    gate_ = run.args.gate;
    sums_[0] = sums, sums_[1] = others;
    out_ = out, stride_ = stride, row_ = 0, rows_ = rows;
    quarters_ = wait_ = std::max(4 * run.part_steps * run.halves() / PAIR, 1);
    for (int which = 0; which < run.halves(); ++which)
      for (int half = 0; half < 2; ++half) bias_[which][half] = bias_of(layer[which], column + half * HALF);
  }

  // Once in each quarter of a step: all rows, if the next panel has as many.
  PB_INLINE void pass_quarter() {
    if (--wait_ > 0 || row_ >= rows_) return;
    convert_row();
    wait_ = quarters_;
  }

  void convert_all() {
    tiles_meet_memory();
    while (row_ < rows_) convert_row();
  }

 private:
  __attribute__((noinline)) void convert_row() {
    if (gate_ == Activation::NONE) store(out_, rounded(0));
    else if (gate_ == Activation::SILU) store(out_, gated<Activation::SILU>());
    else store(out_, gated<Activation::NONE>());
    ++row_, out_ += stride_;
  }

  // Sums of a row as bf16.
  PB_INLINE VU rounded(int which) const {
    const int row_tile = row_ % PAIR / TILE_LINES;
    const float* sums = sums_[which] + row_ / PAIR * PAIR_SUMS + row_tile * 2 * TILE_SUMS + row_ % TILE_LINES * HALF;
    return narrow_both(load<VF>(sums) + bias_[which][0], load<VF>(sums + TILE_SUMS) + bias_[which][1]);
  }

  // KNOWN: the activation, if the compiler shall know it. Even columns are a vector, odd ones another.
  template <Activation KNOWN>
  PB_INLINE VU gated() const {
    const Activation activation = KNOWN == Activation::NONE ? gate_ : KNOWN;
    const Pair gate = apart(rounded(0)), up = apart(rounded(1));
    return round_to_pairs(gated_product(activation, gate.first, up.first),
                          gated_product(activation, gate.second, up.second));
  }

  static VF bias_of(const LinearLayer& layer, int64_t column) {
    return layer.bias == nullptr ? VF{} : load_float(static_cast<const bf16*>(layer.bias) + column);
  }

  int row_ = 0, rows_ = 0, quarters_ = 1, wait_ = 1;
  Activation gate_ = Activation::NONE;
  bf16* out_ = nullptr;
  int64_t stride_ = 0;
  const float* sums_[2] = {};  // [pair][row tile][column tile][16][16]
  VF bias_[2][2] = {};
};

// ---- sums ------------------------------------------------------------------------------------------------------

// What is asked for beside a product: in each of its steps `lines` of each run of a panel to come. Given by reference: as
// a value it was loaded as a whole right after its parts had been stored, which waits for all stores.
struct Ahead {
  const char* first;
  int64_t run;  // bytes
  int lines;
};

// Adds `steps` steps of ROWS row tiles and two column tiles to sums[row tile][column tile], which begin as zeros if
// `first`. x comes from the second cache and does not displace the panel in the nearest one.
template <int ROWS>
void multiply(const char* x, const char* w, int steps, bool first, const Ahead& ahead, float* sums, Results& before) {
  const char* coming = ahead.first;
  const int64_t run = ahead.run, lines = ahead.lines;
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
  for (int step = 0; step < steps; ++step, x += STEP_BYTES, w += STEP_BYTES, coming += lines * 64) {
    const auto do_quarter = [&](int quarter) __attribute__((always_inline)) {
      before.pass_quarter();
      for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(coming + quarter * run + i * 64, 0, 2);
      tiles_meet_memory();
    };
    do_quarter(0);
    _tile_stream_loadd(4, x, 64);
    _tile_loadd(6, w, 64);
    do_quarter(1);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + TILE_BYTES, 64);
    do_quarter(2);
    _tile_dpbf16ps(1, 4, 7);
    if (ROWS == 2) _tile_stream_loadd(5, x + TILE_BYTES, 64);
    do_quarter(3);
    if (ROWS == 2) _tile_dpbf16ps(2, 5, 6);
    if (ROWS == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + TILE_SUMS, 64);
  if (ROWS == 2) _tile_stored(2, sums + 2 * TILE_SUMS, 64);
  if (ROWS == 2) _tile_stored(3, sums + 3 * TILE_SUMS, 64);
  tiles_meet_memory();
}

// ---- one job ---------------------------------------------------------------------------------------------------

// A panel to come, asked for evenly while another one is read: in each step LINES lines of each of STREAM_RUNS runs. What
// does not divide so is left to the processor's prefetcher.
template <int LINES>
struct ComingPanel {
  const char* first = nullptr;
  int64_t run = 0;  // bytes

  PB_INLINE void ask(int step, int quarter) const {
    if (first == nullptr) return;
    constexpr int RUNS_AT_ONCE = STREAM_RUNS / 4;
    const char* line = first + quarter * RUNS_AT_ONCE * run + step * LINES * 64;
    for (int i = 0; i < RUNS_AT_ONCE * LINES; ++i)
      __builtin_prefetch(line + i / LINES * run + i % LINES * 64, 0, 2);
  }
};

// Panels that are read once, step by step: `begin` before the first, `do_quarter` four times beside each one's products.
struct StoredPanel {
  const char* first = nullptr;

  PB_INLINE void begin() const {}
  PB_INLINE void do_quarter(int step, int quarter, int) const {
    prefetch(step_at(step) + STREAM_AHEAD + quarter * QUARTER, QUARTER);
  }
  PB_INLINE const char* step_at(int step) const { return first + static_cast<int64_t>(step) * STEP_BYTES; }
};

// The same, while another one is asked for.
struct FollowedPanel : StoredPanel {
  using Coming = ComingPanel<STEP_BYTES / 64 / STREAM_RUNS>;
  Coming coming{};

  PB_INLINE void do_quarter(int step, int quarter, int steps) const {
    StoredPanel::do_quarter(step, quarter, steps);
    coming.ask(step, quarter);
  }
};

// A step is decoded while the one before meets x. FOLLOWED: another panel is asked for meanwhile, else this one's codes.
template <bool FOLLOWED>
class CodedPanel {
 public:
  using Coming = ComingPanel<CODED_BODY / CODED_STEPS / 64 / STREAM_RUNS>;
  static constexpr int RING = 2;  // steps
  CodedPanel(const char* codes, int64_t block_bytes, const Coming& coming, uint16_t* ring)
      : codes_(reinterpret_cast<const uint8_t*>(codes)), block_bytes_(block_bytes), coming_(coming), ring_(ring) {}

  PB_INLINE void begin() {
    for (int quarter = 0; quarter < 4; ++quarter) decode_quarter(0, quarter);
  }
  PB_INLINE void do_quarter(int step, int quarter, int steps) {
    if (FOLLOWED) coming_.ask(step, quarter);
    else prefetch(decoder_->coming() + CODES_STREAM_AHEAD, CODED_QUARTER);
    if (step + 1 < steps) decode_quarter(step + 1, quarter);
  }
  PB_INLINE const char* step_at(int step) const {
    return reinterpret_cast<const char*>(ring_ + step % RING * STEP_WEIGHTS);
  }

 private:
  PB_INLINE void decode_quarter(int step, int quarter) {
    if (quarter == 0 && step % CODED_STEPS == 0) decoder_.emplace(codes_ + step / CODED_STEPS * block_bytes_);
    decoder_->next_quarter(ring_ + step % RING * STEP_WEIGHTS, quarter);
  }

  const uint8_t* codes_;
  int64_t block_bytes_;
  Coming coming_;
  uint16_t* ring_;
  std::optional<BlockDecoder> decoder_{};
};

class Worker {
 public:
  Worker(Run& run, int number) : run_(run), number_(number) {
    static thread_local Buffer sums, decoded, tiles, rows;
    const int products = std::max(run.panels_of_sums() * run.block_strips, run.group);
    sums_ = sums.at_least<float>(int64_t{run.halves()} * products * PAIR_SUMS);
    rows_ = rows.at_least<bf16>(int64_t{run.block_strips} * PAIR * run.group * PANEL);
    if (run.coded()) decoded_ = decoded.at_least<uint16_t>(BLOCK_STEPS * STEP_WEIGHTS);
    if (run.args.rows > TILE_LINES) tiles_ = tiles.at_least<char>(run.block_strips * run.panel_bytes());
  }

  void run_job(const PackedJob& job, const PackedJob& next) {
    if (run_.args.rows <= PAIR) return stream_job(job, next);
    if (job.first_strip != kept_pair_) pack_rows(job);
    kept_pair_ = job.first_strip;
    for (int first = 0; first < run_.steps; first += run_.part_steps) run_part(job, next, first);
    write_results(job);
  }

 private:
  struct Block {
    int step, steps;
    bool first, last;
  };
  struct Place {
    int panel, which;  // which: 1 is the other of gated layers
  };

  struct Coming {
    const PackedJob* job;
    int panel, step;
  };

  Block block_at(int step) const {
    return {step, std::min(BLOCK_STEPS, run_.steps - step), step == 0, step + BLOCK_STEPS >= run_.steps};
  }
  static int pairs_of(const PackedJob& job) { return job.end_strip - job.first_strip; }

  char* tiles_of(const PackedJob& job, int pair, const Block& block) const {
    return tiles_ + (int64_t{block.step} * pairs_of(job) + int64_t{pair - job.first_strip} * block.steps) * STEP_BYTES;
  }

  // The rows of a job as tiles, half a block of a row at a time: those of a pair that are written then are few enough for
  // the nearest cache. Lines beyond the last row stay as they are: only their own sums read them.
  void pack_rows(const PackedJob& job) {
    const int64_t line = run_.args.x_stride * 2;
    for (int pair = job.first_strip; pair < job.end_strip; ++pair) {
      const char* from = static_cast<const char*>(run_.args.x) + int64_t{pair} * PAIR * line;
      for (int first = 0; first < run_.steps; first += BLOCK_STEPS / 2) {
        const Block block = block_at(first / BLOCK_STEPS * BLOCK_STEPS);
        char* to = tiles_of(job, pair, block) + (first - block.step) * STEP_BYTES;
        const int count = std::min(BLOCK_STEPS / 2, run_.steps - first);
        for (int r = 0, rows = run_.rows_of(pair); r < rows; ++r)
          for (int step = 0; step < count; ++step) {
            const char* x = from + r * line + (first + step) * 64;
            if (pair + 1 < job.end_strip) __builtin_prefetch(x + PAIR * line);
            store(reinterpret_cast<float*>(to + step * STEP_BYTES + r * 64), load<VF>(x));
          }
      }
    }
  }

  float* sums_of(const PackedJob& job, Place at, int pair) const {
    const int panel = at.panel % run_.panels_of_sums();
    return sums_ + (int64_t{panel * run_.halves() + at.which} * pairs_of(job) + pair - job.first_strip) * PAIR_SUMS;
  }

  // Where a block of a panel begins, plain or coded.
  const char* block_of(const PackedJob& job, Place at, int step) const {
    const LinearLayer& layer = job.layer[at.which];
    return job.panel[at.which] + at.panel * run_.panel_bytes_of(layer) + run_.bytes_of(layer, step);
  }

  const char* decode(const char* codes, int64_t block_bytes, int steps) const {
    for (int step = 0; step < steps; step += CODED_STEPS, codes += block_bytes) {
      BlockDecoder decoder(reinterpret_cast<const uint8_t*>(codes));
      for (int i = 0; i < CODED_STEPS; ++i) decoder.next<CODES_AHEAD>(decoded_ + (step + i) * STEP_WEIGHTS);
    }
    return reinterpret_cast<const char*>(decoded_);
  }

  // All rows and panels of a job, a part of K.
  void run_part(const PackedJob& job, const PackedJob& next, int first) {
    const int end = std::min(first + run_.part_steps, run_.steps);
    for (int panel = 0; panel < job.panels; ++panel) {
      for (int step = first; step < end; step += BLOCK_STEPS) {
        Coming coming{&job, panel, step + BLOCK_STEPS};
        if (coming.step >= end) ++coming.panel, coming.step = first;
        if (coming.panel == job.panels) coming.panel = 0, coming.step = end;
        if (coming.step == run_.steps) coming.job = &next, coming.step = 0;
        for (int which = 0; which < run_.halves(); ++which) run_panel(job, {panel, which}, block_at(step), coming);
      }
      if (end < run_.steps) continue;
      results_.convert_all();
      begin_results(job, panel, sums_of(job, {panel, 0}, job.first_strip), sums_of(job, {panel, 1}, job.first_strip));
    }
  }

  // All rows of a job times a block of a panel, while the coming one is asked for.
  void run_panel(const PackedJob& job, Place at, const Block& block, const Coming& coming) {
    const char* w = block_of(job, at, block.step);
    if (run_.coded()) w = decode(w, job.layer[at.which].coded_bytes, block.steps);
    Ahead ahead{};
    int64_t lines = 0;  // of a run, still to be asked for
    if (coming.panel < coming.job->panels) {
      const int64_t products = int64_t{pairs_of(job)} * block.steps;
      lines = (run_.bytes_of(coming.job->layer[at.which], block_at(coming.step).steps) / RUNS + 63) / 64;
      ahead = {block_of(*coming.job, {coming.panel, at.which}, coming.step), lines * 64,
               static_cast<int>((lines + products - 1) / products)};
    }
    for (int pair = job.first_strip; pair < job.end_strip; ++pair) {
      const auto kernel = run_.rows_of(pair) <= TILE_LINES ? multiply<1> : multiply<2>;
      kernel(tiles_of(job, pair, block), w, block.steps, block.first, ahead, sums_of(job, at, pair), results_);
      const int64_t asked = int64_t{ahead.lines} * block.steps;
      lines -= asked, ahead.first += asked * 64;
      if (lines <= 0) ahead.lines = 0;
    }
  }

  void stream_job(const PackedJob& job, const PackedJob& next) {
    const bool one_tile = run_.args.rows <= TILE_LINES;
    if (one_tile && run_.coded()) stream_one_tile<CodedPanel<false>>(job, next);
    else if (one_tile) stream_one_tile<StoredPanel>(job, next);
    else if (run_.coded()) stream_two_tiles<CodedPanel<true>>(job, next);
    else stream_two_tiles<FollowedPanel>(job, next);
  }

  // One tile of rows times the panels of a job, two side by side: memory gives more bytes to two streams than to one.
  template <class Panel>
  void stream_one_tile(const PackedJob& job, const PackedJob& next) {
    const int count = panels_of(job);
    int i = 0;
    for (; i + 2 <= count; i += 2) {
      Panel panels[] = {panel_of<Panel>(job, next, i), panel_of<Panel>(job, next, i + 1)};
      stream_panels<1, 2>(panels, sums_ + i * PAIR_SUMS);
    }
    if (i < count) {
      Panel panel = panel_of<Panel>(job, next, i);
      stream_panels<1, 1>(&panel, sums_ + i * PAIR_SUMS);
    }
    for (int panel = 0; panel < job.panels; ++panel) begin_results_of_stream(job, panel);
    write_results(job);
  }

  // Two tiles of rows times one panel after the other. Whatever else is to be done with rows goes beside the products, or
  // memory would have nothing to do meanwhile: x is packed beside the first ones, results are written beside the next.
  template <class Panel>
  void stream_two_tiles(const PackedJob& job, const PackedJob& next) {
    for (int i = 0; i < panels_of(job); ++i) {
      Panel panel = panel_of<Panel>(job, next, i);
      if (kept_pair_ != 0) stream_panels<2, 1, true>(&panel, sums_ + i * PAIR_SUMS);
      else stream_panels<2, 1>(&panel, sums_ + i * PAIR_SUMS);
      kept_pair_ = 0;
      if ((i + 1) % run_.halves() == 0) begin_results_of_stream(job, i / run_.halves());
    }
    write_results(job);
  }

  // Those of the panel before are done first.
  void begin_results_of_stream(const PackedJob& job, int panel) {
    const float* sums = sums_ + int64_t{panel} * run_.halves() * PAIR_SUMS;
    results_.convert_all();
    begin_results(job, panel, sums, sums + PAIR_SUMS);
  }

  // A job's panels in order, of gated layers in turns.
  int panels_of(const PackedJob& job) const { return job.panels * run_.halves(); }
  const LinearLayer& layer_of(const PackedJob& job, int i) const { return job.layer[i % run_.halves()]; }

  template <class Panel>
  Panel panel_of(const PackedJob& job, const PackedJob& next, int i) const {
    const char* first = start_of(job, i);
    if constexpr (std::is_same_v<Panel, StoredPanel>) return {first};
    else {
      using Coming = typename Panel::Coming;
      const Coming coming = i + 1 < panels_of(job) ? coming_panel<Coming>(job, i + 1) : coming_panel<Coming>(next, 0);
      if constexpr (std::is_same_v<Panel, FollowedPanel>) return {{first}, coming};
      else return {first, layer_of(job, i).coded_bytes, coming, decoded_ + i % 2 * Panel::RING * STEP_WEIGHTS};
    }
  }
  const char* start_of(const PackedJob& job, int i) const {
    return block_of(job, {i / run_.halves(), i % run_.halves()}, 0);
  }
  template <class Coming>
  Coming coming_panel(const PackedJob& job, int i) const {
    if (i >= panels_of(job)) return {};
    return {start_of(job, i), run_.panel_bytes_of(layer_of(job, i)) / STREAM_RUNS};
  }

  // A single tile of rows is read as it lies, two are packed beside the first products (PACK).
  template <int ROWS, int PANELS, bool PACK = false, class Panel>
  void stream_panels(Panel* panels, float* sums) {
    static_assert(ROWS * PANELS <= 2);
    const char* lines = static_cast<const char*>(run_.args.x);
    const int64_t line = run_.args.x_stride * 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const auto multiply_step = [&](Panel& panel, bool second, int step) __attribute__((always_inline)) {
      const char *w = panel.step_at(step), *x = tiles_ + static_cast<int64_t>(step) * STEP_BYTES;
      const auto ask_quarter = [&](int quarter) __attribute__((always_inline)) {
        panel.do_quarter(step, quarter, run_.steps);
        if (ROWS == 2) results_.pass_quarter();
        if (PACK) pack_quarter(step + 1, quarter);
        else if (ROWS == 2) prefetch(x + 2 * STEP_BYTES + quarter * QUARTER, QUARTER);
        tiles_meet_memory();
      };
      ask_quarter(0);
      if (ROWS == 2) _tile_loadd(4, x, 64);
      else if (!second) _tile_loadd(4, lines + step * TILE_STEP * 2, line);
      _tile_loadd(6, w, 64);
      ask_quarter(1);
      if (second) _tile_dpbf16ps(2, 4, 6);
      else _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + TILE_BYTES, 64);
      ask_quarter(2);
      if (second) _tile_dpbf16ps(3, 4, 7);
      else _tile_dpbf16ps(1, 4, 7);
      if (ROWS == 2) _tile_loadd(5, x + TILE_BYTES, 64);
      ask_quarter(3);
      if (ROWS == 2) _tile_dpbf16ps(2, 5, 6);
      if (ROWS == 2) _tile_dpbf16ps(3, 5, 7);
    };
    for (int i = 0; i < PANELS; ++i) panels[i].begin();
    for (int quarter = 0; PACK && quarter < 4; ++quarter) pack_quarter(0, quarter);
    for (int step = 0; step < run_.steps; ++step)
      for (int i = 0; i < PANELS; ++i) multiply_step(panels[i], i == 1, step);
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE_SUMS, 64);
    float* others = PANELS == 2 ? sums + PAIR_SUMS : sums + 2 * TILE_SUMS;
    if (ROWS * PANELS == 2) _tile_stored(2, others, 64);
    if (ROWS * PANELS == 2) _tile_stored(3, others + TILE_SUMS, 64);
    tiles_meet_memory();
  }

  // A quarter of the rows of a step, where there are no more than a pair of tiles. Lines beyond the last row stay as they
  // are.
  PB_INLINE void pack_quarter(int step, int quarter) {
    constexpr int ROWS = PAIR / 4, AHEAD = 4;
    if (step >= run_.steps) return;
    const int64_t line = run_.args.x_stride * 2;
    const int first = quarter * ROWS, end = std::min(first + ROWS, run_.rows_of(0));
    for (int r = first; r < end; ++r) {
      const char* x = static_cast<const char*>(run_.args.x) + r * line + step * 64;
      __builtin_prefetch(x + AHEAD * 64);
      store(reinterpret_cast<float*>(tiles_ + step * STEP_BYTES + r * 64), load<VF>(x));
    }
  }

  int64_t row_of_results() const { return int64_t{run_.group} * PANEL; }

  void begin_results(const PackedJob& job, int panel, const float* sums, const float* others) {
    const int64_t first = int64_t{job.first_strip} * PAIR;
    const int64_t end = std::min<int64_t>(int64_t{job.end_strip} * PAIR, run_.args.rows);
    results_.begin(run_, job.layer, job.column + panel * PANEL, sums, others, rows_ + panel * PANEL, row_of_results(),
                   static_cast<int>(end - first));
  }

  // Writes what nobody else did.
  void write_results(const PackedJob& job) {
    results_.convert_all();
    stand_still(number_);
    for (int pair = job.first_strip; pair < job.end_strip; ++pair)
      run_.products.write_once(run_.product_of(job, pair), [&] {
        const bf16* from = rows_ + int64_t{pair - job.first_strip} * PAIR * row_of_results();
        bf16* to = static_cast<bf16*>(job.layer->out) + int64_t{pair} * PAIR * job.layer->columns + job.column;
        for (int r = 0, rows = run_.rows_of(pair); r < rows; ++r, from += row_of_results(), to += job.layer->columns)
          std::memcpy(to, from, job.panels * PANEL * sizeof(bf16));
      });
  }

  Run& run_;
  const int number_;
  float* sums_;                   // [panels_of_sums()][of gated layers two][pair][PAIR_SUMS], of streams [panel][two]
  bf16* rows_;                    // of results of a job: [row][panel][32]
  Results results_;               // the last panel's, on their way there
  uint16_t* decoded_ = nullptr;   // a block of coded weights
  char* tiles_ = nullptr;         // of the rows of a job
  int kept_pair_ = -1;            // the first of those rows
};

void job_worker(void* context, int number) {
  Run& run = *static_cast<Run*>(context);
  const FullTiles tiles(static_cast<int>(std::min<int64_t>(run.args.rows, TILE_LINES)));
  Worker worker(run, number);
  run_jobs(run, number, [&](const PackedJob& job, const PackedJob& next) { worker.run_job(job, next); });
}

// Of row tiles of a job: half as many if the second cache holds x then, and only then.
int most_pairs(const LinearArgs& args) {
  const int64_t bytes = args.inner * 2 * PAIR * MOST_PAIRS;
  return bytes > MOST_X && bytes / 2 <= MOST_X ? MOST_PAIRS / 2 : MOST_PAIRS;
}

}  // namespace

void packed_linear_with_tiles(const LinearArgs& args) {
  const int halves = args.gate == Activation::NONE ? 1 : 2;
  const PackedShape shape = packed_shape(args, PAIR, most_pairs(args), MOST_GROUP / halves);
  run_packed(make_run<Run>(args, shape), job_worker);
}

}  // namespace pagebinder

#else

namespace pagebinder {

struct LinearArgs;
void packed_linear_with_tiles(const LinearArgs&) {}

}  // namespace pagebinder

#endif
