// Pointwise programs (custom_ops/pointwise/program.py), compiled to instructions over blocks of floats.
//
//     add:bfloat16 x0 x1; tanh:bfloat16 v0 -> v0 v1
//
//     LOAD r0 x0 | LOAD r1 x1 | ADD r0 r0 r1, rounded | STORE y0 r0 | TANH r1 r0 | STORE y1 r1
//
// Registers are blocks of elements in the first-level cache. Constants have registers of their own, filled once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "elements.h"

namespace pagebinder::pointwise {

enum class Operation : uint8_t {
  ABS, ADD, AND, CLAMP_MAX, CLAMP_MIN, COPY, CUBE, DIV, EQ, EXP, EXPM1, FLOOR, GE, GELU, GELU_TANH, GT, LE, LEAKY_RELU,
  LOAD, LOG, LOG1P, LOG_SIGMOID, LT, MAXIMUM, MINIMUM, MUL, NE, NEG, NOT, OR, RECIPROCAL, RELU, ROUND, RSQRT, RSUB,
  SIGMOID, SILU, SOFTPLUS, SQRT, SQUARE, STORE, SUB, TANH, WHERE,
};

// LOAD: register `to` from input `from[0]`; STORE: result `to` from register `from[0]`; ROUND: `to` to `type`.
struct Instruction {
  Operation operation;
  Element type;  // of ROUND
  uint16_t to;
  uint16_t from[3];
};

// A number as bfloat16 or float16 holds it.
float rounded(float number, Element type);

struct Constant {
  uint16_t to;
  float value;
};

struct Program {
  std::vector<Instruction> instructions;
  std::vector<Constant> constants;
  std::vector<Element> results;
  int num_registers = 0, num_inputs = 0;
};

// The program of this text, read once in a process and kept. Raises std::runtime_error for text that is none.
const Program& program_of(const std::string& text);

constexpr int MOST_DIMS = 8;

// An input as it is read along the contiguous results: dims of one element are gone, neighbours that lie as one are one.
struct Input {
  const void* data;
  Element type;
  int dims;
  int64_t sizes[MOST_DIMS], strides[MOST_DIMS];  // strides of 0 where it is repeated
};

struct Args {
  const Program* program;
  std::vector<Input> inputs;
  std::vector<void*> results;
  int64_t numel;  // of each result
  int num_threads;
};

void run(const Args& args);

}  // namespace pagebinder::pointwise
