#include "attention_tile.h"
#include "quantized_kv.h"

namespace pagebinder {

const char* quantized_attention_f16(const AttentionArgs& args, Codes codes) {
  switch (codes) {
    case Codes::E4M3: return run_attention(args, 2, attention_job<f16, f8e4m3>);
    case Codes::E5M2: return run_attention(args, 2, attention_job<f16, f8e5m2>);
    default: return run_attention(args, 2, attention_job<f16, i8>);
  }
}

}  // namespace pagebinder
