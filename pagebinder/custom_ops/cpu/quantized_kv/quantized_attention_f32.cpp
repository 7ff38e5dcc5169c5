#include "attention_tile.h"
#include "quantized_kv.h"

namespace pagebinder {

const char* quantized_attention_f32(const AttentionArgs& args, Codes codes) {
  switch (codes) {
    case Codes::E4M3: return run_attention(args, 4, attention_job<float, f8e4m3>);
    case Codes::E5M2: return run_attention(args, 4, attention_job<float, f8e5m2>);
    default: return run_attention(args, 4, attention_job<float, i8>);
  }
}

}  // namespace pagebinder
