// Linear layers y = x W^T (+ bias).
//
//   tiles     bf16 on matrix tiles (AMX):  y^T [column][row]  =  W [column][K]  x  x pairs [K/2][row]
//   vectors   bf16, float32, float16: every row of W is read once and meets a few rows of x
//
//   packed    bf16 on matrix tiles, W packed as tiles beforehand (linear/packed_weights.py), any number of rows; or W
//             packed and coded in some 12 bits (coded_weights.h): the same sums of fewer bytes
//   dots      bf16 where there are no tiles: W in any of these forms, any number of rows
//   floats    float16, more rows than vectors take
//
// Weights that were not packed are taken as they lie, so no second copy of one exists. Layers that read the same x are
// one call: threads take panels of columns from all of them, each from a run of its own (work_ranges.h). A thread that
// stands still is left behind (leaving_loop.h).
#pragma once

#include <memory>
#include <vector>

#include "activation.h"
#include "attention.h"
#include "elements.h"

namespace pagebinder {

constexpr int LINEAR_GRAIN = 32;  // columns and K must be multiples of this
constexpr int64_t LINEAR_MOST_ROWS = 128;     // on tiles; beyond, oneDNN is as fast or faster (docs/measurements.md)
constexpr int64_t LINEAR_MOST_VECTOR_ROWS = 8;  // on vectors
constexpr int64_t LINEAR_STREAM_ROWS = 4;       // on vectors though there are tiles: memory is read faster
constexpr int PACKED_PANEL = 32;  // columns of a panel of packed weights; steps of K are as long
constexpr int64_t LINEAR_SERIAL_FLOPS = 1 << 19;

// One layer of those that read the same x; data of x's type.
struct LinearLayer {
  int64_t columns;
  const void* weight;   // [columns, inner], or packed: [columns / 32, inner / 32, 2, 16, 16, 2], or coded
  int64_t weight_stride;
  int64_t coded_bytes;  // of a block of a coded weight, 0 of others
  const void* bias;     // [columns] or null
  void* out;            // [rows, columns] contiguous
};

struct LinearArgs {
  int64_t rows, inner;
  const void* x;        // [rows, inner]
  int64_t x_stride;
  const LinearLayer* layers;
  int num_layers;
  Activation gate;      // not NONE: of two equal layers, one result: out of the first = act(first) * second
  int num_threads;
  std::shared_ptr<void> operands;  // x, weights and biases exist as long as it

  int num_results() const { return gate == Activation::NONE ? num_layers : 1; }
};

// Arguments that outlive the call.
struct KeptLinearArgs : LinearArgs {
  explicit KeptLinearArgs(const LinearArgs& args) : LinearArgs(args), kept(args.layers, args.layers + args.num_layers) {
    layers = kept.data();
  }
  KeptLinearArgs(const KeptLinearArgs&) = delete;
  const std::vector<LinearLayer> kept;
};

// Memory of a thread's calls, of which late helpers of the last one may still read: then there is another.
inline std::shared_ptr<Buffer> buffer_of_a_call(std::shared_ptr<Buffer>& last) {
  if (last == nullptr || last.use_count() > 1) last = std::make_shared<Buffer>();
  std::atomic_thread_fence(std::memory_order_acquire);
  return last;
}

// Panels of `columns` columns of all results, in order, and where each begins.
class LinearPanels {
 public:
  struct Place { int result; int64_t column; };

  LinearPanels(const LinearArgs& args, int64_t columns) : args_(args), columns_(columns) {
    for (int i = 0; i < args.num_results(); ++i) count_ += panels_of(i);
  }
  int count() const { return static_cast<int>(count_); }
  Place operator[](int64_t panel) const {
    int result = 0;
    for (; panel >= panels_of(result); ++result) panel -= panels_of(result);
    return {result, panel * columns_};
  }

 private:
  int64_t panels_of(int i) const { return (args_.layers[i].columns + columns_ - 1) / columns_; }
  const LinearArgs& args_;
  int64_t columns_, count_ = 0;
};

// Are the sizes of a bf16 layer such, and does this machine have tiles?
bool linear_suits_tiles(int64_t rows, int64_t columns, int64_t inner);
void linear_with_tiles(const LinearArgs& args);
template <class T> void linear_with_vectors(const LinearArgs& args);

// gate[i] = act(gate[i]) * up[i]
template <class T> void gate_values(Activation activation, T* gate, const T* up, int64_t count, int num_threads);

// A weight, and the memory of its packed form.
struct PackedWeight {
  void* plain;          // [columns, inner]
  int64_t plain_stride, inner;
  void* packed;
};

// Coded weights: how many bytes its largest block takes; the codes of all blocks of a panel, and back. `inner` is a
// multiple of CODED_INNER.
constexpr int64_t CODED_INNER = 256;
int64_t coded_bytes_of_panel(const PackedWeight& weight, int64_t panel);
void code_panel(const PackedWeight& weight, int64_t panel, int64_t block_bytes, uint8_t* codes);
void decode_panel(const uint8_t* codes, int64_t block_bytes, int64_t inner, uint16_t* packed);

// Packs one panel of 32 columns, or unpacks it.
void pack_panel(const PackedWeight& weight, int64_t panel, bool unpack);
void packed_linear_with_tiles(const LinearArgs& args);

// On BF16 dots or floats, of weights as they lie and packed ones: the same bits.
bool linear_suits_dots(int64_t columns, int64_t inner);
void linear_with_dots(const LinearArgs& args);
void packed_linear_with_dots(const LinearArgs& args);

// In float32, of weights that are widened on the way.
template <class T> void linear_with_floats(const LinearArgs& args);

}  // namespace pagebinder
