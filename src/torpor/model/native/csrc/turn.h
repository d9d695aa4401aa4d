// Rows of 32-bit words as columns.

#pragma once

#include "vectors.h"

// Four rows of four words become four columns.
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
