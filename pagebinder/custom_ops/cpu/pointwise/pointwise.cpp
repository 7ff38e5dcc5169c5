// Runs pointwise programs block by block, see pointwise.h.
#include "pointwise.h"

#include <algorithm>

#include "attention.h"
#include "functions.h"
#include "thread_pool.h"

namespace pagebinder::pointwise {
namespace {

// All registers of a block in half of a first-level cache, whole vectors each.
constexpr int64_t BYTES_OF_BLOCKS = 1 << 14, MOST_ELEMENTS = 1024, LEAST_ELEMENTS = 64;
// Operations on as many elements are not worth waking another thread.
constexpr int64_t SERIAL_WORK = 1 << 16;

template <class Each>
PB_INLINE void for_block(int64_t count, float* to, Each each) {
  for (int64_t i = 0; i < count; i += W) store(to + i, each(i));
}

template <class T>
void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(to + i, load_float(from + i));
  if (i < count) store_float_part(to + i, load_float_part(from + i, static_cast<int>(count - i)), static_cast<int>(count - i));
}
void widen(const bool* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] ? 1.0f : 0.0f;
}

template <class T>
float widened(T x) { return load_float_part(&x, 1)[0]; }
float widened(float x) { return x; }
float widened(bool x) { return x ? 1.0f : 0.0f; }

template <class T>
void narrow(const float* from, int64_t count, T* to) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store_float(to + i, load_float(from + i));
  if (i < count) store_float_part(to + i, load_float(from + i), static_cast<int>(count - i));
}
void narrow(const float* from, int64_t count, bool* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] != 0.0f;
}

template <class Use>
PB_INLINE void with_type(Element type, Use use) {
  if (type == Element::BOOL) use(bool{});
  else with_element(type, use);
}

// Elements [begin, begin + count) of an input as floats, run by run of its last dimension.
void load_input(const Input& input, int64_t begin, int64_t count, float* to) {
  with_type(input.type, [&](auto type) {
    const auto* data = static_cast<const decltype(type)*>(input.data);
    const int last = input.dims - 1;
    const int64_t run = input.dims > 0 ? input.sizes[last] : 1, stride = input.dims > 0 ? input.strides[last] : 0;
    while (count > 0) {
      int64_t offset = 0, row = begin / run;
      const int64_t column = begin - row * run, length = input.dims > 0 ? std::min(run - column, count) : count;
      for (int d = last - 1; d >= 0; --d) {
        const int64_t next = row / input.sizes[d];
        offset += (row - next * input.sizes[d]) * input.strides[d];
        row = next;
      }
      const auto* from = data + offset + column * stride;
      if (stride == 1) widen(from, length, to);
      else if (stride == 0) std::fill_n(to, length, widened(*from));
      else
        for (int64_t i = 0; i < length; ++i) to[i] = widened(from[i * stride]);
      begin += length, count -= length, to += length;
    }
  });
}

// Registers are blocks of `size` floats, one behind the other.
struct Block {
  float* registers;
  int64_t size, count;  // count: of elements that are there, filled up to whole vectors by what lies there
  float* operator[](int number) const { return registers + number * size; }
};

template <class Function>
PB_INLINE void unary(const Block& block, const Instruction& i, Function function) {
  const float* a = block[i.from[0]];
  for_block(block.count, block[i.to], [&](int64_t at) { return function(load<VF>(a + at)); });
}

template <class Function>
PB_INLINE void binary(const Block& block, const Instruction& i, Function function) {
  const float *a = block[i.from[0]], *b = block[i.from[1]];
  for_block(block.count, block[i.to], [&](int64_t at) { return function(load<VF>(a + at), load<VF>(b + at)); });
}

template <class Function>
PB_INLINE void ternary(const Block& block, const Instruction& i, Function function) {
  const float *a = block[i.from[0]], *b = block[i.from[1]], *c = block[i.from[2]];
  for_block(block.count, block[i.to],
            [&](int64_t at) { return function(load<VF>(a + at), load<VF>(b + at), load<VF>(c + at)); });
}

PB_INLINE VF smaller(VF a, VF b) { return select(a == a, select(b < a, b, select(b == b, a, b)), a); }
PB_INLINE VF larger(VF a, VF b) { return select(a == a, select(b > a, b, select(b == b, a, b)), a); }

void compute(const Block& block, const Instruction& i) {
  switch (i.operation) {
    case Operation::ABS: return unary(block, i, [](VF x) { return magnitude_of(x); });
    case Operation::ADD: return binary(block, i, [](VF a, VF b) { return a + b; });
    case Operation::AND: return binary(block, i, [](VF a, VF b) { return truth((a != VF{}) & (b != VF{})); });
    case Operation::CLAMP_MAX:
    case Operation::MINIMUM: return binary(block, i, [](VF a, VF b) { return smaller(a, b); });
    case Operation::CLAMP_MIN:
    case Operation::MAXIMUM: return binary(block, i, [](VF a, VF b) { return larger(a, b); });
    case Operation::COPY: return unary(block, i, [](VF x) { return x; });
    case Operation::CUBE: return unary(block, i, [](VF x) { return x * x * x; });
    case Operation::DIV: return binary(block, i, [](VF a, VF b) { return a / b; });
    case Operation::EQ: return binary(block, i, [](VF a, VF b) { return truth(a == b); });
    case Operation::EXP: return unary(block, i, [](VF x) { return exponential(x); });
    case Operation::EXPM1: return unary(block, i, [](VF x) { return exponential_minus_one(x); });
    case Operation::FLOOR: return unary(block, i, [](VF x) { return floor_of(x); });
    case Operation::GE: return binary(block, i, [](VF a, VF b) { return truth(a >= b); });
    case Operation::GELU: return unary(block, i, [](VF x) { return select(x == splat(INFINITE), x, gelu(x)); });
    case Operation::GELU_TANH: return unary(block, i, [](VF x) { return activate(Activation::GELU_TANH, x); });
    case Operation::GT: return binary(block, i, [](VF a, VF b) { return truth(a > b); });
    case Operation::LE: return binary(block, i, [](VF a, VF b) { return truth(a <= b); });
    case Operation::LEAKY_RELU: return binary(block, i, [](VF x, VF slope) { return select(x > VF{}, x, x * slope); });
    case Operation::LOG: return unary(block, i, [](VF x) { return logarithm(x); });
    case Operation::LOG1P: return unary(block, i, [](VF x) { return logarithm_of_one_plus(x); });
    case Operation::LOG_SIGMOID:
      return unary(block, i, [](VF x) {
        return select(x < VF{}, x, VF{}) - logarithm_of_one_plus(exponential(-magnitude_of(x)));
      });
    case Operation::LT: return binary(block, i, [](VF a, VF b) { return truth(a < b); });
    case Operation::MUL: return binary(block, i, [](VF a, VF b) { return a * b; });
    case Operation::NE: return binary(block, i, [](VF a, VF b) { return truth(a != b); });
    case Operation::NEG: return unary(block, i, [](VF x) { return -x; });
    case Operation::NOT: return unary(block, i, [](VF x) { return truth(x == VF{}); });
    case Operation::OR: return binary(block, i, [](VF a, VF b) { return truth((a != VF{}) | (b != VF{})); });
    case Operation::RECIPROCAL: return unary(block, i, [](VF x) { return 1.0f / x; });
    case Operation::RELU: return unary(block, i, [](VF x) { return select(x < VF{}, VF{}, x); });
    case Operation::ROUND:
      if (i.type == Element::BF16) return unary(block, i, [](VF x) { return from_bf16(to_bf16(x)); });
      return unary(block, i, [](VF x) { return from_f16(to_f16(x)); });
    case Operation::RSQRT: return unary(block, i, [](VF x) { return 1.0f / square_root(x); });
    case Operation::RSUB: return binary(block, i, [](VF a, VF b) { return b - a; });
    case Operation::SIGMOID: return unary(block, i, [](VF x) { return logistic(x); });
    case Operation::SILU: return unary(block, i, [](VF x) { return x / (1.0f + exponential(-x)); });
    case Operation::SOFTPLUS:  // x, beta, threshold
      return ternary(block, i, [](VF x, VF beta, VF threshold) {
        const VF scaled = x * beta;
        return select(scaled > threshold, x, logarithm_of_one_plus(exponential(scaled)) / beta);
      });
    case Operation::SQRT: return unary(block, i, [](VF x) { return square_root(x); });
    case Operation::SQUARE: return unary(block, i, [](VF x) { return x * x; });
    case Operation::SUB: return binary(block, i, [](VF a, VF b) { return a - b; });
    case Operation::TANH: return unary(block, i, [](VF x) { return tanh_approx(x); });
    case Operation::WHERE: return ternary(block, i, [](VF mask, VF a, VF b) { return select(mask != VF{}, a, b); });
    case Operation::LOAD:
    case Operation::STORE: return;
  }
}

// Elements [begin, end), `size` at a time.
void run_range(const Args& args, int64_t begin, int64_t end, int64_t size) {
  static thread_local Buffer buffer;
  const Program& program = *args.program;
  Block block{buffer.at_least<float>(static_cast<size_t>(program.num_registers * size)), size, 0};
  for (const Constant& constant : program.constants) std::fill_n(block[constant.to], size, constant.value);
  for (; begin < end; begin += block.count) {
    block.count = std::min(size, end - begin);
    for (const Instruction& i : program.instructions) {
      if (i.operation == Operation::LOAD) {
        load_input(args.inputs[i.from[0]], begin, block.count, block[i.to]);
      } else if (i.operation == Operation::STORE) {
        with_type(i.type, [&](auto type) {
          narrow(block[i.from[0]], block.count, static_cast<decltype(type)*>(args.results[i.to]) + begin);
        });
      } else {
        compute(block, i);
      }
    }
  }
}

}  // namespace

float rounded(float number, Element type) {
  const VF x = splat(number);
  return (type == Element::BF16 ? from_bf16(to_bf16(x)) : from_f16(to_f16(x)))[0];
}

void run(const Args& args) {
  const Program& program = *args.program;
  const int64_t fits = BYTES_OF_BLOCKS / (4 * std::max(program.num_registers, 1)) / 64 * 64;
  const int64_t most = (args.numel + W - 1) / W * W;
  const int64_t size = std::min(most, std::clamp(fits, LEAST_ELEMENTS, MOST_ELEMENTS));
  const int64_t work = args.numel * static_cast<int64_t>(program.instructions.size());
  if (work < SERIAL_WORK || args.num_threads <= 1) return run_range(args, 0, args.numel, size);
  for_ranges(args.numel, 4 * size, args.num_threads,
             [&](int64_t begin, int64_t end) { run_range(args, begin, end, size); });
}

}  // namespace pagebinder::pointwise
