#include "attention_amx.h"

namespace pagebinder {

const char* paged_attention_bf16(const AttentionArgs& args) {
#if PAGEBINDER_AMX
  if (tiles_usable()) return run_attention(args, 2, attention_job_with_tiles<>);
#endif
  return run_attention(args, 2, attention_job<bf16>);
}

}  // namespace pagebinder
