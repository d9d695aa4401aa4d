// Products with weights as the checkpoint has them: y[M, N] = x[M, K] w[N, K]^T + b[N].
//
// Every lane of a vector is a row of x, and a weight meets them all at once: so no sum is taken over
// a vector, and weights are neither rearranged nor copied. x is turned for it, by each thread for
// itself. An output is one sum over K, first to last: its bits depend neither on the other rows nor
// on the number of threads.

#pragma once

#include <vector>

#include "elementwise.h"
#include "team.h"
#include "turn.h"
#include "words.h"

constexpr int64_t kTile = 12;  // outputs at a time
constexpr int64_t kRun = 4;    // tiles that a thread takes at a time
constexpr int64_t kGroup = 2 * kLanes;  // rows at a time
// Rows of x that a thread has turned stay in its cache while all weights pass by.
constexpr int64_t kTurnedWords = 96 << 10;

template <class T, class Y>
struct Linear {
  const T* x;
  const T* w;
  const T* bias;  // null for none
  Y* y;
  int64_t M, N, K, x_stride, y_stride;
  float* turned;  // [threads, turned_words], where a line of the cache begins
};

// Lanes that so many rows of a group take.
INLINE int64_t lanes(int64_t rows) { return rows <= 8 ? 8 : rows <= kLanes ? kLanes : kGroup; }

// Rows that are turned at a time: as many in each block as can be, and as many blocks for each
// thread, which thus finds most of its rows where it has written them.
template <class T>
INLINE int64_t block_rows(int64_t rows, int64_t width, int64_t threads) {
  int64_t most = kTurnedWords / words<T>(width) / kGroup * kGroup;
  if (most < 2 * kGroup) most = 2 * kGroup;
  int64_t blocks = (rows + most - 1) / most;
  if (blocks > 1) blocks = (blocks + threads - 1) / threads * threads;
  return ((rows + blocks - 1) / blocks + kGroup - 1) / kGroup * kGroup;
}
// Words that each thread needs, in whole lines of the cache.
template <class T>
INLINE int64_t turned_words(int64_t rows, int64_t width, int64_t threads) {
  const int64_t each = rows <= kLanes ? lanes(rows) : block_rows<T>(rows, width, threads);
  return (each * words<T>(width) + 15) / 16 * 16;
}

// to[words, lanes] of rows of x[rows, K]; lanes without a row are zero.
template <class T>
static void turn_rows(const T* x, int64_t stride, int64_t rows, int64_t K, float* to) {
  const int64_t width = lanes(rows);
  int64_t k = 0;
  for (; k + 4 * kPerWord<T> <= K; k += 4 * kPerWord<T>)
    for (int64_t j = 0; j < width; j += 4) {
      Vec4 four[4];
      for (int i = 0; i < 4; i++)
        four[i] = j + i < rows ? load_as<Vec4>(x + (j + i) * stride + k) : Vec4{};
      turn(four);
      for (int i = 0; i < 4; i++)
        store_as(to + (k / kPerWord<T> + i) * width + j, four[i]);
    }
  for (; k < K; k += kPerWord<T>)
    for (int64_t j = 0; j < width; j++) {
      const int32_t bits = j < rows ? word(x + j * stride + k, K - k) : 0;
      std::memcpy(to + k / kPerWord<T> * width + j, &bits, sizeof(bits));
    }
}

// to[H, V vectors L]: products of H rows of weights with rows turned. The rows of weights from
// `ahead` on, if any, are fetched meanwhile: memory is never idle then.
template <class L, int V, int H, class T>
INLINE void multiply_rows(const T* w, int64_t K, const float* turned, const T* ahead, float* to) {
  constexpr int64_t kWidth = V * sizeof(L) / sizeof(float), kLine = 64 / sizeof(T);
  L acc[H][V] = {};
  const auto step = [&](int64_t k, int64_t count) __attribute__((always_inline)) {
    L rows[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++)
      rows[v] = load_as<L>(turned + k / kPerWord<T> * kWidth + v * sizeof(L) / sizeof(float));
#pragma GCC unroll 16
    for (int i = 0; i < H; i++) {
      const int32_t weight = word(w + i * K + k, count);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) acc[i][v] = Word<T>::add(acc[i][v], weight, rows[v]);
    }
  };
  int64_t k = 0;
  for (; k + kLine <= K; k += kLine) {
    if (ahead)
#pragma GCC unroll 16
      for (int i = 0; i < H; i++) __builtin_prefetch(ahead + i * K + k, 0, 2);
    for (int64_t at = k; at < k + kLine; at += kPerWord<T>) step(at, kPerWord<T>);
  }
  for (; k + kPerWord<T> <= K; k += kPerWord<T>) step(k, kPerWord<T>);
  if (k < K) step(k, K - k);
  for (int i = 0; i < H; i++)
    for (int v = 0; v < V; v++) store_as(to + i * kWidth + v * sizeof(L) / sizeof(float), acc[i][v]);
}

template <int H, class T>
INLINE void multiply_group(const T* w, int64_t K, const float* turned, int64_t width,
                           const T* ahead, float* to) {
  if (width == 8) return multiply_rows<Vec8, 1, H>(w, K, turned, ahead, to);
  if (width == kLanes) return multiply_rows<Vec, 1, H>(w, K, turned, ahead, to);
  // As many sums at a time as there are registers for.
  constexpr int kPart = kLanes == 16 || H == 1 ? H : H / 2;
  for (int i = 0; i < H; i += kPart)
    multiply_rows<Vec, 2, kPart>(w + i * K, K, turned, ahead ? ahead + i * K : nullptr,
                                 to + i * width);
}

template <class T>
INLINE void add_bias(float* sums, int64_t width, int64_t height, const T* bias) {
  for (int64_t i = 0; i < height; i++)
    for (int64_t j = 0; j < width; j += 8) {
      store_as(sums + i * width + j, load_as<Vec8>(sums + i * width + j) + widen(bias[i]));
    }
}

// y[rows, height] of sums [height, width].
template <class Y>
INLINE void turn_back(const float* sums, int64_t width, int64_t rows, int64_t height, Y* y,
                      int64_t stride) {
  int64_t j = 0, i = 0;
  for (; j + 4 <= rows; j += 4)
    for (i = 0; i + 4 <= height; i += 4) {
      Vec4 four[4];
      for (int p = 0; p < 4; p++) four[p] = load_as<Vec4>(sums + (i + p) * width + j);
      turn(four);
      for (int p = 0; p < 4; p++) store4(y + (j + p) * stride + i, four[p]);
    }
  for (int64_t row = 0; row < rows; row++)
    for (int64_t at = row < j ? i : 0; at < height; at++)
      put(y + row * stride + at, sums[at * width + row]);
}

// Outputs n .. n + H - 1 of rows m .. end - 1, those before `from` left out. Gated, an output is
// silu(gate) * up of two, half of N apart.
template <bool kGated, int H, class T, class Y>
INLINE void tile(const Linear<T, Y>& a, int64_t m, int64_t end, int64_t n, int64_t from,
                 const float* turned, int64_t next) {
  const int64_t half = kGated ? a.N / 2 : 0, first = m;
  for (; m < end; m += kGroup) {
    const int64_t rows = end - m < kGroup ? end - m : kGroup, width = lanes(rows);
    const float* x = turned + (m - first) * words<T>(a.K);
    alignas(64) float sums[1 + kGated][H * kGroup];
    for (int i = 0; i <= kGated; i++) {
      const int64_t at = n + i * half;
      const T* ahead = m == first ? a.w + (next + i * half) * a.K : nullptr;
      multiply_group<H>(a.w + at * a.K, a.K, x, width, ahead, sums[i]);
      if (a.bias) add_bias(sums[i], width, H, a.bias + at);
    }
    if constexpr (kGated)
      for (int64_t i = 0; i < H * width; i += kLanes)
        store(sums[0] + i,
              through_gate(rounded<T>(load(sums[0] + i)), rounded<T>(load(sums[1] + i))));
    turn_back(sums[0] + (from - n) * width, width, rows, n + H - from, a.y + m * a.y_stride + from,
              a.y_stride);
  }
}

template <bool kGated, int H, class T, class Y>
static void linear_of(Team* team, const Linear<T, Y>& a, int64_t outputs) {
  const int64_t tiles = (outputs + H - 1) / H, runs = (tiles + kRun - 1) / kRun;
  const int64_t threads = team->threads(), size = turned_words<T>(a.M, a.K, threads);
  const int64_t each = block_rows<T>(a.M, a.K, threads), blocks = (a.M + each - 1) / each;
  std::vector<int64_t> turned(threads, -1);  // the block that each thread has turned
  // The last tile reaches back over outputs that the one before it has made.
  const auto start = [&](int64_t number) {
    return number * H < outputs - H ? number * H : outputs - H;
  };
  const bool worth_it = a.M * a.N * a.K >= 1 << 15;
  together(team, worth_it, runs * blocks, [&](int64_t item, int64_t thread, const auto& next) {
    const int64_t block = item / runs, m = block * each, end = m + each < a.M ? m + each : a.M;
    float* mine = a.turned + thread * size;
    if (turned[thread] != block) {
      turned[thread] = block;
      for (int64_t i = m; i < end; i += kGroup)
        turn_rows(a.x + i * a.x_stride, a.x_stride, end - i < kGroup ? end - i : kGroup, a.K,
                  mine + (i - m) * words<T>(a.K));
    }
    const int64_t first = item % runs * kRun, last = first + kRun < tiles ? first + kRun : tiles;
    for (int64_t number = first; number < last; number++) {
      // What is given out next is likely this thread's: its weights can be on their way.
      const int64_t after = number + 1 < last ? number + 1 : next.load() % runs * kRun;
      tile<kGated, H>(a, m, end, start(number), number * H, mine, start(after));
    }
  });
}

// y[M, N] of x, or with kGated y[M, N / 2] = silu(gate) * up of the N outputs, gate first, which
// are never in memory as a whole (Shazeer 2020).
template <bool kGated, class T, class Y>
static void linear(Team* team, const Linear<T, Y>& a) {
  const int64_t outputs = kGated ? a.N / 2 : a.N;
  if (!a.M || !outputs) return;
  if (outputs >= kTile) return linear_of<kGated, kTile>(team, a, outputs);
  linear_of<kGated, 1>(team, a, outputs);
}
