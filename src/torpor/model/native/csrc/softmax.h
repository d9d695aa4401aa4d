// A softmax over keys that are seen chunk after chunk (Milakov and Gimelshein 2018).

#pragma once

#include "paged.h"

constexpr float kHidden = -1e30f;  // a score that must not count; finite, so that no NaN arises

// Of one query: the largest score so far, and the sum of the exponentials relative to it.
struct Running {
  float most = kHidden, total = 0.0f;

  float lse() const { return most + std::log(total); }

  // Turns the first `count` scores, hidden ones up to the next whole vector, into weights. Returns
  // the factor for what was added up before.
  float fold(float* scores, int64_t count) {
    Vec most_now = broadcast(most);
    for (int64_t j = 0; j < count; j += kLanes) most_now = larger(load(scores + j), most_now);
    const float next = largest(most_now);
    Vec sums_now{};
    for (int64_t j = 0; j < count; j += kLanes) {
      const Vec part = weight(load(scores + j) - next);
      store(scores + j, part);
      sums_now += part;
    }
    const float factor = weight(broadcast(most - next))[0];
    total = total * factor + sum(sums_now);
    most = next;
    return factor;
  }
};
