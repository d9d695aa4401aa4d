// Products of two matrices of floats, both near: the inner loop of everything with many rows.

#pragma once

#include "vectors.h"

// Where a product goes: it replaces what is there, is added to it, or to that times factors [rows].
struct Into {
  float* c;
  int64_t stride;
  bool add;
  const float* factors;  // null for none; not without `add`

  Into from(int64_t row, int64_t column) const {
    return {c + row * stride + column, stride, add, factors ? factors + row : nullptr};
  }
};

// c[R, V vectors] of a[R, depth] b[depth, V vectors].
template <int R, int V>
INLINE void outer(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                  const Into& into) {
  Vec acc[R][V] = {};
  if (into.add)
    for (int r = 0; r < R; r++)
      for (int i = 0; i < V; i++) {
        acc[r][i] = load(into.c + r * into.stride + i * kLanes);
        if (into.factors) acc[r][i] *= into.factors[r];
      }
  for (int64_t k = 0; k < depth; k++) {
    Vec across[V];
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) across[i] = load(b + k * b_stride + i * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vec down = broadcast(a[r * a_stride + k]);
#pragma GCC unroll 8
      for (int i = 0; i < V; i++) acc[r][i] = multiply_add(down, across[i], acc[r][i]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < V; i++) store(into.c + r * into.stride + i * kLanes, acc[r][i]);
}

template <int R>
static void outer_rows(const float* a, int64_t a_stride, const float* b, int64_t width,
                       int64_t depth, const Into& into) {
  int64_t at = 0;
  for (; at + 4 * kLanes <= width; at += 4 * kLanes)
    outer<R, 4>(a, a_stride, b + at, width, depth, into.from(0, at));
  for (; at < width; at += kLanes)
    outer<R, 1>(a, a_stride, b + at, width, depth, into.from(0, at));
}

// a[rows, depth] b[depth, width]; width is a multiple of kLanes.
static void multiply(const float* a, int64_t a_stride, const float* b, int64_t width, int64_t rows,
                     int64_t depth, const Into& into) {
  int64_t r = 0;
  for (; r + kWide <= rows; r += kWide)
    outer_rows<kWide>(a + r * a_stride, a_stride, b, width, depth, into.from(r, 0));
  for (; r + 2 <= rows; r += 2)
    outer_rows<2>(a + r * a_stride, a_stride, b, width, depth, into.from(r, 0));
  for (; r < rows; r++)
    outer_rows<1>(a + r * a_stride, a_stride, b, width, depth, into.from(r, 0));
}
