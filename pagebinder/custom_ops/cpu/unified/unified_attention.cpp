// The phases of unified attention as calls of the paged-attention kernel. See unified_attention.h.
#include "unified_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention_partials.h"
#include "simd.h"

namespace pagebinder {
namespace {

constexpr float MINUS_INFINITY = -__builtin_inff(), LN_2 = 0.69314718055994530942f;

// What the phases are called with; memory that stays from call to call.
struct Phases {
  std::vector<int32_t> context, carried_rows;                        // [R], [T]
  std::vector<int32_t> starts, lens, tables, positions;              // of groups of sharers, of their tokens
  std::vector<int32_t> own_tables, own_lens;                         // [R] of this step's rows
  Buffer carried, own_rows;
  int64_t num_carried = 0;
};

// Contexts of the requests; their lengths are checked here, as the phases below read them.
const char* read_lengths(const UnifiedArgs& u, Phases& p) {
  const AttentionArgs& a = u.attention;
  if (a.query_start_loc[0] != 0) return "query_start_loc must begin with 0";
  if (a.query_start_loc[a.num_requests] > a.num_tokens) return "query_start_loc exceeds the tokens of q";
  p.context.resize(a.num_requests);
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int32_t count = a.query_start_loc[r + 1] - a.query_start_loc[r], seq_len = a.seq_lens[r];
    if (count < 0) return "query_start_loc must not fall";
    if (seq_len < 0 || seq_len > a.max_blocks * a.block_size) return "a seq_len exceeds its block table";
    p.context[r] = seq_len - count;
    if (u.only != 0 || u.has_unique || count == 0) continue;
    const int32_t covered = (u.has_shared ? u.shared_lens[r] : 0) + (u.has_causal ? count : 0);
    if (covered < seq_len) return "phases leave keys of a request out";
  }
  return nullptr;
}

const char* check_sharer(const UnifiedArgs& u, const Phases& p, int64_t r) {
  const AttentionArgs& a = u.attention;
  const int32_t shared = u.shared_lens[r], leader = u.shared_leaders[r];
  if (shared < 0 || shared > p.context[r]) return "a request shares more tokens than its context has";
  if (leader < 0 || leader >= a.num_requests || u.shared_leaders[leader] != leader || u.shared_lens[leader] != shared)
    return "a leader in shared_leaders does not share the same tokens, or follows another one";
  const int32_t* table = a.block_table + r * a.block_table_stride;
  const int32_t* others = a.block_table + leader * a.block_table_stride;
  const int64_t blocks = (shared + a.block_size - 1) / a.block_size;
  if (std::memcmp(table, others, blocks * sizeof(int32_t)) != 0)
    return "a request shares tokens with a leader but not its blocks";
  return nullptr;
}

// Groups of tokens with one leader, as requests of the kernel; says which rows are carried for which token.
const char* group_sharers(const UnifiedArgs& u, Phases& p) {
  const AttentionArgs& a = u.attention;
  constexpr const char* INCOMPLETE = "shared_tokens must hold every token of the requests that share, once";
  p.starts.assign(1, 0);
  p.lens.clear(), p.tables.clear(), p.positions.clear();
  int64_t expected = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    if (u.shared_lens[r] == 0) continue;
    if (const char* error = check_sharer(u, p, r)) return error;
    expected += a.query_start_loc[r + 1] - a.query_start_loc[r];
  }
  int64_t i = 0;
  for (int32_t before = -1; i < expected; ++i) {
    const int32_t token = u.shared_tokens[i];
    if (token < 0 || token >= a.query_start_loc[a.num_requests] || p.carried_rows[token] >= 0) return INCOMPLETE;
    const int32_t* end = a.query_start_loc + a.num_requests + 1;
    const int64_t r = std::upper_bound(a.query_start_loc, end, token) - a.query_start_loc - 1;
    if (u.shared_lens[r] == 0) return INCOMPLETE;
    const int32_t leader = u.shared_leaders[r];
    if (leader != before) {
      if (before >= 0) p.starts.push_back(static_cast<int32_t>(i));
      p.lens.push_back(u.shared_lens[r]);
      const int32_t* table = a.block_table + leader * a.block_table_stride;
      p.tables.insert(p.tables.end(), table, table + a.max_blocks);
      before = leader;
    }
    p.positions.push_back(p.context[r] + token - a.query_start_loc[r]);
    p.carried_rows[token] = static_cast<int32_t>(i);
  }
  if (i < a.num_tokens && u.shared_tokens[i] >= 0) return INCOMPLETE;
  if (i > 0) p.starts.push_back(static_cast<int32_t>(i));
  p.num_carried = i;
  return nullptr;
}

// No keys yet for any row that is carried.
float* clear_carried(const AttentionArgs& a, Phases& p) {
  const int64_t row_floats = partial_row_floats(a), rows = p.num_carried * a.num_heads;
  float* carried = p.carried.at_least<float>(rows * row_floats);
  for (int64_t i = 0; i < rows; ++i) carried[i * row_floats] = MINUS_INFINITY, carried[i * row_floats + 1] = 0.0f;
  return carried;
}

// This step's K and V side by side, as a cache with a block for each request that begins at its first token.
const char* attend_causally(const UnifiedArgs& u, Phases& p, AttentionArgs args, const Attend& attend) {
  const AttentionArgs& a = u.attention;
  const int64_t k_bytes = a.head_dim * u.element_bytes, row = k_bytes + a.head_dim_v * u.element_bytes;
  char* rows = p.own_rows.at_least<char>(std::max<int64_t>(1, a.num_tokens * a.num_kv_heads * row));
  for (int64_t t = 0; t < a.num_tokens; ++t)
    for (int64_t g = 0; g < a.num_kv_heads; ++g) {
      char* to = rows + (t * a.num_kv_heads + g) * row;
      std::memcpy(to, u.k + t * u.k_token_stride + g * u.k_head_stride, k_bytes);
      std::memcpy(to + k_bytes, u.v + t * u.v_token_stride + g * u.v_head_stride, row - k_bytes);
    }
  p.own_tables.assign(a.query_start_loc, a.query_start_loc + a.num_requests);
  p.own_lens.resize(a.num_requests);
  for (int64_t r = 0; r < a.num_requests; ++r) p.own_lens[r] = a.query_start_loc[r + 1] - a.query_start_loc[r];
  const int64_t width = a.head_dim + a.head_dim_v;
  args.cache = rows, args.num_blocks = args.block_size = std::max<int64_t>(1, a.num_tokens), args.max_blocks = 1;
  args.cache_head_stride = width, args.cache_block_stride = args.cache_slot_stride = a.num_kv_heads * width;
  args.block_table = p.own_tables.data(), args.block_table_stride = 1, args.seq_lens = p.own_lens.data();
  return attend(args);
}

const char* attend_shared(const UnifiedArgs& u, const Phases& p, AttentionArgs args, const Attend& attend) {
  args.num_requests = static_cast<int64_t>(p.lens.size());
  args.query_start_loc = p.starts.data(), args.seq_lens = p.lens.data();
  args.block_table = p.tables.data(), args.block_table_stride = args.max_blocks;
  args.row_tokens = u.shared_tokens, args.row_positions = p.positions.data();
  return attend(args);
}

const char* attend_unique(const UnifiedArgs& u, const Phases& p, AttentionArgs args, const Attend& attend) {
  args.key_begins = u.has_shared ? u.shared_lens : nullptr;
  args.key_ends = u.has_causal || !u.has_unique ? p.context.data() : nullptr;
  // Without a unique part nothing is left to be read: what is carried is written. All contexts are covered then.
  if (!u.has_unique && !u.has_shared) args.key_begins = p.context.data();
  return attend(args);
}

// The state of the one part that ran.
void give_part(const UnifiedArgs& u, const Phases& p, const float* carried) {
  const AttentionArgs& a = u.attention;
  const int64_t row_floats = partial_row_floats(a);
  for (int64_t t = 0; t < a.num_tokens; ++t)
    for (int64_t h = 0; h < a.num_heads; ++h) {
      const int32_t at = p.carried_rows[t];
      const float* row = at < 0 ? nullptr : carried + (at * a.num_heads + h) * row_floats;
      const bool empty = row == nullptr || row[1] == 0.0f;
      float* out = u.part_out + (t * a.num_heads + h) * a.head_dim_v;
      for (int64_t d = 0; d < a.head_dim_v; ++d) out[d] = empty ? 0.0f : row[2 + d] / row[1];
      u.part_lse[h * a.num_tokens + t] = empty ? MINUS_INFINITY : (row[0] + std::log2(row[1])) * LN_2;
    }
}

}  // namespace

const char* unified_attention(const UnifiedArgs& u, const Attend& attend) {
  static thread_local Phases p;
  AttentionArgs args = u.attention;
  if (const char* error = read_lengths(u, p)) return error;
  p.carried_rows.assign(args.num_tokens, -1);
  p.num_carried = 0;
  if (u.has_shared)
    if (const char* error = group_sharers(u, p)) return error;
  const bool shares = p.num_carried > 0;
  if (u.only == 0 && !shares && !u.has_causal && u.has_unique) return attend(args);
  if (u.has_causal || u.only != 0) {  // a row for every token
    p.num_carried = args.num_tokens;
    for (int64_t t = 0; t < args.num_tokens; ++t) p.carried_rows[t] = static_cast<int32_t>(t);
  }
  args.carried = clear_carried(args, p), args.carried_rows = p.carried_rows.data(), args.carries_on = true;
  const auto runs = [&](char part, bool here) { return here && (u.only == 0 || u.only == part); };
  if (runs('c', u.has_causal))
    if (const char* error = attend_causally(u, p, args, attend)) return error;
  if (runs('s', shares))
    if (const char* error = attend_shared(u, p, args, attend)) return error;
  if (u.only == 0) args.carries_on = false;
  if (u.only == 0 || runs('u', u.has_unique))
    if (const char* error = attend_unique(u, p, args, attend)) return error;
  if (u.only != 0) give_part(u, p, args.carried);
  return nullptr;
}

void merge_states(const MergeArgs& m, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t token = row / m.num_heads, head = row % m.num_heads, at = head * m.num_tokens + token;
    const auto lse_of = [&](int64_t part) {
      const float lse = m.lses[part][at];
      return lse == -MINUS_INFINITY ? MINUS_INFINITY : lse;
    };
    float top = MINUS_INFINITY, sum = 0.0f;
    for (int64_t i = 0; i < m.num_parts; ++i) top = std::max(lse_of(i), top);
    const float shift = top == MINUS_INFINITY ? 0.0f : top;
    for (int64_t i = 0; i < m.num_parts; ++i) sum += std::exp(lse_of(i) - shift);
    m.lse[at] = shift + std::log(sum);
    float total = sum, rescale = 1.0f;
    if (m.sinks != nullptr && m.sinks[head] != MINUS_INFINITY) {
      const float highest = std::max(m.sinks[head], top);
      rescale = std::exp(shift - highest);
      total = sum * rescale + std::exp(m.sinks[head] - highest);
    }
    float* out = m.out + row * m.head_dim_v;
    std::memset(out, 0, m.head_dim_v * sizeof(float));
    for (int64_t i = 0; i < m.num_parts; ++i) {
      if (lse_of(i) == MINUS_INFINITY) continue;
      const float weight = std::exp(lse_of(i) - shift) * rescale / total;
      const float* part = m.outs[i] + row * m.head_dim_v;
      for (int64_t d = 0; d < m.head_dim_v; ++d) out[d] += weight * part[d];
    }
  }
}

}  // namespace pagebinder
