// A softmax over keys that are seen chunk after chunk (Milakov and Gimelshein 2018).

#pragma once

#include "paged.h"

constexpr float kHidden = -1e30f;  // a score that must not count; finite, so that no NaN arises

// More than any hidden score, so that those have weight 0 also before anything was seen.
constexpr float kNothingYet = -5e29f;

// Of one query: the largest score so far, and the sum of the exponentials relative to it.
struct Running {
  float most = kNothingYet, total = 0.0f;

  float lse() const { return most + std::log(total); }

  // Turns the scores of a chunk into weights. Returns the factor for what was added up before.
  float fold(float* scores) {
    Vec most_now = broadcast(most);
    for (int64_t j = 0; j < kChunk; j += kLanes) most_now = larger(load(scores + j), most_now);
    const float next = largest(most_now);
    Vec sums_now{};
    for (int64_t j = 0; j < kChunk; j += kLanes) {
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

// As many queries as there are lanes, with scores [kChunk, stride]: every one gets the bits that
// `Running` has, sums over a vector included.
struct RunningLanes {
  float *most, *total;  // [kLanes]

  Vec fold(float* scores, int64_t stride) {
    const Vec before = load(most);
    Vec next = before;
    for (int64_t j = 0; j < kChunk; j++) next = larger(load(scores + j * stride), next);
    Vec sums_now[kLanes] = {};
    for (int64_t j = 0; j < kChunk; j += kLanes)
      for (int i = 0; i < kLanes; i++) {
        const Vec part = weight(load(scores + (j + i) * stride) - next);
        store(scores + (j + i) * stride, part);
        sums_now[i] += part;
      }
    for (int half = kLanes / 2; half >= 4; half /= 2)
      for (int i = 0; i < half; i++) sums_now[i] += sums_now[i + half];
    const Vec factor = weight(before - next);
    const Vec sum_now = (sums_now[0] + sums_now[2]) + (sums_now[1] + sums_now[3]);
    store(total, load(total) * factor + sum_now);
    store(most, next);
    return factor;
  }
};
