// Rows of logits -> tokens: sampling/sample_tokens.py, with equal results.
#pragma once

#include "noise.h"

namespace pagebinder {

template <class T>
struct Draw {
  const T* logits;  // [vocab]
  int64_t vocab;
  float scale;      // log2(e) / temperature
  double top_k;     // vocab or more: all
  double top_p;
  float min_y, penalty;
  const int64_t* seen;  // [num_seen] tokens that the penalty is for, in [0, vocab)
  int64_t num_seen;
  Stream stream;
};

// A token; -1 if there is a NaN.
template <class T> int64_t sample_token(const Draw<T>& draw);

}  // namespace pagebinder
