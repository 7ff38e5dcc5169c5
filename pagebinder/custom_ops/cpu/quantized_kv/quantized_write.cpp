// Encodes new K and V rows at their slots. What is stored of a token depends on its own row alone.
#include <algorithm>
#include <cstring>

#include "qk_write_heads.h"
#include "quantized_kv.h"
#include "quantized_rows.h"

namespace pagebinder {
namespace {

// Rows of amax 0 have a scale, too.
constexpr float MIN_SCALE = 0x1p-126f;

constexpr float largest_code(Codes codes) {
  return codes == Codes::E4M3 ? E4M3_MAX : codes == Codes::E5M2 ? E5M2_MAX : 127.0f;
}

// Nearest, ties to even, saturating; so does a NaN.
template <Codes CODES>
PB_INLINE VU encode(VF x) {
  const VF most = splat(largest_code(CODES)), bounded = select(x < most, max(x, -most), most);
  if constexpr (CODES == Codes::E4M3) return encode_e4m3(bounded);
  else if constexpr (CODES == Codes::E5M2) return encode_e5m2(bounded);
  else return bit_cast<VU>(__builtin_convertvector(round_nearest(bounded), VI));
}

// Row x [width] -> codes; `fixed` is its scale, or null: amax / the largest code, which goes to `scale`.
template <Codes CODES, class T>
void encode_row(const T* x, int64_t width, const float* fixed, char* codes, char* scale) {
  const int64_t full = width / W * W;
  auto lanes = [&](int64_t d) { return d < full ? load_float(x + d) : load_float_part(x + d, width - d); };
  float factor;
  if (fixed != nullptr) {
    factor = *fixed;
  } else {
    VU most{};  // the bits of magnitudes are in their order, and those of a NaN above all
    for (int64_t d = 0; d < width; d += W) {
      const VU bits = bit_cast<VU>(magnitude_of(lanes(d)));
      most = select_bits(bits > most, bits, most);
    }
    uint32_t amax = 0;
    for (int lane = 0; lane < W; ++lane) amax = std::max(amax, most[lane]);
    factor = bit_cast<float>(amax) / largest_code(CODES);
    factor = factor < MIN_SCALE ? MIN_SCALE : factor;
    std::memcpy(scale, &factor, sizeof(factor));
  }
  for (int64_t d = 0; d < width; d += W) {
    const VB packed = low_bytes(encode<CODES>(lanes(d) / factor));
    std::memcpy(codes + d, &packed, std::min<int64_t>(W, width - d));
  }
}

// The row of KV head g: K's codes, V's codes and, if they are its own, two scales.
template <Codes CODES, class T, class Args>
void encode_head(const Args& a, int64_t g, const T* k, const T* v, char* row) {
  const float* fixed = a.kv_scales == nullptr ? nullptr : a.kv_scales + g;
  const float* fixed_v = fixed == nullptr ? nullptr : fixed + a.num_kv_heads;
  char* scales = row + a.head_dim + a.head_dim_v;
  encode_row<CODES>(k, a.head_dim, fixed, row, scales);
  encode_row<CODES>(v, a.head_dim_v, fixed_v, row + a.head_dim, scales + sizeof(float));
}

template <Codes CODES, class T>
void encode_token(const CacheWriteArgs& args, int64_t token, char* to) {
  const auto& a = static_cast<const QuantizedWriteArgs&>(args);
  const char *k = a.k + token * a.k_token_stride, *v = a.v + token * a.v_token_stride;
  for (int64_t g = 0; g < a.num_kv_heads; ++g)
    encode_head<CODES>(a, g, reinterpret_cast<const T*>(k + g * a.k_head_stride),
                       reinterpret_cast<const T*>(v + g * a.v_head_stride), to + g * a.cache_head_stride);
}

template <Codes CODES, class T>
void encode_turned(const QkWriteArgs<T>& args, int64_t g, const T* k, const T* v, char* row) {
  encode_head<CODES>(static_cast<const QuantizedQkWriteArgs<T>&>(args), g, k, v, row);
}

template <Codes CODES>
const char* write_codes(const QuantizedWriteArgs& a) {
  return with_element(a.type, [&](auto x) { return write_tokens(a, encode_token<CODES, decltype(x)>); });
}

}  // namespace

const char* quantized_kv_cache_write(const QuantizedWriteArgs& args) {
  switch (args.codes) {
    case Codes::E4M3: return write_codes<Codes::E4M3>(args);
    case Codes::E5M2: return write_codes<Codes::E5M2>(args);
    default: return write_codes<Codes::INT8>(args);
  }
}

template <class T>
const char* qk_norm_rope_quantized_write(QuantizedQkWriteArgs<T>& args, Codes codes) {
  args.encode = codes == Codes::E4M3   ? encode_turned<Codes::E4M3, T>
                : codes == Codes::E5M2 ? encode_turned<Codes::E5M2, T>
                                       : encode_turned<Codes::INT8, T>;
  return qk_norm_rope_write<T>(args);
}

template const char* qk_norm_rope_quantized_write<float>(QuantizedQkWriteArgs<float>&, Codes);
template const char* qk_norm_rope_quantized_write<bf16>(QuantizedQkWriteArgs<bf16>&, Codes);
template const char* qk_norm_rope_quantized_write<f16>(QuantizedQkWriteArgs<f16>&, Codes);

}  // namespace pagebinder
