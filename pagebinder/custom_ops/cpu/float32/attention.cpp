#include "attention_tile.h"
#include "element_kernels.h"

pagebinder::JobKernel pagebinder_attention_float32() { return pagebinder::attention_job<float>; }
