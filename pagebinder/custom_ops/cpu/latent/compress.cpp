// Running softmax over windows of tokens, see compress/paged_compress.py.
//
//     tokens of a request   |- context ... | cut          | cut          end -|      one job = one piece
//     job 0                 reads the request's state
//     job i                 begins at a window's edge: what it needs of the window before it adds up again
//
// All jobs add a token to a channel by the same operations in the same order, so neither cuts between steps nor the
// number of threads change a bit.
#include <algorithm>
#include <cmath>

#include "compress_state.h"
#include "rope_pairs.h"

namespace pagebinder {
namespace {

constexpr int64_t JOB_TOKENS = 64;
constexpr int64_t SERIAL_ELEMENTS = 1 << 15;

// Tokens [begin, end), absolute positions, of one request; token p is row first_row + p of kv.
// `start` is the state at `begin` in scratch's form, null if the job finds it itself.
struct Job {
  int64_t request, begin, end, context, last, first_row;
  const float* start;
};

// ---- one token -------------------------------------------------------------------------------------------------

PB_INLINE void add_lanes(const CompressSlot& s, int i, VF kv, VF z) {
  const VF most = load<VF>(s.most + i), difference = z - most;
  const VI rises = difference > VF{};
  const VF smaller = exp2_approx(magnitude_of(difference) * -1.44269504f);
  const VF kept = select(rises, smaller, splat(1.0f)), weight = select(rises, splat(1.0f), smaller);
  store(s.most + i, select(rises, z, most));
  store(s.total + i, load<VF>(s.total + i) * kept + weight);
  store(s.sum + i, load<VF>(s.sum + i) * kept + weight * kv);
}

template <class T, class B>
void add_half(const CompressSlot& s, const T* kv, const T* gate, const B* bias, int width) {
  int i = 0;
  for (; i + W <= width; i += W) add_lanes(s, i, load_float(kv + i), load_float(gate + i) + load_float(bias + i));
  if (i == width) return;
  const int rest = width - i;
  add_lanes(s, i, load_float_part(kv + i, rest),
            load_float_part(gate + i, rest) + load_float_part(bias + i, rest));
}

// Adds half `half` of the token at p to a slot: 0 = a (or all), 1 = b.
template <class T, class B>
void add_typed(const CompressArgs& a, const Job& job, int64_t p, int half, const CompressSlot& s) {
  const int64_t row = job.first_row + p, channel = static_cast<int64_t>(half) * a.width;
  add_half(s, static_cast<const T*>(a.kv) + row * a.kv_stride + channel,
           static_cast<const T*>(a.gate) + row * a.gate_stride + channel,
           static_cast<const B*>(a.position_bias.base) + p % a.ratio * a.bias_stride + channel, a.width);
}

using AddToken = void (*)(const CompressArgs&, const Job&, int64_t p, int half, const CompressSlot&);

AddToken add_token_of(const CompressArgs& a) {
  const bool wide = a.position_bias.type == RowKind::F32;
  if (a.type == RowKind::F32) return add_typed<float, float>;
  if (a.type == RowKind::BF16) return wide ? add_typed<bf16, float> : add_typed<bf16, bf16>;
  return wide ? add_typed<f16, float> : add_typed<f16, f16>;
}

int64_t state_block(const CompressArgs& a, int64_t request, int64_t last_token) {
  return a.state_table[request * a.state_table_stride + last_token / a.block_size];
}

// ---- entries ---------------------------------------------------------------------------------------------------

// What the entries of a step share, and each thread's place for one.
struct EntryScratch {
  float *weight, *row, *cos, *sin;
};

// The finished window in `s` -> norm, if there is one -> RoPE at its first token -> the cache. Block 0 takes no entry.
void store_entry(const CompressArgs& a, int64_t request, int64_t entry, const CompressSlot& s, const EntryScratch& e) {
  const RowLayout& rows = a.entries.rows;
  const int64_t block = a.entry_table[request * a.entry_table_stride + entry / rows.entries];
  if (block == 0) return;
  VF squares{};
  for (int i = 0; i < a.width; i += W) {
    VF x = load<VF>(s.sum + i) / load<VF>(s.total + i);
    if (i + W > a.width)
      for (int lane = a.width - i; lane < W; ++lane) x[lane] = 0.0f;
    squares += x * x;
    store(e.row + i, x);
  }
  float sum = 0.0f;
  for (int lane = 0; lane < W; ++lane) sum += squares[lane];
  if (a.norm_weight.base != nullptr) {
    const float factor = 1.0f / std::sqrt(sum / static_cast<float>(a.width) + a.eps);
    for (int i = 0; i < a.width; i += W) store(e.row + i, load<VF>(e.row + i) * factor * load<VF>(e.weight + i));
  }
  const float position = static_cast<float>(entry * a.ratio);
  for (int i = 0; i < a.pairs; ++i) {
    const float angle = rounded(position * a.inv_freq[i]);
    e.cos[i] = rounded(std::cos(angle) * a.rope_scale), e.sin[i] = rounded(std::sin(angle) * a.rope_scale);
  }
  rotate_pairs(e.row + a.width - 2 * a.pairs, e.cos, e.sin, a.pairs);
  round_row(rows, e.row);
  encode_row(rows, a.entries.page(block), entry % rows.entries, e.row);
}

// ---- jobs ------------------------------------------------------------------------------------------------------

struct Run {
  const CompressArgs& args;
  AddToken add;
  std::vector<Job> jobs;
  std::atomic<size_t> next{0};
};

// The state at job.begin.
void begin_job(const Run& run, const Job& job, CompressState& state) {
  const CompressArgs& a = run.args;
  if (job.start != nullptr) {
    std::memcpy(state.slot[0].most, job.start, CompressState::floats(a) * sizeof(float));
    return;
  }
  if (job.begin == job.context && job.context > 0) {
    read_compress_state(a, state_block(a, job.request, job.context - 1), state);
    return;
  }
  state.clear();
  if (job.begin == 0 || a.slots == 1) return;
  for (int64_t p = job.begin - a.ratio; p < job.begin; ++p) run.add(a, job, p, 0, state.slot[0]);
}

void run_job(const Run& run, const Job& job, float* memory, const EntryScratch& entry) {
  const CompressArgs& a = run.args;
  CompressState state(memory, a.slots, a.width);
  begin_job(run, job, state);
  for (int64_t p = job.begin; p < job.end; ++p) {
    for (int s = 0; s < a.slots; ++s) run.add(a, job, p, a.slots - 1 - s, state.slot[s]);
    if ((p + 1) % a.ratio == 0) {
      store_entry(a, job.request, p / a.ratio, state.slot[0], entry);
      state.close_window();
    }
    if ((p + 1) % a.block_size != 0 && p + 1 != job.last) continue;
    const int64_t block = state_block(a, job.request, p);
    if (block != 0) write_compress_state(a, block, state);
  }
}

void worker(void* context, int) {
  static thread_local Buffer memory;
  Run& run = *static_cast<Run*>(context);
  const CompressArgs& a = run.args;
  const int64_t row = whole_vectors(a.width);
  float* floats = memory.at_least<float>(CompressState::floats(a) + 2 * row + 2 * whole_vectors(a.pairs));
  EntryScratch entry{floats + CompressState::floats(a), nullptr, nullptr, nullptr};
  entry.row = entry.weight + row, entry.cos = entry.row + row, entry.sin = entry.cos + whole_vectors(a.pairs);
  std::fill_n(entry.weight, row, 0.0f);
  if (a.norm_weight.base != nullptr) a.norm_weight.to_float(0, a.width, entry.weight);
  for (size_t i; (i = run.next.fetch_add(1, std::memory_order_relaxed)) < run.jobs.size();)
    run_job(run, run.jobs[i], floats, entry);
}

// Pieces of JOB_TOKENS or a window, whichever is more, cut at windows' edges at least one window after `context`.
void add_jobs(const CompressArgs& a, int64_t r, std::vector<Job>& jobs) {
  const int64_t length = a.query_start_loc[r + 1] - a.query_start_loc[r], end = a.seq_lens[r], context = end - length;
  const int64_t first_row = a.query_start_loc[r] - context;
  for (int64_t begin = context; begin < end;) {
    const int64_t least = begin + std::max<int64_t>(JOB_TOKENS, a.ratio);
    const int64_t cut = std::min(end, (least + a.ratio - 1) / a.ratio * a.ratio);
    jobs.push_back({r, begin, cut, context, end, first_row, nullptr});
    begin = cut;
  }
}

// A request in several jobs may write the block that its first job reads: that one gets a copy.
void copy_starts(const CompressArgs& a, std::vector<Job>& jobs, std::vector<float>& starts) {
  const auto needs_copy = [](const Job& j) { return j.begin == j.context && j.context > 0 && j.end != j.last; };
  const int64_t floats = CompressState::floats(a);
  starts.resize(std::count_if(jobs.begin(), jobs.end(), needs_copy) * floats);
  float* to = starts.data();
  for (Job& job : jobs) {
    if (!needs_copy(job)) continue;
    CompressState state(to, a.slots, a.width);
    read_compress_state(a, state_block(a, job.request, job.context - 1), state);
    job.start = to;
    to += floats;
  }
}

const char* check_request(const CompressArgs& a, int64_t r) {
  const int64_t start = a.query_start_loc[r], length = a.query_start_loc[r + 1] - start, end = a.seq_lens[r];
  if (length < 0 || start + length > a.num_tokens) return "query_start_loc must rise from 0 to at most T";
  if (length == 0) return nullptr;
  const int64_t context = end - length, block_size = a.block_size, per_page = a.entries.rows.entries;
  if (context < 0) return "a seq_len is smaller than its new tokens";
  if (end > a.max_state_blocks * block_size) return "a seq_len exceeds its block table";
  for (int64_t i = std::max<int64_t>(context - 1, 0) / block_size; i <= (end - 1) / block_size; ++i) {
    const int64_t block = a.state_table[r * a.state_table_stride + i];
    if (block < 0 || block >= a.num_state_blocks) return "a block id in block_table is not valid";
  }
  if (context > 0 && state_block(a, r, context - 1) == 0) return "the block of a request's start state is null";
  if (context / a.ratio == end / a.ratio) return nullptr;
  const int64_t last_page = (end / a.ratio - 1) / per_page;
  if (last_page >= a.max_entry_blocks) return "a seq_len exceeds its entry table";
  for (int64_t i = context / a.ratio / per_page; i <= last_page; ++i) {
    const int64_t block = a.entry_table[r * a.entry_table_stride + i];
    if (block < 0 || block >= a.entries.num_blocks) return "a block id in entry_table is not valid";
  }
  return nullptr;
}

}  // namespace

const char* compress_norm_rope_store(const CompressArgs& a) {
  if (a.query_start_loc[0] != 0) return "query_start_loc must rise from 0 to at most T";
  Run run{a, add_token_of(a)};
  for (int64_t r = 0; r < a.num_requests; ++r) {
    if (const char* error = check_request(a, r)) return error;
    add_jobs(a, r, run.jobs);
  }
  std::vector<float> starts;
  copy_starts(a, run.jobs, starts);
  const int64_t elements = a.query_start_loc[a.num_requests] * a.slots * a.width;
  if (a.num_threads <= 1 || run.jobs.size() < 2 || elements < SERIAL_ELEMENTS) worker(&run, 0);
  else a.run(a.num_threads, worker, &run);
  return nullptr;
}

}  // namespace pagebinder
