// Registers pointwise programs under `pagebinder_cpu`.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "checks.h"
#include "direct_calls.h"
#include "element_of.h"
#include "num_threads.h"
#include "pointwise.h"
#include "recorder.h"
#include "row_tensors.h"

namespace {

using namespace pagebinder;

Element type_of(const Tensor& x) {
  if (x.scalar_type() == ScalarType::Bool) return Element::BOOL;
  PB_CHECK(is_float(x.scalar_type()), "inputs must be float32, bfloat16, float16 or bool");
  return element_of(x, "x");
}

ScalarType scalar_type_of(Element type) {
  constexpr ScalarType TYPES[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Bool};
  return TYPES[static_cast<int>(type)];
}

// The size that all of these broadcast to, dimension by dimension from the last.
std::vector<int64_t> broadcast_sizes(const std::vector<Tensor>& inputs) {
  std::vector<int64_t> sizes;
  for (const Tensor& x : inputs) sizes.resize(std::max<size_t>(sizes.size(), x.dim()), 1);
  for (const Tensor& x : inputs) {
    const size_t before = sizes.size() - x.dim();
    for (int64_t d = 0; d < x.dim(); ++d) {
      int64_t& size = sizes[before + d];
      PB_CHECK(x.size(d) == size || x.size(d) == 1 || size == 1, "inputs of ", size, " and ", x.size(d),
               " elements in one dimension do not broadcast");
      if (size == 1) size = x.size(d);
    }
  }
  return sizes;
}

pointwise::Input input_of(const Tensor& x, const std::vector<int64_t>& sizes) {
  pointwise::Input input{x.const_data_ptr(), type_of(x), 0, {}, {}};
  const size_t before = sizes.size() - x.dim();
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1) continue;
    const bool repeats = d < before || x.size(d - before) == 1;
    const int64_t stride = repeats ? 0 : x.stride(d - before);
    const int last = input.dims - 1;
    if (last >= 0 && input.strides[last] == stride * sizes[d]) {
      input.sizes[last] *= sizes[d], input.strides[last] = stride;
      continue;
    }
    PB_CHECK(input.dims < pointwise::MOST_DIMS, "an input of more than ", pointwise::MOST_DIMS, " dimensions");
    input.sizes[input.dims] = sizes[d], input.strides[input.dims] = stride;
    ++input.dims;
  }
  return input;
}

std::vector<Tensor> pointwise_op(std::vector<Tensor> inputs, std::string program) {
  pointwise::Args args{&pointwise::program_of(program), {}, {}, 1, num_threads()};
  PB_CHECK(args.program->num_inputs <= static_cast<int>(inputs.size()) && !inputs.empty(),
           "a pointwise program reads ", args.program->num_inputs, " inputs, not ", inputs.size());
  const std::vector<int64_t> sizes = broadcast_sizes(inputs);
  for (int64_t size : sizes) args.numel *= size;
  for (const Tensor& x : inputs) args.inputs.push_back(input_of(x, sizes));
  std::vector<Tensor> results;
  for (Element type : args.program->results) {
    results.push_back(new_tensor(sizes, scalar_type_of(type)));
    args.results.push_back(results.back().mutable_data_ptr());
  }
  if (args.numel > 0) launch([args] { pointwise::run(args); });
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "pointwise", TORCH_BOX(&pointwise_op));
}
