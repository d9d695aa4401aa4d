// Products with weights as the checkpoint has them: y[M, N] = x[M, K] w[N, K]^T + b[N].
//
// Weights are not rearranged, so that there is one copy of them. An output is one sum over K in an
// order of its own: its bits depend neither on the other rows nor on the number of threads.

#pragma once

#include "vectors.h"

#include "team.h"

// Rows of x that stay in the processor's cache while all weights pass by.
constexpr int64_t kRowsBytes = 384 << 10;

constexpr int64_t kRun = 4;  // tiles of weights that a thread takes at a time

// How many elements of K one step takes, and one step of it.
template <class T>
struct Dot {
  static constexpr int kStep = kLanes;
  using Piece = Vec;
  INLINE Piece get(const T* from) { return load(from); }
  INLINE Vec add(Vec acc, Piece a, Piece b) { return multiply_add(a, b, acc); }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<BFloat16> {
  static constexpr int kStep = 2 * kLanes;
  using Piece = __m512bh;
  INLINE Piece get(const BFloat16* from) {
    Piece out;
    std::memcpy(&out, from, sizeof(out));
    return out;
  }
  INLINE Vec add(Vec acc, Piece a, Piece b) {
    return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), a, b));
  }
};
#endif

template <class T, class Y>
struct Linear {
  const T* x;
  const T* w;
  const T* bias;  // null for none
  Y* y;
  int64_t M, N, K, x_stride, y_stride;
};

// Rows of weights to fetch into the cache while others are multiplied with.
template <class T>
struct Ahead {
  const T* rows;
  int count;
};

// NR outputs of MR rows.
template <int NR, int MR, class T, class Y>
INLINE void outputs(const Linear<T, Y>& a, int64_t m, int64_t n, const Ahead<T>& ahead) {
  using D = Dot<T>;
  const T* x = a.x + m * a.x_stride;
  const T* w = a.w + n * a.K;
  Vec acc[NR][MR] = {};
  int64_t k = 0;
  for (; k + D::kStep <= a.K; k += D::kStep) {
    typename D::Piece weights[NR];
#pragma GCC unroll 8
    for (int i = 0; i < NR; i++) {
      weights[i] = D::get(w + i * a.K + k);
      if (i < ahead.count) __builtin_prefetch(ahead.rows + i * a.K + k, 0, 2);
    }
#pragma GCC unroll 8
    for (int j = 0; j < MR; j++) {
      const typename D::Piece row = D::get(x + j * a.x_stride + k);
#pragma GCC unroll 8
      for (int i = 0; i < NR; i++) acc[i][j] = D::add(acc[i][j], weights[i], row);
    }
  }
  float out[NR][MR];
  if constexpr (MR == 4) {
#pragma GCC unroll 8
    for (int i = 0; i < NR; i++) {
      const Vec4 four = sums(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
      std::memcpy(out[i], &four, sizeof(four));
    }
  } else {
    // Four at a time here too, of what there is: a sum is a chain that waits for itself.
    float flat[(NR * MR + 3) / 4 * 4];
    const auto nth = [&](int n) { return n < NR * MR ? acc[n / MR][n % MR] : Vec{}; };
#pragma GCC unroll 8
    for (int n = 0; n < NR * MR; n += 4) {
      const Vec4 four = sums(nth(n), nth(n + 1), nth(n + 2), nth(n + 3));
      std::memcpy(flat + n, &four, sizeof(four));
    }
    std::memcpy(out, flat, sizeof(out));
  }
  for (; k < a.K; k++)
    for (int i = 0; i < NR; i++)
      for (int j = 0; j < MR; j++)
        out[i][j] = std::fma(widen(w[i * a.K + k]), widen(x[j * a.x_stride + k]), out[i][j]);
  for (int i = 0; i < NR; i++) {
    const float bias = a.bias ? widen(a.bias[n + i]) : 0.0f;
    for (int j = 0; j < MR; j++) put(a.y + (m + j) * a.y_stride + n + i, out[i][j] + bias);
  }
}

// NR outputs of rows m .. end - 1. What is fetched ahead, null or kWide rows of weights, is spread
// over them: memory is never idle then.
template <int NR, class T, class Y>
static void columns(const Linear<T, Y>& a, int64_t m, int64_t end, int64_t n, const T* ahead) {
  static_assert(kAcross == 4);
  const int parts = static_cast<int>((end - m + 3) / 4), each = (kWide + parts - 1) / parts;
  int fetched = ahead ? 0 : kWide;
  const auto next = [&] {
    const Ahead<T> part{ahead ? ahead + fetched * a.K : nullptr, each < kWide - fetched ? each : kWide - fetched};
    fetched += part.count;
    return part;
  };
  for (; m + 4 <= end; m += 4) outputs<NR, 4>(a, m, n, next());
  if (end - m == 3) outputs<NR, 3>(a, m, n, next());
  if (end - m == 2) outputs<NR, 2>(a, m, n, next());
  if (end - m == 1) outputs<NR, 1>(a, m, n, next());
}

template <class T, class Y>
static void linear(Team* team, const Linear<T, Y>& a) {
  const int64_t tiles = (a.N + kWide - 1) / kWide;
  int64_t rows = kRowsBytes / (a.K * static_cast<int64_t>(sizeof(T))) / 4 * 4;
  if (rows < 4) rows = 4;
  const int64_t runs = (tiles + kRun - 1) / kRun, blocks = (a.M + rows - 1) / rows;
  const bool worth_it = a.M * a.N * a.K >= 1 << 15;
  together(team, worth_it, runs * blocks, [&](int64_t item, int64_t, const auto& next) {
    const int64_t m = item / runs * rows, end = m + rows < a.M ? m + rows : a.M;
    const int64_t first = item % runs * kRun, last = first + kRun < tiles ? first + kRun : tiles;
    for (int64_t tile = first; tile < last; tile++) {
      int64_t n = tile * kWide;
      if (n + kWide <= a.N) {
        // What is given out next is likely this thread's: its weights can be on their way.
        const int64_t after = tile + 1 < last ? tile + 1 : next.load() % runs * kRun;
        const T* ahead = (after + 1) * kWide <= a.N ? a.w + after * kWide * a.K : nullptr;
        columns<kWide>(a, m, end, n, ahead);
      } else {
        for (; n < a.N; n++) columns<1, T>(a, m, end, n, nullptr);
      }
    }
  });
}
