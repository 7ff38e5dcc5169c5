// Registers the ops that fill latent caches under `pagebinder_cpu`, see binding.cpp.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "checks.h"
#include "direct_calls.h"
#include "latent.h"
#include "latent_tensors.h"
#include "num_threads.h"
#include "thread_pool.h"

namespace {

using pagebinder::FloatData;
using pagebinder::float_kind;
using pagebinder::has_dense_rows;
using pagebinder::latent_pages;
using pagebinder::run_parallel;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

FloatData elements(const Tensor& t, int64_t dim, const char* name) {
  PB_CHECK(t.dim() == dim && has_dense_rows(t), name, " must have ", dim, " dims and last stride 1");
  return {float_kind(t, name), t.const_data_ptr()};
}

const int32_t* integers(const Tensor& t, int64_t dim, const char* name) {
  PB_CHECK(t.scalar_type() == ScalarType::Int && t.dim() == dim, name, " must be int32 with ", dim, " dims");
  PB_CHECK(has_dense_rows(t), name, " must have last stride 1");
  return static_cast<const int32_t*>(t.const_data_ptr());
}

void write_rows(pagebinder::LatentWriteArgs a, const Tensor& rows, const Tensor& cache, const Tensor& slot_mapping,
                const std::string& layout, int64_t rope_dim) {
  a.rows = elements(rows, 2, "rows");
  a.num_tokens = rows.size(0), a.row_stride = rows.stride(0);
  a.cache = latent_pages(cache, layout, rows.size(1), rope_dim);
  a.slot_mapping = integers(slot_mapping, 1, "slot_mapping");
  PB_CHECK(slot_mapping.size(0) == a.num_tokens, "slot_mapping must have one slot a token");
  a.num_threads = pagebinder::num_threads(), a.run = run_parallel;
  const char* error = pagebinder::latent_cache_write(a);
  PB_CHECK(error == nullptr, error);
}

void latent_cache_write(const Tensor& rows, const Tensor& cache, const Tensor& slot_mapping, std::string layout,
                        int64_t rope_dim) {
  write_rows({}, rows, cache, slot_mapping, layout, rope_dim);
}

void kv_rope_quant_store(const Tensor& kv, const Tensor& cos, const Tensor& sin, const Tensor& cache,
                         const Tensor& slot_mapping, std::string layout, int64_t rope_dim) {
  pagebinder::LatentWriteArgs a{};
  a.cos = elements(cos, 2, "cos"), a.sin = elements(sin, 2, "sin");
  PB_CHECK(cos.size(0) == sin.size(0) && cos.size(1) == sin.size(1), "cos and sin are [T, pairs]");
  PB_CHECK(a.cos.type == a.sin.type, "cos and sin must have one float type");
  PB_CHECK(kv.dim() == 2 && cos.size(0) == kv.size(0), "cos and sin must have one row a token");
  PB_CHECK(2 * cos.size(1) <= kv.size(1), "cos and sin rotate more channels than a row has");
  a.pairs = static_cast<int>(cos.size(1)), a.cos_stride = cos.stride(0), a.sin_stride = sin.stride(0);
  write_rows(a, kv, cache, slot_mapping, layout, rope_dim);
}

// The operands that say what an entry is.
void describe_entries(pagebinder::CompressArgs& a, const Tensor& kv, const Tensor& gate, const Tensor& position_bias,
                      const std::optional<Tensor>& norm_weight, const Tensor& inv_freq, int64_t ratio,
                      bool overlap) {
  PB_CHECK(ratio > 0, "ratio must be positive");
  const FloatData tokens = elements(kv, 2, "kv"), gates = elements(gate, 2, "gate");
  PB_CHECK(kv.size(0) == gate.size(0) && kv.size(1) == gate.size(1), "kv and gate are [T, c * d]");
  PB_CHECK(tokens.type == gates.type, "kv and gate must have one float type");
  a.slots = overlap ? 2 : 1, a.ratio = static_cast<int>(ratio), a.width = static_cast<int>(kv.size(1) / a.slots);
  PB_CHECK(a.width > 0 && kv.size(1) == a.width * a.slots, "kv must be d wide, 2 * d with overlap");
  a.norm_weight = {};
  if (norm_weight.has_value()) {
    a.norm_weight = elements(*norm_weight, 1, "norm_weight");
    PB_CHECK(norm_weight->size(0) == a.width, "kv must be d wide, 2 * d with overlap, as norm_weight is");
  }
  a.position_bias = elements(position_bias, 2, "position_bias");
  PB_CHECK(position_bias.size(0) == ratio && position_bias.size(1) == kv.size(1),
           "position_bias is [ratio, c * d]");
  PB_CHECK(a.position_bias.type == pagebinder::RowKind::F32 || a.position_bias.type == tokens.type,
           "position_bias must be float32 or of kv's dtype");
  PB_CHECK(inv_freq.dim() == 1 && inv_freq.scalar_type() == ScalarType::Float && has_dense_rows(inv_freq),
           "inv_freq is [pairs] float32");
  PB_CHECK(2 * inv_freq.size(0) <= a.width, "inv_freq rotates more channels than an entry has");
  a.num_tokens = kv.size(0), a.type = tokens.type, a.kv = tokens.base, a.gate = gates.base;
  a.kv_stride = kv.stride(0), a.gate_stride = gate.stride(0), a.bias_stride = position_bias.stride(0);
  a.inv_freq = static_cast<const float*>(inv_freq.const_data_ptr()), a.pairs = static_cast<int>(inv_freq.size(0));
}

void describe_states(pagebinder::CompressArgs& a, const Tensor& state_cache, const Tensor& state_table,
                     int64_t block_size) {
  PB_CHECK(state_cache.scalar_type() == ScalarType::Float && state_cache.dim() == 4 &&
               state_cache.size(1) == a.slots && state_cache.size(2) == 3 && state_cache.size(3) == a.width &&
               has_dense_rows(state_cache),
           "state_cache is [N, c, 3, d] float32, last stride 1");
  PB_CHECK(block_size > 0, "block_size must be positive");
  a.state = static_cast<float*>(state_cache.mutable_data_ptr());
  a.num_state_blocks = state_cache.size(0), a.state_block_stride = state_cache.stride(0);
  a.state_slot_stride = state_cache.stride(1), a.state_part_stride = state_cache.stride(2);
  a.state_table = integers(state_table, 2, "block_table"), a.state_table_stride = state_table.stride(0);
  a.max_state_blocks = state_table.size(1), a.block_size = block_size;
}

void compress_norm_rope_store(const Tensor& kv, const Tensor& gate, const Tensor& position_bias,
                              const std::optional<Tensor>& norm_weight, const Tensor& inv_freq,
                              const Tensor& state_cache,
                              const Tensor& state_table, const Tensor& entry_cache, const Tensor& entry_table,
                              const Tensor& seq_lens, const Tensor& query_start_loc, int64_t ratio, bool overlap,
                              double eps, double rope_scale, int64_t block_size, std::string layout,
                              int64_t rope_dim) {
  pagebinder::CompressArgs a{};
  describe_entries(a, kv, gate, position_bias, norm_weight, inv_freq, ratio, overlap);
  describe_states(a, state_cache, state_table, block_size);
  a.eps = static_cast<float>(eps), a.rope_scale = static_cast<float>(rope_scale);
  a.entries = latent_pages(entry_cache, layout, a.width, rope_dim);
  a.entry_table = integers(entry_table, 2, "entry_table"), a.entry_table_stride = entry_table.stride(0);
  a.max_entry_blocks = entry_table.size(1);
  a.seq_lens = integers(seq_lens, 1, "seq_lens"), a.num_requests = seq_lens.size(0);
  a.query_start_loc = integers(query_start_loc, 1, "query_start_loc");
  PB_CHECK(state_table.size(0) >= a.num_requests && entry_table.size(0) >= a.num_requests,
           "block_table and entry_table must have at least as many rows as requests");
  PB_CHECK(query_start_loc.size(0) == a.num_requests + 1,
           "query_start_loc must have one entry more than seq_lens");
  a.num_threads = pagebinder::num_threads(), a.run = run_parallel;
  const char* error = pagebinder::compress_norm_rope_store(a);
  PB_CHECK(error == nullptr, error);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "latent_cache_write", TORCH_BOX(&latent_cache_write));
  pagebinder::implement(m, "kv_rope_quant_store", TORCH_BOX(&kv_rope_quant_store));
  pagebinder::implement(m, "compress_norm_rope_store", TORCH_BOX(&compress_norm_rope_store));
}
