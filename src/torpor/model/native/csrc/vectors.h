// Vectors of floats in the widest registers of the processor this is compiled for.
//
// Where a product is added to something, rounding once or twice is said, with `multiply_add` or
// without: compilers choose differently from loop to loop (and are told not to).
//
// A sum over a vector always adds the same pairs in the same order.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

using Vec = float __attribute__((vector_size(kLanes * 4)));
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));
using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));
using Vec8 = float __attribute__((vector_size(32)));
using Vec4 = float __attribute__((vector_size(16)));

// Vectors of as many integers.
template <class V>
struct As;
#define AS(LANES)                                               \
  template <>                                                   \
  struct As<float __attribute__((vector_size(LANES * 4)))> {    \
    using Ints = int32_t __attribute__((vector_size(LANES * 4))); \
    using Halves = uint16_t __attribute__((vector_size(LANES * 2))); \
  };
AS(4)
AS(8)
AS(16)
#undef AS

#define INLINE static inline __attribute__((always_inline))

// bfloat16 is the upper half of a float.
struct BFloat16 {
  uint16_t bits;
};

INLINE float widen(float x) { return x; }
INLINE float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

INLINE Vec broadcast(float x) {
  // Not `Vec{} + x`, which is not x where that is -0: compilers do add then.
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return reinterpret_cast<Vec>(Ints{} + bits);
}

// A vector's bytes, whatever they mean.
template <class V>
INLINE V load_as(const void* from) {
  V out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}
template <class V>
INLINE void store_as(void* to, V x) {
  std::memcpy(to, &x, sizeof(x));
}

INLINE Vec load(const float* from) { return load_as<Vec>(from); }
INLINE Vec load(const BFloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  const Ints wide = __builtin_convertvector(halves, Ints) << 16;
  return reinterpret_cast<Vec>(wide);
}
// a * b + c, rounded once; twice on processors that cannot do better, there always.
INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a),
                                               reinterpret_cast<__m512>(b),
                                               reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
  return reinterpret_cast<Vec>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a),
                                               reinterpret_cast<__m256>(b),
                                               reinterpret_cast<__m256>(c)));
#elif defined(__x86_64__)
  return a * b + c;
#else
  for (int i = 0; i < kLanes; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}
#if defined(__AVX512F__)
INLINE Vec8 multiply_add(Vec8 a, Vec8 b, Vec8 c) {
  return reinterpret_cast<Vec8>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a),
                                                reinterpret_cast<__m256>(b),
                                                reinterpret_cast<__m256>(c)));
}
#endif
INLINE Vec multiply_add(Vec a, float b, Vec c) { return multiply_add(a, broadcast(b), c); }
INLINE Vec multiply_add(Vec a, Vec b, float c) { return multiply_add(a, b, broadcast(c)); }
INLINE Vec multiply_add(Vec a, float b, float c) {
  return multiply_add(a, broadcast(b), broadcast(c));
}

INLINE void store(float* to, Vec x) { std::memcpy(to, &x, sizeof(x)); }

// To the nearest, ties to even; a NaN stays one.
INLINE BFloat16 round_to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
INLINE void put(float* to, float x) { *to = x; }
INLINE void put(BFloat16* to, float x) { *to = round_to_bfloat16(x); }

// The same of all lanes.
template <class V>
INLINE auto round_to_halves(V x) {
  using I = typename As<V>::Ints;
  const I bits = reinterpret_cast<I>(x);
  const I rounded = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
  const I nan = ((bits >> 16) & 0xffff) | 0x40;
  const I is_nan = x != x;
  return __builtin_convertvector((is_nan & nan) | (~is_nan & rounded),
                                 typename As<V>::Halves);
}
INLINE void store(BFloat16* to, Vec x) {
  const auto halves = round_to_halves(x);
  std::memcpy(to, &halves, sizeof(halves));
}
INLINE Vec4 load4(const float* from) { return load_as<Vec4>(from); }
INLINE Vec4 load4(const BFloat16* from) {
  return Vec4{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])};
}
INLINE void store4(float* to, Vec4 x) { std::memcpy(to, &x, sizeof(x)); }
INLINE void store4(BFloat16* to, Vec4 x) {
  const auto halves = round_to_halves(x);
  std::memcpy(to, &halves, sizeof(halves));
}

// x as memory of type T would hold it.
template <class T>
INLINE Vec rounded(Vec x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
  T held[kLanes];
  store(held, x);
  return load(held);
}

// The first `count` elements, and zeros.
template <class T>
INLINE Vec load_part(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T held[kLanes] = {};
  std::memcpy(held, from, count * sizeof(T));
  return load(held);
}
template <class T>
INLINE void store_part(T* to, Vec x, int64_t count) {
  if (count >= kLanes) return store(to, x);
  T held[kLanes];
  store(held, x);
  std::memcpy(to, held, count * sizeof(T));
}

INLINE Vec8 fold_to_8(Vec x) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
         __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  return x;
#endif
}
INLINE Vec4 fold_to_4(Vec x) {
  const Vec8 y = fold_to_8(x);
  return __builtin_shufflevector(y, y, 0, 1, 2, 3) + __builtin_shufflevector(y, y, 4, 5, 6, 7);
}
INLINE float sum(Vec x) {
  const Vec4 y = fold_to_4(x);
  return (y[0] + y[2]) + (y[1] + y[3]);
}

INLINE Vec select(Ints mask, Vec yes, Vec no) { return mask ? yes : no; }
INLINE Vec larger(Vec a, Vec b) { return select(a > b, a, b); }
INLINE float largest(Vec x) {
#if defined(__AVX512F__)
  x = larger(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
#else
  x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
#endif
  const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}

// Where adding it rounds a float of less than 2**22 to an integer, which its lowest bits then hold.
constexpr float kToInteger = 12582912.0f;  // 1.5 * 2**23
constexpr float kLog2E = 1.44269504088896341f;

// The Taylor polynomial of e**r: at |r| <= ln 2 / 2 the remainder is below 4e-9.
INLINE Vec polynomial(Vec r) {
  Vec p = broadcast(1.0f / 5040);
  for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = multiply_add(p, r, factor);
  return p;
}

// e**x within 2 units in the last place; exactly 0 below -87, infinite above 88.7; a NaN stays one.
//
// x = n ln 2 + r. ln 2 is taken away in two parts, the first of which has few digits.
INLINE Vec exponential(Vec x) {
  const Vec bounded = select(x > 88.7f, broadcast(88.7f), select(x < -87.0f, broadcast(-87.0f), x));
  const Vec shifted = multiply_add(bounded, kLog2E, kToInteger);
  const Vec n = shifted - kToInteger;
  const Vec p = polynomial(multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, bounded)));
  // 2**n by its exponent; in two halves, since n may be 128.
  const Ints whole = reinterpret_cast<Ints>(shifted) - reinterpret_cast<Ints>(broadcast(kToInteger));
  const Ints half = whole >> 1;
  const Vec first = reinterpret_cast<Vec>((half + 127) << 23);
  const Vec second = reinterpret_cast<Vec>((whole - half + 127) << 23);
  const Vec capped = select(x > 88.7f, broadcast(INFINITY), p * first * second);
  return select(x < -87.0f, Vec{}, capped);
}

// As `exponential`, for x <= 0 only, where what is far below 0 hardly counts: its relative error is
// 1e-8 times |x| more.
INLINE Vec weight(Vec x) {
  const Vec bounded = select(x < -87.0f, broadcast(-87.0f), x);
  const Vec shifted = multiply_add(bounded, kLog2E, kToInteger);
  const Vec p = polynomial(multiply_add(shifted - kToInteger, -0.69314718056f, bounded));
  const Ints whole = reinterpret_cast<Ints>(shifted) - reinterpret_cast<Ints>(broadcast(kToInteger));
  return select(x < -87.0f, Vec{}, p * reinterpret_cast<Vec>((whole + 127) << 23));
}
