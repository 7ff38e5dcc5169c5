// Turns channels in pairs, row by row: the first ones and the second ones of all pairs side by side in float32.
#include "rope.h"

#include "attention.h"
#include "neighbours.h"
#include "thread_pool.h"

namespace pagebinder::rope {
namespace {

constexpr int64_t SERIAL_VALUES = 1 << 14, VALUES_AT_ONCE = 1 << 12;

template <class T>
PB_INLINE float widened(T x) { return load_float_part(&x, 1)[0]; }
PB_INLINE float widened(float x) { return x; }
PB_INLINE float widened(bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Channels as floats, first ones and second ones of `count` pairs: neighbours, or a half apart.
void load_pairs(const Operand& from, int64_t offset, bool are_neighbours, int64_t count, float* first, float* second) {
  with_element(from.type, [&](auto type) {
    using T = decltype(type);
    const int64_t channel = from.channel_stride, step = are_neighbours ? 2 * channel : channel;
    const T *a = static_cast<const T*>(from.data) + offset, *b = a + (are_neighbours ? channel : count * channel);
    int64_t i = 0;
    for (; channel == 1 && i + W <= count; i += W) {
      const Pair pair = are_neighbours ? load_neighbours(a + 2 * i) : Pair{load_float(a + i), load_float(b + i)};
      store(first + i, pair.first);
      store(second + i, pair.second);
    }
    for (; i < count; ++i) first[i] = widened(a[i * step]), second[i] = widened(b[i * step]);
  });
}

void load_angles(const Operand& from, int64_t offset, int64_t count, float* to) {
  with_element(from.type, [&](auto type) {
    const auto* data = static_cast<const decltype(type)*>(from.data) + offset;
    int64_t i = 0;
    for (; from.channel_stride == 1 && i + W <= count; i += W) store(to + i, load_float(data + i));
    for (; i < count; ++i) to[i] = widened(data[i * from.channel_stride]);
  });
}

template <class T>
void store_pairs(const float* first, const float* second, bool are_neighbours, int64_t count, T* out) {
  int64_t i = 0;
  for (; i + W <= count; i += W) {
    const VF a = load<VF>(first + i), b = load<VF>(second + i);
    if (are_neighbours) store_neighbours(out + 2 * i, a, b);
    else store_float(out + i, a), store_float(out + count + i, b);
  }
  const int64_t step = are_neighbours ? 2 : 1, behind = are_neighbours ? 1 : count;
  for (; i < count; ++i) {
    store_float_part(out + i * step, splat(first[i]), 1);
    store_float_part(out + i * step + behind, splat(second[i]), 1);
  }
}

struct Rows {
  float *first, *second, *cos_first, *cos_second, *sin_first, *sin_second;
};

template <class T>
void turn(const Rows& rows, int64_t pairs) {
  for (int64_t i = 0; i < pairs; i += W) {
    const VF first = load<VF>(rows.first + i), second = load<VF>(rows.second + i);
    const VF a = rounded<T>(unfused(first * load<VF>(rows.cos_first + i)));
    const VF b = rounded<T>(unfused(second * load<VF>(rows.sin_first + i)));
    const VF c = rounded<T>(unfused(second * load<VF>(rows.cos_second + i)));
    const VF d = rounded<T>(unfused(first * load<VF>(rows.sin_second + i)));
    store(rows.first + i, a - b);
    store(rows.second + i, c + d);
  }
}

int64_t offset_of(const Operand& operand, const int64_t* place) {
  int64_t offset = 0;
  for (int d = 0; d < MOST_DIMS; ++d) offset += place[d] * operand.strides[d];
  return offset;
}

template <class T>
void turn_rows(const Args& a, int64_t begin, int64_t end) {
  static thread_local Buffer buffer;
  const int64_t pairs = a.width / 2, room = (pairs + W - 1) / W * W;
  float* memory = buffer.at_least<float>(static_cast<size_t>(6 * room));
  const bool neighbours = a.style != Style::HALF && a.style != Style::CHUNKED;
  const bool wide = a.style == Style::HALF || a.style == Style::EVERY_TWO;
  const bool out_neighbours = neighbours && a.style != Style::DEINTERLEAVED;
  Rows rows{memory, memory + room, memory + 2 * room, memory + 3 * room, memory + 4 * room, memory + 5 * room};
  if (!wide) rows.cos_second = rows.cos_first, rows.sin_second = rows.sin_first;
  const auto load_table = [&](const Operand& table, int64_t at, float* first, float* second) {
    if (wide) load_pairs(table, at, neighbours, pairs, first, second);
    else load_angles(table, at, pairs, first);
  };
  int64_t last_cos = -1, last_sin = -1;  // heads of a token read the same row
  for (int64_t row = begin; row < end; ++row) {
    int64_t place[MOST_DIMS], rest = row;
    for (int d = MOST_DIMS - 1; d >= 0; --d) place[d] = rest % a.sizes[d], rest /= a.sizes[d];
    const int64_t x = offset_of(a.x, place), cos = offset_of(a.cos, place), sin = offset_of(a.sin, place);
    load_pairs(a.x, x, neighbours, pairs, rows.first, rows.second);
    if (cos != last_cos) load_table(a.cos, cos, rows.cos_first, rows.cos_second);
    if (sin != last_sin) load_table(a.sin, sin, rows.sin_first, rows.sin_second);
    last_cos = cos, last_sin = sin;
    turn<T>(rows, pairs);
    store_pairs(rows.first, rows.second, out_neighbours, pairs, static_cast<T*>(a.out) + row * a.width);
  }
}

}  // namespace

void run(const Args& args) {
  int64_t count = 1;
  for (int64_t size : args.sizes) count *= size;
  const int threads = count * args.width < SERIAL_VALUES ? 1 : args.num_threads;
  const int64_t at_once = VALUES_AT_ONCE / args.width > 0 ? VALUES_AT_ONCE / args.width : 1;
  with_element(args.type, [&](auto type) {
    for_ranges(count, at_once, threads,
               [&](int64_t begin, int64_t end) { turn_rows<decltype(type)>(args, begin, end); });
  });
}

}  // namespace pagebinder::rope
