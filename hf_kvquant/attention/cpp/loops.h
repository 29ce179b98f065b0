// The inner loops: numbers from a source, each converted once for all query heads of a tile, times weights that are
// constant along the vector. Sums of a tile stay in registers.

#pragma once

#include "sources.h"

namespace {

constexpr int MAX_TILE = 4;  // query heads

template <int N>
using Constant = std::integral_constant<int, N>;

// A matrix of rows of ``run`` elements, ``stride`` elements apart. Number i + 1 of an element belongs to the token
// ``period`` behind that of number i.
template <class S>
struct Rows {
  static constexpr bool BY_INTEGERS = INTEGERS && S::AFFINE;  // not by the loops of this file
  const typename S::Element* data;
  Int count, stride, run, period;
  const uint8_t* high = nullptr;  // the other plane of two, its rows high_stride apart
  Int high_stride = 0;
  int shift = 0;
};

// output[r][i * period + lane] += sum over rows of weights[r][row] * number i of the element at lane
template <class S, int R, int L, int P>
inline void key_tile(Rows<S> rows, const float* weights, Int weight_stride, float* output, Int output_stride) {
  typedef typename Vector<L>::F F;
  F sums[R][S::PER][P] = {};
  const auto* from = rows.data;
  const uint8_t* high = rows.high;
  for (Int c = 0; c < rows.count; ++c, from += rows.stride, high += rows.high_stride) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const auto raw = S::template fetch<L>(from + p * L, high + p * L, rows.shift);
#pragma GCC unroll 8
      for (int i = 0; i < S::PER; ++i) {
        const F x = S::template number<L>(raw, i);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][i][p] += weights[r * weight_stride + c] * x;
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < S::PER; ++i)
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        float* to = output + r * output_stride + i * rows.period + p * L;
        store(to, load<F>(to) + sums[r][i][p]);
      }
}

// output[r][lane] += sum over rows j and i of weights[r][i * period + j] * number i of the element at (j, lane)
template <class S, int R, int L, int P>
inline void value_tile(Rows<S> rows, const float* weights, Int weight_stride, float* output, Int output_stride) {
  typedef typename Vector<L>::F F;
  F sums[R][P] = {};
  const auto* from = rows.data;
  const uint8_t* high = rows.high;
  for (Int j = 0; j < rows.count; ++j, from += rows.stride, high += rows.high_stride) {
    typename S::template Raw<L> raw[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) raw[p] = S::template fetch<L>(from + p * L, high + p * L, rows.shift);
#pragma GCC unroll 8
    for (int i = 0; i < S::PER; ++i)
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        const F x = S::template number<L>(raw[p], i);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][p] += weights[r * weight_stride + i * rows.period + j] * x;
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      float* to = output + r * output_stride + p * L;
      store(to, load<F>(to) + sums[r][p]);
    }
}

template <bool OF_KEYS, class S, int R, int L, int P>
inline void tile(Rows<S> rows, const float* weights, Int weight_stride, float* output, Int output_stride) {
  if (OF_KEYS)
    key_tile<S, R, L, P>(rows, weights, weight_stride, output, output_stride);
  else
    value_tile<S, R, L, P>(rows, weights, weight_stride, output, output_stride);
}

// output[r][t] = weights[r] . token t, for tokens that are rows
template <class S, int R>
void dot_rows(Rows<S> rows, const float* weights, Int weight_stride, float* output, Int output_stride) {
  typedef Vector<16>::F F;
  const auto* from = rows.data;
  for (Int t = 0; t < rows.count; ++t, from += rows.stride) {
    F sums[R] = {};
    float rest[R] = {};
    Int c = 0;
    for (; c + 16 <= rows.run; c += 16) {
      const F x = S::template fetch<16>(from + c);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r] += x * load<F>(weights + r * weight_stride + c);
    }
    for (; c < rows.run; ++c)
      for (int r = 0; r < R; ++r) rest[r] += S::template fetch<1>(from + c)[0] * weights[r * weight_stride + c];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) output[r * output_stride + t] = sum16(sums[r]) + rest[r];
  }
}

// All lanes of a run: in the widest tiles that fit.
template <bool OF_KEYS, class S, int R>
void lanes(Rows<S> rows, const float* weights, Int weight_stride, float* output, Int output_stride) {
  constexpr int WIDE = OF_KEYS ? std::max(1, 4 / S::PER) : 4;  // vectors of a tile: R * 4 sums stay in registers
  const Int run = rows.run;
  Int lane = 0;
  const auto from = [=](Int lane) {
    Rows<S> rest = rows;
    rest.data += lane, rest.high += lane;
    return rest;
  };
  for (; lane + 16 * WIDE <= run; lane += 16 * WIDE)
    tile<OF_KEYS, S, R, 16, WIDE>(from(lane), weights, weight_stride, output + lane, output_stride);
  for (; lane + 16 <= run; lane += 16)
    tile<OF_KEYS, S, R, 16, 1>(from(lane), weights, weight_stride, output + lane, output_stride);
  for (; lane + 8 <= run; lane += 8)
    tile<OF_KEYS, S, R, 8, 1>(from(lane), weights, weight_stride, output + lane, output_stride);
  for (; lane < run; ++lane)
    tile<OF_KEYS, S, R, 1, 1>(from(lane), weights, weight_stride, output + lane, output_stride);
}

enum Loop { KEYS, VALUES, DOTS };

template <Loop LOOP, class S, int R>
void loop(Rows<S> rows, const float* weights, Int weight_stride, float* output, Int output_stride) {
  if constexpr (LOOP == DOTS)
    dot_rows<S, R>(rows, weights, weight_stride, output, output_stride);
  else
    lanes<LOOP == KEYS, S, R>(rows, weights, weight_stride, output, output_stride);
}

// All query heads, in tiles of at most MAX_TILE: ``visit(size as a constant, first head)``.
template <class Visit>
void each_tile(Int heads, Visit visit) {
  Int head = 0;
  for (Int tiles = (heads + MAX_TILE - 1) / MAX_TILE; tiles; --tiles) {
    const Int size = (heads - head + tiles - 1) / tiles;
    if (size == 1) visit(Constant<1>(), head);
    if (size == 2) visit(Constant<2>(), head);
    if (size == 3) visit(Constant<3>(), head);
    if (size == 4) visit(Constant<4>(), head);
    head += size;
  }
}

template <Loop LOOP, class S>
void multiply(Rows<S> rows, Int heads, const float* weights, Int weight_stride, float* output, Int output_stride) {
  each_tile(heads, [&](auto size, Int head) {
    loop<LOOP, S, size>(rows, weights + head * weight_stride, weight_stride, output + head * output_stride,
                        output_stride);
  });
}

// output [heads, dim] += input [heads, dim] times a matrix [dim, dim]
inline void transform(const float* matrix, Int dim, Int heads, const float* input, float* output) {
  multiply<VALUES, Floats>({matrix, dim, dim, dim, 0}, heads, input, dim, output, dim);
}

// All query heads, with full-precision tokens [count, dim] of an element that is known only now.
template <Loop LOOP>
void multiply_exact(Int element, const char* tokens, Int count, Int dim, Int heads, const float* weights,
                    Int weight_stride, float* output, Int output_stride) {
#define WITH(E)                                                                                             \
  multiply<LOOP, Exact<E>>({(const Exact<E>::Element*)tokens, count, dim, dim, 0}, heads, weights, weight_stride, \
                           output, output_stride)
  if (element == FLOAT32) WITH(FLOAT32);
  else if (element == BFLOAT16) WITH(BFLOAT16);
  else WITH(FLOAT16);
#undef WITH
}

}  // namespace
