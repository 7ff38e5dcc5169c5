// Arguments of the kernels for mixtures of experts, see custom_ops/moe/experts.py. Strides count elements.
//
// T tokens, K slots of a token, E experts, C width, I inner width, J = 2 I for gated experts, else I.
#pragma once

#include "attention.h"
#include "moe_gate.h"

namespace pagebinder {

struct CodedStack;                // quantized_moe/coded_stack.h

// The weights of all experts for one of their projections, where they lie in the model.
struct Projection {
  const void* weight;             // [E, columns, inner]; [E, inner, columns] if transposed
  int64_t expert_stride;
  int64_t line_stride;            // from column to column; from k to k if transposed
  const void* bias;               // [E, columns] or null
  int64_t bias_stride;
  int64_t columns, inner;
  const CodedStack* codes;        // in place of a weight and its strides, or null
  bool packed;                    // weight [E, columns / 32, inner / 32, 2, 16, 16, 2], or coded:
  int64_t coded_bytes;            // of a block, 0 of others: weight [E, columns / 32, inner / 256, coded_bytes]
};

// Which expert each slot of a token goes to.
struct Choice {
  int64_t tokens, slots, experts;  // T, K, E
  const int64_t* ids;              // [T, K]; outside [0, E) means none
};

struct MoeArgs {
  Choice choice;
  Element type;                   // of x, weights, biases and out
  bool transposed;
  const void* x;                  // [T, C]
  int64_t x_stride;
  const float* weights;           // [T, K]
  Projection up, down;
  Gate gate;
  void* out;                      // [T, C] contiguous
  int num_threads;
  ParallelRun run;
};
void moe_experts(const MoeArgs& args);

struct ExpertLinearArgs {
  Choice choice;
  Element type;
  bool transposed;
  const void* x;                  // [T, C], or [T, K, C] with a row for each slot
  int64_t x_stride;               // between rows
  bool row_per_slot;
  Projection projection;
  void* out;                      // [T, K, columns] contiguous
  int num_threads;
  ParallelRun run;
};
void expert_linear(const ExpertLinearArgs& args);

// On matrix tiles: do machine, type and sizes suit them?
bool tiles_suit(Element type, const Projection& projection);
void moe_experts_tiles(const MoeArgs& args);
void expert_linear_tiles(const ExpertLinearArgs& args);

// On BF16 dots: packed experts alone. Does this machine have them?
bool reads_packed_experts();
void moe_experts_dots(const MoeArgs& args);

// On vectors, for any size; one element type each.
template <Element TYPE> void moe_experts_vectors(const MoeArgs& args);
template <Element TYPE> void expert_linear_vectors(const ExpertLinearArgs& args);

}  // namespace pagebinder
