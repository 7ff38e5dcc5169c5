// Runs a model that `compiled.save(DIR, executable="aot")` wrote, without Python: a prompt's prefill, then decode
// steps, each token the one with the largest logit.
//
//     aot_step DIR NUM_TOKENS PROMPT_ID...          aot_step out 8 1 2 3   prints 8 token ids
//
// DIR/step_plan.json says what to load and what to pass; pagebinder/artefacts/aot.py describes it. One request, alone:
//
//     blocks of the cache   | 0: nobody's | group 0: 1 .. n | group 1: n + 1 .. 2 n | ...
//     position p of group g   block 1 + g n + p / block_size, slot block * block_size + p % block_size
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include "json.h"

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

at::ScalarType dtype_named(const std::string& name) {
  static const std::map<std::string, at::ScalarType> NAMES = {
      {"float64", at::kDouble}, {"float32", at::kFloat}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16},
      {"int64", at::kLong},     {"int32", at::kInt},     {"int16", at::kShort},  {"int8", at::kChar},
      {"uint8", at::kByte},     {"bool", at::kBool},     {"float8_e4m3fn", at::kFloat8_e4m3fn},
      {"float8_e5m2", at::kFloat8_e5m2}};
  const auto found = NAMES.find(name);
  return found == NAMES.end() ? fail("unknown dtype " + name), at::kByte : found->second;
}

std::vector<int64_t> integers(const Json& list) {
  std::vector<int64_t> result;
  for (const Json& value : list.list) result.push_back(value.integer());
  return result;
}

Json read_plan(const fs::path& dir) {
  std::ifstream file(dir / "step_plan.json");
  if (!file) fail((dir / "step_plan.json").string() + " cannot be read: save the model with executable=\"aot\"");
  std::stringstream text;
  text << file.rdbuf();
  Json plan = Json::parse(text.str());
  if (plan["format"].integer() != 1) fail("step_plan.json has another format");
  return plan;
}

// A file that holds weights, mapped for as long as the program runs.
char* mapped(const fs::path& dir, const Json& file) {
  fs::path path = dir / file["path"].string;
  if (!fs::exists(path) && file.has("absolute")) path = file["absolute"].string;
  const int opened = open(path.c_str(), O_RDONLY);
  struct stat facts {};
  if (opened < 0 || fstat(opened, &facts) != 0) fail("cannot read the weights in " + path.string());
  if (facts.st_size != file["bytes"].integer()) fail(path.string() + " is not the file that was there at saving");
  void* data = mmap(nullptr, facts.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, opened, 0);
  close(opened);
  if (data == MAP_FAILED) fail("cannot map " + path.string());
  return static_cast<char*>(data);
}

at::Tensor weight(const Json& input, char* data) {
  const auto stored = dtype_named(input["stored_dtype"].string);
  const auto shape = integers(input["shape"]);
  at::Tensor tensor = at::from_blob(data + input["offset_bytes"].integer(), integers(input["stored_shape"]),
                                    at::TensorOptions().dtype(stored));
  if (input.has("coded_by")) {
    const at::Tensor codes = at::empty(shape, at::TensorOptions().dtype(dtype_named(input["dtype"].string)));
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(input["coded_by"].string.c_str(), "");
    torch::jit::Stack arguments{tensor.to(dtype_named(input["plain_dtype"].string)), codes};
    op.callBoxed(&arguments);
    return codes;
  }
  tensor = tensor.to(dtype_named(input["dtype"].string));
  if (input.has("view")) return tensor.view(integers(input["view"])).permute(integers(input["permute"])).contiguous();
  if (!input.has("strides")) return tensor;
  const auto strides = integers(input["strides"]);  // a stride of 0: stored once
  std::vector<int64_t> once = shape;
  for (size_t i = 0; i < once.size(); ++i) once[i] = strides[i] == 0 ? std::min<int64_t>(once[i], 1) : once[i];
  return at::empty_strided(once, strides, tensor.options()).copy_(tensor).expand(shape);
}

class Model {
 public:
  // max_tokens: of the one request that the cache has room for.
  Model(const fs::path& dir, int64_t max_tokens) : plan_(read_plan(dir)), program_(plan_["programs"]["fused"]) {
    for (const Json& library : plan_["libraries"].list) {
      if (!dlopen((dir / library.string).c_str(), RTLD_NOW | RTLD_GLOBAL)) fail(dlerror());
    }
    make_cache(max_tokens);
    std::vector<char*> files;
    for (const Json& file : plan_["files"].list) files.push_back(mapped(dir, file));
    for (const Json& input : program_["inputs"].list) {
      const std::string& role = input["role"].string;
      if (role == "cache") fixed_[input["name"].string] = cache_view(input);
      if (role == "weight") fixed_[input["name"].string] = weight(input, files.at(input["file"].integer()));
    }
    const fs::path library = dir / program_["library"].string;
    runner_ = std::make_unique<torch::inductor::AOTIModelContainerRunnerCpu>(library.string(), 1);
  }

  // Computes the request's tokens at positions start, start + 1, ...; returns the logits of the last one, [1, V].
  at::Tensor step(const std::vector<int64_t>& tokens, int64_t start) {
    const int64_t vocab_size = plan_["vocab_size"].integer();
    for (int64_t id : tokens) {
      if (id < 0 || id >= vocab_size) fail("token " + std::to_string(id) + " is outside the vocabulary");
    }
    std::vector<at::Tensor> inputs;
    for (const Json& input : program_["inputs"].list) {
      const auto fixed = fixed_.find(input["name"].string);
      inputs.push_back(fixed != fixed_.end() ? fixed->second : step_input(input, tokens, start));
    }
    return runner_->run(inputs).at(0);
  }

 private:
  void make_cache(int64_t max_tokens) {
    const Json& cache = plan_["cache"];
    for (const Json& group : cache["groups"].list) {
      block_sizes_.push_back(group["block_size"].integer());
      blocks_per_group_ = std::max(blocks_per_group_, (max_tokens + block_sizes_.back() - 1) / block_sizes_.back());
    }
    num_blocks_ = 1 + blocks_per_group_ * static_cast<int64_t>(block_sizes_.size());
    bytes_per_block_ = cache["bytes_per_block"].integer();
    cache_ = at::zeros({num_blocks_ * bytes_per_block_}, at::kByte);
  }

  at::Tensor cache_view(const Json& input) {
    std::vector<int64_t> shape = integers(input["shape"]);
    shape[0] = num_blocks_;  // its name in the plan
    char* data = static_cast<char*>(cache_.data_ptr()) + input["offset_bytes"].integer();
    return at::from_blob(data, shape, integers(input["strides"]),
                         at::TensorOptions().dtype(dtype_named(input["dtype"].string)));
  }

  at::Tensor step_input(const Json& input, const std::vector<int64_t>& tokens, int64_t start) const {
    const std::string& role = input["role"].string;
    const int64_t count = static_cast<int64_t>(tokens.size());
    const at::Tensor positions = at::arange(start, start + count, at::kLong);
    const auto blocks = [&](const at::Tensor& of_request) {
      return of_request.add(1 + input["group"].integer() * blocks_per_group_);
    };
    at::Tensor value;
    if (role == "input_ids") value = at::tensor(tokens, at::kLong);
    else if (role == "positions") value = positions;
    else if (role == "logits_rows") value = at::tensor({count - 1}, at::kLong);
    else if (role == "query_start_loc") value = at::tensor({int64_t{0}, count}, at::kLong);
    else if (role == "seq_lens") value = at::tensor({start + count}, at::kLong);
    else if (role == "block_table") value = blocks(at::arange(blocks_per_group_, at::kLong)).unsqueeze(0);
    else if (role == "slot_mapping") {
      const int64_t size = block_sizes_.at(input["group"].integer());
      value = blocks(positions.div(size, "floor")).mul(size).add(positions.remainder(size));
    } else fail("this example does not know the input " + input["name"].string);
    return value.to(dtype_named(input["dtype"].string));
  }

  const Json plan_;
  const Json& program_;
  std::vector<int64_t> block_sizes_;
  int64_t blocks_per_group_ = 1, num_blocks_ = 0, bytes_per_block_ = 0;
  at::Tensor cache_;
  std::map<std::string, at::Tensor> fixed_;  // inputs that are the same in every step
  std::unique_ptr<torch::inductor::AOTIModelContainerRunnerCpu> runner_;
};

int64_t number(const std::string& text) {
  const bool digits = !text.empty() && text.size() < 19 && text.find_first_not_of("0123456789") == std::string::npos;
  return digits ? std::stoll(text) : (fail("\"" + text + "\" is no whole number"), 0);
}

int main(int argc, char** argv) try {
  if (argc < 4) fail("usage: aot_step DIR NUM_TOKENS PROMPT_ID...");
  const int64_t num_tokens = number(argv[2]);
  std::vector<int64_t> prompt;
  for (int i = 3; i < argc; ++i) prompt.push_back(number(argv[i]));
  const int64_t limit = read_plan(argv[1])["max_model_len"].integer();
  if (static_cast<int64_t>(prompt.size()) + num_tokens > limit) {
    fail("more than the model's " + std::to_string(limit) + " tokens");
  }
  Model model(argv[1], static_cast<int64_t>(prompt.size()) + num_tokens);
  int64_t done = 0;
  std::vector<int64_t> next = prompt;
  for (int64_t i = 0; i < num_tokens; ++i) {
    const at::Tensor logits = model.step(next, done);
    done += static_cast<int64_t>(next.size());
    next = {logits.argmax(-1).item<int64_t>()};
    std::cout << next[0] << (i + 1 < num_tokens ? " " : "\n");
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << "aot_step: " << error.what() << "\n";
  return 1;
}
