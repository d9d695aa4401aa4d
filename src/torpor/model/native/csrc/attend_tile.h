// Attention of many queries of one row: tiles of queries against chunks of keys, both in the
// processor's cache (Dao et al. 2022). Every lane of a vector is a query, so that keys and values are
// used as they lie and no sum is taken over a vector. A query has the bits that it has alone. What it
// must not see has weight 0, which does not help where a value is not finite: it spreads within its
// row.
//
// Shapes: K positions of a chunk, D head size, L lanes of a group of queries.

#pragma once

#include "attend_few.h"

constexpr int64_t kQueryRows = 192;          // queries of a tile, of all heads that share a KV head
constexpr int64_t kQueryLanes = 3 * kLanes;  // queries of a group
constexpr int kAtATime = kLanes == 16 ? 8 : 4;  // keys, or elements of values

INLINE int64_t tile_tokens(const Layer& layer) {
  const int64_t tokens = kQueryRows / (layer.heads / layer.kv_heads);
  return tokens > 1 ? tokens : 1;
}

// One group of queries.
struct Group {
  float *query, *out;    // [k_dim, L], [v_dim, L]
  float *most, *total;   // [L]
  int32_t* tokens;       // [L] of each query, counted within the tile
  int64_t first, count;  // of the queries of the tile

  static int64_t floats(const Layer& layer) {
    return (layer.k_dim + layer.v_dim + 3) * kQueryLanes;
  }
  Group(const Layer& layer, float* room, int64_t first, int64_t rows) : query(room), first(first) {
    out = query + layer.k_dim * kQueryLanes;
    most = out + layer.v_dim * kQueryLanes;
    total = most + kQueryLanes;
    tokens = reinterpret_cast<int32_t*>(total + kQueryLanes);
    count = rows - first < kQueryLanes ? rows - first : kQueryLanes;
  }
};

struct TileRoom {
  float *scores, *factors, *wide, *groups;  // [K, L], [L], [K, D of keys and values], ...

  static int64_t floats(const Layer& layer) {
    const int64_t rows = tile_tokens(layer) * (layer.heads / layer.kv_heads);
    const int64_t groups = (rows + kQueryLanes - 1) / kQueryLanes;
    return (kChunk + 1) * kQueryLanes + kChunk * (layer.k_dim + layer.v_dim) +
           groups * Group::floats(layer);
  }
  TileRoom(const Layer& layer, float* scratch) {
    scores = scratch;
    factors = scores + kChunk * kQueryLanes;
    groups = factors + kQueryLanes;  // before what is of any size, so that all begin with a line
    const int64_t rows = tile_tokens(layer) * (layer.heads / layer.kv_heads);
    wide = groups + (rows + kQueryLanes - 1) / kQueryLanes * Group::floats(layer);
  }
};

// Rows of a chunk as floats: where they are, or where they are widened to.
INLINE void as_floats(const float* const* rows, int64_t first, int64_t count, int64_t, float*,
                      const float** to) {
  for (int64_t j = first; j < count; j++) to[j] = rows[j];
}
INLINE void as_floats(const BFloat16* const* rows, int64_t first, int64_t count, int64_t width,
                      float* wide, const float** to) {
  for (int64_t j = first; j < count; j++) {
    to[j] = wide + j * width;
    for (int64_t k = 0; k < width; k += kLanes)
      store_part(wide + j * width + k, load_part(rows[j] + k, width - k), width - k);
  }
}

// Scores of H keys with V vectors of queries.
template <int V, int H>
INLINE void score_keys(const float* const* keys, int64_t width, const float* query, float* scores) {
  Vec acc[H][V] = {};
  for (int64_t k = 0; k < width; k++) {
    Vec part[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) part[v] = load(query + k * kQueryLanes + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < H; i++) {
      const Vec key = broadcast(keys[i][k]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) acc[i][v] = multiply_add(key, part[v], acc[i][v]);
    }
  }
  for (int i = 0; i < H; i++)
    for (int v = 0; v < V; v++) store(scores + i * kQueryLanes + v * kLanes, acc[i][v]);
}

// Adds weighted values first .. count - 1, H elements of each from `at` on, to V vectors of queries.
template <int V, int H>
INLINE void weigh_values(const float* const* values, int64_t first, int64_t count, int64_t at,
                         const float* weights, const float* factors, float* out) {
  Vec acc[H][V];
  for (int i = 0; i < H; i++)
    for (int v = 0; v < V; v++)
      acc[i][v] = load(out + (at + i) * kQueryLanes + v * kLanes) * load(factors + v * kLanes);
  for (int64_t j = first; j < count; j++) {
    const float* from = values[j] + at;
    Vec part[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) part[v] = load(weights + j * kQueryLanes + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < H; i++) {
      const Vec value = broadcast(from[i]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) acc[i][v] = multiply_add(value, part[v], acc[i][v]);
    }
  }
  for (int i = 0; i < H; i++)
    for (int v = 0; v < V; v++) store(out + (at + i) * kQueryLanes + v * kLanes, acc[i][v]);
}

// Hides the scores of V vectors of queries with what they must not see. `position`: of the first
// token, counted from the chunk's first position; `window`: 0 for none.
template <int V>
INLINE void hide(float* scores, int64_t first, int64_t count, const int32_t* tokens,
                 int32_t position, int32_t window) {
  for (int v = 0; v < V; v++) {
    const Ints last = load_as<Ints>(tokens + v * kLanes) + position;
    for (int32_t j = 0; j < kChunk; j++) {
      float* at = scores + j * kQueryLanes + v * kLanes;
      if (j < first || j >= count)
        store(at, broadcast(kHidden));
      else if (window)
        store(at, select((last >= j) & (last - window < j), load(at), broadcast(kHidden)));
      else
        store(at, select(last >= j, load(at), broadcast(kHidden)));
    }
  }
}

struct Rows {
  const float* keys[kChunk];
  const float* values[kChunk];
  int64_t first, count;
  int32_t position;  // of the tile's first token, counted from the chunk's first position
  bool all_seen;
};

// One chunk for V vectors of queries, as far as any of them sees it.
template <int V>
static void attend_group(const Layer& layer, const Rows& rows, const Group& group,
                         const TileRoom& room) {
  // No row is as long as this: what is subtracted from a position stays in 32 bits.
  constexpr int64_t kLongest = 1 << 30;
  const int32_t window = static_cast<int32_t>(layer.window < kLongest ? layer.window : kLongest);
  const int64_t last = rows.position + group.tokens[group.count - 1];
  const int64_t begin = window ? rows.position + group.tokens[0] - window + 1 : 0;
  const int64_t count = last < rows.count ? last + 1 : rows.count;
  const int64_t first = begin > rows.first ? begin : rows.first;
  if (first >= count) return;
  int64_t j = first;
  for (; j + kAtATime <= count; j += kAtATime)
    score_keys<V, kAtATime>(rows.keys + j, layer.k_dim, group.query, room.scores + j * kQueryLanes);
  for (; j < count; j++)
    score_keys<V, 1>(rows.keys + j, layer.k_dim, group.query, room.scores + j * kQueryLanes);
  if (!rows.all_seen)
    hide<V>(room.scores, first, count, group.tokens, rows.position, window);
  for (int v = 0; v < V * kLanes; v += kLanes) {
    RunningLanes running{group.most + v, group.total + v};
    store(room.factors + v, running.fold(room.scores + v, kQueryLanes));
  }
  int64_t at = 0;
  for (; at + kAtATime <= layer.v_dim; at += kAtATime)
    weigh_values<V, kAtATime>(rows.values, first, count, at, room.scores, room.factors, group.out);
  for (; at < layer.v_dim; at++)
    weigh_values<V, 1>(rows.values, first, count, at, room.scores, room.factors, group.out);
}

// The queries of a tile, and where their results go.
template <class T>
struct Tile {
  const Layer& layer;
  const Tokens<T>& a;
  int64_t token, head, heads_each;

  int64_t place(int64_t m) const {
    return (token + m / heads_each) * layer.heads + head * heads_each + m % heads_each;
  }
  const T* query(int64_t m) const {
    return a.q + (token + m / heads_each) * a.q_stride +
           (head * heads_each + m % heads_each) * layer.k_dim;
  }

  void start(const Group& group) const {
    for (int64_t m = 0; m < kQueryLanes; m += 4) {
      const T* from[4];
      for (int i = 0; i < 4; i++)
        from[i] = m + i < group.count ? query(group.first + m + i) : nullptr;
      int64_t k = 0;
      for (; k + 4 <= layer.k_dim; k += 4) {
        Vec4 four[4];
        for (int i = 0; i < 4; i++) four[i] = from[i] ? load4(from[i] + k) * layer.scale : Vec4{};
        turn(four);
        for (int i = 0; i < 4; i++) store_as(group.query + (k + i) * kQueryLanes + m, four[i]);
      }
      for (; k < layer.k_dim; k++)
        for (int i = 0; i < 4; i++)
          group.query[k * kQueryLanes + m + i] = from[i] ? widen(from[i][k]) * layer.scale : 0.0f;
    }
    for (int64_t m = 0; m < kQueryLanes; m++) {
      group.most[m] = kNothingYet, group.total[m] = 0.0f;
      group.tokens[m] = static_cast<int32_t>((group.first + m) / heads_each);
    }
    std::memset(group.out, 0, layer.v_dim * kQueryLanes * sizeof(float));
  }

  void finish(const Group& group) const {
    for (int64_t k = 0; k < layer.v_dim; k++)
      for (int64_t v = 0; v < kQueryLanes; v += kLanes) {
        float* at = group.out + k * kQueryLanes + v;
        store(at, load(at) / load(group.total + v));
      }
    for (int64_t m = 0; m < group.count; m++) {
      const int64_t to = place(group.first + m);
      if (a.lse) a.lse[to] = Running{group.most[m], group.total[m]}.lse();
    }
    for (int64_t m = 0; m < group.count; m += 4) {
      T* to[4];
      for (int i = 0; i < 4; i++)
        to[i] = m + i < group.count ? a.out + place(group.first + m + i) * layer.v_dim : nullptr;
      int64_t k = 0;
      for (; k + 4 <= layer.v_dim; k += 4) {
        Vec4 four[4];
        for (int i = 0; i < 4; i++) four[i] = load_as<Vec4>(group.out + (k + i) * kQueryLanes + m);
        turn(four);
        for (int i = 0; i < 4; i++)
          if (to[i]) store4(to[i] + k, four[i]);
      }
      for (; k < layer.v_dim; k++)
        for (int i = 0; i < 4; i++)
          if (to[i]) put(to[i] + k, group.out[k * kQueryLanes + m + i]);
    }
  }
};

template <class T, class C>
static void attend_tile(const Layer& layer, const Step& step, const Tokens<T>& a, const Item& item,
                        int64_t head, float* scratch) {
  const TileRoom room(layer, scratch);
  const int64_t heads_each = layer.heads / layer.kv_heads, count = item.count * heads_each;
  const Tile<T> tile{layer, a, step.starts[item.row] + item.first, head, heads_each};
  const auto each_group = [&](const auto& work) {
    for (int64_t first = 0; first < count; first += kQueryLanes)
      work(Group(layer, room.groups + first / kQueryLanes * Group::floats(layer), first, count));
  };
  each_group([&](const Group& group) { tile.start(group); });
  const int64_t position = step.contexts[item.row] + item.first, end = position + item.count;
  const int64_t begin = layer.window && position + 1 > layer.window ? position + 1 - layer.window : 0;
  Chunk<C> chunk;
  Rows rows;
  for (int64_t at = begin; at < end; at = chunk_end(at)) {
    chunk.locate(layer, step, item.row, head, at, end);
    chunk.fetch_keys(layer, 0, kChunk);
    chunk.fetch_values(layer, 0, kChunk);
    rows.first = chunk.first, rows.count = chunk.count;
    rows.position = static_cast<int32_t>(position - at / kChunk * kChunk);
    rows.all_seen = chunk_end(at) - 1 <= position && !layer.window;
    as_floats(chunk.keys, chunk.first, chunk.count, layer.k_dim, room.wide, rows.keys);
    as_floats(chunk.values, chunk.first, chunk.count, layer.v_dim, room.wide + kChunk * layer.k_dim,
              rows.values);
    each_group([&](const Group& group) {
      if (group.count > 2 * kLanes)
        attend_group<3>(layer, rows, group, room);
      else if (group.count > kLanes)
        attend_group<2>(layer, rows, group, room);
      else
        attend_group<1>(layer, rows, group, room);
    });
  }
  each_group([&](const Group& group) { tile.finish(group); });
}
