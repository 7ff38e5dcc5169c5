// The quantised linear layer in bf16 on matrix tiles; layout and formats: quantized_linear.h.
//
//                 B 0     B 1         one job = a panel of 32 columns; A: rows of x as they lie in memory,
//         A 0     C 0     C 1         B: tiles of codes, made into pairs of bf16, 16 steps at a time,
//         A 1     C 2     C 3         C: sums over the steps that share a scale, then scaled and added in float32
//
// Many rows come in blocks, which the second cache holds while all panels meet them, each decoded once for a block. The
// first rows meet a step while the next one is decoded. Of a number of rows that is no multiple of 16, the last
// 16 are a tile of their own. An element of y is summed in the same order whatever the number of rows and threads.
#include <algorithm>
#include <vector>

#include "decode.h"
#include "quantized_jobs.h"

namespace pagebinder {
#if PAGEBINDER_AMX
namespace {

constexpr int BLOCK_STEPS = 16;
constexpr int TILE_FLOATS = TILE_LINES * TILE_LINES;
constexpr int TILE_BYTES = TILE_LINES * 64;
constexpr int64_t LEAST_ROWS = 128;              // that a panel is decoded for, if there are more
constexpr int RING = 4;                          // decoded steps that are kept where no further rows meet them
constexpr int AHEAD_BYTES = 2048;                // how far codes are asked for before they are decoded

struct Run : QuantizedRun {
  using QuantizedRun::QuantizedRun;
  const int steps = static_cast<int>(args.inner / QUANT_STEP);
  const int span = static_cast<int>(std::min<int64_t>(BLOCK_STEPS, args.scaled_steps()));
  const int row_tiles = static_cast<int>((args.rows + TILE_LINES - 1) / TILE_LINES);

  int tile_rows() const { return static_cast<int>(std::min<int64_t>(args.rows, TILE_LINES)); }
  int64_t first_row(int tile) const { return std::min<int64_t>(tile * TILE_LINES, args.rows - tile_rows()); }
};

// One panel: its decoded block, and sums [row tile][16 rows][32].
struct Panel {
  const Run& run;
  const QuantizedLinearArgs& layer;
  int64_t index;
  char* tiles;
  float* sums;
};

// sums += scale * c, for both halves of a row tile; c [2][16][16], summed up to `step`.
template <bool SCALED_ROWS>
PB_INLINE void add_scaled(const Panel& p, int tile, int step, const float* c, const float* scales) {
  float* sums = p.sums + tile * 2 * TILE_FLOATS;
  const VF scale[2] = {load<VF>(scales), load<VF>(scales + W)};
  const int rows = p.run.tile_rows();
  for (int r = 0; r < rows; ++r) {
    const float of_row = SCALED_ROWS ? p.run.args.x_scale_at(p.run.first_row(tile) + r, step) : 1.0f;
    for (int half = 0; half < 2; ++half) {
      const int at = r * QUANT_PANEL + half * W;
      const VF before = step < p.run.span ? VF{} : load<VF>(sums + at);
      const VF c_row = load<VF>(c + half * TILE_FLOATS + r * W);
      store(sums + at, before + scale[half] * (SCALED_ROWS ? c_row * of_row : c_row));
    }
  }
}

// Step `step`, which is number `at` of the decoded block, of one or two row tiles.
template <int ROW_TILES>
PB_INLINE void multiply_step(const Panel& p, int tile, int step, int at, float factor) {
  const Run& run = p.run;
  const QuantizedLinearArgs& a = p.layer;
  const int of_span = step % run.span;
  if (of_span == 0) {
    _tile_zero(0);
    _tile_zero(1);
    if (ROW_TILES == 2) _tile_zero(2);
    if (ROW_TILES == 2) _tile_zero(3);
  }
  const bf16* x = static_cast<const bf16*>(a.x) + step * QUANT_STEP;
  const char* b = p.tiles + at * 2 * TILE_BYTES;
  _tile_loadd(6, b, 64);
  _tile_loadd(7, b + TILE_BYTES, 64);
  const bf16* rows = x + run.first_row(tile) * a.x_stride;
  if (ROW_TILES == 2) _tile_stream_loadd(4, rows, a.x_stride * 2);  // does not push the panel out of the nearest cache
  else _tile_loadd(4, rows, a.x_stride * 2);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (ROW_TILES == 2) {
    _tile_stream_loadd(5, x + run.first_row(tile + 1) * a.x_stride, a.x_stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  if (of_span + 1 < run.span && step + 1 < run.steps) return;
  alignas(64) float c[ROW_TILES][2 * TILE_FLOATS];
  alignas(64) float scales[QUANT_PANEL];
  scales_of(a, p.index, step, scales);
  for (int i = 0; i < QUANT_PANEL; i += W) store(scales + i, load<VF>(scales + i) * factor);
  tiles_meet_memory();
  _tile_stored(0, c[0], 64);
  _tile_stored(1, c[0] + TILE_FLOATS, 64);
  if (ROW_TILES == 2) _tile_stored(2, c[ROW_TILES - 1], 64);
  if (ROW_TILES == 2) _tile_stored(3, c[ROW_TILES - 1] + TILE_FLOATS, 64);
  tiles_meet_memory();
  for (int i = 0; i < ROW_TILES; ++i) {
    if (a.x_scale == nullptr) add_scaled<false>(p, tile + i, step, c[i], scales);
    else add_scaled<true>(p, tile + i, step, c[i], scales);
  }
}

// Decodes steps [step, step + count) of a panel while its first rows meet them. If those are all rows, few steps are kept:
// a whole block would fill the nearest cache.
template <Code CODE, int ROW_TILES>
void decode_and_multiply(const Panel& p, const uint8_t* codes, int step, int count) {
  constexpr int CODE_BYTES = tile_bytes_of(CODE);
  constexpr float FACTOR = 1.0f / PAIR_FACTOR<CODE>;
  const int kept = p.run.row_tiles > ROW_TILES ? BLOCK_STEPS : RING;
  for (int i = 0; i < count; ++i) {
    for (int half = 0; half < 2; ++half)
      decode_tile_to_pairs<CODE, AHEAD_BYTES>(codes + (2 * i + half) * CODE_BYTES,
                                              p.tiles + (2 * (i % kept) + half) * TILE_BYTES);
    tiles_meet_memory();
    if (i > 0) multiply_step<ROW_TILES>(p, 0, step + i - 1, (i - 1) % kept, FACTOR);
  }
  multiply_step<ROW_TILES>(p, 0, step + count - 1, (count - 1) % kept, FACTOR);
}

template <int ROW_TILES>
void multiply_block(const Panel& p, int tile, int step, int count, float factor) {
  for (int i = 0; i < count; ++i) multiply_step<ROW_TILES>(p, tile, step + i, i, factor);
}

template <Code CODE>
void run_panel(const Panel& p) {
  const Run& run = p.run;
  const QuantizedLinearArgs& a = p.layer;
  const int64_t step_bytes = 2 * a.tile_bytes();
  for (int step = 0; step < run.steps; step += BLOCK_STEPS) {
    const int count = std::min(BLOCK_STEPS, run.steps - step);
    const uint8_t* codes = a.weight + p.index * a.panel_bytes() + step * step_bytes;
    const auto begin = run.row_tiles > 1 ? decode_and_multiply<CODE, 2> : decode_and_multiply<CODE, 1>;
    begin(p, codes, step, count);
    for (int tile = 2; tile < run.row_tiles; tile += 2) {
      const auto multiply = tile + 1 < run.row_tiles ? multiply_block<2> : multiply_block<1>;
      multiply(p, tile, step, count, 1.0f / PAIR_FACTOR<CODE>);
    }
  }
}

struct Scratch {
  Buffer tiles, sums;
};

template <Code CODE>
void worker(void* context, int index) {
  static thread_local Scratch scratch;
  Run& run = static_cast<Run&>(*static_cast<QuantizedRun*>(context));
  const FullTiles tiles(run.tile_rows());
  char* decoded = scratch.tiles.at_least<char>(BLOCK_STEPS * 2 * TILE_BYTES);
  const int64_t size = int64_t{run.row_tiles} * 2 * TILE_FLOATS;
  float* memory = scratch.sums.at_least<float>(static_cast<size_t>(run.parts * size));
  const auto write = run.args.wide_out ? write_panel<float> : write_panel<bf16>;
  for (int i; (i = run.work.take(index)) < run.num_jobs;) {
    const QuantizedJob job = run.job(i);
    for (int part = 0; part < run.parts; ++part)
      run_panel<CODE>({run, job.layer[part], job.panel, decoded, memory + part * size});
    for (int tile = 0; tile < run.row_tiles; ++tile) {
      float* at = memory + tile * 2 * TILE_FLOATS;
      float* const sums[] = {at, at + (run.parts - 1) * size};
      write(run, job, sums, run.first_row(tile), run.tile_rows(), LevelParts::BOTH);
    }
  }
}

void multiply(Run& run) {
  using Body = void (*)(void*, int);
  run.in_workers(false, with_code(run.args.code, [](auto constant) -> Body { return worker<decltype(constant)::value>; }));
}

// A layer for rows [first, first + rows).
QuantizedLinearArgs with_rows(QuantizedLinearArgs layer, int64_t first, int64_t rows) {
  layer.rows = rows;
  layer.x = static_cast<const bf16*>(layer.x) + first * layer.x_stride;
  layer.out = static_cast<char*>(layer.out) + first * layer.columns * (layer.wide_out ? sizeof(float) : sizeof(bf16));
  if (layer.x_scale != nullptr) layer.x_scale += first * layer.x_scale_stride;
  if (layer.is_shifted) layer.x_sums += first * (layer.inner / layer.scale_group);
  return layer;
}

// Blocks of rows, one after the other, that stay in the second cache while all panels meet them.
void multiply_blocks(const QuantizedLayers& call, int64_t most_rows) {
  const int64_t all_rows = call.first().rows, blocks = (all_rows + most_rows - 1) / most_rows;
  const int64_t block = ((all_rows + blocks - 1) / blocks + PAIR - 1) / PAIR * PAIR;
  std::vector<QuantizedLinearArgs> layers(call.layers, call.layers + call.num_layers);
  const QuantizedLayers of_block{layers.data(), call.num_layers, call.gate, call.rounds};
  for (int64_t first = 0; first < all_rows; first += block) {
    for (int i = 0; i < call.num_layers; ++i)
      layers[i] = with_rows(call.layers[i], first, std::min(block, all_rows - first));
    Run run(of_block);
    multiply(run);
  }
}

}  // namespace

bool quantized_linear_has_tiles() { return tiles_usable(); }

bool quantized_linear_with_tiles(const QuantizedLayers& call) {
  if (!tiles_usable()) return false;
  const QuantizedLinearArgs& args = call.first();
  const int64_t most_rows = std::max<int64_t>(MOST_X / 2 / args.inner / PAIR * PAIR, LEAST_ROWS);
  if (args.rows > most_rows) {
    multiply_blocks(call, most_rows);
    return true;
  }
  Run run(call);
  tell_next_weights(run);
  multiply(run);
  return true;
}

#else

bool quantized_linear_has_tiles() { return false; }
bool quantized_linear_with_tiles(const QuantizedLayers&) { return false; }

#endif
}  // namespace pagebinder
