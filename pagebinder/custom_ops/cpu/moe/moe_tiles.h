// Experts on matrix tiles, in bf16.
//
//     as stored     [E, columns, K]   y^T [column][row] = W  x  pairs of rows     W is operand A, lines from memory
//     transposed    [E, K, columns]   y [row][column]   = rows  x  pairs of W     pairs of k are made while copying
//
// A job's columns are pairs of column tiles; of a gated expert a pair is a tile of gates and the tile of its values,
// so that the gate works on the sums of one product and writes the next product's operand without a transposition.
// Where the rows fill one pair of row tiles, W as stored is loaded from where it lies; else blocks of K are copied
// into tiles that meet all rows. An element is summed in the order of k, whatever the number of rows and threads.
#pragma once

#include "amx.h"
#include "attention_scores.h"
#include "moe_flow.h"

#if PAGEBINDER_AMX
namespace pagebinder {

constexpr int TILE_WORDS = TILE_LINES * TILE_LINES;   // 1 KB: a tile of any operand or of sums
constexpr int BLOCK_STEPS = 8;                        // of K that are copied at a time, for many rows
constexpr int MOST_ROW_PAIRS = 8;                     // whose sums wait in scratch between blocks

// The columns of one job, as pairs of tiles.
struct TilePanel {
  int num_pairs = 0;              // 0: there is no such job
  bool two_parts;                 // gates and values lie in different places
  int column_step;                // from one column of a tile to the next: 2 if gates and values take turns
  const char* first[2];           // where the tiles of the first pair begin
  int64_t column[2];              // their first columns
  int64_t line_bytes;             // from column to column of a tile; from k to k if transposed
  int64_t pair_bytes, pair_columns;  // from pair to pair

  const char* tile(int i) const { return first[i % 2] + i / 2 * pair_bytes; }
  int64_t column_of(int i) const { return column[i % 2] + i / 2 * pair_columns; }
};

// Operand W of a product: two tiles of columns, and from line to line and step to step.
struct ColumnTiles {
  const char* tile[2];
  int64_t line_bytes, step_bytes;
};

template <bool TRANSPOSED>
struct Tiles {
  using Element = bf16;
  using Operand = uint32_t;  // [group of 16 rows][step][16][16]: pairs [k / 2][row]; if transposed rows [row][32 k]
  using Setup = FullTiles;
  using Panel = TilePanel;
  // Columns are dense as stored; rows of k of transposed weights are far apart, so more of each is read at a time.
  static constexpr int GROUP = TILE_LINES, PANEL = TRANSPOSED ? 512 : 64, PAIRS = PANEL / PAIR;

  static int64_t operand_size(int64_t positions, int64_t inner) { return positions * inner / 2; }

  static void pack(const Run&, const bf16* const* rows, int count, int64_t inner, uint32_t* to) {
    if constexpr (!TRANSPOSED) {
      pack_lane_queries<PairElements>(rows, count, static_cast<int>(inner), TILE_LINES, reinterpret_cast<bf16*>(to));
    } else {
      for (int r = 0; r < count; ++r)
        for (int64_t i = 0; i < inner / TILE_STEP; ++i)
          std::memcpy(to + i * TILE_WORDS + r * TILE_LINES, rows[r] + i * TILE_STEP, 64);
    }
  }

  // ---- panels --------------------------------------------------------------------------------------------------

  // Pairs of tiles that begin at two columns and are repeated every `apart` columns.
  static TilePanel pairs_at(const Projection& p, int expert, int64_t column, int64_t second, int step, int apart,
                            int64_t num_pairs) {
    const int64_t column_bytes = (TRANSPOSED ? 1 : p.line_stride) * 2;
    const char* weight = static_cast<const char*>(p.weight) + expert * p.expert_stride * 2;
    TilePanel panel{};
    panel.num_pairs = static_cast<int>(num_pairs), panel.column_step = step;
    panel.first[0] = weight + column * column_bytes, panel.first[1] = weight + second * column_bytes;
    panel.column[0] = column, panel.column[1] = second;
    panel.line_bytes = TRANSPOSED ? p.line_stride * 2 : step * column_bytes;
    panel.pair_bytes = apart * column_bytes, panel.pair_columns = apart;
    return panel;
  }

  static TilePanel panel(const Projection& p, int expert, int64_t column, int width) {
    const int64_t num_pairs = std::min<int64_t>(width, p.columns - column) / PAIR;
    return pairs_at(p, expert, column, column + TILE_LINES, 1, PAIR, num_pairs);
  }

  // Inner columns from i on.
  static TilePanel hidden_panel(const MoeArgs& a, int expert, int64_t i) {
    if (!a.gate.gated) return panel(a.up, expert, i, PANEL);
    const int64_t I = a.down.inner, num_pairs = std::min<int64_t>(PANEL / 2, I - i) / TILE_LINES;
    const bool take_turns = a.gate.interleaved;
    TilePanel panel = take_turns ? pairs_at(a.up, expert, 2 * i, 2 * i + 1, 2, PAIR, num_pairs)
                                 : pairs_at(a.up, expert, i, I + i, 1, TILE_LINES, num_pairs);
    panel.two_parts = !(TRANSPOSED && take_turns);
    return panel;
  }

  // ---- weights -------------------------------------------------------------------------------------------------

  // What `count` steps of a panel need of memory.
  static Fetch lines_of(const TilePanel& panel, int step, int count) {
    if (panel.num_pairs == 0) return {};
    const int columns = panel.num_pairs * PAIR / (panel.two_parts ? 2 : 1);
    const int64_t offset = TRANSPOSED ? step * TILE_STEP * panel.line_bytes : step * 64;
    const char* first = panel.first[0] + offset;
    const char* second = panel.two_parts ? panel.first[1] + offset : nullptr;
    if (TRANSPOSED) return {first, second, panel.line_bytes, count * TILE_STEP, (columns + 31) / 32};
    return {first, second, panel.line_bytes, columns, count};
  }

  // `count` steps of a pair of tiles -> [step][2][16][16].
  static void copy_pair(const TilePanel& panel, int pair, int step, int count, Fetch& fetch, int lines,
                        uint32_t* to) {
    const char *first = panel.tile(2 * pair), *second = panel.tile(2 * pair + 1);
    const int64_t row = panel.line_bytes;
    if constexpr (!TRANSPOSED) {
      for (int line = 0; line < TILE_LINES; ++line) {
        fetch.ask(lines / TILE_LINES);
        for (int i = 0; i < count; ++i) {
          const int64_t offset = line * row + (step + i) * 64;
          store(to + i * 2 * TILE_WORDS + line * W, load<VU>(first + offset));
          store(to + (i * 2 + 1) * TILE_WORDS + line * W, load<VU>(second + offset));
        }
      }
    } else {
      for (int k = 0; k < count * TILE_LINES; ++k) {
        const int64_t offset = (step * TILE_STEP + 2 * k) * row;
        uint32_t* line = to + k / TILE_LINES * 2 * TILE_WORDS + k % TILE_LINES * W;
        fetch.ask(lines / (count * TILE_LINES));
        if (panel.column_step == 2) {  // both tiles lie in the same 32 columns
          const VU low = load<VU>(first + offset), high = load<VU>(first + offset + row);
          store(line, (low & 0xffffu) | (high << 16));
          store(line + TILE_WORDS, (low >> 16) | (high & 0xffff0000u));
        } else {
          store(line, pair_lanes(load<VH>(first + offset), load<VH>(first + offset + row)));
          store(line + TILE_WORDS, pair_lanes(load<VH>(second + offset), load<VH>(second + offset + row)));
        }
      }
    }
  }

  // ---- products ------------------------------------------------------------------------------------------------

  // Adds `steps` steps to sums [column tile][row tile], which begin as zeros if `first`. ROW_TILES 1: x1 is not used.
  template <int ROW_TILES>
  static void add_steps(const ColumnTiles& w, const uint32_t* x0, const uint32_t* x1, int steps, bool first,
                        Fetch& fetch, int lines, float* sums) {
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
      fetch.ask(lines);
      _tile_loadd(4, w.tile[0] + i * w.step_bytes, w.line_bytes);
      _tile_loadd(5, w.tile[1] + i * w.step_bytes, w.line_bytes);
      _tile_loadd(6, x0 + i * TILE_WORDS, 64);
      if (ROW_TILES == 2) _tile_loadd(7, x1 + i * TILE_WORDS, 64);
      if constexpr (TRANSPOSED) {
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(2, 6, 5);
        if (ROW_TILES == 2) _tile_dpbf16ps(1, 7, 4);
        if (ROW_TILES == 2) _tile_dpbf16ps(3, 7, 5);
      } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (ROW_TILES == 2) _tile_dpbf16ps(1, 4, 7);
        if (ROW_TILES == 2) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(2, sums + 2 * TILE_WORDS, 64);
    if (ROW_TILES == 2) _tile_stored(1, sums + TILE_WORDS, 64);
    if (ROW_TILES == 2) _tile_stored(3, sums + 3 * TILE_WORDS, 64);
  }

  // Steps of K that all pairs of a panel meet before the next ones. Copies that are used once fit the nearest cache.
  static int block_steps(int row_pairs, int steps) {
    return row_pairs > 1 ? BLOCK_STEPS : TRANSPOSED ? BLOCK_STEPS / 4 : steps;
  }

  // Sums of up to MOST_ROW_PAIRS row pairs, [row pair][pair][column tile][row tile][16][16].
  static const float* panel_sums(const TilePanel& panel, const TilePanel& next, const uint32_t* x, int rows,
                                 int steps) {
    static thread_local Buffer sums_buffer, copies_buffer;
    float* sums = sums_buffer.at_least<float>(MOST_ROW_PAIRS * PAIRS * 4 * TILE_WORDS);
    uint32_t* copies = copies_buffer.at_least<uint32_t>(PAIRS * BLOCK_STEPS * 2 * TILE_WORDS);
    const int row_pairs = (rows + PAIR - 1) / PAIR, block = block_steps(row_pairs, steps);
    const bool direct = !TRANSPOSED && row_pairs == 1;
    for (int step = 0; step < steps; step += block) {
      const int count = std::min(block, steps - step);
      Fetch fetch = step + count < steps ? lines_of(panel, step + count, count) : lines_of(next, 0, block);
      const int share = (fetch.lines() + panel.num_pairs - 1) / panel.num_pairs;
      for (int r = 0; r < row_pairs; ++r)
        for (int p = 0; p < panel.num_pairs; ++p) {
          uint32_t* copy = direct ? nullptr : copies + p * block * 2 * TILE_WORDS;
          if (r == 0 && !direct) copy_pair(panel, p, step, count, fetch, share, copy);
          tiles_meet_memory();
          const char* tiles = reinterpret_cast<const char*>(copy);
          const ColumnTiles copied{{tiles, tiles + 4 * TILE_WORDS}, 64, 8 * TILE_WORDS};
          const ColumnTiles stored{{panel.tile(2 * p), panel.tile(2 * p + 1)}, panel.line_bytes, 64};
          const uint32_t* x0 = x + (static_cast<int64_t>(2 * r) * steps + step) * TILE_WORDS;
          const uint32_t* x1 = x0 + static_cast<int64_t>(steps) * TILE_WORDS;
          const auto add = rows <= (2 * r + 1) * TILE_LINES ? add_steps<1> : add_steps<2>;
          add(direct ? stored : copied, x0, x1, count, step == 0, fetch, direct ? share / steps : 0,
              sums + (r * PAIRS + p) * 4 * TILE_WORDS);
        }
    }
    tiles_meet_memory();
    return sums;
  }

  // Calls f(row, pair, sums of the pair's first tile, of its second) for each tile of 16 rows.
  template <class F>
  static void for_tiles(const Run& run, const TilePanel& panel, const TilePanel& next, const uint32_t* x,
                        int64_t inner, const F& f) {
    const int steps = static_cast<int>(inner / TILE_STEP), most = MOST_ROW_PAIRS * PAIR;
    for (int first = 0; first < run.rows; first += most) {
      const int rows = std::min(run.rows - first, most);
      const TilePanel& after = first + rows < run.rows ? panel : next;
      const float* sums = panel_sums(panel, after, x + operand_size(first, inner), rows, steps);
      for (int row = 0; row < rows; row += TILE_LINES)
        for (int p = 0; p < panel.num_pairs; ++p) {
          const float* pair = sums + ((row / PAIR * PAIRS + p) * 4 + row / TILE_LINES % 2) * TILE_WORDS;
          f(first + row, p, pair, pair + 2 * TILE_WORDS);
        }
    }
  }

  // ---- results -------------------------------------------------------------------------------------------------

  // The lines of a tile of sums plus the bias of its columns.
  static PB_INLINE void load_sums(const Projection& p, int expert, const TilePanel& panel, int tile,
                                  const float* sums, VF* lines) {
    for (int l = 0; l < TILE_LINES; ++l) lines[l] = load<VF>(sums + l * W);
    if (p.bias == nullptr) return;
    const bf16* bias = static_cast<const bf16*>(p.bias) + expert * p.bias_stride + panel.column_of(tile);
    float of_column[W];
    for (int i = 0; i < W; ++i) of_column[i] = bit_cast<float>(uint32_t{bias[i * panel.column_step].bits} << 16);
    const VF all = load<VF>(of_column);
    for (int l = 0; l < TILE_LINES; ++l) lines[l] += TRANSPOSED ? all : splat(of_column[l]);
  }

  // Lines of 16 inner columns from i on -> the operand of the next product, `to` being that of the group of rows.
  static PB_INLINE void store_hidden(const VF* lines, int64_t i, uint32_t* to) {
    to += i / TILE_STEP * TILE_WORDS;
    const int place = static_cast<int>(i % TILE_STEP) / 2;
    if constexpr (TRANSPOSED) {
      for (int l = 0; l < TILE_LINES; ++l) store_float(reinterpret_cast<bf16*>(to + l * W + place), lines[l]);
    } else {
      for (int l = 0; l < TILE_LINES; l += 2) store(to + (place + l / 2) * W, round_to_pairs(lines[l], lines[l + 1]));
    }
  }

  static void hidden(const MoeArgs& a, const Run& run, const uint32_t* x, const TilePanel& panel,
                     const TilePanel& next, uint32_t* to) {
    const int64_t I = a.down.inner;
    for_tiles(run, panel, next, x, a.up.inner, [&](int row, int p, const float* first, const float* second) {
      VF gate[TILE_LINES], up[TILE_LINES];
      load_sums(a.up, run.expert, panel, 2 * p, first, gate);
      load_sums(a.up, run.expert, panel, 2 * p + 1, second, up);
      apply_gate(a.gate, gate, up, TILE_LINES);
      const int64_t column = panel.column_of(2 * p);
      store_hidden(gate, column / panel.column_step, to + operand_size(row, I));
      if (a.gate.gated) return;
      apply_gate(a.gate, up, nullptr, TILE_LINES);
      store_hidden(up, column + TILE_LINES, to + operand_size(row, I));
    });
  }

  static void products(const Projection& p, const Run& run, const uint32_t* x, const TilePanel& panel,
                       const TilePanel& next, float* y) {
    for_tiles(run, panel, next, x, p.inner, [&](int row, int pair, const float* first, const float* second) {
      for (int half = 0; half < 2; ++half) {
        VF lines[TILE_LINES];
        load_sums(p, run.expert, panel, 2 * pair + half, half ? second : first, lines);
        if (!TRANSPOSED) transpose(lines);
        float* to = y + static_cast<int64_t>(row) * PANEL + pair * PAIR + half * W;
        for (int l = 0; l < std::min(TILE_LINES, run.rows - row); ++l) store(to + l * PANEL, lines[l]);
      }
    });
  }
};

}  // namespace pagebinder
#endif
