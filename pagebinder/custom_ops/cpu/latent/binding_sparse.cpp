// Registers attention to latent rows and the indexer under `pagebinder_cpu`: checks operands, fills in arguments.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "binding_attention.h"
#include "checks.h"
#include "direct_calls.h"
#include "element_of.h"
#include "indexer.h"
#include "latent_tensors.h"
#include "num_threads.h"
#include "sparse_mla.h"
#include "thread_pool.h"

namespace {

using pagebinder::Element;
using pagebinder::index_data;
using pagebinder::new_tensor;
using pagebinder::PagedRows;
using pagebinder::run_parallel;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Are a cache of rows as wide as q's and its table as they must be?
PagedRows paged_rows(const Tensor& q, const Tensor& cache, const Tensor& table, int64_t num_requests,
                     const std::string& layout, int64_t rope_dim, const std::string& cache_name) {
  const std::string table_name = cache_name.substr(0, cache_name.find('_')) + "_table";
  PB_CHECK(layout != "plain" || cache.scalar_type() == q.scalar_type(), "q and ", cache_name,
           " must have the same dtype");
  PagedRows rows{};
  rows.pages = pagebinder::latent_pages(cache, layout, q.size(2), rope_dim);
  rows.table = index_data(table, 2, table_name.c_str());
  PB_CHECK(table.size(0) >= num_requests, table_name, " must have at least one row a request");
  rows.table_stride = table.stride(0), rows.max_blocks = table.size(1);
  return rows;
}

void check_lengths(const Tensor& seq_lens, const Tensor& query_start_loc) {
  index_data(seq_lens, 1, "seq_lens");
  index_data(query_start_loc, 1, "query_start_loc");
  PB_CHECK(query_start_loc.size(0) == seq_lens.size(0) + 1,
           "query_start_loc must have one entry more than seq_lens");
}

template <class Args>
void set_batch(Args& a, const Tensor& q, const Tensor& seq_lens, const Tensor& query_start_loc) {
  PB_CHECK(q.dim() == 3 && q.size(1) > 0 && q.size(2) > 0, "q must be [T, heads, width]");
  PB_CHECK(q.size(2) == 1 || q.stride(2) == 1, "the last stride of q must be 1");
  check_lengths(seq_lens, query_start_loc);
  a.num_tokens = q.size(0), a.num_heads = q.size(1), a.width = q.size(2), a.num_requests = seq_lens.size(0);
  a.q = q.const_data_ptr(), a.q_token_stride = q.stride(0), a.q_head_stride = q.stride(1);
  a.seq_lens = index_data(seq_lens, 1, "seq_lens");
  a.query_start_loc = index_data(query_start_loc, 1, "query_start_loc");
  a.num_threads = pagebinder::num_threads(), a.run = run_parallel;
}

template <class Args>
const char* by_type(const Tensor& q, const Args& args, const char* (*f32)(const Args&),
                    const char* (*bf16)(const Args&), const char* (*f16)(const Args&)) {
  const Element type = pagebinder::element_of(q, "q");
  return (type == Element::F32 ? f32 : type == Element::BF16 ? bf16 : f16)(args);
}

Tensor sparse_mla_attention(const Tensor& q, std::optional<Tensor> window_cache, std::optional<Tensor> window_table,
                            std::optional<Tensor> entry_cache, std::optional<Tensor> entry_table,
                            std::optional<Tensor> indices, const Tensor& seq_lens, const Tensor& query_start_loc,
                            std::optional<Tensor> sinks, double scale, int64_t window, int64_t ratio,
                            int64_t head_dim_v, std::string layout, int64_t rope_dim) {
  pagebinder::SparseMlaArgs a{};
  set_batch(a, q, seq_lens, query_start_loc);
  PB_CHECK(head_dim_v > 0 && head_dim_v <= a.width, "head_dim_v must be between 1 and D");
  PB_CHECK(window >= 0 && ratio > 0, "window must not be negative, ratio must be positive");
  PB_CHECK(window == 0 || window_cache, "a window needs window_cache");
  PB_CHECK(window_cache.has_value() == window_table.has_value(), "window_cache and window_table go together");
  PB_CHECK(entry_cache.has_value() == entry_table.has_value(), "entry_cache and entry_table go together");
  PB_CHECK(!indices || entry_cache, "indices without entry_cache");
  if (window_cache)
    a.window_rows = paged_rows(q, *window_cache, *window_table, a.num_requests, layout, rope_dim, "window_cache");
  if (entry_cache)
    a.entry_rows = paged_rows(q, *entry_cache, *entry_table, a.num_requests, layout, rope_dim, "entry_cache");
  if (indices) {
    a.indices = index_data(*indices, 2, "indices");
    PB_CHECK(indices->size(0) == a.num_tokens, "indices must be int32 [T, K]");
    a.indices_stride = indices->stride(0), a.num_indices = indices->size(1);
  }
  if (sinks) {
    PB_CHECK(sinks->scalar_type() == ScalarType::Float && sinks->dim() == 1 && sinks->size(0) == a.num_heads &&
                 pagebinder::last_is_dense(*sinks),
             "sinks must be float32 [H], contiguous");
    a.sinks = static_cast<const float*>(sinks->const_data_ptr());
  }
  a.width_v = head_dim_v, a.window = window, a.ratio = ratio, a.scale = static_cast<float>(scale);
  Tensor out = new_tensor({a.num_tokens, a.num_heads, head_dim_v}, q.scalar_type());
  a.out = out.mutable_data_ptr();
  using namespace pagebinder;
  const char* error = by_type<SparseMlaArgs>(q, a, sparse_mla_f32, sparse_mla_bf16, sparse_mla_f16);
  PB_CHECK(error == nullptr, "sparse_mla_attention: ", error);
  return out;
}

Tensor indexer_score_topk(const Tensor& q, const Tensor& weights, const Tensor& k_cache, const Tensor& k_table,
                          const Tensor& seq_lens, const Tensor& query_start_loc, int64_t topk, int64_t ratio,
                          double scale, std::string layout) {
  pagebinder::IndexerArgs a{};
  set_batch(a, q, seq_lens, query_start_loc);
  PB_CHECK(topk > 0 && ratio > 0, "topk and ratio must be positive");
  PB_CHECK(weights.dim() == 2 && weights.size(0) == a.num_tokens && weights.size(1) == a.num_heads,
           "weights must be [T, Hi]");
  a.float_weights = weights.scalar_type() == ScalarType::Float;
  PB_CHECK(a.float_weights || weights.scalar_type() == q.scalar_type(),
           "weights must be float32 or of q's dtype");
  a.weights = weights.const_data_ptr();
  a.weight_token_stride = weights.stride(0), a.weight_head_stride = weights.stride(1);
  PB_CHECK(layout == "plain" || layout == "fp8_index" || layout == "fp4_index", "layout ", layout,
           " is not one of plain, fp8_index, fp4_index");
  a.keys = paged_rows(q, k_cache, k_table, a.num_requests, layout, 0, "k_cache");
  a.topk = topk, a.ratio = ratio, a.scale = static_cast<float>(scale);
  Tensor out = new_tensor({a.num_tokens, topk}, ScalarType::Int);
  a.out = static_cast<int32_t*>(out.mutable_data_ptr());
  using namespace pagebinder;
  const char* error = by_type<IndexerArgs>(q, a, indexer_f32, indexer_bf16, indexer_f16);
  PB_CHECK(error == nullptr, "indexer_score_topk: ", error);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "sparse_mla_attention", TORCH_BOX(&sparse_mla_attention));
  pagebinder::implement(m, "indexer_score_topk", TORCH_BOX(&indexer_score_topk));
}
