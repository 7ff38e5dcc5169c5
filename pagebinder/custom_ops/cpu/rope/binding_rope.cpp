// Registers RoPE under `pagebinder_cpu`.
#include <torch/csrc/stable/library.h>

#include <string>

#include "checks.h"
#include "direct_calls.h"
#include "element_of.h"
#include "num_threads.h"
#include "recorder.h"
#include "rope.h"
#include "row_tensors.h"

namespace {

using namespace pagebinder;

rope::Style style_named(const std::string& name) {
  if (name == "half") return rope::Style::HALF;
  if (name == "chunked") return rope::Style::CHUNKED;
  if (name == "every_two") return rope::Style::EVERY_TWO;
  if (name == "interleaved") return rope::Style::INTERLEAVED;
  PB_CHECK(name == "deinterleaved", "unknown RoPE style ", name);
  return rope::Style::DEINTERLEAVED;
}

// t, broadcast to x's sizes but for the channels, of which it has `channels`.
rope::Operand operand_of(const Tensor& t, const Tensor& x, int64_t channels) {
  PB_CHECK(t.dim() > 0 && t.dim() <= x.dim() && t.size(t.dim() - 1) == channels,
           "x is [..., D] with D even, cos and sin broadcast against it and are ", channels, " wide here");
  rope::Operand operand{t.const_data_ptr(), element_of(t, "x, cos and sin"), {}, t.stride(t.dim() - 1)};
  for (int64_t d = 0; d < t.dim() - 1; ++d) {
    const int64_t at = x.dim() - t.dim() + d;
    PB_CHECK(t.size(d) == x.size(at) || t.size(d) == 1, "cos and sin must broadcast against x");
    operand.strides[rope::MOST_DIMS - (x.dim() - 1) + at] = t.size(d) == 1 ? 0 : t.stride(d);
  }
  return operand;
}

Tensor rope_op(const Tensor& x, const Tensor& cos, const Tensor& sin, std::string style) {
  PB_CHECK(x.dim() > 0 && x.dim() <= rope::MOST_DIMS + 1 && x.size(x.dim() - 1) % 2 == 0,
           "x must be [..., D] of at most ", rope::MOST_DIMS + 1, " dimensions, D even");
  rope::Args args{};
  args.style = style_named(style), args.width = x.size(x.dim() - 1);
  const bool wide = args.style == rope::Style::HALF || args.style == rope::Style::EVERY_TWO;
  const int64_t columns = wide ? args.width : args.width / 2;
  args.x = operand_of(x, x, args.width);
  args.cos = operand_of(cos, x, columns), args.sin = operand_of(sin, x, columns);
  PB_CHECK(cos.scalar_type() == sin.scalar_type(), "cos and sin must have one dtype");
  for (int64_t& size : args.sizes) size = 1;
  for (int64_t d = 0; d < x.dim() - 1; ++d) args.sizes[rope::MOST_DIMS - (x.dim() - 1) + d] = x.size(d);
  args.type = args.x.type == args.cos.type ? args.x.type : Element::F32;  // as types are promoted
  Tensor out = new_tensor(sizes_of(x), args.x.type == args.cos.type ? x.scalar_type() : ScalarType::Float);
  args.out = out.mutable_data_ptr(), args.num_threads = num_threads();
  if (x.numel() > 0) launch([args] { rope::run(args); });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "rope", TORCH_BOX(&rope_op));
}
