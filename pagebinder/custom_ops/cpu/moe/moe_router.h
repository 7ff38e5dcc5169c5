// Which experts a token goes to, see custom_ops/moe/router.py.
//
// T tokens, E experts, K chosen for each token, G groups of E / G neighbours.
#pragma once

#include "moe.h"

namespace pagebinder {

struct RouterArgs {
  int64_t tokens, experts, top_k;
  const float* scores;            // [T, E]
  const float* bias;              // [E] or null: added for the choice alone
  bool sorted;                    // the slots of a token by their rating, else as the selection leaves them
  int64_t groups, top_groups;     // 1 and 1: no groups
  bool best_two;                  // a group's score is the sum of its best two, else its best
  float outside;                  // what experts of other groups rate
  bool weigh_rated;               // `chosen` is what was rated, else the score
  int64_t* ids;                   // [T, K]
  float* chosen;                  // [T, K]
  int num_threads;
  ParallelRun run;
};
void choose_experts(const RouterArgs& args);

}  // namespace pagebinder
