// Reads a program and runs it, see program.h.
//
// Text: numbers and words with spaces between, a list in brackets with its length, text with its length in bytes:
//
//     program      inputs sizes slots  may it be recorded  count of calls  calls...  count of outputs  slots...
//     call         op <name> <overload, or -> <"list" or "values"> <"views", "writes" or "new"> <count> <slots...> <count> <operands...>
//     operand      T<slot> L<slot> K<constant> N<number> V<place of a size> F<real> B<0 or 1> Y<dtype> - ? <operand>
//                  [<count> <operands...>  |  S<bytes> <the text>
#include "checks.h"
#include "real_numbers.h"
#include "recording.h"

#include <algorithm>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace pagebinder::programs {
namespace {

using torch::headeronly::ScalarType;

constexpr size_t VIEW_DIMS = 8;  // of a view that is made here

[[noreturn]] void damaged(const std::string& what) { throw std::runtime_error("a native program is damaged: " + what); }

class Reader {
 public:
  explicit Reader(const std::string& text) : in_(text) {}

  std::string word() {
    std::string word;
    if (!(in_ >> word)) damaged("it ends too early");
    return word;
  }
  int64_t number() { return std::stoll(word()); }
  std::vector<int64_t> numbers() {
    std::vector<int64_t> values(static_cast<size_t>(number()));
    for (int64_t& value : values) value = number();
    return values;
  }

  Operand operand() {
    const std::string token = word();
    const std::string rest = token.substr(1);
    switch (token[0]) {
      case '-': return {};
      case 'T': return numbered(Operand::TENSOR, rest);
      case 'L': return numbered(Operand::LAST_TENSOR, rest);
      case 'K': return numbered(Operand::CONSTANT, rest);
      case 'N': return numbered(Operand::NUMBER, rest);
      case 'V': return numbered(Operand::SIZE, rest);
      case 'B': return numbered(Operand::BOOLEAN, rest);
      case 'Y': return numbered(Operand::DTYPE, rest);
      case 'F': {
        Operand operand;
        operand.kind = Operand::REAL, operand.real = real_of(rest);
        return operand;
      }
      case 'S': {
        Operand operand;
        operand.kind = Operand::TEXT, operand.text.resize(std::stoull(rest));
        in_.get();  // the space before it
        in_.read(operand.text.data(), static_cast<std::streamsize>(operand.text.size()));
        return operand;
      }
      case '?': {
        Operand operand;
        operand.kind = Operand::SOME, operand.items = {this->operand()};
        return operand;
      }
      case '[': {
        Operand operand;
        operand.kind = Operand::LIST, operand.items = operands(std::stoll(rest));
        return operand;
      }
      default: damaged("unknown operand " + token);
    }
  }
  std::vector<Operand> operands(int64_t count) {
    std::vector<Operand> operands;
    while (count-- > 0) operands.push_back(operand());
    return operands;
  }

 private:
  static Operand numbered(Operand::Kind kind, const std::string& number) {
    Operand operand;
    operand.kind = kind, operand.number = std::stoll(number);
    return operand;
  }

  std::istringstream in_;
};

Call read_call(Reader& reader) {
  Call call;
  if (reader.word() != "op") damaged("a call does not begin");
  call.op = reader.word(), call.overload = reader.word();
  if (call.overload == "-") call.overload.clear();
  call.returns_list = reader.word() == "list";
  const std::string kind = reader.word();
  call.may_view = kind == "views", call.writes = kind == "writes";
  call.results = reader.numbers();
  call.operands = reader.operands(reader.number());
  return call;
}

std::string what_went_wrong() {
#if PB_TORCH_2_13
  return torch_exception_get_what_without_backtrace();
#else
  return "it failed; torch wrote why to stderr";
#endif
}

}  // namespace

Program::Program(const std::string& text, std::vector<Tensor> constants) : constants_(std::move(constants)) {
  Reader reader(text);
  num_inputs_ = reader.number(), num_sizes_ = reader.number();
  num_slots_ = reader.number(), is_recorded_ = reader.number() != 0;
  for (int64_t count = reader.number(); count > 0; --count) calls_.push_back(read_call(reader));
  outputs_ = reader.numbers();
  for (Call& call : calls_) {
    if (call.overload.empty()) call.direct = direct_calls().find(call.op);
    call.is_view = call.op == "aten::view" && call.overload.empty() && call.operands.size() == 2 &&
                   call.operands[0].is_tensor() && call.operands[1].kind == Operand::LIST;
    const size_t returned = call.returns_list ? 1 : call.results.size();
    deepest_stack_ = std::max({deepest_stack_, call.operands.size(), returned});
  }
  find_lasting();
}

Program::~Program() = default;

void Program::fill(Slots& slots, const std::vector<Tensor>& inputs) const {
  for (size_t i = 0; i < inputs.size(); ++i) slots.fill(static_cast<int64_t>(i), inputs[i]);
}

std::vector<Tensor> Program::take_outputs(const Slots& slots) const {
  std::vector<Tensor> outputs;
  for (int64_t slot : outputs_) {  // one may be asked for twice
    AtenTensorHandle handle = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(slots.tensors[slot], &handle));
    outputs.emplace_back(handle);
  }
  return outputs;
}

// Other sizes for a contiguous tensor, a new tensor over the same memory. false: it is a matter of the dispatcher, which
// also says what is wrong.
bool Program::view(const Call& call, Slots& slots) const {
  const AtenTensorHandle from = slots.tensor_of(call.operands[0]);
  const std::vector<Operand>& given = call.operands[1].items;
  bool contiguous = false;
  int64_t numel = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(from, &contiguous));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(from, &numel));
  if (!contiguous || numel == 0 || given.empty() || given.size() > VIEW_DIMS) return false;
  int64_t sizes[VIEW_DIMS], strides[VIEW_DIMS], known = 1;
  int free_dim = -1;  // the one whose size is -1
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].kind != Operand::NUMBER && given[i].kind != Operand::SIZE) return false;
    sizes[i] = given[i].kind == Operand::SIZE ? slots.sizes[given[i].number] : given[i].number;
    if (sizes[i] > 0) known *= sizes[i];
    else if (sizes[i] != -1 || std::exchange(free_dim, static_cast<int>(i)) >= 0) return false;
  }
  if (free_dim >= 0) sizes[free_dim] = numel / known;
  if (numel != known * (free_dim >= 0 ? sizes[free_dim] : 1)) return false;
  int64_t stride = 1;
  for (size_t i = given.size(); i-- > 0; stride *= sizes[i]) strides[i] = stride;
  AtenTensorHandle result = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(from, static_cast<int64_t>(given.size()), sizes, strides, 0, &result));
  if (call.operands[0].kind == Operand::LAST_TENSOR) slots.drop(call.operands[0].number);
  slots.keep(call.results[0], result);
  return true;
}

void Program::make_call(const Call& call, Slots& slots, bool direct) const {
  if (direct && call.is_view && view(call, slots)) return;
  std::vector<StableIValue> stack(deepest_stack_);
  for (size_t i = 0; i < call.operands.size(); ++i) stack[i] = slots.value_of(call.operands[i]);
  if (direct && call.direct != nullptr) {
    try {
      call.direct(stack.data(), call.operands.size(), call.returns_list ? 1 : call.results.size());
    } catch (const std::exception& error) {
      throw std::runtime_error(call.op + ": " + error.what());
    }
  } else if (torch_call_dispatcher(call.op.c_str(), call.overload.c_str(), stack.data(), TORCH_ABI_VERSION) !=
             TORCH_SUCCESS) {
    throw std::runtime_error(call.op + ": " + what_went_wrong());
  }
  if (!call.returns_list) {
    for (size_t i = 0; i < call.results.size(); ++i)
      slots.keep(call.results[i], torch::stable::detail::to<AtenTensorHandle>(stack[i]));
    return;
  }
  const auto list = torch::stable::detail::to<StableListHandle>(stack[0]);
  for (size_t i = 0; i < call.results.size(); ++i) {
    StableIValue item;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &item));
    slots.keep(call.results[i], torch::stable::detail::to<AtenTensorHandle>(item));
  }
  STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
}

// ---- programs by number --------------------------------------------------------------------------------------------

namespace {

std::mutex programs_lock;
std::unordered_map<int64_t, std::shared_ptr<const Program>> programs;
int64_t last_program = 0;

int64_t make_native_program(std::string text, std::vector<Tensor> constants) {
  auto program = std::make_shared<const Program>(text, std::move(constants));
  const std::lock_guard guard(programs_lock);
  programs[++last_program] = std::move(program);
  return last_program;
}

std::shared_ptr<const Program> program_of(int64_t number) {
  const std::lock_guard guard(programs_lock);
  const auto found = programs.find(number);
  PB_CHECK(found != programs.end(), "there is no native program ", number);
  return found->second;
}

std::vector<Tensor> run_native_program(int64_t number, std::vector<Tensor> inputs, std::vector<int64_t> sizes) {
  return program_of(number)->run(inputs, sizes, true);
}

std::vector<Tensor> run_profiled_program(int64_t number, std::vector<Tensor> inputs, std::vector<int64_t> sizes) {
  return program_of(number)->run(inputs, sizes, false);
}

std::vector<int64_t> native_program_counts(int64_t number) {
  const std::shared_ptr<const Program> program = program_of(number);
  const RunCounts& counts = program->counts();
  return {counts.runs, counts.replayed, counts.recordings, counts.bytes};
}

void drop_native_program(int64_t number) {
  std::shared_ptr<const Program> last;  // its tensors are freed without the lock
  const std::lock_guard guard(programs_lock);
  const auto found = programs.find(number);
  if (found == programs.end()) return;
  last = std::move(found->second);
  programs.erase(found);
}

}  // namespace
}  // namespace pagebinder::programs

STABLE_TORCH_LIBRARY_FRAGMENT(pagebinder_cpu, m) {
  m.def("make_native_program(str text, Tensor[] constants) -> int");
  m.def("run_native_program(int program, Tensor[] inputs, int[] sizes) -> Tensor[]");
  m.def("run_profiled_program(int program, Tensor[] inputs, int[] sizes) -> Tensor[]");
  m.def("native_program_counts(int program) -> int[]");
  m.def("record_runs(str when) -> str");
  m.def("drop_native_program(int program) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CompositeExplicitAutograd, m) {
  m.impl("make_native_program", TORCH_BOX(&pagebinder::programs::make_native_program));
  m.impl("run_native_program", TORCH_BOX(&pagebinder::programs::run_native_program));
  m.impl("run_profiled_program", TORCH_BOX(&pagebinder::programs::run_profiled_program));
  m.impl("record_runs", TORCH_BOX(&pagebinder::programs::record_runs));
  m.impl("native_program_counts", TORCH_BOX(&pagebinder::programs::native_program_counts));
  m.impl("drop_native_program", TORCH_BOX(&pagebinder::programs::drop_native_program));
}
