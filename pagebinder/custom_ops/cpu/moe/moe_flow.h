// The two ops over an engine, which multiplies the rows of an expert with some of its columns.
//
//     pack     rows of x, sorted by expert         x -> operand            a job: a group of rows
//     hidden   x W_up, gate                        operand -> operand      a job: an expert, some inner columns
//     down     hidden W_down                       operand -> rows         a job: an expert, some columns
//     add      slots times their weights           rows -> out             a job: a token, some columns
//
// So it is where experts have few rows and memory is what they wait for: a worker reads its weights as they lie, one
// expert after the other, and packs the rows of an expert for itself. Where they have many, rows would be too much in
// float32: one phase has `down` and `add`, a job all experts' rows of some columns. Slots are added in their order either
// way. An engine has:
//
//     GROUP, PANEL, MOST_HIDDEN           rows that are packed together; most columns of a job, and of a hidden one, of
//                                         gated experts half of them with gates and half with values
//     Element, Operand, operand_size      of the model; packed rows, how many of them
//     Setup, Panel                        what a thread holds while it works; the columns of a job, {} for none
//     panel, hidden_panel                 columns of a projection; inner columns, with their gates and values
//     pack(run, rows, count, inner, to)
//     hidden(args, run, x, panel, next, to)         gated inner columns of all rows of a run, as an operand
//     products(projection, run, x, panel, next, y)  rows of PANEL floats, with bias
//
// `next` is the panel that the same thread reads afterwards, so that memory can be asked for it early.
#pragma once

#include "moe_routing.h"

namespace pagebinder {

constexpr int64_t MOST_SLOTS = 8192;  // of one pass: more tokens are handled piece by piece, to bound the scratch
constexpr int64_t FEW_ROWS = 16, MOST_SUMS = 1 << 21;  // of an expert, on average; floats of all slots' rows
constexpr int64_t ADDED_COLUMNS = 512;
constexpr int64_t JOBS_OF_A_WORKER = 16;               // at least, before a hidden one has more panels

template <class Engine, class RowOf>
void pack_group(const Routing& routing, int64_t group, int64_t inner, const RowOf& row_of,
                typename Engine::Operand* operand) {
  const typename Engine::Element* rows[Engine::GROUP];
  int count = 0;
  for (int i = 0; i < Engine::GROUP; ++i) {
    const int slot = routing.slot_at[group * Engine::GROUP + i];
    if (slot >= 0) rows[count++] = row_of(slot);
  }
  Engine::pack(routing.runs[routing.run_of[group]], rows, count, inner, operand);
}

template <class Engine, class RowOf>
void pack_rows(const Routing& routing, int64_t inner, const Team& team, const RowOf& row_of,
               typename Engine::Operand* operand) {
  for_jobs<NoSetup>(routing.positions() / Engine::GROUP, team, [&](int64_t group, int64_t, NoSetup&) {
    pack_group<Engine>(routing, group, inner, row_of, operand + Engine::operand_size(group * Engine::GROUP, inner));
  });
}

// What a worker packed for itself: the rows of a run.
template <class Engine>
struct OwnRows {
  [[maybe_unused]] const typename Engine::Setup setup{};
  int64_t run = -1;
  typename Engine::Operand* operand = nullptr;

  template <class RowOf>
  const typename Engine::Operand* of(const Routing& routing, int64_t wanted, int64_t inner, const RowOf& row_of) {
    static thread_local Buffer memory;
    if (wanted == run) return operand;
    run = wanted;
    const int64_t first = routing.runs[run].first / Engine::GROUP;
    const int64_t groups = (routing.runs[run].rows + Engine::GROUP - 1) / Engine::GROUP;
    operand = memory.at_least<typename Engine::Operand>(Engine::operand_size(groups * Engine::GROUP, inner));
    for (int64_t g = 0; g < groups; ++g)
      pack_group<Engine>(routing, first + g, inner, row_of, operand + Engine::operand_size(g * Engine::GROUP, inner));
    return operand;
  }
};

// All columns of the rows of `x` that a projection makes, expert after expert: put(slot, column, width, sums) of each.
template <class Engine, class Put>
void for_panels(const Projection& p, const Routing& routing, const typename Engine::Operand* x, const Team& team,
                const Put& put) {
  const int64_t num_runs = static_cast<int64_t>(routing.runs.size());
  const int64_t panels = (p.columns + Engine::PANEL - 1) / Engine::PANEL;
  const auto panel = [&](int64_t job) {
    return job < num_runs * panels
               ? Engine::panel(p, routing.runs[job / panels].expert, job % panels * Engine::PANEL, Engine::PANEL)
               : typename Engine::Panel{};
  };
  for_jobs<typename Engine::Setup>(num_runs * panels, team, [&](int64_t job, int64_t next, auto&) {
    static thread_local Buffer buffer;
    const Run& run = routing.runs[job / panels];
    const int64_t column = job % panels * Engine::PANEL;
    const int width = static_cast<int>(std::min<int64_t>(Engine::PANEL, p.columns - column));
    float* y = buffer.at_least<float>(static_cast<size_t>(run.rows + Engine::GROUP) * Engine::PANEL);
    Engine::products(p, run, x + Engine::operand_size(run.first, p.inner), panel(job), panel(next), y);
    for (int r = 0; r < run.rows; ++r) put(routing.slot_at[run.first + r], column, width, y + r * Engine::PANEL);
  });
}

// Columns [column, column + width) of a token: row_of(slot) of each of its slots times its weight, added in their order.
template <class T, class RowOf>
void add_slots(const MoeArgs& a, const Routing& routing, int64_t token, int64_t column, int width, const RowOf& row_of) {
  const int64_t first = token * a.choice.slots;
  T* to = static_cast<T*>(a.out) + token * a.down.columns + column;
  for (int c = 0; c < width; c += W) {
    VF sum{};
    for (int64_t s = first; s < first + a.choice.slots; ++s)
      if (routing.position_of[s] >= 0) sum += a.weights[s] * load<VF>(row_of(s) + c);
    if (width - c >= W) store_float(to + c, sum);
    else store_float_part(to + c, sum, width - c);
  }
}

// Down where experts have few rows: a worker reads the weights of one expert after the other as they lie, and slots are
// added when all are there.
template <class Engine>
void down_by_expert(const MoeArgs& a, const Routing& routing, const typename Engine::Operand* hidden, const Team& team) {
  static thread_local Buffer slots_buffer;
  const int64_t pitch = (a.down.columns + W - 1) / W * W;
  float* of_slots = slots_buffer.at_least<float>(static_cast<size_t>(a.choice.tokens * a.choice.slots * pitch));
  for_panels<Engine>(a.down, routing, hidden, team, [&](int slot, int64_t column, int width, const float* y) {
    std::memcpy(of_slots + slot * pitch + column, y, (width + W - 1) / W * W * sizeof(float));
  });
  const int64_t parts = (a.down.columns + ADDED_COLUMNS - 1) / ADDED_COLUMNS;
  for_jobs<NoSetup>(a.choice.tokens * parts, team, [&](int64_t job, int64_t, NoSetup&) {
    const int64_t column = job % parts * ADDED_COLUMNS;
    add_slots<typename Engine::Element>(a, routing, job / parts, column,
        static_cast<int>(std::min(ADDED_COLUMNS, a.down.columns - column)),
        [&](int64_t slot) { return of_slots + slot * pitch + column; });
  });
}

// Down where they have many: a worker has all experts' rows of some columns.
template <class Engine>
void down_by_columns(const MoeArgs& a, const Routing& routing, const typename Engine::Operand* hidden, const Team& team) {
  const int64_t I = a.down.inner, num_runs = static_cast<int64_t>(routing.runs.size());
  const int width = a.down.columns / Engine::PANEL >= 4 * team.num_threads ? Engine::PANEL : Engine::PANEL / 2;
  const int64_t jobs = (a.down.columns + width - 1) / width;
  for_jobs<typename Engine::Setup>(jobs, team, [&](int64_t job, int64_t next_job, auto&) {
    static thread_local Buffer buffer;
    float* y = buffer.at_least<float>(static_cast<size_t>(routing.positions()) * Engine::PANEL);
    const auto panel = [&](int64_t run, int64_t j) {
      if (run == num_runs) run = 0, j = next_job;
      return j < jobs ? Engine::panel(a.down, routing.runs[run].expert, j * width, width) : typename Engine::Panel{};
    };
    for (int64_t r = 0; r < num_runs; ++r) {
      const Run& run = routing.runs[r];
      Engine::products(a.down, run, hidden + Engine::operand_size(run.first, I), panel(r, job), panel(r + 1, job),
                       y + static_cast<int64_t>(run.first) * Engine::PANEL);
    }
    const int64_t column = job * width, rest = a.down.columns - column;
    for (int64_t t = 0; t < a.choice.tokens; ++t)
      add_slots<typename Engine::Element>(a, routing, t, column, static_cast<int>(std::min<int64_t>(width, rest)),
          [&](int64_t slot) { return y + static_cast<int64_t>(routing.position_of[slot]) * Engine::PANEL; });
  });
}

// Inner columns of a job.
template <class Engine>
int64_t hidden_columns(const MoeArgs& a, int64_t num_runs, const Team& team) {
  const int64_t parts = a.gate.gated ? 2 : 1;
  int64_t columns = Engine::MOST_HIDDEN / parts;
  while (columns > Engine::PANEL / parts && num_runs * a.down.inner < columns * JOBS_OF_A_WORKER * team.num_threads)
    columns /= 2;
  return columns;
}

template <class Engine>
void moe_pass(const MoeArgs& a) {
  using T = typename Engine::Element;
  static thread_local Routing routing_buffer;
  static thread_local Buffer x_buffer, hidden_buffer;
  Routing& routing = routing_buffer;
  routing.assign(a.choice, Engine::GROUP);
  const int64_t C = a.up.inner, I = a.down.inner, num_runs = static_cast<int64_t>(routing.runs.size());
  const int64_t num_slots = a.choice.tokens * a.choice.slots;
  const bool few = num_slots <= FEW_ROWS * num_runs && num_slots * a.down.columns <= MOST_SUMS;
  const Team team = Team::of(routing.positions() * C * I, a.num_threads, a.run);
  const auto row_of = [&](int slot) { return static_cast<const T*>(a.x) + slot / a.choice.slots * a.x_stride; };
  auto* x = few ? nullptr : x_buffer.at_least<typename Engine::Operand>(Engine::operand_size(routing.positions(), C));
  if (!few) pack_rows<Engine>(routing, C, team, row_of, x);
  auto* hidden = hidden_buffer.at_least<typename Engine::Operand>(Engine::operand_size(routing.positions(), I));

  const int64_t step = hidden_columns<Engine>(a, num_runs, team), panels = (I + step - 1) / step;
  const auto inner_panel = [&](int64_t job) {
    return job < num_runs * panels
               ? Engine::hidden_panel(a, routing.runs[job / panels].expert, job % panels * step, step)
               : typename Engine::Panel{};
  };
  for_jobs<OwnRows<Engine>>(num_runs * panels, team, [&](int64_t job, int64_t next, OwnRows<Engine>& own) {
    const Run& run = routing.runs[job / panels];
    Engine::hidden(a, run, few ? own.of(routing, job / panels, C, row_of) : x + Engine::operand_size(run.first, C),
                   inner_panel(job), inner_panel(next), hidden + Engine::operand_size(run.first, I));
  });
  if (few) down_by_expert<Engine>(a, routing, hidden, team);
  else down_by_columns<Engine>(a, routing, hidden, team);
}

template <class Engine>
void linear_pass(const ExpertLinearArgs& a) {
  using T = typename Engine::Element;
  static thread_local Routing routing_buffer;
  static thread_local Buffer x_buffer;
  Routing& routing = routing_buffer;
  routing.assign(a.choice, Engine::GROUP);
  const Projection& p = a.projection;
  T* out = static_cast<T*>(a.out);
  for (int64_t s = 0; s < a.choice.tokens * a.choice.slots; ++s)
    if (routing.position_of[s] < 0) std::memset(out + s * p.columns, 0, p.columns * sizeof(T));
  const Team team = Team::of(routing.positions() * p.columns * p.inner, a.num_threads, a.run);
  auto* x = x_buffer.at_least<typename Engine::Operand>(Engine::operand_size(routing.positions(), p.inner));
  pack_rows<Engine>(routing, p.inner, team, [&](int slot) {
    return static_cast<const T*>(a.x) + (a.row_per_slot ? slot : slot / a.choice.slots) * a.x_stride;
  }, x);

  for_panels<Engine>(p, routing, x, team, [&](int slot, int64_t column, int width, const float* y) {
    T* to = out + slot * p.columns + column;
    for (int c = 0; c < width; c += W) {
      const VF value = load<VF>(y + c);
      if (width - c >= W) store_float(to + c, value);
      else store_float_part(to + c, value, width - c);
    }
  });
}

// The same call for tokens [begin, end).
template <class T>
MoeArgs piece(MoeArgs a, int64_t begin, int64_t end) {
  a.choice.ids += begin * a.choice.slots, a.weights += begin * a.choice.slots;
  a.x = static_cast<const T*>(a.x) + begin * a.x_stride;
  a.out = static_cast<T*>(a.out) + begin * a.down.columns;
  a.choice.tokens = end - begin;
  return a;
}

template <class T>
ExpertLinearArgs piece(ExpertLinearArgs a, int64_t begin, int64_t end) {
  const int64_t slots = begin * a.choice.slots;
  a.choice.ids += slots;
  a.x = static_cast<const T*>(a.x) + (a.row_per_slot ? slots : begin) * a.x_stride;
  a.out = static_cast<T*>(a.out) + slots * a.projection.columns;
  a.choice.tokens = end - begin;
  return a;
}

template <class T, class Args>
void in_pieces(const Args& a, void (*pass)(const Args&)) {
  const int64_t most = std::max<int64_t>(1, MOST_SLOTS / std::max<int64_t>(1, a.choice.slots));
  for (int64_t t = 0; t < a.choice.tokens; t += most) pass(piece<T>(a, t, std::min(t + most, a.choice.tokens)));
}

}  // namespace pagebinder
