#include "attention_amx.h"
#include "element_kernels.h"

pagebinder::JobKernel pagebinder_attention_bfloat16() {
  using namespace pagebinder;
#if PAGEBINDER_AMX
  if (tiles_usable()) return attention_job_with_tiles<>;
#endif
  return attention_job<bf16>;
}
