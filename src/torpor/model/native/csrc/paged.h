// The paged cache as attention sees it, and the rows of one step.

#pragma once

#include "elementwise.h"

// One layer. Inside a block lie its keys [kv_heads, block_size, k_dim], then its values.
struct Layer {
  void* arena;
  int64_t block_elements;  // of all layers
  int64_t key_offset, value_offset;
  int64_t heads, kv_heads, k_dim, v_dim, block_size;
  int64_t window;  // 0 for none
  float scale;
};

// Queries `first` .. `first + count` of a row, counted within it; `form` as below.
struct Item {
  int64_t row, first, count, form;
};
constexpr int64_t kFew = 0;  // one query after another
// otherwise: as tiles of queries

struct Step {
  const int64_t* tables;  // [rows, table_width] block ids
  int64_t table_width;
  const int64_t* starts;    // [rows] first token of each row
  const int64_t* contexts;  // [rows] tokens that the cache held before
  const int64_t* slots;     // [tokens] where each new token goes
  int64_t tokens;
  const Item* items;
  int64_t num_items;
};

// What the layer hands over and takes back. Heads lie together, tokens `stride` elements apart.
template <class T>
struct Tokens {
  const T *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
  T* out;      // [tokens, heads, v_dim]
  float* lse;  // [tokens, heads], natural logarithm; null if not wanted
};

constexpr int64_t kChunk = 64;  // positions attended at a time, from a multiple of it on

INLINE int64_t chunk_end(int64_t at) { return at / kChunk * kChunk + kChunk; }

template <class C>
INLINE void fetch(const C* from, int64_t count) {
  for (int64_t k = 0; k < count; k += 64 / static_cast<int64_t>(sizeof(C)))
    __builtin_prefetch(from + k, 0, 2);
}

// Where the positions of a chunk lie: those before number `first` are out of the window, those from
// number `count` on are not there. Blocks lie far apart, where the processor does not guess what
// comes next: it is told, while it works on what came before.
template <class C>
struct Chunk {
  const C* keys[kChunk];
  const C* values[kChunk];
  int64_t first = 0, count = 0;

  // Of positions from `begin`, which is in this chunk, to `end`.
  void locate(const Layer& layer, const Step& step, int64_t row, int64_t head, int64_t begin,
              int64_t end) {
    const int64_t start = begin / kChunk * kChunk;
    const int64_t* table = step.tables + row * step.table_width + start / layer.block_size;
    const C* arena = static_cast<const C*>(layer.arena);
    int64_t at = start % layer.block_size;
    first = begin - start;
    count = end - start < kChunk ? end - start : kChunk;
    for (int64_t j = 0; j < count; table++, at = 0) {
      const C* base = arena + *table * layer.block_elements;
      for (; j < count && at < layer.block_size; j++, at++) {
        const int64_t place = head * layer.block_size + at;
        keys[j] = base + layer.key_offset + place * layer.k_dim;
        values[j] = base + layer.value_offset + place * layer.v_dim;
      }
    }
  }
  void fetch_keys(const Layer& layer, int64_t from, int64_t to) const {
    for (int64_t j = from > first ? from : first; j < to && j < count; j++)
      fetch(keys[j], layer.k_dim);
  }
  void fetch_values(const Layer& layer, int64_t from, int64_t to) const {
    for (int64_t j = from > first ? from : first; j < to && j < count; j++)
      fetch(values[j], layer.v_dim);
  }
};

template <class T, class C>
INLINE void copy(const T* from, C* to, int64_t count) {
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) store(to + k, load(from + k));
  for (; k < count; k++) put(to + k, widen(from[k]));
}

// Stores the new tokens' keys and values, rounded as the cache rounds.
template <class T, class C>
static void write_tokens(Team* team, const Layer& layer, const Step& step, const Tokens<T>& a) {
  const int64_t width = layer.kv_heads * (layer.k_dim + layer.v_dim);
  C* arena = static_cast<C*>(layer.arena);
  each_row(team, step.tokens, width, [&](int64_t t) {
    const int64_t block = step.slots[t] / layer.block_size, at = step.slots[t] % layer.block_size;
    C* base = arena + block * layer.block_elements;
    for (int64_t head = 0; head < layer.kv_heads; head++) {
      const int64_t place = head * layer.block_size + at;
      copy(a.k + t * a.k_stride + head * layer.k_dim, base + layer.key_offset + place * layer.k_dim,
           layer.k_dim);
      copy(a.v + t * a.v_stride + head * layer.v_dim,
           base + layer.value_offset + place * layer.v_dim, layer.v_dim);
    }
  });
}
