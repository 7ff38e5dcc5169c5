// Registers the products of MLA's weights under `pagebinder_cpu`; mla.py puts it together with attention.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "checks.h"
#include "direct_calls.h"
#include "element_of.h"
#include "mla.h"
#include "num_threads.h"
#include "thread_pool.h"

namespace {

using pagebinder::run_parallel;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

bool last_is_dense(const Tensor& t) {
  return t.size(t.dim() - 1) == 1 || t.stride(t.dim() - 1) == 1;
}

// x [T, H, I], weight [H, I, O] or, dotted, [H, O, I] -> out[:, :, :O] of [T, H, >= O]
void mla_head_product(const Tensor& x, const Tensor& weight, const Tensor& out, bool dotted) {
  PB_CHECK(x.dim() == 3 && weight.dim() == 3 && out.dim() == 3, "x, weight and out must be 3-D");
  pagebinder::HeadProductArgs a{};
  a.num_tokens = x.size(0), a.num_heads = x.size(1), a.width_in = x.size(2), a.dotted = dotted;
  a.width_out = weight.size(dotted ? 1 : 2);
  PB_CHECK(weight.size(0) == a.num_heads && weight.size(dotted ? 2 : 1) == a.width_in,
           "weight does not fit x [T, ", a.num_heads, ", ", a.width_in, "]");
  PB_CHECK(out.size(0) == a.num_tokens && out.size(1) == a.num_heads && out.size(2) >= a.width_out,
           "out must be [T, H, at least ", a.width_out, "]");
  PB_CHECK(weight.scalar_type() == x.scalar_type() && out.scalar_type() == x.scalar_type(),
           "x, weight and out must have the same dtype");
  PB_CHECK(last_is_dense(x) && last_is_dense(weight) && last_is_dense(out), "last strides must be 1");
  a.x = x.const_data_ptr(), a.x_token_stride = x.stride(0), a.x_head_stride = x.stride(1);
  a.weight = weight.const_data_ptr();
  a.weight_head_stride = weight.stride(0), a.weight_row_stride = weight.stride(1);
  a.out = out.mutable_data_ptr(), a.out_token_stride = out.stride(0), a.out_head_stride = out.stride(1);
  a.num_threads = pagebinder::num_threads(), a.run = run_parallel;
  const char* error = pagebinder::head_product(a, pagebinder::element_of(x, "the input of latent attention"));
  PB_CHECK(error == nullptr, "mla_head_product: ", error);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pagebinder_cpu, m) {
  m.def("mla_head_product(Tensor x, Tensor weight, Tensor(a!) out, bool dotted) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "mla_head_product", TORCH_BOX(&mla_head_product));
}
