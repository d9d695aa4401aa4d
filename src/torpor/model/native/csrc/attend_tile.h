// Attention of many queries of one row: tiles of queries against chunks of keys, both in the
// processor's cache (Dao et al. 2022). What a query must not see has weight 0, which does not help
// where a value is not finite: it spreads within its row.
//
// Shapes: M queries of all heads that share a KV head, K positions of a chunk, D head size.

#pragma once

#include "attend_few.h"
#include "outer.h"
#include "turn.h"

constexpr int64_t kQueryRows = 192;

INLINE int64_t tile_tokens(const Layer& layer) {
  const int64_t tokens = kQueryRows / (layer.heads / layer.kv_heads);
  return tokens > 1 ? tokens : 1;
}

struct TileRoom {
  float *query, *keys, *scores, *values, *out;  // [M, D], [D, K], [M, K], [K, D], [M, D]
  float* factors;                               // [M]
  Running* running;                             // [M]
  int64_t k_width, v_width;

  static int64_t queries(const Layer& layer) {
    return tile_tokens(layer) * (layer.heads / layer.kv_heads);
  }
  static int64_t floats(const Layer& layer) {
    const int64_t k = padded(layer.k_dim), v = padded(layer.v_dim);
    return queries(layer) * (k + v + kChunk + 3) + kChunk * (k + v);
  }
  TileRoom(const Layer& layer, float* scratch)
      : k_width(padded(layer.k_dim)), v_width(padded(layer.v_dim)) {
    const int64_t rows = queries(layer);
    query = scratch;
    keys = query + rows * k_width;
    scores = keys + kChunk * k_width;
    values = scores + rows * kChunk;
    out = values + kChunk * v_width;
    factors = out + rows * v_width;
    running = reinterpret_cast<Running*>(factors + rows);
  }
};

// Keys of a chunk as columns [D, K]; columns beyond `count` are zero.
template <class C>
static void columns_of_keys(const Chunk<C>& chunk, int64_t k_dim, float* to) {
  int64_t k = 0;
  for (; k + 4 <= k_dim; k += 4)
    for (int64_t j = 0; j < kChunk; j += 4) {
      Vec4 rows[4];
      for (int i = 0; i < 4; i++) rows[i] = j + i < chunk.count ? load4(chunk.keys[j + i] + k) : Vec4{};
      turn(rows);
      for (int i = 0; i < 4; i++) store_as(to + (k + i) * kChunk + j, rows[i]);
    }
  for (; k < k_dim; k++)
    for (int64_t j = 0; j < kChunk; j++)
      to[k * kChunk + j] = j < chunk.count ? widen(chunk.keys[j][k]) : 0.0f;
}

template <class C>
static void rows_of_values(const Chunk<C>& chunk, int64_t v_dim, float* to) {
  for (int64_t j = 0; j < chunk.count; j++)
    for (int64_t k = 0; k < v_dim; k += kLanes)
      store(to + j * padded(v_dim) + k, load_part(chunk.values[j] + k, v_dim - k));
}

// Hides the scores of a query at `position` with what it must not see; `begin` is the chunk's first.
INLINE void hide(float* scores, int64_t begin, int64_t position, int64_t window) {
  const int32_t last = static_cast<int32_t>(position - begin);
  const int32_t first = window && last - window + 1 > 0 ? static_cast<int32_t>(last - window + 1) : 0;
  Ints lanes;
  for (int i = 0; i < kLanes; i++) lanes[i] = i;
  for (int32_t j = 0; j < kChunk; j += kLanes) {
    const Ints at = lanes + j;
    store(scores + j, select((at <= last) & (at >= first), load(scores + j), broadcast(kHidden)));
  }
}

template <class T, class C>
static void attend_tile(const Layer& layer, const Step& step, const Tokens<T>& a, const Item& item,
                        int64_t head, float* scratch) {
  const TileRoom room(layer, scratch);
  const int64_t group = layer.heads / layer.kv_heads, rows = item.count * group;
  const int64_t token = step.starts[item.row] + item.first;
  const int64_t position = step.contexts[item.row] + item.first;
  for (int64_t m = 0; m < rows; m++) {
    const T* query = a.q + (token + m / group) * a.q_stride + (head * group + m % group) * layer.k_dim;
    for (int64_t k = 0; k < layer.k_dim; k += kLanes)
      store(room.query + m * room.k_width + k, load_part(query + k, layer.k_dim - k) * layer.scale);
    room.running[m] = Running{};
  }
  std::memset(room.out, 0, rows * room.v_width * sizeof(float));
  const int64_t end = position + item.count;
  const int64_t begin = layer.window && position + 1 > layer.window ? position + 1 - layer.window : 0;
  Chunk<C> chunk;
  for (int64_t at = begin; at < end; at += kChunk) {
    chunk.locate(layer, step, item.row, head, at, end);
    chunk.fetch_keys(layer, 0, kChunk);
    chunk.fetch_values(layer, 0, kChunk);
    const int64_t count = chunk.count;
    columns_of_keys(chunk, layer.k_dim, room.keys);
    rows_of_values(chunk, layer.v_dim, room.values);
    multiply(room.query, room.k_width, room.keys, kChunk, rows, layer.k_dim,
             {room.scores, kChunk, false, nullptr});
    const bool all_seen = at + kChunk - 1 <= position && !layer.window;
    for (int64_t m = 0; m < rows; m++) {
      float* scores = room.scores + m * kChunk;
      if (!all_seen) hide(scores, at, position + m / group, layer.window);
      room.factors[m] = room.running[m].fold(scores, kChunk);
    }
    multiply(room.scores, kChunk, room.values, room.v_width, rows, count,
             {room.out, room.v_width, true, room.factors});
  }
  for (int64_t m = 0; m < rows; m++) {
    const int64_t place = (token + m / group) * layer.heads + head * group + m % group;
    const Vec total = broadcast(room.running[m].total);
    for (int64_t k = 0; k < layer.v_dim; k += kLanes)
      store_part(a.out + place * layer.v_dim + k, load(room.out + m * room.v_width + k) / total,
                 layer.v_dim - k);
    if (a.lse) a.lse[place] = room.running[m].lse();
  }
}
