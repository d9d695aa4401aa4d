// 32 bits of a row at a time: one float, or two halves. Products of both are added to a float.

#pragma once

#include "vectors.h"

template <class T>
constexpr int64_t kPerWord = 4 / static_cast<int64_t>(sizeof(T));

template <class T>
INLINE int64_t words(int64_t elements) {
  return (elements + kPerWord<T> - 1) / kPerWord<T>;
}

// The first `count` elements of a word, and zeros.
template <class T>
INLINE int32_t word(const T* from, int64_t count = kPerWord<T>) {
  int32_t bits = 0;
  std::memcpy(&bits, from, count < kPerWord<T> ? count * sizeof(T) : sizeof(bits));
  return bits;
}

// sum + a * b of a word in every lane with words, for the lanes of V.
template <class T>
struct Word;

template <>
struct Word<float> {
  template <class V>
  INLINE V add(V sum, int32_t a, V b) {
    return multiply_add(reinterpret_cast<V>(typename As<V>::Ints{} + a), b, sum);
  }
};

template <>
struct Word<BFloat16> {
  template <class V>
  INLINE V add(V sum, int32_t a, V b) {
    using Ints = typename As<V>::Ints;
    const Ints left = Ints{} + a;
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    if constexpr (sizeof(V) == 64)
      return reinterpret_cast<V>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                  reinterpret_cast<__m512bh>(left),
                                                  reinterpret_cast<__m512bh>(b)));
    else
      return reinterpret_cast<V>(_mm256_dpbf16_ps(reinterpret_cast<__m256>(sum),
                                                  reinterpret_cast<__m256bh>(left),
                                                  reinterpret_cast<__m256bh>(b)));
#else
    const Ints right = reinterpret_cast<Ints>(b);
    const int32_t upper = static_cast<int32_t>(0xffff0000);
    sum = multiply_add(reinterpret_cast<V>(left << 16), reinterpret_cast<V>(right << 16), sum);
    return multiply_add(reinterpret_cast<V>(left & upper), reinterpret_cast<V>(right & upper), sum);
#endif
  }
};
