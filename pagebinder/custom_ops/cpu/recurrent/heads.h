// Recurrences whose state is a matrix per head. A job is a head of a request; its matrix is cut into patches that
// stay in the nearest cache while a chunk of tokens passes over them:
//
//     cache block ──first token──▶ scratch ──tokens──▶ scratch ──last token before a checkpoint──▶ cache block
//
// A token reads a patch in one place and writes it to another, so a decode reads and writes the cache alone. A patch
// that is not made of whole vectors of the cache always lies in the scratch and is copied.
#pragma once

#include "step.h"

namespace pagebinder {

constexpr int64_t CHUNK = 32;  // tokens that are prepared together

// Where a patch lies: rows `stride` floats apart.
struct Place {
  float* base;
  int64_t stride;
};

// Rows and columns [row, row + rows) x [column, column + columns) of a head's matrix.
struct Patch {
  int64_t row, rows, column, columns;
};

// op.num_patches(), op.patch(i). op.row_step(): rows of a patch in memory are padded to a multiple of it, columns to
// whole vectors. op.chunk_floats(): scratch for a chunk, where
//   op.begin(head, state, chunk): before the first token of a request; `state` is null at the start of a sequence
//   op.prepare(row, n, head, chunk): reads the operands of rows [row, row + n)
//   op.tokens(n, patch, from, scratch, last, chunk): adds the chunk's tokens to a patch that lies in `from`, then in
//     `scratch`, and in the end in `last`
//   op.finish(row, n, head, chunk): all patches are done; writes the results
//   op.end(head, state, chunk): a checkpoint has been written, but for what is not part of the matrix
template <class Op>
class HeadRun {
 public:
  HeadRun(const StateCache& cache, const Op& op, int64_t head, float* scratch)
      : cache_(cache), op_(op), head_(head), scratch_(scratch),
        chunk_(scratch + op.num_patches() * patch_floats(op)) {}

  static int64_t patch_floats(const Op& op) {
    const Patch first = op.patch(0);
    return padded_rows(op, first) * whole_vectors(first.columns);
  }
  static int64_t floats(const Op& op) { return op.num_patches() * patch_floats(op) + op.chunk_floats(); }

  void run(const Request& request) {
    start(request);
    for (int64_t p = request.context; p < request.end;) {
      const int64_t stop = request.next_checkpoint(p), n = std::min(CHUNK, stop - p);
      const int64_t block = p + n == stop ? request.block(stop) : 0;
      op_.prepare(request.first_row + p, n, head_, chunk_);
      for (int64_t i = 0; i < op_.num_patches(); ++i) advance(i, n, block);
      op_.finish(request.first_row + p, n, head_, chunk_);
      if (block != 0) op_.end(head_, state_of(block), chunk_);
      source_ = block;
      p += n;
    }
  }

 private:
  const StateCache& cache_;
  const Op& op_;
  const int64_t head_;
  float *scratch_, *chunk_;
  int64_t source_ = 0;     // the block where the state lies, 0: in the scratch

  static int64_t padded_rows(const Op& op, const Patch& patch) {
    return (patch.rows + op.row_step() - 1) / op.row_step() * op.row_step();
  }

  // May tokens read and write the patch in the cache?
  bool is_direct(const Patch& patch) const {
    return cache_.strides[2] == 1 && patch.columns % W == 0 && patch.rows % op_.row_step() == 0;
  }

  float* state_of(int64_t block) const {
    return static_cast<float*>(cache_.base) + block * cache_.block_stride + head_ * cache_.strides[0];
  }

  Place in_scratch(int64_t i) const {
    return {scratch_ + i * patch_floats(op_), whole_vectors(op_.patch(i).columns)};
  }
  Place in_cache(const Patch& patch, int64_t block) const {
    return {state_of(block) + patch.row * cache_.strides[1] + patch.column * cache_.strides[2], cache_.strides[1]};
  }

  void start(const Request& request) {
    source_ = request.context == 0 ? 0 : request.block(request.context);
    op_.begin(head_, source_ == 0 ? nullptr : state_of(source_), chunk_);
    for (int64_t i = 0; i < op_.num_patches(); ++i) {
      const Patch patch = op_.patch(i);
      if (source_ != 0 && is_direct(patch)) continue;
      std::fill_n(in_scratch(i).base, patch_floats(op_), 0.0f);
      if (source_ != 0) copy(patch, in_cache(patch, source_), cache_.strides[2], in_scratch(i), 1);
    }
  }

  void advance(int64_t i, int64_t n, int64_t block) {
    const Patch patch = op_.patch(i);
    const bool direct = is_direct(patch);
    const Place scratch = in_scratch(i);
    const Place from = direct && source_ != 0 ? in_cache(patch, source_) : scratch;
    const Place last = direct && block != 0 ? in_cache(patch, block) : scratch;
    op_.tokens(n, patch, from, scratch, last, chunk_);
    if (!direct && block != 0) copy(patch, scratch, 1, in_cache(patch, block), cache_.strides[2]);
  }

  // Values of a row are `from_step` and `to_step` floats apart.
  static void copy(const Patch& patch, Place from, int64_t from_step, Place to, int64_t to_step) {
    for (int64_t r = 0; r < patch.rows; ++r) {
      const float* source = from.base + r * from.stride;
      float* target = to.base + r * to.stride;
      if (from_step == 1 && to_step == 1) std::memcpy(target, source, patch.columns * sizeof(float));
      else
        for (int64_t c = 0; c < patch.columns; ++c) target[c * to_step] = source[c * from_step];
    }
  }
};

template <class Op>
const char* run_heads(const Step& step, const StateCache& cache, const Result& out, int64_t heads, int64_t work,
                      const Op& op) {
  if (const char* error = check_step(step, cache)) return error;
  run_jobs(step, step.num_requests * heads, work, [&](int64_t job) {
    const Request request(step, job / heads);
    if (request.empty()) return;
    static thread_local Buffer memory;
    HeadRun<Op>(cache, op, job % heads, memory.at_least<float>(HeadRun<Op>::floats(op))).run(request);
  });
  zero_padding(step, out);
  return nullptr;
}

}  // namespace pagebinder
