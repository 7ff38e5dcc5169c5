#include "attention_tile.h"

namespace pagebinder {

const char* paged_attention_f16(const AttentionArgs& args) {
  return run_attention(args, 2, attention_job<f16>);
}

}  // namespace pagebinder
