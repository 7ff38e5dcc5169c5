#include "attention_tile.h"

namespace pagebinder {

const char* paged_attention_f32(const AttentionArgs& args) {
  return run_attention(args, 4, attention_job<float>);
}

}  // namespace pagebinder
