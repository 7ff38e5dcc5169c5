#include "attention_amx.h"
#include "quantized_kv.h"

namespace pagebinder {
namespace {

template <class S>
const char* attend_rows(const AttentionArgs& args) {
#if PAGEBINDER_AMX
  if (tiles_usable()) return run_attention(args, 2, attention_job_with_tiles<S>);
#endif
  return run_attention(args, 2, attention_job<bf16, S>);
}

}  // namespace

const char* quantized_attention_bf16(const AttentionArgs& args, Codes codes) {
  switch (codes) {
    case Codes::E4M3: return attend_rows<f8e4m3>(args);
    case Codes::E5M2: return attend_rows<f8e5m2>(args);
    default: return attend_rows<i8>(args);
  }
}

}  // namespace pagebinder
