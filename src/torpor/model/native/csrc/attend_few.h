// Attention of single queries: every key is read once, for all query heads that share it.
//
// The bits of a query depend on its own row up to it and on nothing else, and are those that it has in a
// tile.

#pragma once

#include "softmax.h"
#include "turn.h"

INLINE int64_t padded(int64_t width) { return (width + kLanes - 1) / kLanes * kLanes; }

struct FewRoom {
  float *query, *scores, *values;  // [group, padded k_dim], [group, kChunk], [group, padded v_dim]
  Running* running;                // [group]

  static int64_t floats(const Layer& layer) {
    const int64_t group = layer.heads / layer.kv_heads;
    return group * (padded(layer.k_dim) + kChunk + padded(layer.v_dim) + 2);
  }
  FewRoom(const Layer& layer, float* scratch) {
    const int64_t group = layer.heads / layer.kv_heads;
    query = scratch;
    scores = query + group * padded(layer.k_dim);
    values = scores + group * kChunk;
    running = reinterpret_cast<Running*>(values + group * padded(layer.v_dim));
  }
};

// Scores of G query heads with the keys of kLanes positions, `count` of which there are; each is a
// sum over the key, first to last.
template <class C, int G>
INLINE void score(const float* query, int64_t width, const C* const* keys, int64_t count,
                  float* scores) {
  Vec acc[G] = {};
  for (int64_t k = 0; k < width; k += kLanes) {
    Vec parts[kLanes];
    if (count >= kLanes && k + kLanes <= width) {
#pragma GCC unroll 16
      for (int p = 0; p < kLanes; p++) parts[p] = load(keys[p] + k);
    } else {
      for (int p = 0; p < kLanes; p++) parts[p] = p < count ? load_part(keys[p] + k, width - k) : Vec{};
    }
    turn(parts);
#pragma GCC unroll 16
    for (int p = 0; p < kLanes; p++)
#pragma GCC unroll 4
      for (int g = 0; g < G; g++)
        acc[g] = multiply_add(broadcast(query[g * padded(width) + k + p]), parts[p], acc[g]);
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; g++) store(scores + g * kChunk, acc[g]);
}

// Adds weighted values of a chunk to G heads, V vectors of them.
template <class C, int G, int V>
INLINE void weigh(const Layer& layer, const Chunk<C>& chunk, const Chunk<C>& ahead, int64_t at,
                  const float* weights, const float* factors, float* values) {
  const int64_t width = layer.v_dim;
  Vec acc[G][V];
  for (int g = 0; g < G; g++)
    for (int i = 0; i < V; i++)
      acc[g][i] = load(values + g * padded(width) + at + i * kLanes) * factors[g];
  for (int64_t j = chunk.first; j < chunk.count; j++) {
    ahead.fetch_values(layer, j, j + 1);
    const C* from = chunk.values[j] + at;
#pragma GCC unroll 4
    for (int i = 0; i < V; i++) {
      const Vec part = load_part(from + i * kLanes, width - at - i * kLanes);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++)
        acc[g][i] = multiply_add(part, weights[g * kChunk + j], acc[g][i]);
    }
  }
  for (int g = 0; g < G; g++)
    for (int i = 0; i < V; i++) store(values + g * padded(width) + at + i * kLanes, acc[g][i]);
}

// One chunk for G heads; what lies ahead is fetched meanwhile.
template <class C, int G>
static void few_heads(const Layer& layer, const Chunk<C>& chunk, const Chunk<C>& ahead,
                      const FewRoom& room, int64_t g) {
  float* scores = room.scores + g * kChunk;
  const float* query = room.query + g * padded(layer.k_dim);
  for (int64_t j = 0; j < kChunk; j += kLanes) {
    ahead.fetch_keys(layer, j, j + kLanes);
    if (j + kLanes > chunk.first && j < chunk.count)
      score<C, G>(query, layer.k_dim, chunk.keys + j, chunk.count - j, scores + j);
  }
  float factors[G];
  for (int i = 0; i < G; i++) {
    for (int64_t j = 0; j < chunk.first; j++) scores[i * kChunk + j] = kHidden;
    for (int64_t j = chunk.count; j < kChunk; j++) scores[i * kChunk + j] = kHidden;
    factors[i] = room.running[g + i].fold(scores + i * kChunk);
  }
  float* values = room.values + g * padded(layer.v_dim);
  int64_t at = 0;
  for (; at + 4 * kLanes <= padded(layer.v_dim); at += 4 * kLanes)
    weigh<C, G, 4>(layer, chunk, ahead, at, scores, factors, values);
  for (; at < layer.v_dim; at += kLanes)
    weigh<C, G, 1>(layer, chunk, ahead, at, scores, factors, values);
  ahead.fetch_values(layer, chunk.count, kChunk);
}

// A query: its row, its place there, and the head of the cache that it asks.
struct Query {
  int64_t row, index, head;

  int64_t end(const Step& step) const { return step.contexts[row] + index + 1; }
  int64_t begin(const Layer& layer, const Step& step) const {
    const int64_t end = this->end(step);
    return layer.window && end > layer.window ? end - layer.window : 0;
  }
};

// `next`: the query that comes next, if known.
template <class T, class C>
static void attend_one(const Layer& layer, const Step& step, const Tokens<T>& a, const Query& asked,
                       const Query* next, float* scratch) {
  const FewRoom room(layer, scratch);
  const int64_t group = layer.heads / layer.kv_heads, head = asked.head;
  const int64_t token = step.starts[asked.row] + asked.index, end = asked.end(step);
  for (int64_t g = 0; g < group; g++) {
    const T* query = a.q + token * a.q_stride + (head * group + g) * layer.k_dim;
    for (int64_t k = 0; k < layer.k_dim; k += kLanes)
      store(room.query + g * padded(layer.k_dim) + k,
            load_part(query + k, layer.k_dim - k) * layer.scale);
    room.running[g] = Running{};
    std::memset(room.values + g * padded(layer.v_dim), 0, padded(layer.v_dim) * sizeof(float));
  }
  Chunk<C> chunk, ahead, none;
  for (int64_t at = asked.begin(layer, step); at < end; at = chunk_end(at)) {
    chunk.locate(layer, step, asked.row, head, at, end);
    if (chunk_end(at) < end)
      ahead.locate(layer, step, asked.row, head, chunk_end(at), end);
    else if (next)
      ahead.locate(layer, step, next->row, next->head, next->begin(layer, step), next->end(step));
    else
      ahead.count = 0;
    int64_t g = 0;
    for (; g + 4 <= group; g += 4) few_heads<C, 4>(layer, chunk, g ? none : ahead, room, g);
    if (group - g == 3) few_heads<C, 3>(layer, chunk, g ? none : ahead, room, g);
    if (group - g == 2) few_heads<C, 2>(layer, chunk, g ? none : ahead, room, g);
    if (group - g == 1) few_heads<C, 1>(layer, chunk, g ? none : ahead, room, g);
  }
  for (int64_t g = 0; g < group; g++) {
    const int64_t place = token * layer.heads + head * group + g;
    const Vec total = broadcast(room.running[g].total);
    for (int64_t k = 0; k < layer.v_dim; k += kLanes)
      store_part(a.out + place * layer.v_dim + k,
                 load(room.values + g * padded(layer.v_dim) + k) / total, layer.v_dim - k);
    if (a.lse) a.lse[place] = room.running[g].lse();
  }
}
