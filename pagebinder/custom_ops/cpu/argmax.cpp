// The likeliest token of a row of logits: sampling/sample_tokens.py, with equal results.
#include "logit_rows.h"

namespace pagebinder {

template <class T>
int64_t first_largest(const T* x, int64_t vocab) {
  VF most[AT_ONCE], sums[AT_ONCE] = {};
  for (VF& part : most) part = splat(-INFINITE);
  int64_t i = 0;
  const auto add = [&](int part, VF value) { sums[part] += value, most[part] = max(value, most[part]); };
  for (; i + AT_ONCE * W <= vocab; i += AT_ONCE * W) {
    PB_UNROLL
    for (int j = 0; j < AT_ONCE; ++j) add(j, load_float(x + i + j * W));
  }
  for (; i < vocab; i += W) add(0, load_filled(x, i, vocab));
  if (may_hide_nan(sums) && has_nan(x, vocab)) return -1;
  const VF largest = splat(largest_lane(max(max(most[0], most[1]), max(most[2], most[3]))));
  for (i = 0;; i += W) {
    const VI found = load_filled(x, i, vocab) == largest;
    if (!any_lane(found)) continue;
    int lane = 0;
    while (!found[lane]) ++lane;
    return i + lane;
  }
}

template int64_t first_largest<float>(const float*, int64_t);
template int64_t first_largest<bf16>(const bf16*, int64_t);
template int64_t first_largest<f16>(const f16*, int64_t);

}  // namespace pagebinder
