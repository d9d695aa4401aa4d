// What lies between the products: norms, gates and rotations, each in one pass over its rows.

#pragma once

#include "vectors.h"

#include "team.h"

// Elements below which a second thread costs more than it saves.
constexpr int64_t kShared = 1 << 14;

template <class Row>
static void each_row(Team* team, int64_t rows, int64_t width, Row row) {
  const int64_t run = kShared / 4 / (width + 1) + 1, runs = (rows + run - 1) / run;
  together(team, rows * width >= kShared, runs, [&](int64_t item, int64_t, const auto&) {
    const int64_t last = (item + 1) * run < rows ? (item + 1) * run : rows;
    for (int64_t i = item * run; i < last; i++) row(i);
  });
}

// out[i] = x[numbers[i]], of rows [width].
template <class T>
static void take_rows(const T* x, const int64_t* numbers, T* out, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; i++)
    std::memcpy(out + i * width, x + numbers[i] * width, width * sizeof(T));
}

// out = x / rms(x) * gain, in float32 (Zhang and Sennrich 2019). Rounded to T before the gain, as
// the checkpoints were trained. With `residual`, x is first added to it, and the sum is its new
// value.
template <class T>
static void rms_norm(Team* team, const T* x, T* residual, const T* gain, T* out, int64_t rows,
                     int64_t width, float eps) {
  each_row(team, rows, width, [&](int64_t i) {
    const T* from = x + i * width;
    T* to = out + i * width;
    if (residual) {
      T* total = residual + i * width;
      int64_t k = 0;
      for (; k + kLanes <= width; k += kLanes) store(total + k, load(total + k) + load(from + k));
      for (; k < width; k++) put(total + k, widen(total[k]) + widen(from[k]));
      from = total;
    }
    Vec squares[4] = {};
    int64_t k = 0;
    for (; k + 4 * kLanes <= width; k += 4 * kLanes)
      for (int j = 0; j < 4; j++) {
        const Vec part = load(from + k + j * kLanes);
        squares[j] = multiply_add(part, part, squares[j]);
      }
    for (; k + kLanes <= width; k += kLanes) {
      const Vec part = load(from + k);
      squares[0] = multiply_add(part, part, squares[0]);
    }
    float square = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; k < width; k++) square += widen(from[k]) * widen(from[k]);
    const float factor = 1.0f / std::sqrt(square / static_cast<float>(width) + eps);
    for (k = 0; k < width; k += kLanes) {
      const Vec normed = rounded<T>(load_part(from + k, width - k) * factor);
      store_part(to + k, normed * load_part(gain + k, width - k), width - k);
    }
  });
}

// silu(gate) * up
INLINE Vec through_gate(Vec gate, Vec up) { return gate / (1.0f + exponential(-gate)) * up; }

// out[rows, width] = silu(gate) * up of gate_up[rows, 2 * width] (Shazeer 2020).
template <class T>
static void gated(Team* team, const T* gate_up, T* out, int64_t rows, int64_t width) {
  each_row(team, rows, width, [&](int64_t i) {
    const T* gate = gate_up + 2 * i * width;
    const T* up = gate + width;
    T* to = out + i * width;
    for (int64_t k = 0; k < width; k += kLanes) {
      const Vec part = load_part(gate + k, width - k);
      store_part(to + k, through_gate(part, load_part(up + k, width - k)), width - k);
    }
  });
}

// Rotates the pairs (i, i + width / 2) of every head in place: x[rows, heads, width], rows
// `stride` apart, by cosines and signed sines [rows, width].
template <class T>
static void rotate(Team* team, T* x, const T* cosines, const T* sines, int64_t rows,
                   int64_t heads, int64_t width, int64_t stride) {
  const int64_t half = width / 2;
  each_row(team, rows, heads * width, [&](int64_t i) {
    const T* cos = cosines + i * width;
    const T* sin = sines + i * width;
    for (int64_t head = 0; head < heads; head++) {
      T* low = x + i * stride + head * width;
      T* high = low + half;
      int64_t k = 0;
      for (; k + kLanes <= half; k += kLanes) {
        const Vec a = load(low + k), b = load(high + k);
        store(low + k, multiply_add(a, load(cos + k), b * load(sin + k)));
        store(high + k, multiply_add(b, load(cos + half + k), a * load(sin + half + k)));
      }
      for (; k < half; k++) {
        const float a = widen(low[k]), b = widen(high[k]);
        put(low + k, std::fma(a, widen(cos[k]), b * widen(sin[k])));
        put(high + k, std::fma(b, widen(cos[half + k]), a * widen(sin[half + k])));
      }
    }
  });
}
