#include "attention_tile.h"
#include "element_kernels.h"
#include "qk_write_heads.h"

pagebinder::JobKernel pagebinder_attention_float32() { return pagebinder::attention_job<float>; }

pagebinder::QkWriteKernel<float> pagebinder_qk_write_float32() { return pagebinder::qk_norm_rope_write<float>; }
