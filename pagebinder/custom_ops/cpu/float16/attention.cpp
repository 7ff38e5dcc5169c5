#include "attention_tile.h"
#include "element_kernels.h"

pagebinder::JobKernel pagebinder_attention_float16() { return pagebinder::attention_job<pagebinder::f16>; }
