// Registers the op between projections and attention under `pagebinder_cpu`.
#include <torch/csrc/stable/library.h>

#include "binding_elements.h"
#include "binding_qk_write.h"
#include "checks.h"
#include "direct_calls.h"
#include "recorder.h"

namespace {

using namespace pagebinder;

Tensor qk_write(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                std::optional<Tensor> q_weight, std::optional<Tensor> k_weight, const Tensor& kv_cache,
                const Tensor& slot_mapping, double eps, std::string tail, std::string style, bool in_float32) {
  const QkOperands operands{q, k, v, cos, sin, q_weight, k_weight, kv_cache, slot_mapping, eps,
                            tail, style, in_float32};
  check_qk_operands(operands);
  PB_CHECK(kv_cache.scalar_type() == q.scalar_type(), "kv_cache must have q's dtype");
  PB_CHECK(kv_cache.size(3) == k.size(2) + v.size(2), "a kv_cache row must hold a key and a value");
  return with_element(element_of(q, "q"), [&](auto element) {
    QkWriteArgs<decltype(element)> args{};
    const auto kernel = qk_write_kernel<decltype(element)>(q.scalar_type());
    Tensor out = set_qk_operands(operands, args);
    launch([args, kernel] {
      const char* error = kernel(args);
      PB_CHECK(error == nullptr, "qk_norm_rope_write: ", error);
    });
    return out;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagebinder_cpu, CPU, m) {
  pagebinder::implement(m, "qk_norm_rope_write", TORCH_BOX(&qk_write));
}
