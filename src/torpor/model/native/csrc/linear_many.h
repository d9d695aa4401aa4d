// Products of many rows in float32: weights are turned, a panel at a time, so that no sum has to be
// taken over a vector.

#pragma once

#include "elementwise.h"
#include "linear.h"
#include "outer.h"

constexpr int64_t kManyRows = 128;  // from so many on this is faster
constexpr int64_t kPanel = 64;      // outputs of a panel
constexpr int64_t kDepth = 288;     // of K in a panel: with it, what stays in the cache
constexpr int64_t kBlockRows = 504;

// Rows of a block, as many in each as can be.
INLINE int64_t block_rows(int64_t rows) {
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  return ((rows + blocks - 1) / blocks + kWide - 1) / kWide * kWide;
}

// to[rows, kPanel] = x[rows, K] w[kPanel, K]^T + bias, of rows from m on and outputs from n on.
static void panel(const Linear<float, float>& a, int64_t m, int64_t rows, int64_t n, float* to,
                  int64_t stride) {
  alignas(64) float turned[kDepth * kPanel];
  for (int64_t k = 0; k < a.K; k += kDepth) {
    const int64_t depth = a.K - k < kDepth ? a.K - k : kDepth;
    const float* w = a.w + n * a.K + k;
    int64_t i = 0;
    for (; i + 4 <= depth; i += 4)
      for (int64_t j = 0; j < kPanel; j += 4) {
        Vec4 four[4];
        for (int p = 0; p < 4; p++) four[p] = load4(w + (j + p) * a.K + i);
        store_turned(four, turned + i * kPanel + j, kPanel);
      }
    for (; i < depth; i++)
      for (int64_t j = 0; j < kPanel; j++) turned[i * kPanel + j] = w[j * a.K + i];
    multiply(a.x + m * a.x_stride + k, a.x_stride, turned, kPanel, rows, depth,
             {to, stride, k > 0, nullptr});
  }
  if (!a.bias) return;
  for (int64_t j = 0; j < rows; j++)
    for (int64_t p = 0; p < kPanel; p++) to[j * stride + p] += a.bias[n + p];
}

static void linear_many(Team* team, const Linear<float, float>& a) {
  const int64_t panels = a.N / kPanel, each = block_rows(a.M), blocks = (a.M + each - 1) / each;
  together(team, true, panels * blocks, [&](int64_t item, int64_t, const auto&) {
    const int64_t n = item % panels * kPanel, m = item / panels * each;
    const int64_t rows = a.M - m < each ? a.M - m : each;
    panel(a, m, rows, n, a.y + m * a.y_stride + n, a.y_stride);
  });
  Linear<float, float> rest = a;
  const int64_t done = panels * kPanel;
  rest.w += done * a.K, rest.y += done, rest.N -= done;
  if (a.bias) rest.bias += done;
  if (rest.N) linear(team, rest);
}

// Whether `linear_gated` takes so many rows and outputs.
INLINE bool gates_many(int64_t rows, int64_t width) {
  return rows >= kManyRows && width % kPanel == 0;
}

// y[M, N / 2] = silu(gate) * up of the N outputs, gate first, which are never in memory as a whole.
static void linear_gated(Team* team, const Linear<float, float>& a) {
  const int64_t width = a.N / 2;
  const int64_t panels = width / kPanel, each = block_rows(a.M), blocks = (a.M + each - 1) / each;
  together(team, true, panels * blocks, [&](int64_t item, int64_t, const auto&) {
    alignas(64) float gate[kBlockRows * kPanel], up[kBlockRows * kPanel];
    const int64_t n = item % panels * kPanel, m = item / panels * each;
    const int64_t rows = a.M - m < each ? a.M - m : each;
    panel(a, m, rows, n, gate, kPanel);
    panel(a, m, rows, width + n, up, kPanel);
    for (int64_t j = 0; j < rows; j++)
      for (int64_t p = 0; p < kPanel; p += kLanes)
        store(a.y + (m + j) * a.y_stride + n + p,
              through_gate(load(gate + j * kPanel + p), load(up + j * kPanel + p)));
  });
}
