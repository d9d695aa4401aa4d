// Rows of 32-bit words as columns: word i of row j becomes word j of row i.

#pragma once

#include "vectors.h"

INLINE void turn(Vec4 (&rows)[4]) {
  const Vec4 low01 = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5);
  const Vec4 high01 = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
  const Vec4 low23 = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
  const Vec4 high23 = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
  rows[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
  rows[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
  rows[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
  rows[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
}

INLINE void turn(Vec (&rows)[kLanes]) {
  // In every quarter of the vectors, four rows at a time.
  Vec t[kLanes];
#if defined(__AVX512F__)
#define MIX(X, Y, A, B, C, D)                                                                    \
  __builtin_shufflevector(X, Y, A, B, C, D, A + 4, B + 4, C + 4, D + 4, A + 8, B + 8, C + 8,     \
                          D + 8, A + 12, B + 12, C + 12, D + 12)
#else
#define MIX(X, Y, A, B, C, D) __builtin_shufflevector(X, Y, A, B, C, D, A + 4, B + 4, C + 4, D + 4)
#endif
  constexpr int L = kLanes;
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    const Vec low01 = MIX(rows[i], rows[i + 1], 0, L, 1, L + 1);
    const Vec high01 = MIX(rows[i], rows[i + 1], 2, L + 2, 3, L + 3);
    const Vec low23 = MIX(rows[i + 2], rows[i + 3], 0, L, 1, L + 1);
    const Vec high23 = MIX(rows[i + 2], rows[i + 3], 2, L + 2, 3, L + 3);
    t[i] = MIX(low01, low23, 0, 1, L, L + 1);
    t[i + 1] = MIX(low01, low23, 2, 3, L + 2, L + 3);
    t[i + 2] = MIX(high01, high23, 0, 1, L, L + 1);
    t[i + 3] = MIX(high01, high23, 2, 3, L + 2, L + 3);
  }
#undef MIX
  // Quarter q of t[4 g + c] is a part of row 4 q + c, of columns from 4 g on.
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
#if defined(__AVX512F__)
#define HALVES(X, Y, A)                                                                          \
  __builtin_shufflevector(X, Y, A, A + 1, A + 2, A + 3, A + 4, A + 5, A + 6, A + 7, A + 16,      \
                          A + 17, A + 18, A + 19, A + 20, A + 21, A + 22, A + 23)
#define EVERY_OTHER(X, Y, A)                                                                     \
  __builtin_shufflevector(X, Y, A, A + 1, A + 2, A + 3, A + 8, A + 9, A + 10, A + 11, A + 16,    \
                          A + 17, A + 18, A + 19, A + 24, A + 25, A + 26, A + 27)
    const Vec low01 = HALVES(t[c], t[4 + c], 0), high01 = HALVES(t[c], t[4 + c], 8);
    const Vec low23 = HALVES(t[8 + c], t[12 + c], 0), high23 = HALVES(t[8 + c], t[12 + c], 8);
    rows[c] = EVERY_OTHER(low01, low23, 0);
    rows[4 + c] = EVERY_OTHER(low01, low23, 4);
    rows[8 + c] = EVERY_OTHER(high01, high23, 0);
    rows[12 + c] = EVERY_OTHER(high01, high23, 4);
#undef HALVES
#undef EVERY_OTHER
#else
    rows[c] = __builtin_shufflevector(t[c], t[4 + c], 0, 1, 2, 3, 8, 9, 10, 11);
    rows[4 + c] = __builtin_shufflevector(t[c], t[4 + c], 4, 5, 6, 7, 12, 13, 14, 15);
#endif
  }
}
