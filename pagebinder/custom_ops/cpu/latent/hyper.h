// Arguments of the DeepSeek-V4 glue kernels: hyper-connections, query norm with RoPE, grouped output projection.
//
// T tokens, S streams, C channels, H heads, D head width, P pairs that turn. Channels lie next to each other in
// every operand; other strides are free and count elements.
#pragma once

#include "attention.h"
#include "simd.h"
#include "small_floats.h"

namespace pagebinder {

// Runs job(i) for i in [0, num_jobs), possibly at the same time; one thread if there is too little to do.
template <class Job>
void run_jobs(int64_t num_jobs, bool serial, int num_threads, ParallelRun run, const Job& job) {
  struct Shared {
    const Job& job;
    const int64_t num_jobs;
    std::atomic<int64_t> next{0};
  } shared{job, num_jobs};
  const auto worker = [](void* context, int) {
    Shared& s = *static_cast<Shared*>(context);
    for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.num_jobs;) s.job(i);
  };
  if (serial || num_threads <= 1 || num_jobs <= 1) worker(&shared, 0);
  else run(static_cast<int>(num_jobs < num_threads ? num_jobs : num_threads), worker, &shared);
}

constexpr int MAX_STREAMS = 16;

struct HyperArgs {
  int64_t tokens, streams, channels;
  Element type, fn_type;
  const void* x;            // [T, S, C]
  int64_t x_token_stride, x_stream_stride;
  const void* fn;           // [rows, S * C]
  int64_t fn_stride;
  int rows;                 // (2 + S) * S, or S for the head
  const float* base;        // [rows]
  const float* scale;       // [3], or [1] for the head
  int iterations;
  float norm_eps, eps;
  float* post;              // [T, S] contiguous, null for the head
  float* comb;              // [T, S, S] contiguous, null for the head
  void* collapsed;          // [T, C] contiguous
  int num_threads;
  ParallelRun run;
};
void hyper_connection(const HyperArgs& args);

struct HyperMixArgs {
  int64_t tokens, streams, channels;
  Element type;
  const void* x;            // [T, S, C]
  int64_t x_token_stride, x_stream_stride;
  const float* post;        // [T, S] contiguous
  const float* comb;        // [T, S, S] contiguous
  const void* update;       // [T, C]
  int64_t update_stride;
  void* out;                // [T, S, C] contiguous
  int num_threads;
  ParallelRun run;
};
void hyper_mix(const HyperMixArgs& args);

// cos and sin [T, P] of any float type.
struct Angles {
  const void *cos, *sin;
  int64_t cos_stride, sin_stride, pairs;
  Element cos_type, sin_type;
};

struct HeadsArgs {
  int64_t tokens, heads, width;
  Element type;
  const void* x;            // [T, H, D]
  int64_t x_token_stride, x_head_stride;
  Angles angles;
  float eps;                // of the norm
  int64_t groups;           // of heads
  bool fp8;                 // round turned rows to e4m3, 128 channels to a scale
  void* out;                // q_norm_rope: [T, H, D]; inverse_rope_groups: [groups, T, H / groups * D]; contiguous
  int num_threads;
  ParallelRun run;
};
void q_norm_rope(const HeadsArgs& args);
void inverse_rope_groups(const HeadsArgs& args);

}  // namespace pagebinder
