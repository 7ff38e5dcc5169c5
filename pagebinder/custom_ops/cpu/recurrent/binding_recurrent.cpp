// Registers the paged recurrences under `pagebinder_cpu`, see binding.cpp.
#include <torch/csrc/stable/library.h>

#include <limits>
#include <string>

#include "checks.h"
#include "direct_calls.h"
#include "new_tensor.h"
#include "recurrent_tensors.h"

namespace {

using namespace pagebinder;

// ---- single channels -------------------------------------------------------------------------------------------

Tensor paged_short_conv(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias, const Tensor& cache,
                        const Tensor& block_table, const Tensor& seq_lens, const Tensor& query_start_loc,
                        int64_t block_size, std::optional<std::string> activation) {
  PB_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(0) && weight.size(1) >= 2,
           "short_conv takes x [T, C] and weight [C, K] with at least 2 taps");
  PB_CHECK(!activation || *activation == "silu", "activation='", activation.value_or(""),
           "': use one of None, 'silu'");
  PB_CHECK(!bias || has_shape(*bias, {x.size(1)}), "bias is [C]");
  ShortConvArgs a{};
  a.channels = x.size(1), a.taps = weight.size(1), a.silu = activation.has_value();
  a.cache = cache_of(cache, {a.channels, a.taps - 1}, x.scalar_type(),
                     "the cache of a short convolution is [N, C, K - 1] in x's dtype");
  a.step = step_of(x.size(0), block_table, seq_lens, query_start_loc, block_size);
  Operands operands;
  a.x = operands.rows(x), a.weight = operands.rows(weight), a.bias = operands.rows(bias);
  Tensor out = new_tensor({x.size(0), x.size(1)}, x.scalar_type());
  a.out = result_of(out);
  operands.run(short_conv, a);
  return out;
}

Tensor paged_linear_recurrence(const Tensor& x, const Tensor& decay, const Tensor& cache, const Tensor& block_table,
                               const Tensor& seq_lens, const Tensor& query_start_loc, int64_t block_size) {
  PB_CHECK(x.dim() == 2 && has_shape(decay, {x.size(0), x.size(1)}),
           "linear_recurrence takes x and decay [T, W]");
  LinearRecurrenceArgs a{};
  a.channels = x.size(1);
  a.cache = cache_of(cache, {a.channels}, ScalarType::Float, "the cache of a linear_recurrence is [N, W] float32");
  a.step = step_of(x.size(0), block_table, seq_lens, query_start_loc, block_size);
  Operands operands;
  a.x = operands.rows(x), a.decay = operands.rows(decay);
  Tensor out = new_tensor({x.size(0), x.size(1)}, x.scalar_type());
  a.out = result_of(out);
  operands.run(linear_recurrence, a);
  return out;
}

Tensor paged_selective_scan(const Tensor& x, const Tensor& dt, const Tensor& b, const Tensor& c, const Tensor& A,
                            std::optional<Tensor> D, std::optional<Tensor> dt_bias, const Tensor& cache,
                            const Tensor& block_table, const Tensor& seq_lens, const Tensor& query_start_loc,
                            int64_t block_size, bool dt_softplus) {
  PB_CHECK(x.dim() == 2 && has_shape(dt, {x.size(0), x.size(1)}), "selective_scan takes x and dt [T, W]");
  PB_CHECK(b.dim() == 2 && b.size(0) == x.size(0) && has_shape(c, {b.size(0), b.size(1)}),
           "selective_scan takes B and C [T, N]");
  SelectiveScanArgs a{};
  a.channels = x.size(1), a.width = b.size(1), a.dt_softplus = dt_softplus;
  PB_CHECK(has_shape(A, {a.channels, a.width}), "A is [W, N]");
  PB_CHECK(!D || has_shape(*D, {a.channels}), "D is [W]");
  PB_CHECK(!dt_bias || has_shape(*dt_bias, {a.channels}), "dt_bias is [W]");
  a.cache = cache_of(cache, {a.channels, a.width}, ScalarType::Float,
                     "the cache of a selective_scan is [blocks, W, N] float32");
  a.step = step_of(x.size(0), block_table, seq_lens, query_start_loc, block_size);
  Operands operands;
  a.x = operands.rows(x), a.dt = operands.rows(dt), a.b = operands.rows(b), a.c = operands.rows(c);
  a.a = operands.rows(A), a.d = operands.rows(D), a.dt_bias = operands.rows(dt_bias);
  Tensor out = new_tensor({x.size(0), x.size(1)}, ScalarType::Float);
  a.out = result_of(out);
  operands.run(selective_scan, a);
  return out;
}

Tensor paged_wkv(const Tensor& k, const Tensor& v, const Tensor& decay, const Tensor& first, const Tensor& cache,
                 const Tensor& block_table, const Tensor& seq_lens, const Tensor& query_start_loc,
                 int64_t block_size) {
  PB_CHECK(k.dim() == 2 && has_shape(v, {k.size(0), k.size(1)}), "wkv takes k and v [T, W]");
  PB_CHECK(has_shape(decay, {k.size(1)}) && has_shape(first, {k.size(1)}), "decay and first are [W]");
  WkvArgs a{};
  a.channels = k.size(1);
  a.cache = cache_of(cache, {3, a.channels}, ScalarType::Float, "the cache of a wkv is [N, 3, W] float32");
  a.step = step_of(k.size(0), block_table, seq_lens, query_start_loc, block_size);
  Operands operands;
  a.k = operands.rows(k), a.v = operands.rows(v), a.decay = operands.rows(decay), a.first = operands.rows(first);
  Tensor out = new_tensor({k.size(0), k.size(1)}, k.scalar_type());
  a.out = result_of(out);
  operands.run(wkv, a);
  return out;
}

// ---- a matrix per head -----------------------------------------------------------------------------------------

Tensor paged_gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                              const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens,
                              const Tensor& query_start_loc, int64_t block_size, double scale,
                              std::optional<double> l2norm_eps) {
  PB_CHECK(q.dim() == 3 && v.dim() == 3 && has_shape(k, {q.size(0), q.size(1), q.size(2)}) &&
               q.size(0) == v.size(0),
           "gated_delta_rule takes q and k [T, G, Dk] and v [T, H, Dv]");
  GatedDeltaRuleArgs a{};
  const int64_t T = q.size(0);
  a.heads = v.size(1), a.key_width = q.size(2), a.value_width = v.size(2), a.row_decay = g.dim() == 3;
  PB_CHECK(q.size(1) > 0 && a.heads % q.size(1) == 0, "value heads must be a multiple of key heads");
  a.group = a.heads / q.size(1);
  PB_CHECK((has_shape(g, {T, a.heads}) || has_shape(g, {T, a.heads, a.key_width})) &&
               has_shape(beta, {T, a.heads}),
           "g and beta are [T, H], or g is [T, H, Dk]");
  a.cache = cache_of(cache, {a.heads, a.key_width, a.value_width}, ScalarType::Float,
                     "the cache of a gated delta rule is [N, H, Dk, Dv] float32");
  a.step = step_of(T, block_table, seq_lens, query_start_loc, block_size);
  a.scale = static_cast<float>(scale);
  a.normalise = l2norm_eps.has_value(), a.norm_eps = static_cast<float>(l2norm_eps.value_or(0.0));
  Operands operands;
  a.q = operands.rows(q), a.k = operands.rows(k), a.v = operands.rows(v), a.beta = operands.values(beta);
  a.g = a.row_decay ? operands.rows(g) : operands.values(g);
  Tensor out = new_tensor({T, a.heads, a.value_width}, q.scalar_type());
  a.out = result_of(out);
  operands.run(gated_delta_rule, a);
  return out;
}

Tensor paged_mlstm(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& igate, const Tensor& fgate,
                   const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens,
                   const Tensor& query_start_loc, int64_t block_size, double scale, double eps) {
  PB_CHECK(q.dim() == 3 && has_shape(k, {q.size(0), q.size(1), q.size(2)}), "mlstm takes q and k [T, H, Dk]");
  PB_CHECK(v.dim() == 3 && v.size(0) == q.size(0) && v.size(1) == q.size(1), "v is [T, H, Dv]");
  MlstmArgs a{};
  const int64_t T = q.size(0);
  a.heads = q.size(1), a.key_width = q.size(2), a.value_width = v.size(2);
  PB_CHECK(has_shape(igate, {T, a.heads}) && has_shape(fgate, {T, a.heads}), "igate and fgate are [T, H]");
  a.cache = cache_of(cache, {a.heads, a.key_width + 1, a.value_width + 1}, ScalarType::Float,
                     "the cache of a mlstm is [N, H, Dk + 1, Dv + 1] float32");
  a.step = step_of(T, block_table, seq_lens, query_start_loc, block_size);
  a.scale = static_cast<float>(scale), a.eps = static_cast<float>(eps);
  Operands operands;
  a.q = operands.rows(q), a.k = operands.rows(k), a.v = operands.rows(v);
  a.igate = operands.values(igate), a.fgate = operands.values(fgate);
  Tensor out = new_tensor({T, a.heads, a.value_width}, q.scalar_type());
  a.out = result_of(out);
  operands.run(mlstm, a);
  return out;
}

Tensor paged_ssd(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& b, const Tensor& c,
                 std::optional<Tensor> D, std::optional<Tensor> dt_bias, const Tensor& cache,
                 const Tensor& block_table, const Tensor& seq_lens, const Tensor& query_start_loc,
                 int64_t block_size, bool dt_softplus, double dt_min, std::optional<double> dt_max) {
  PB_CHECK(x.dim() == 3 && b.dim() == 3 && b.size(0) == x.size(0) &&
               has_shape(c, {b.size(0), b.size(1), b.size(2)}),
           "ssd takes x [T, H, P] and B and C [T, G, N]");
  SsdArgs a{};
  const int64_t T = x.size(0);
  a.heads = x.size(1), a.head_width = x.size(2), a.width = b.size(2);
  PB_CHECK(b.size(1) > 0 && a.heads % b.size(1) == 0, "heads must be a multiple of the groups of B and C");
  a.group = a.heads / b.size(1);
  PB_CHECK(has_shape(dt, {T, a.heads}) && has_shape(A, {a.heads}), "dt is [T, H] and A is [H]");
  PB_CHECK((!D || has_shape(*D, {a.heads})) && (!dt_bias || has_shape(*dt_bias, {a.heads})),
           "D and dt_bias are [H]");
  a.cache = cache_of(cache, {a.heads, a.head_width, a.width}, ScalarType::Float,
                     "the cache of a state space layer is [blocks, H, P, N] float32");
  a.step = step_of(T, block_table, seq_lens, query_start_loc, block_size);
  a.dt_softplus = dt_softplus, a.dt_min = static_cast<float>(dt_min);
  a.dt_max = dt_max ? static_cast<float>(*dt_max) : std::numeric_limits<float>::infinity();
  Operands operands;
  a.x = operands.rows(x), a.b = operands.rows(b), a.c = operands.rows(c), a.dt = operands.values(dt);
  a.a = operands.values(A), a.d = operands.values(D), a.dt_bias = operands.values(dt_bias);
  Tensor out = new_tensor({T, a.heads, a.head_width}, ScalarType::Float);
  a.out = result_of(out);
  operands.run(ssd, a);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "paged_short_conv", TORCH_BOX(&paged_short_conv));
  pagebinder::implement(m, "paged_linear_recurrence", TORCH_BOX(&paged_linear_recurrence));
  pagebinder::implement(m, "paged_selective_scan", TORCH_BOX(&paged_selective_scan));
  pagebinder::implement(m, "paged_wkv", TORCH_BOX(&paged_wkv));
  pagebinder::implement(m, "paged_gated_delta_rule", TORCH_BOX(&paged_gated_delta_rule));
  pagebinder::implement(m, "paged_mlstm", TORCH_BOX(&paged_mlstm));
  pagebinder::implement(m, "paged_ssd", TORCH_BOX(&paged_ssd));
}
