// Tensors of recurrences for bindings: checks them and describes them as the kernels want it.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <vector>

#include "element_of.h"
#include "num_threads.h"
#include "recorder.h"
#include "recurrent.h"
#include "thread_pool.h"

namespace pagebinder {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline bool has_shape(const Tensor& t, std::initializer_list<int64_t> shape) {
  if (t.dim() != static_cast<int64_t>(shape.size())) return false;
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) != shape.begin()[d]) return false;
  return true;
}

// Operands as the kernels read them; keeps copies of those whose rows are not adjacent or of another type.
class Operands {
 public:
  // Rows along the last dimension.
  Operand rows(const Tensor& t) {
    Tensor x = of_element_type(t);
    const int64_t last = x.dim() - 1;
    if (x.size(last) > 1 && x.stride(last) != 1) copies_.push_back(x = torch::stable::contiguous(x));
    return describe(x, last);
  }
  Operand rows(const std::optional<Tensor>& t) { return t.has_value() ? rows(*t) : Operand{}; }

  // Rows of one value: every dimension counts rows.
  Operand values(const Tensor& t) { return describe(of_element_type(t), t.dim()); }
  Operand values(const std::optional<Tensor>& t) { return t.has_value() ? values(*t) : Operand{}; }

  // Launches kernel(args), which says what is wrong or null.
  template <class Args>
  void run(const char* (*kernel)(const Args&), const Args& args) const {
    const auto call = [kernel, args] {
      const char* error = kernel(args);
      PB_CHECK(error == nullptr, error);
    };
    launch(call, !copies_.empty());
  }

 private:
  std::vector<Tensor> copies_;

  Tensor of_element_type(const Tensor& t) {
    if (is_float(t.scalar_type())) return t;
    copies_.push_back(torch::stable::to(t, ScalarType::Float));
    return copies_.back();
  }
  Operand describe(const Tensor& x, int64_t row_dims) {
    return {x.const_data_ptr(), element_of(x, "an operand"),
            {row_dims > 0 ? x.stride(0) : 0, row_dims > 1 ? x.stride(1) : 0}};
  }
};

inline const int32_t* integers(const Tensor& t, int64_t dim, const char* name) {
  PB_CHECK(t.scalar_type() == ScalarType::Int, name, " must be int32");
  PB_CHECK(t.dim() == dim, name, " must have ", dim, " dims");
  PB_CHECK(t.numel() == 0 || t.size(dim - 1) == 1 || t.stride(dim - 1) == 1, name, " must have last stride 1");
  return static_cast<const int32_t*>(t.const_data_ptr());
}

inline Step step_of(int64_t num_tokens, const Tensor& block_table, const Tensor& seq_lens,
                    const Tensor& query_start_loc, int64_t block_size) {
  Step s{};
  s.block_table = integers(block_table, 2, "block_table"), s.seq_lens = integers(seq_lens, 1, "seq_lens");
  s.query_start_loc = integers(query_start_loc, 1, "query_start_loc");
  PB_CHECK(block_size > 0, "block_size must be positive");
  PB_CHECK(seq_lens.size(0) <= block_table.size(0),
           "seq_lens must have one entry a request, and block_table at least as many rows");
  PB_CHECK(query_start_loc.size(0) == seq_lens.size(0) + 1,
           "query_start_loc must have one entry more than seq_lens");
  s.num_tokens = num_tokens, s.num_requests = seq_lens.size(0), s.block_size = block_size;
  s.max_blocks = block_table.size(1), s.table_stride = block_table.stride(0);
  s.num_threads = pagebinder::num_threads(), s.run = run_parallel;
  return s;
}

// cache [N, *shape] of one type; `message` says so.
inline StateCache cache_of(const Tensor& cache, std::initializer_list<int64_t> shape, ScalarType type,
                           const char* message) {
  bool fits = cache.dim() == static_cast<int64_t>(shape.size()) + 1 && cache.scalar_type() == type;
  for (size_t d = 0; fits && d < shape.size(); ++d) fits = cache.size(d + 1) == shape.begin()[d];
  PB_CHECK(fits, message);
  StateCache c{cache.mutable_data_ptr(), element_of(cache, "the cache"), cache.size(0), cache.stride(0), {}};
  for (size_t d = 0; d < shape.size(); ++d) c.strides[d] = cache.stride(d + 1);
  return c;
}

// [T, width] or [T, rows, width]
inline Result result_of(const Tensor& out) {
  const int64_t last = out.dim() - 1;
  return {out.mutable_data_ptr(), element_of(out, "the output"), last == 1 ? 1 : out.size(1),
          out.size(last)};
}

}  // namespace pagebinder
