#include "attention_tile.h"
#include "element_kernels.h"
#include "qk_write_heads.h"

pagebinder::JobKernel pagebinder_attention_float16() { return pagebinder::attention_job<pagebinder::f16>; }

pagebinder::QkWriteKernel<pagebinder::f16> pagebinder_qk_write_float16() { return pagebinder::qk_norm_rope_write<pagebinder::f16>; }
