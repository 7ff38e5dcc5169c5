#include "attention_amx.h"
#include "element_kernels.h"
#include "qk_write_heads.h"

pagebinder::JobKernel pagebinder_attention_bfloat16() {
  using namespace pagebinder;
#if PAGEBINDER_AMX
  if (tiles_usable()) return attention_job_with_tiles<>;
#endif
  return attention_job<bf16>;
}

pagebinder::QkWriteKernel<pagebinder::bf16> pagebinder_qk_write_bfloat16() { return pagebinder::qk_norm_rope_write<pagebinder::bf16>; }
