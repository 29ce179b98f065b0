// Vectors of numbers: those of GCC and Clang, 16 floats wide; narrower machines split them.

#pragma once

#include <algorithm>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "handed.h"

// Whether codes are multiplied as integers (integers.h).
#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__AVX512VL__) && !defined(WITHOUT_INTEGERS)
#define INTEGERS 1
#else
#define INTEGERS 0
#endif

namespace {

template <int L>
struct Vector {
  typedef float F __attribute__((vector_size(4 * L)));
  typedef int32_t I __attribute__((vector_size(4 * L)));
};

template <class T>
inline T load(const void* from) {
  T x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <class T>
inline void store(void* to, T x) {
  std::memcpy(to, &x, sizeof x);
}

// Unsigned bytes and 16-bit numbers to 32 bits. GCC 12 takes __builtin_convertvector apart, number by number.
template <int L, class T>
inline typename Vector<L>::I widen(const void* from) {
#if defined(__AVX512F__)
  if constexpr (L == 16 && sizeof(T) == 1) return (typename Vector<L>::I)_mm512_cvtepu8_epi32(load<__m128i>(from));
  if constexpr (L == 16 && sizeof(T) == 2) return (typename Vector<L>::I)_mm512_cvtepu16_epi32(load<__m256i>(from));
#elif defined(__AVX2__)
  if constexpr (L == 16) {
    const char* bytes = (const char*)from;
    const Vector<8>::I halves[2] = {widen<8, T>(bytes), widen<8, T>(bytes + 8 * sizeof(T))};
    return load<Vector<16>::I>(halves);
  }
#endif
#ifdef __AVX2__
  if constexpr (L == 8 && sizeof(T) == 1)
    return (typename Vector<L>::I)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load<int64_t>(from)));
  if constexpr (L == 8 && sizeof(T) == 2) return (typename Vector<L>::I)_mm256_cvtepu16_epi32(load<__m128i>(from));
#endif
  typedef T Narrow __attribute__((vector_size(L * sizeof(T))));
  return __builtin_convertvector(load<Narrow>(from), typename Vector<L>::I);
}

template <int L>
inline typename Vector<L>::F as_float(typename Vector<L>::I bits) {
  return (typename Vector<L>::F)bits;
}

// fp16, subnormal numbers, infinities and NaN included.
template <int L>
inline typename Vector<L>::F from_half(typename Vector<L>::I half) {
  typedef typename Vector<L>::I I;
  const I magnitude = half & 0x7fff;
  const I special = magnitude >= 0x7c00;
  const I bits = (I)(as_float<L>(magnitude << 13) * 0x1p112f) | (special & 0x7f800000);
  return as_float<L>(bits | ((half & 0x8000) << 16));
}

template <int L>
inline typename Vector<L>::F read(const char* data, Int index, Int element) {
  if (element == FLOAT32) return load<typename Vector<L>::F>(data + 4 * index);
#ifdef __AVX512F__
  if constexpr (L == 16)
    if (element == FLOAT16) return (typename Vector<L>::F)_mm512_cvtph_ps(load<__m256i>(data + 2 * index));
#endif
  const typename Vector<L>::I bits = widen<L, uint16_t>(data + 2 * index);
  return element == BFLOAT16 ? as_float<L>(bits << 16) : from_half<L>(bits);
}

// ``count`` numbers, times ``factor``, to fp32.
inline void read_all(float* to, const char* data, Int start, Int count, Int element, float factor = 1.0f) {
  Int i = 0;
  for (; i + 16 <= count; i += 16) store(to + i, read<16>(data, start + i, element) * factor);
  for (; i < count; ++i) store(to + i, read<1>(data, start + i, element) * factor);
}

// exp for x <= 0 (and NaN): 2^n times exp(f), |f| <= log(2) / 2, relative error 8e-8.
template <int L>
inline typename Vector<L>::F exponential(typename Vector<L>::F x) {
  typedef typename Vector<L>::F F;
  typedef typename Vector<L>::I I;
  const I low = x < -87.0f;
  x = low ? F{} - 87.0f : x;
  const F magic = F{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const F shifted = x * 1.44269504f + magic;
  const F n = shifted - magic;
  F f = x - n * 0.693145752f;
  f = f - n * 1.42860677e-6f;
  F y = F{} + 8.363235742e-3f;  // Chebyshev fit of (exp(f) - 1 - f) / f^2
  y = y * f + 4.166646302e-2f;
  y = y * f + 1.666657627e-1f;
  y = y * f + 0.5f;
  y = y * f * f + f + 1.0f;
  // 2^n as a factor: added to the exponent of y it could turn a NaN into a number.
  const F power = as_float<L>(((I)shifted - (0x4b400000 - 127)) << 23);
  return low ? F{} : y * power;
}

inline float sum16(Vector<16>::F x) {
  float lanes[16];  // not the address of x, which would keep the sums of a loop in memory
  store(lanes, x);
  typedef Vector<4>::F Q;
  const Q q = (load<Q>(lanes) + load<Q>(lanes + 4)) + (load<Q>(lanes + 8) + load<Q>(lanes + 12));
  return (q[0] + q[1]) + (q[2] + q[3]);
}

// Sum of ``term<L>(i)`` over the numbers, in four sums at a time: one would wait for each of its additions.
template <class Term>
inline float reduce(Int count, Term term) {
  typedef Vector<16>::F F;
  F a = {}, b = {}, c = {}, d = {};
  float rest = 0;
  Int i = 0;
  for (; i + 64 <= count; i += 64) {
    a += term(i, F{});
    b += term(i + 16, F{});
    c += term(i + 32, F{});
    d += term(i + 48, F{});
  }
  for (; i + 16 <= count; i += 16) a += term(i, F{});
  for (; i < count; ++i) rest += term(i, Vector<1>::F{})[0];
  return sum16((a + b) + (c + d)) + rest;
}

inline float max16(Vector<16>::F x) {
  float lanes[16];
  store(lanes, x);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = std::max(lanes[i], lanes[i + half]);
  return lanes[0];
}

inline float dot(const float* x, const float* y, Int count) {
  return reduce(count, [=](Int i, auto like) { return load<decltype(like)>(x + i) * load<decltype(like)>(y + i); });
}

// y += a x
inline void add(float* y, float a, const float* x, Int count) {
  Int i = 0;
  for (; i + 16 <= count; i += 16)
    store(y + i, load<Vector<16>::F>(y + i) + a * load<Vector<16>::F>(x + i));
  for (; i < count; ++i) y[i] += a * x[i];
}

inline float total(const float* x, Int count) {
  return reduce(count, [=](Int i, auto like) { return load<decltype(like)>(x + i); });
}

}  // namespace
