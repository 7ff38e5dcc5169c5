// y = x W^T (+ bias) with W in 8, 6 or 4 bits. A weight is read once, whatever the number of rows, and its codes become
// bf16 or float in a few instructions; codes of every format are exact in bf16, scales multiply float32 sums.
//
//     packed  [columns / 32] panels  x  [K / 32] steps  x  [2] tiles of 32 k x 16 columns
//
//     8 bits  tile = 8 lines of 64 bytes; lane n (4 bytes) of line L: k = 4L + 0, 2, 1, 3 of column n
//     4 bits  tile = 4 lines of 64 bytes; lane n (8 nibbles) of line L: k = 8L + 0, 2, 4, 6, 1, 3, 5, 7
//     6 bits  tile = 6 lines of 64 bytes: of each half of the k two as of 4 bits, the lower bits, and one of the upper ones;
//             lane n (16 times 2 bits) of that: k = 0, 2, ... 14, 1, 3, ... 15
//
// So a byte (a nibble) of each 16-bit word of a line is, in place, a line of pairs as matrix tiles and BF16 dot
// products want them. custom_ops/linear/quantized.py packs.
#pragma once

#include <algorithm>
#include <type_traits>

#include "activations.h"
#include "attention.h"
#include "small_floats.h"

namespace pagebinder {

constexpr int QUANT_PANEL = 32;  // columns of a panel
constexpr int QUANT_STEP = 32;   // k of a step
constexpr int QUANT_HALF_STEP = QUANT_STEP / 2;
constexpr int64_t QUANT_MOST_DOT_ROWS = 2;  // that meet codes in registers

// What scales are: numbers, or of two levels, products of a number for 256 k and a byte for each group. Of a panel and
// 256 k these are bytes
//
//     LEVELS       d  32 f16   [m  32 f16]   and of each group   s  32 int8   [t  32 int8]      in brackets: with shifts
//     LEVELS_E4M3  d  32 f32                                     s  32 e4m3
//
// A scale is d s, a shift LEVEL_OFFSET d s - m t.
enum class ScaleKind { F32, BF16, F16, LEVELS, LEVELS_E4M3 };
constexpr bool has_levels(ScaleKind kind) { return kind == ScaleKind::LEVELS || kind == ScaleKind::LEVELS_E4M3; }
constexpr int64_t scale_bytes(ScaleKind kind) {  // of what strides count
  return has_levels(kind) ? 1 : kind == ScaleKind::F32 ? 4 : 2;
}
constexpr int LEVEL_SPAN = 256;
constexpr float level_offset(int bits) { return bits == 4 ? 8.0f : 16.0f; }

enum class Code { FP8, INT8, INT4, FP4, NF4, IQ4, INT6 };
// Do codes stand for numbers of a table (decode.h)?
constexpr bool is_of_table(Code code) { return code == Code::FP4 || code == Code::NF4 || code == Code::IQ4; }
constexpr bool has_4_bits(Code code) { return code == Code::INT4 || is_of_table(code); }
constexpr int tile_bytes_of(Code code) { return has_4_bits(code) ? 256 : code == Code::INT6 ? 384 : 512; }

// The function object `body` called with a code as a constant: body(std::integral_constant<Code, ...>). Of codes that all
// kernels read, or of any.
template <class Body>
auto with_code(Code code, const Body& body) {
  switch (code) {
    case Code::FP8: return body(std::integral_constant<Code, Code::FP8>());
    case Code::INT8: return body(std::integral_constant<Code, Code::INT8>());
    case Code::INT4: return body(std::integral_constant<Code, Code::INT4>());
    case Code::NF4: return body(std::integral_constant<Code, Code::NF4>());
    case Code::IQ4: return body(std::integral_constant<Code, Code::IQ4>());
    default: return body(std::integral_constant<Code, Code::FP4>());
  }
}
template <class Body>
auto with_any_code(Code code, const Body& body) {
  return code == Code::INT6 ? body(std::integral_constant<Code, Code::INT6>()) : with_code(code, body);
}

struct QuantizedLinearArgs {
  Code code;
  int64_t rows, columns, inner;
  const void* x;             // [rows, inner] bf16, or float32 without tiles
  int64_t x_stride;
  const float* lowering;     // what sums of rows of x that were lifted (panel_floats.h) are times, or null
  const uint8_t* weight;     // packed
  const void* scale;         // see scales_of
  ScaleKind scale_kind;
  int64_t scale_group;       // k that share a scale: a multiple of QUANT_STEP, or half of it
  int64_t scale_panel_stride, scale_group_stride;  // in elements; panel_stride is that of `scale_panels` panels. Of
                             // two levels, in bytes: group_stride is that of the integers of a group
  int64_t level_bytes;       // of two levels: of 256 k of a panel
  int scale_group_bits;      // log2 of scale_group, where that is a power of two
  int64_t scale_panels;      // panels that share their scales
  bool scale_is_vector;      // one scale for each column of a panel, or one for all
  bool is_shifted;           // behind the scales of a group and panel lie shifts: a weight is code * scale + shift
  const float* x_sums;       // then: of each row of x the sums over what shares a scale, [rows, inner / scale_group]
  const float* x_scale;      // what rows of x are times, or null: [rows, k / x_group]
  int64_t x_group;           // k that share one: a multiple of 4 QUANT_STEP, or more than `inner`
  int64_t x_scale_stride;    // from row to row: 0 where all share it
  bool wide_out;             // bias and out are float32 whatever x is
  const void* bias;          // [columns] of out's type, or null
  void* out;                 // [rows, columns] contiguous, of x's type unless `wide_out`
  int num_threads;
  ParallelRun run;

  int64_t tile_bytes() const { return tile_bytes_of(code); }
  int64_t panels() const { return columns / QUANT_PANEL; }
  // Bytes of the numbers of 256 k, in front of those of groups.
  int64_t number_bytes() const {
    return (scale_kind == ScaleKind::LEVELS_E4M3 || is_shifted ? 4 : 2) * QUANT_PANEL;
  }
  int64_t jobs(int64_t group) const { return (panels() + group - 1) / group; }  // of `group` panels at most
  int64_t panel_bytes() const { return inner / QUANT_STEP * 2 * tile_bytes(); }
  // Does a step have two scales? Products of integers and floats serve that.
  bool has_half_steps() const { return scale_group < QUANT_STEP; }
  // k that share a scale of the weight and one of x, in steps.
  int64_t scaled_steps() const {
    const int64_t group = x_scale == nullptr ? scale_group : std::min(scale_group, x_group);
    return std::max<int64_t>(group / QUANT_STEP, 1);
  }
  // What row `row` of x is times, from k of `step` on.
  float x_scale_at(int64_t row, int64_t step) const {
    return x_scale == nullptr ? 1.0f : x_scale[row * x_scale_stride + step * QUANT_STEP / x_group];
  }
};

// Scales, or shifts, of the 32 columns of a panel for what begins at k, W in a vector.
struct PanelScales {
  VF of[QUANT_PANEL / W];
};

// Where the scales begin of what is from `k` on: of numbers, in elements.
inline int64_t scales_begin(const QuantizedLinearArgs& a, int64_t panel, int64_t k) {
  return panel / a.scale_panels * a.scale_panel_stride + k / a.scale_group * a.scale_group_stride;
}

// Where the numbers of two levels lie, and the bytes of the group of k.
struct Levels {
  const bool are_e4m3;
  const char* wide;
  const uint8_t* narrow;

  Levels(const QuantizedLinearArgs& a, int64_t panel, int64_t k) : are_e4m3(a.scale_kind == ScaleKind::LEVELS_E4M3) {
    const uint64_t in_span = static_cast<uint64_t>(k) % LEVEL_SPAN, spans = static_cast<uint64_t>(k) / LEVEL_SPAN;
    wide = static_cast<const char*>(a.scale) + panel * a.scale_panel_stride + spans * a.level_bytes;
    const int64_t group = static_cast<int64_t>(in_span >> a.scale_group_bits);
    narrow = reinterpret_cast<const uint8_t*>(wide + a.number_bytes() + group * a.scale_group_stride);
  }

  // d and s of columns from `column` on, or m and t, which are QUANT_PANEL further. Of e4m3 256 d and s / 256.
  PB_INLINE VF upper(int column) const {
    return are_e4m3 ? load<VF>(wide + 4 * column) * 256.0f : load_float(reinterpret_cast<const f16*>(wide) + column);
  }
  PB_INLINE VF lower(int column) const {
    if (are_e4m3) return load_e4m3_over_256(narrow + column);
    return __builtin_convertvector(widen(load<VSB>(narrow + column)), VF);
  }
};

template <class T>
PB_INLINE PanelScales load_panel(const void* scale, int64_t at) {
  PanelScales scales;
  PB_UNROLL
  for (int v = 0; v < QUANT_PANEL / W; ++v) scales.of[v] = load_float(static_cast<const T*>(scale) + at + v * W);
  return scales;
}

PB_INLINE PanelScales load_numbers(const QuantizedLinearArgs& a, int64_t at) {
  if (a.scale_kind == ScaleKind::BF16) return load_panel<bf16>(a.scale, at);
  if (a.scale_kind == ScaleKind::F16) return load_panel<f16>(a.scale, at);
  return load_panel<float>(a.scale, at);
}

// Of scales that are a vector.
PB_INLINE PanelScales load_scales(const QuantizedLinearArgs& a, int64_t panel, int64_t k) {
  if (!has_levels(a.scale_kind)) return load_numbers(a, scales_begin(a, panel, k));
  const Levels levels(a, panel, k);
  PanelScales scales;
  PB_UNROLL
  for (int v = 0; v < QUANT_PANEL / W; ++v) scales.of[v] = levels.upper(v * W) * levels.lower(v * W);
  return scales;
}

// Of shifts that are numbers.
PB_INLINE PanelScales load_shifts(const QuantizedLinearArgs& a, int64_t panel, int64_t k) {
  return load_numbers(a, scales_begin(a, panel, k) + QUANT_PANEL);
}

struct PanelOf {
  const QuantizedLinearArgs* weight;
  int64_t panel;
};

// Layers that read the same x, in one call: threads take panels from all of them. They are alike in all but columns,
// weight, scale, bias and out.
struct QuantizedLayers {
  const QuantizedLinearArgs* layers;
  int num_layers = 1;
  Activation gate = Activation::NONE;  // else: of two equal layers, one result: out of the first = act(first) * second
  bool rounds = false;                 // x in float32 stands for bf16: so do the values that a gate reads

  const QuantizedLinearArgs& first() const { return layers[0]; }
  int num_results() const { return gate == Activation::NONE ? num_layers : 1; }
  int64_t num_jobs(int64_t group) const {
    int64_t count = 0;
    for (int i = 0; i < num_results(); ++i) count += layers[i].jobs(group);
    return count;
  }
};

// `x_sums` of a call's first layer, of x in bf16 or float32; they are this thread's until the next call.
const float* sums_of_groups(const QuantizedLinearArgs& a, bool is_bf16);

// bf16 on matrix tiles; false where there are none, and nothing was done.
bool quantized_linear_has_tiles();
bool quantized_linear_with_tiles(const QuantizedLayers& call);
// bf16 with dot products of pairs; false, and nothing was done, where the machine has none, and where tiles serve more
// than QUANT_MOST_DOT_ROWS rows, rows with scales or wide results.
bool quantized_linear_with_dots(const QuantizedLayers& call);
// bf16 and codes of int8 or int4 with integer dot products; false, and nothing was done, where the machine has none, for
// other codes, where tiles serve the rows (as above), and where digits cannot hold x (see there).
bool quantized_linear_with_int8_dots(const QuantizedLayers& call);
// bf16 and all codes but fp8 with products of 16 bits; false, and nothing was done, without AVX2.
bool quantized_linear_with_int16_products(const QuantizedLayers& call);
// float32 with vectors of any width; true. Of x in bf16: sums are in float32, too.
bool quantized_linear_with_vectors(const QuantizedLayers& call);
bool quantized_linear_in_bf16_with_vectors(const QuantizedLayers& call);
inline bool quantized_linear_in_bf16(const QuantizedLayers& call) {
  const QuantizedLinearArgs& a = call.first();
  if (a.has_half_steps() || a.code == Code::INT6)
    return quantized_linear_with_int16_products(call) || quantized_linear_in_bf16_with_vectors(call);
  // Scales of two levels are read as they lie there: of many rows 1.4 times as fast as in wide vectors, of one as fast.
  const bool tiles_serve = a.rows > QUANT_MOST_DOT_ROWS && quantized_linear_has_tiles();
  if (has_levels(a.scale_kind) && !tiles_serve && quantized_linear_with_int16_products(call)) return true;
  return quantized_linear_with_int8_dots(call) || quantized_linear_with_dots(call) || quantized_linear_with_tiles(call) ||
         quantized_linear_with_int16_products(call) || quantized_linear_in_bf16_with_vectors(call);
}

}  // namespace pagebinder
