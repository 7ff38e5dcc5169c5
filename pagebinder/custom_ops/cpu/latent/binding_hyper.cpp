// Registers hyper-connections, the query norm with RoPE and the grouped output projection under `pagebinder_cpu`.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "checks.h"
#include "direct_calls.h"
#include "element_of.h"
#include "hyper.h"
#include "linear.h"
#include "new_tensor.h"
#include "num_threads.h"
#include "thread_pool.h"

namespace {

using pagebinder::element_of;
using pagebinder::run_parallel;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class Args>
void use_threads(Args& a) {
  a.num_threads = pagebinder::num_threads(), a.run = run_parallel;
}

// The same values with channels next to each other: a copy if they are not.
Tensor adjacent(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return t.size(last) <= 1 || t.stride(last) == 1 ? t : torch::stable::contiguous(t);
}

Tensor contiguous_f32(const Tensor& t) {
  return torch::stable::contiguous(t.scalar_type() == ScalarType::Float ? t : torch::stable::to(t, ScalarType::Float));
}

// ---- hyper-connections -----------------------------------------------------------------------------------------

void check_streams(const Tensor& streams) {
  PB_CHECK(streams.dim() == 3, "streams must be [T, S, C]");
  PB_CHECK(streams.size(1) > 0 && streams.size(1) <= pagebinder::MAX_STREAMS, "streams must be 1 to ",
           pagebinder::MAX_STREAMS, ", not ", streams.size(1));
}

// Fills what both collapses need and runs the kernel. `post` and `comb` are null for the head.
Tensor collapse(const Tensor& streams_in, const Tensor& fn_in, const Tensor& base_in, const Tensor& scale_in,
                int64_t rows, int64_t iterations, double norm_eps, double eps, Tensor* post, Tensor* comb) {
  const int64_t T = streams_in.size(0), S = streams_in.size(1), C = streams_in.size(2);
  const int64_t num_scales = post == nullptr ? 1 : 3;
  PB_CHECK(fn_in.dim() == 2 && fn_in.size(0) == rows && fn_in.size(1) == S * C, "fn must be [", rows, ", ",
           S * C, "]");
  PB_CHECK(base_in.dim() == 1 && base_in.size(0) == rows, "base must be [", rows, "]");
  PB_CHECK(scale_in.dim() == 1 && scale_in.size(0) == num_scales, "scale must be [", num_scales, "]");
  const Tensor streams = adjacent(streams_in), fn = adjacent(fn_in);
  const Tensor base = contiguous_f32(base_in), scale = contiguous_f32(scale_in);
  Tensor out = pagebinder::new_tensor({T, C}, streams.scalar_type());
  if (out.numel() == 0) return out;
  pagebinder::HyperArgs a{};
  a.tokens = T, a.streams = S, a.channels = C, a.rows = static_cast<int>(rows);
  a.type = element_of(streams, "streams"), a.fn_type = element_of(fn, "fn");
  a.x = streams.const_data_ptr(), a.x_token_stride = streams.stride(0), a.x_stream_stride = streams.stride(1);
  a.fn = fn.const_data_ptr(), a.fn_stride = fn.stride(0);
  a.base = static_cast<const float*>(base.const_data_ptr());
  a.scale = static_cast<const float*>(scale.const_data_ptr());
  a.iterations = static_cast<int>(iterations);
  a.norm_eps = static_cast<float>(norm_eps), a.eps = static_cast<float>(eps);
  a.post = post == nullptr ? nullptr : static_cast<float*>(post->mutable_data_ptr());
  a.comb = comb == nullptr ? nullptr : static_cast<float*>(comb->mutable_data_ptr());
  a.collapsed = out.mutable_data_ptr();
  use_threads(a);
  pagebinder::hyper_connection(a);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> hyper_connection(const Tensor& streams, const Tensor& fn, const Tensor& base,
                                                    const Tensor& scale, int64_t sinkhorn_iters, double norm_eps,
                                                    double eps) {
  check_streams(streams);
  PB_CHECK(sinkhorn_iters > 0, "sinkhorn_iters must be 1 or more, not ", sinkhorn_iters);
  const int64_t T = streams.size(0), S = streams.size(1);
  Tensor post = pagebinder::new_tensor({T, S}, ScalarType::Float);
  Tensor comb = pagebinder::new_tensor({T, S, S}, ScalarType::Float);
  Tensor out = collapse(streams, fn, base, scale, (2 + S) * S, sinkhorn_iters, norm_eps, eps, &post, &comb);
  return {post, comb, out};
}

Tensor hyper_head(const Tensor& streams, const Tensor& fn, const Tensor& base, const Tensor& scale, double norm_eps,
                  double eps) {
  check_streams(streams);
  return collapse(streams, fn, base, scale, streams.size(1), 0, norm_eps, eps, nullptr, nullptr);
}

Tensor hyper_mix(const Tensor& streams_in, const Tensor& post_in, const Tensor& comb_in, const Tensor& update_in) {
  check_streams(streams_in);
  const int64_t T = streams_in.size(0), S = streams_in.size(1), C = streams_in.size(2);
  PB_CHECK(update_in.dim() == 2 && update_in.size(0) == T && update_in.size(1) == C &&
               update_in.scalar_type() == streams_in.scalar_type(),
           "update must be [", T, ", ", C, "] of the streams' dtype");
  PB_CHECK(post_in.dim() == 2 && post_in.size(0) == T && post_in.size(1) == S, "post must be [", T, ", ", S,
           "]");
  PB_CHECK(comb_in.dim() == 3 && comb_in.size(0) == T && comb_in.size(1) == S && comb_in.size(2) == S,
           "comb must be [", T, ", ", S, ", ", S, "]");
  const Tensor streams = adjacent(streams_in), update = adjacent(update_in);
  const Tensor post = contiguous_f32(post_in), comb = contiguous_f32(comb_in);
  Tensor out = pagebinder::new_tensor({T, S, C}, streams.scalar_type());
  if (out.numel() == 0) return out;
  pagebinder::HyperMixArgs a{};
  a.tokens = T, a.streams = S, a.channels = C, a.type = element_of(streams, "streams");
  a.x = streams.const_data_ptr(), a.x_token_stride = streams.stride(0), a.x_stream_stride = streams.stride(1);
  a.post = static_cast<const float*>(post.const_data_ptr());
  a.comb = static_cast<const float*>(comb.const_data_ptr());
  a.update = update.const_data_ptr(), a.update_stride = update.stride(0);
  a.out = out.mutable_data_ptr();
  use_threads(a);
  pagebinder::hyper_mix(a);
  return out;
}

// ---- heads -----------------------------------------------------------------------------------------------------

// x [T, H, D] and the angles of its tokens; all of them with adjacent channels.
pagebinder::HeadsArgs heads_args(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& out) {
  pagebinder::HeadsArgs a{};
  a.tokens = x.size(0), a.heads = x.size(1), a.width = x.size(2), a.type = element_of(x, "the heads");
  a.x = x.const_data_ptr(), a.x_token_stride = x.stride(0), a.x_head_stride = x.stride(1);
  a.angles = {cos.const_data_ptr(), sin.const_data_ptr(), cos.stride(0), sin.stride(0), cos.size(1),
              element_of(cos, "cos"), element_of(sin, "sin")};
  a.out = out.mutable_data_ptr();
  use_threads(a);
  return a;
}

void check_heads(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  PB_CHECK(x.dim() == 3, "heads must be [T, H, D]");
  PB_CHECK(cos.dim() == 2 && sin.dim() == 2 && cos.size(0) == x.size(0) && sin.size(0) == x.size(0) &&
               cos.size(1) == sin.size(1),
           "cos and sin must be [", x.size(0), ", P]");
  PB_CHECK(2 * cos.size(1) <= x.size(2), cos.size(1), " pairs do not fit into the ", x.size(2),
           " channels of a head");
}

Tensor q_norm_rope(const Tensor& q_in, const Tensor& cos_in, const Tensor& sin_in, double eps) {
  check_heads(q_in, cos_in, sin_in);
  const Tensor q = adjacent(q_in), cos = adjacent(cos_in), sin = adjacent(sin_in);
  Tensor out = pagebinder::new_tensor({q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  if (out.numel() == 0) return out;
  pagebinder::HeadsArgs a = heads_args(q, cos, sin, out);
  a.eps = static_cast<float>(eps);
  pagebinder::q_norm_rope(a);
  return out;
}

// Parts that a group's r columns are cut into, so that every thread finds work.
int64_t parts_of_group(int64_t groups, int64_t columns, int num_threads) {
  constexpr int64_t LEAST_COLUMNS = 2 * pagebinder::LINEAR_GRAIN;
  int64_t parts = 1;
  while (num_threads > 1 && groups * parts < 4 * num_threads && columns % (2 * parts * LEAST_COLUMNS) == 0) parts *= 2;
  return parts;
}

// rows [groups, T, K] x weight [groups * r, K] on matrix tiles -> [groups * parts, T, r / parts]
Tensor tile_products(const Tensor& rows, const Tensor& weight) {
  const int64_t groups = rows.size(0), T = rows.size(1), K = rows.size(2);
  pagebinder::LinearArgs shared{};
  const int num_threads = pagebinder::num_threads();
  const int64_t parts = parts_of_group(groups, weight.size(0) / groups, num_threads), jobs = groups * parts;
  Tensor out = pagebinder::new_tensor({jobs, T, weight.size(0) / jobs}, rows.scalar_type());
  shared.rows = T, shared.inner = shared.x_stride = K, shared.num_threads = 1;
  const int64_t columns = weight.size(0) / jobs, stride = weight.stride(0);
  const auto* x = static_cast<const uint16_t*>(rows.const_data_ptr());
  const auto* w = static_cast<const uint16_t*>(weight.const_data_ptr());
  auto* y = static_cast<uint16_t*>(out.mutable_data_ptr());
  pagebinder::run_jobs(jobs, false, num_threads, run_parallel, [&](int64_t job) {
    pagebinder::LinearArgs a = shared;
    const pagebinder::LinearLayer layer{columns, w + job * columns * stride, stride, 0, nullptr, y + job * T * columns};
    a.x = x + job / parts * T * K;
    a.layers = &layer, a.num_layers = 1;
    pagebinder::linear_with_tiles(a);
  });
  return out;
}

// rows [groups, T, K] x weight [groups * r, K] -> [n, T, groups * r / n], columns in order: matrix tiles for few rows.
Tensor group_products(const Tensor& rows, const Tensor& weight) {
  const int64_t groups = rows.size(0), K = rows.size(2), r = weight.size(0) / groups;
  const bool bf16 = rows.scalar_type() == ScalarType::BFloat16;
  if (bf16 && weight.stride(1) == 1 && pagebinder::linear_suits_tiles(rows.size(1), r, K))
    return tile_products(rows, weight);
  const Tensor grouped = torch::stable::reshape(weight, {groups, r, K});
  return torch::stable::matmul(rows, torch::stable::transpose(grouped, 1, 2));
}

Tensor inverse_rope_grouped_linear(const Tensor& x_in, const Tensor& cos_in, const Tensor& sin_in, const Tensor& weight,
                                   int64_t groups, bool fp8) {
  check_heads(x_in, cos_in, sin_in);
  const int64_t T = x_in.size(0), H = x_in.size(1), D = x_in.size(2);
  PB_CHECK(groups > 0 && H % groups == 0, H, " heads do not divide into ", groups, " groups");
  const int64_t K = H * D / groups;
  PB_CHECK(weight.dim() == 2 && weight.size(1) == K && weight.size(0) % groups == 0 &&
               weight.scalar_type() == x_in.scalar_type(),
           "weight must be [", groups, " * r, ", K, "] of x's dtype");
  PB_CHECK(!fp8 || K % 128 == 0, "fp8 needs a multiple of 128 channels in a group, not ", K);
  if (T == 0 || K == 0 || weight.size(0) == 0) return torch::stable::new_zeros(x_in, {T, weight.size(0)});
  const Tensor x = adjacent(x_in), cos = adjacent(cos_in), sin = adjacent(sin_in);
  Tensor rows = pagebinder::new_tensor({groups, T, K}, x.scalar_type());
  pagebinder::HeadsArgs a = heads_args(x, cos, sin, rows);
  a.groups = groups, a.fp8 = fp8;
  pagebinder::inverse_rope_groups(a);
  const Tensor out = torch::stable::transpose(group_products(rows, weight), 0, 1);
  return torch::stable::contiguous(torch::stable::reshape(out, {T, weight.size(0)}));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "hyper_connection", TORCH_BOX(&hyper_connection));
  pagebinder::implement(m, "hyper_mix", TORCH_BOX(&hyper_mix));
  pagebinder::implement(m, "hyper_head", TORCH_BOX(&hyper_head));
  pagebinder::implement(m, "q_norm_rope", TORCH_BOX(&q_norm_rope));
  pagebinder::implement(m, "inverse_rope_grouped_linear", TORCH_BOX(&inverse_rope_grouped_linear));
}
