// Reads pointwise programs, see pointwise.h.
#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "checks.h"
#include "pointwise.h"
#include "real_numbers.h"

namespace pagebinder::pointwise {
namespace {

const std::map<std::string, Operation>& operations() {
  static const std::map<std::string, Operation> names = {
      {"abs", Operation::ABS}, {"add", Operation::ADD}, {"and", Operation::AND}, {"clamp_max", Operation::CLAMP_MAX},
      {"clamp_min", Operation::CLAMP_MIN}, {"copy", Operation::COPY}, {"cube", Operation::CUBE}, {"div", Operation::DIV},
      {"eq", Operation::EQ}, {"exp", Operation::EXP}, {"expm1", Operation::EXPM1}, {"floor", Operation::FLOOR},
      {"ge", Operation::GE}, {"gelu", Operation::GELU}, {"gelu_tanh", Operation::GELU_TANH}, {"gt", Operation::GT},
      {"le", Operation::LE}, {"leaky_relu", Operation::LEAKY_RELU}, {"log", Operation::LOG}, {"log1p", Operation::LOG1P},
      {"log_sigmoid", Operation::LOG_SIGMOID}, {"lt", Operation::LT}, {"maximum", Operation::MAXIMUM},
      {"minimum", Operation::MINIMUM}, {"mul", Operation::MUL}, {"ne", Operation::NE}, {"neg", Operation::NEG},
      {"not", Operation::NOT}, {"or", Operation::OR}, {"reciprocal", Operation::RECIPROCAL}, {"relu", Operation::RELU},
      {"rsqrt", Operation::RSQRT}, {"rsub", Operation::RSUB}, {"sigmoid", Operation::SIGMOID}, {"silu", Operation::SILU},
      {"softplus", Operation::SOFTPLUS}, {"sqrt", Operation::SQRT}, {"square", Operation::SQUARE}, {"sub", Operation::SUB},
      {"tanh", Operation::TANH}, {"to", Operation::COPY}, {"where", Operation::WHERE},
  };
  return names;
}

Element type_named(const std::string& name) {
  if (name == "float32") return Element::F32;
  if (name == "bfloat16") return Element::BF16;
  if (name == "float16") return Element::F16;
  PB_CHECK(name == "bool", "a pointwise program has the dtype ", name);
  return Element::BOOL;
}

// What is exact as it is: a choice or a sign of numbers that were rounded before.
bool is_exact(Operation operation) {
  switch (operation) {
    case Operation::ABS: case Operation::COPY: case Operation::NEG: case Operation::RELU: case Operation::MAXIMUM:
    case Operation::MINIMUM: case Operation::CLAMP_MAX: case Operation::CLAMP_MIN: case Operation::WHERE: return true;
    default: return false;
  }
}

// Does torch take a number beside such values in float32? Others round it to the dtype of the result.
bool has_wide_numbers(Operation operation) {
  switch (operation) {
    case Operation::MUL: case Operation::DIV: case Operation::SOFTPLUS: case Operation::LEAKY_RELU: return true;
    default: return false;
  }
}

bool is_comparison(Operation operation) {
  switch (operation) {
    case Operation::EQ: case Operation::GE: case Operation::GT: case Operation::LE: case Operation::LT:
    case Operation::NE: return true;
    default: return false;
  }
}

// How many operands an operation takes.
size_t operands_of(Operation operation) {
  switch (operation) {
    case Operation::SOFTPLUS: case Operation::WHERE: return 3;
    case Operation::ADD: case Operation::AND: case Operation::CLAMP_MAX: case Operation::CLAMP_MIN: case Operation::DIV:
    case Operation::LEAKY_RELU: case Operation::MAXIMUM: case Operation::MINIMUM: case Operation::MUL: case Operation::OR:
    case Operation::RSUB: case Operation::SUB: return 2;
    default: return is_comparison(operation) ? 2 : 1;
  }
}

struct Statement {
  Operation operation;
  Element type;  // that it is computed in; of comparisons that of what they compare
  std::vector<std::string> operands;
};

// A value of the program: of an input, a statement or a number.
struct Value {
  Element type = Element::F32;
  int statement = -1, input = -1;
  float number = 0;
  int last = -1;      // statement that reads it last
  int where = -1;     // its register, once it has one
};

class Compiler {
 public:
  explicit Compiler(const std::string& text) {
    const size_t arrow = text.find(" -> ");
    PB_CHECK(arrow != std::string::npos, "a pointwise program names no results: ", text);
    read_statements(text.substr(0, arrow));
    std::istringstream results(text.substr(arrow + 4));
    for (std::string word; results >> word;) results_.push_back(number_of(word, 'v', statements_.size()));
    PB_CHECK(!statements_.empty() && !results_.empty(), "a pointwise program is empty: ", text);
  }

  Program compile() {
    const int count = static_cast<int>(statements_.size());
    for (int s = 0; s < count; ++s)
      for (const std::string& operand : statements_[s].operands)
        if (Value& value = value_of(operand, statements_[s]); value.statement >= 0 || value.input >= 0) value.last = s;
    for (int s = 0; s < count; ++s) add(s);
    PB_CHECK(num_registers_ < 1 << 16, "a pointwise program needs ", num_registers_, " registers");
    program_.num_registers = num_registers_;
    program_.num_inputs = num_inputs_;
    for (int result : results_) program_.results.push_back(values_[result].type);
    return std::move(program_);
  }

 private:
  void read_statements(const std::string& text) {
    std::istringstream in(text);
    for (std::string part; std::getline(in, part, ';');) {
      std::istringstream words(part);
      std::string head, word;
      words >> head;
      const size_t colon = head.find(':');
      PB_CHECK(colon != std::string::npos, "a pointwise program has the statement ", part);
      const auto found = operations().find(head.substr(0, colon));
      PB_CHECK(found != operations().end(), "a pointwise program has the operation ", head);
      Statement statement{found->second, type_named(head.substr(colon + 1)), {}};
      while (words >> word) statement.operands.push_back(word);
      PB_CHECK(statement.operands.size() == operands_of(statement.operation), "a pointwise program has the statement ", part);
      statements_.push_back(std::move(statement));
    }
    values_.resize(statements_.size());
    for (size_t s = 0; s < statements_.size(); ++s)
      values_[s].statement = static_cast<int>(s), values_[s].type = result_type(statements_[s]);
  }

  static Element result_type(const Statement& statement) {
    return is_comparison(statement.operation) ? Element::BOOL : statement.type;
  }

  static int number_of(const std::string& word, char kind, size_t below) {
    PB_CHECK(word.size() > 1 && word[0] == kind && word.find_first_not_of("0123456789", 1) == std::string::npos &&
                 word.size() < 8, "a pointwise program has the operand ", word);
    const int number = std::stoi(word.substr(1));
    PB_CHECK(static_cast<size_t>(number) < below, "a pointwise program reads ", word, ", which there is not");
    return number;
  }

  Value& value_of(const std::string& operand, const Statement& statement) {
    if (operand[0] == 'v') return values_[number_of(operand, 'v', values_.size())];
    const bool is_rounded = operand[0] != 'x' && !has_wide_numbers(statement.operation) &&
                            (statement.type == Element::BF16 || statement.type == Element::F16);
    const std::string key = is_rounded ? operand + (statement.type == Element::BF16 ? "b" : "h") : operand;
    const auto [place, is_new] = others_.try_emplace(key);
    if (!is_new) return place->second;
    Value& value = place->second;
    if (operand[0] == 'x') {
      value.input = number_of(operand, 'x', 1 << 12);
      num_inputs_ = std::max(num_inputs_, value.input + 1);
      return value;
    }
    value.number = static_cast<float>(real_of(operand));
    if (is_rounded) value.number = rounded(value.number, statement.type);
    value.where = new_register();
    value.last = std::numeric_limits<int>::max();  // filled once, for all blocks
    program_.constants.push_back({static_cast<uint16_t>(value.where), value.number});
    return value;
  }

  int new_register() {
    if (!free_.empty()) {
      const int at = free_.back();
      free_.pop_back();
      return at;
    }
    return num_registers_++;
  }

  void emit(Operation operation, Element type, int to, const std::vector<int>& from) {
    Instruction instruction{operation, type, static_cast<uint16_t>(to), {}};
    for (size_t i = 0; i < from.size(); ++i) instruction.from[i] = static_cast<uint16_t>(from[i]);
    program_.instructions.push_back(instruction);
  }

  void add(int s) {
    const Statement& statement = statements_[s];
    std::vector<int> from;
    std::vector<Value*> read;
    for (const std::string& operand : statement.operands) {
      Value& value = value_of(operand, statement);
      PB_CHECK(value.statement < s, "a pointwise program reads ", operand, " before it is made");
      if (value.where < 0) {
        PB_CHECK(value.input >= 0, "a pointwise program reads ", operand, " behind its last use");
        value.where = new_register();
        emit(Operation::LOAD, Element::F32, value.where, {value.input});
      }
      from.push_back(value.where);
      read.push_back(&value);
    }
    for (Value* value : read)
      if (value->last == s && value->where >= 0) free_.push_back(std::exchange(value->where, -1));
    Value& made = values_[s];
    made.where = new_register();  // maybe that of an operand: each element is read before it is written
    emit(statement.operation, statement.type, made.where, from);
    const auto is_result = [&](int result) { return result == s; };
    const bool is_stored = std::any_of(results_.begin(), results_.end(), is_result);
    const bool is_read = made.last > s;
    const bool narrows = made.type == Element::BF16 || made.type == Element::F16;
    bool rounds = narrows && !is_exact(statement.operation);
    if (narrows && statement.operation == Operation::COPY) rounds = true;  // of a wider dtype
    if (rounds && is_read) emit(Operation::ROUND, statement.type, made.where, {made.where});  // a store rounds, too
    for (size_t r = 0; is_stored && r < results_.size(); ++r)
      if (results_[r] == s) emit(Operation::STORE, made.type, static_cast<int>(r), {made.where});
    if (!is_read) free_.push_back(std::exchange(made.where, -1));
  }

  std::vector<Statement> statements_;
  std::vector<int> results_;
  std::vector<Value> values_;             // of statements
  std::map<std::string, Value> others_;   // of inputs and numbers, by what is written
  std::vector<int> free_;
  int num_registers_ = 0, num_inputs_ = 0;
  Program program_;
};

}  // namespace

const Program& program_of(const std::string& text) {
  static std::mutex lock;
  static auto* programs = new std::unordered_map<std::string, std::unique_ptr<const Program>>();
  const std::lock_guard guard(lock);
  std::unique_ptr<const Program>& program = (*programs)[text];
  if (program == nullptr) program = std::make_unique<const Program>(Compiler(text).compile());
  return *program;
}

}  // namespace pagebinder::pointwise
