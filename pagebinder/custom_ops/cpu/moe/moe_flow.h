// The two ops over an engine, which multiplies the rows of an expert with some of its columns.
//
//     pack     rows of x, sorted by expert         x -> operand            a job: a group of rows
//     hidden   x W_up, gate                        operand -> operand      a job: an expert, some inner columns
//     down     hidden W_down, weighted sum         operand -> out          a job: some columns, all experts
//
// A job of the last phase has all slots of its columns, so it adds them in their order. No phase keeps a product in
// float32 beyond its job. An engine has:
//
//     GROUP, PANEL                        rows that are packed together, most columns of a job
//     Element, Operand, operand_size      of the model; packed rows, how many of them
//     Setup, Panel                        what a thread holds while it works; the columns of a job, {} for none
//     panel, hidden_panel                 columns of a projection; inner columns, with gates and values
//     pack(run, rows, count, inner, to)
//     hidden(args, run, x, panel, next, to)         gated inner columns of all rows of a run, as an operand
//     products(projection, run, x, panel, next, y)  rows of PANEL floats, with bias
//
// `next` is the panel that the same thread reads afterwards, so that memory can be asked for it early.
#pragma once

#include "moe_routing.h"

namespace pagebinder {

constexpr int64_t MOST_SLOTS = 8192;  // of one pass: more tokens are handled piece by piece, to bound the scratch

template <class Engine, class RowOf>
void pack_rows(const Routing& routing, int64_t inner, const Team& team, const RowOf& row_of,
               typename Engine::Operand* operand) {
  for_jobs<NoSetup>(routing.positions() / Engine::GROUP, team, [&](int64_t group, int64_t) {
    const typename Engine::Element* rows[Engine::GROUP];
    int count = 0;
    for (int i = 0; i < Engine::GROUP; ++i) {
      const int slot = routing.slot_at[group * Engine::GROUP + i];
      if (slot >= 0) rows[count++] = row_of(slot);
    }
    const Run& run = routing.runs[routing.run_of[group]];
    Engine::pack(run, rows, count, inner, operand + Engine::operand_size(group * Engine::GROUP, inner));
  });
}

// Columns [column, column + width) of the rows of `y`, each slot's times its weight, added in the order of slots.
template <class T>
void add_slots(const MoeArgs& a, const Routing& routing, const float* y, int panel, int64_t column, int width) {
  const int K = static_cast<int>(a.choice.slots);
  for (int64_t t = 0; t < a.choice.tokens; ++t) {
    T* to = static_cast<T*>(a.out) + t * a.down.columns + column;
    for (int c = 0; c < width; c += W) {
      VF sum{};
      for (int64_t s = t * K; s < (t + 1) * K; ++s)
        if (routing.position_of[s] >= 0)
          sum += a.weights[s] * load<VF>(y + static_cast<int64_t>(routing.position_of[s]) * panel + c);
      if (width - c >= W) store_float(to + c, sum);
      else store_float_part(to + c, sum, width - c);
    }
  }
}

template <class Engine>
void moe_pass(const MoeArgs& a) {
  using T = typename Engine::Element;
  static thread_local Routing routing_buffer;
  static thread_local Buffer x_buffer, hidden_buffer;
  Routing& routing = routing_buffer;
  routing.assign(a.choice, Engine::GROUP);
  const int64_t C = a.up.inner, I = a.down.inner, num_runs = static_cast<int64_t>(routing.runs.size());
  const Team team = Team::of(routing.positions() * C * I, a.num_threads, a.run);
  auto* x = x_buffer.at_least<typename Engine::Operand>(Engine::operand_size(routing.positions(), C));
  auto* hidden = hidden_buffer.at_least<typename Engine::Operand>(Engine::operand_size(routing.positions(), I));
  pack_rows<Engine>(routing, C, team, [&](int slot) {
    return static_cast<const T*>(a.x) + slot / a.choice.slots * a.x_stride;
  }, x);

  const int64_t step = a.gate.gated ? Engine::PANEL / 2 : Engine::PANEL, panels = (I + step - 1) / step;
  const auto inner_panel = [&](int64_t job) {
    return job < num_runs * panels ? Engine::hidden_panel(a, routing.runs[job / panels].expert, job % panels * step)
                                   : typename Engine::Panel{};
  };
  for_jobs<typename Engine::Setup>(num_runs * panels, team, [&](int64_t job, int64_t next) {
    const Run& run = routing.runs[job / panels];
    Engine::hidden(a, run, x + Engine::operand_size(run.first, C), inner_panel(job), inner_panel(next),
                   hidden + Engine::operand_size(run.first, I));
  });

  const int width = a.down.columns / Engine::PANEL >= 4 * team.num_threads ? Engine::PANEL : Engine::PANEL / 2;
  const int64_t jobs = (a.down.columns + width - 1) / width;
  for_jobs<typename Engine::Setup>(jobs, team, [&](int64_t job, int64_t next_job) {
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
    add_slots<T>(a, routing, y, Engine::PANEL, column, static_cast<int>(std::min<int64_t>(width, rest)));
  });
}

template <class Engine>
void linear_pass(const ExpertLinearArgs& a) {
  using T = typename Engine::Element;
  static thread_local Routing routing_buffer;
  static thread_local Buffer x_buffer;
  Routing& routing = routing_buffer;
  routing.assign(a.choice, Engine::GROUP);
  const Projection& p = a.projection;
  const int64_t num_runs = static_cast<int64_t>(routing.runs.size());
  T* out = static_cast<T*>(a.out);
  for (int64_t s = 0; s < a.choice.tokens * a.choice.slots; ++s)
    if (routing.position_of[s] < 0) std::memset(out + s * p.columns, 0, p.columns * sizeof(T));
  const Team team = Team::of(routing.positions() * p.columns * p.inner, a.num_threads, a.run);
  auto* x = x_buffer.at_least<typename Engine::Operand>(Engine::operand_size(routing.positions(), p.inner));
  pack_rows<Engine>(routing, p.inner, team, [&](int slot) {
    return static_cast<const T*>(a.x) + (a.row_per_slot ? slot : slot / a.choice.slots) * a.x_stride;
  }, x);

  const int64_t panels = (p.columns + Engine::PANEL - 1) / Engine::PANEL;
  const auto panel = [&](int64_t job) {
    return job < num_runs * panels
               ? Engine::panel(p, routing.runs[job / panels].expert, job % panels * Engine::PANEL, Engine::PANEL)
               : typename Engine::Panel{};
  };
  for_jobs<typename Engine::Setup>(num_runs * panels, team, [&](int64_t job, int64_t next) {
    static thread_local Buffer buffer;
    const Run& run = routing.runs[job / panels];
    const int64_t column = job % panels * Engine::PANEL;
    const int width = static_cast<int>(std::min<int64_t>(Engine::PANEL, p.columns - column));
    float* y = buffer.at_least<float>(static_cast<size_t>(run.rows + Engine::GROUP) * Engine::PANEL);
    Engine::products(p, run, x + Engine::operand_size(run.first, p.inner), panel(job), panel(next), y);
    for (int r = 0; r < run.rows; ++r) {
      T* to = out + routing.slot_at[run.first + r] * p.columns + column;
      for (int c = 0; c < width; c += W) {
        const VF value = load<VF>(y + r * Engine::PANEL + c);
        if (width - c >= W) store_float(to + c, value);
        else store_float_part(to + c, value, width - c);
      }
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
