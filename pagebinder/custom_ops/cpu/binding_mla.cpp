// Registers what multi-head latent attention is made of under `pagebinder_cpu`; mla.py puts it together.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "attention.h"
#include "mla.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void run_parallel(int num_workers, void (*body)(void*, int), void* context) {
  torch::stable::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(context, static_cast<int>(i));
  });
}

bool last_is_dense(const Tensor& t) {
  return t.size(t.dim() - 1) == 1 || t.stride(t.dim() - 1) == 1;
}

pagebinder::Element element_of(const Tensor& t) {
  const ScalarType dtype = t.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                  "latent attention takes float32, bfloat16 and float16");
  return dtype == ScalarType::Float ? pagebinder::Element::F32
         : dtype == ScalarType::BFloat16 ? pagebinder::Element::BF16
                                         : pagebinder::Element::F16;
}

// x [T, H, I], weight [H, I, O] or, dotted, [H, O, I] -> out[:, :, :O] of [T, H, >= O]
void mla_head_product(const Tensor& x, const Tensor& weight, const Tensor& out, bool dotted) {
  STD_TORCH_CHECK(x.dim() == 3 && weight.dim() == 3 && out.dim() == 3, "x, weight and out must be 3-D");
  pagebinder::HeadProductArgs a{};
  a.num_tokens = x.size(0), a.num_heads = x.size(1), a.width_in = x.size(2), a.dotted = dotted;
  a.width_out = weight.size(dotted ? 1 : 2);
  STD_TORCH_CHECK(weight.size(0) == a.num_heads && weight.size(dotted ? 2 : 1) == a.width_in,
                  "weight does not fit x [T, ", a.num_heads, ", ", a.width_in, "]");
  STD_TORCH_CHECK(out.size(0) == a.num_tokens && out.size(1) == a.num_heads && out.size(2) >= a.width_out,
                  "out must be [T, H, at least ", a.width_out, "]");
  STD_TORCH_CHECK(weight.scalar_type() == x.scalar_type() && out.scalar_type() == x.scalar_type(),
                  "x, weight and out must have the same dtype");
  STD_TORCH_CHECK(last_is_dense(x) && last_is_dense(weight) && last_is_dense(out), "last strides must be 1");
  a.x = x.const_data_ptr(), a.x_token_stride = x.stride(0), a.x_head_stride = x.stride(1);
  a.weight = weight.const_data_ptr();
  a.weight_head_stride = weight.stride(0), a.weight_row_stride = weight.stride(1);
  a.out = out.mutable_data_ptr(), a.out_token_stride = out.stride(0), a.out_head_stride = out.stride(1);
  a.num_threads = static_cast<int>(torch::stable::get_num_threads()), a.run = run_parallel;
  const char* error = pagebinder::head_product(a, element_of(x));
  STD_TORCH_CHECK(error == nullptr, "mla_head_product: ", error);
}

const int32_t* index_data(const Tensor& t, int64_t dim, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.dim() == dim, name, " must be int32 with ", dim, " dims");
  STD_TORCH_CHECK(t.numel() == 0 || last_is_dense(t), name, " must have last stride 1");
  return static_cast<const int32_t*>(t.const_data_ptr());
}

// Attention of all heads to the same rows [N, B, D], whose leading part is the value: q [T, H, D] -> out [T, H, Dv].
void latent_attention(const Tensor& q, const Tensor& cache, const Tensor& table, const Tensor& seq_lens,
                      const Tensor& query_start_loc, const Tensor& out, double scale, std::optional<int64_t> window) {
  STD_TORCH_CHECK(q.dim() == 3 && cache.dim() == 3 && out.dim() == 3 && q.size(2) == cache.size(2),
                  "q must be [T, H, D], cache [N, B, D] and out [T, H, Dv]");
  STD_TORCH_CHECK(q.scalar_type() == cache.scalar_type() && out.scalar_type() == q.scalar_type(),
                  "q, cache and out must have the same dtype");
  STD_TORCH_CHECK(last_is_dense(q) && last_is_dense(cache), "the last strides of q and cache must be 1");
  STD_TORCH_CHECK(out.size(0) == q.size(0) && out.size(1) == q.size(1) && out.size(2) <= q.size(2) &&
                      last_is_dense(out) && out.stride(1) == out.size(2) &&
                      (out.size(0) <= 1 || out.stride(0) == out.size(1) * out.size(2)),
                  "out must be contiguous [T, H, Dv] with Dv <= D");
  pagebinder::AttentionArgs a{};
  a.num_tokens = q.size(0), a.num_heads = q.size(1), a.head_dim = q.size(2), a.head_dim_v = out.size(2);
  a.num_blocks = cache.size(0), a.num_kv_heads = 1, a.block_size = cache.size(1), a.value_offset = 0;
  a.q = q.const_data_ptr(), a.q_token_stride = q.stride(0), a.q_head_stride = q.stride(1);
  a.cache = cache.const_data_ptr(), a.cache_block_stride = cache.stride(0), a.cache_slot_stride = cache.stride(1);
  a.block_table = index_data(table, 2, "table"), a.block_table_stride = table.stride(0), a.max_blocks = table.size(1);
  a.seq_lens = index_data(seq_lens, 1, "seq_lens"), a.num_requests = seq_lens.size(0);
  a.query_start_loc = index_data(query_start_loc, 1, "query_start_loc");
  STD_TORCH_CHECK(table.size(0) >= a.num_requests && query_start_loc.size(0) == a.num_requests + 1,
                  "table, seq_lens and query_start_loc must have at least R, R and R + 1 rows");
  STD_TORCH_CHECK(!window || *window > 0, "window must be positive");
  a.scale = static_cast<float>(scale), a.causal = true, a.window = window.value_or(pagebinder::NO_WINDOW);
  a.num_threads = static_cast<int>(torch::stable::get_num_threads()), a.run = run_parallel;
  a.out = out.mutable_data_ptr();
  const pagebinder::Element element = element_of(q);
  const char* error = element == pagebinder::Element::F32    ? pagebinder::paged_attention_f32(a)
                      : element == pagebinder::Element::BF16 ? pagebinder::paged_attention_bf16(a)
                                                             : pagebinder::paged_attention_f16(a);
  STD_TORCH_CHECK(error == nullptr, "paged_mla_attention: ", error);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pagebinder_cpu, m) {
  m.def("mla_head_product(Tensor x, Tensor weight, Tensor(a!) out, bool dotted) -> ()");
  m.def("latent_attention(Tensor q, Tensor cache, Tensor table, Tensor seq_lens, Tensor query_start_loc, "
        "Tensor(a!) out, *, float scale, int? window) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  m.impl("mla_head_product", TORCH_BOX(&mla_head_product));
  m.impl("latent_attention", TORCH_BOX(&latent_attention));
}
