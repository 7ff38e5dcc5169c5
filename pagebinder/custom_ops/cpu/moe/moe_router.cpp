#include "moe_router.h"

#include <cmath>
#include <utility>

#include "moe_routing.h"

namespace pagebinder {
namespace {

using Rated = std::pair<float, int64_t>;  // a rating and whose it is

constexpr int64_t TOKENS_OF_A_JOB = 16, SERIAL_RATINGS = 1 << 14;

// NaN comes first, as it does for torch. A type of its own, so that algorithms inline it.
struct IsBetter {
  bool operator()(const Rated& a, const Rated& b) const {
    return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
  }
};

struct Scratch {
  std::vector<Rated> all, groups;
  std::vector<float> rated;
};

// The best k to the front. torch.topk runs these very algorithms of the standard library, so that equal ratings are
// chosen, and stand, as they do there.
void best_first(std::vector<Rated>& all, int64_t k, bool sorted) {
  const auto first = all.begin();
  if (k * 64 <= static_cast<int64_t>(all.size())) {
    std::partial_sort(first, first + k, all.end(), IsBetter{});
  } else {
    std::nth_element(first, first + k - 1, all.end(), IsBetter{});
    if (sorted) std::sort(first, first + k - 1, IsBetter{});
  }
}

float group_score(const float* rated, int64_t size, bool best_two) {
  float best = -INFINITY, second = -INFINITY;
  for (int64_t i = 0; i < size; ++i) {
    if (std::isnan(rated[i])) return rated[i];
    if (rated[i] > best) second = best, best = rated[i];
    else if (rated[i] > second) second = rated[i];
  }
  return best_two ? best + second : best;
}

void leave_best_groups(const RouterArgs& a, float* rated, std::vector<Rated>& groups) {
  const int64_t size = a.experts / a.groups;
  groups.resize(a.groups);
  for (int64_t g = 0; g < a.groups; ++g) groups[g] = {group_score(rated + g * size, size, a.best_two), g};
  best_first(groups, a.top_groups, false);
  for (int64_t i = a.top_groups; i < a.groups; ++i)
    std::fill_n(rated + groups[i].second * size, size, a.outside);
}

void choose(const RouterArgs& a, int64_t token, Scratch& scratch) {
  const float *scores = a.scores + token * a.experts, *rated = scores;
  if (a.bias != nullptr || a.groups > 1) {
    scratch.rated.assign(scores, scores + a.experts);
    if (a.bias != nullptr)
      for (int64_t e = 0; e < a.experts; ++e) scratch.rated[e] += a.bias[e];
    if (a.groups > 1) leave_best_groups(a, scratch.rated.data(), scratch.groups);
    rated = scratch.rated.data();
  }
  scratch.all.resize(a.experts);
  Rated* all = scratch.all.data();
  for (int64_t e = 0; e < a.experts; ++e) all[e] = {rated[e], e};
  best_first(scratch.all, a.top_k, a.sorted);
  for (int64_t k = 0; k < a.top_k; ++k) {
    a.ids[token * a.top_k + k] = all[k].second;
    a.chosen[token * a.top_k + k] = a.weigh_rated ? all[k].first : scores[all[k].second];
  }
}

}  // namespace

void choose_experts(const RouterArgs& a) {
  const Team team{a.tokens * a.experts < SERIAL_RATINGS ? 1 : a.num_threads, a.run};
  for_jobs<NoSetup>((a.tokens + TOKENS_OF_A_JOB - 1) / TOKENS_OF_A_JOB, team, [&](int64_t job, int64_t, NoSetup&) {
    static thread_local Scratch scratch;
    const int64_t end = std::min(a.tokens, (job + 1) * TOKENS_OF_A_JOB);
    for (int64_t token = job * TOKENS_OF_A_JOB; token < end; ++token) choose(a, token, scratch);
  });
}

}  // namespace pagebinder
