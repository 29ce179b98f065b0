// Keys before RoPE whose channels have one scale each in a block: dequantized, rotated and multiplied in registers, once
// for all query heads of a tile.

#pragma once

#include "rows.h"

namespace {

// A key is number * scale + shift in each channel. A negative sign of the rotation is in those of ``second``, and in the
// queries that meet them.
struct Rotated {
  const Int *first, *second, *rest;  // channels of the pairs, and those that are in none
  Int pairs, rests, length;
  const float *scale, *shift;                                 // [channels]
  const float *first_query, *second_query, *query;            // [heads, pairs], and [heads, channels]
  Int channels;
  const float *cos, *sin;                                     // [pairs, length]
};

// scores[r][token + i * period + lane] += query . rotated key, for number i of the elements at lane
template <class S, int R, int L>
inline void rotated_tile(const Rows<S>& rows, const Rotated& with, Int head, Int token, Int lane, float* scores,
                         Int stride) {
  typedef typename Vector<L>::F F;
  F sums[R][S::PER] = {};
  const auto fetch = [&](Int c) {
    return S::template fetch<L>(rows.data + c * rows.stride + lane, rows.high + c * rows.high_stride + lane, rows.shift);
  };
  const auto key = [&](const auto& raw, int i, Int c) {
    return S::template number<L>(raw, i) * with.scale[c] + with.shift[c];
  };
  const float *cos = with.cos + token + lane, *sin = with.sin + token + lane;
  const float *one = with.first_query + head * with.pairs, *other = with.second_query + head * with.pairs;
  for (Int pair = 0; pair < with.pairs; ++pair, cos += with.length, sin += with.length) {
    const Int a = with.first[pair], b = with.second[pair];
    const auto raw = fetch(a), raw_other = fetch(b);
#pragma GCC unroll 8
    for (int i = 0; i < S::PER; ++i) {
      const F x = key(raw, i, a), y = key(raw_other, i, b);
      const F c = load<F>(cos + i * rows.period), s = load<F>(sin + i * rows.period);
      const F u = x * c - y * s, v = y * c + x * s;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][i] += one[r * with.pairs + pair] * u + other[r * with.pairs + pair] * v;
    }
  }
  for (Int j = 0; j < with.rests; ++j) {
    const Int c = with.rest[j];
    const auto raw = fetch(c);
#pragma GCC unroll 8
    for (int i = 0; i < S::PER; ++i) {
      const F x = key(raw, i, c);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][i] += with.query[(head + r) * with.channels + c] * x;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < S::PER; ++i) {
      float* to = scores + r * stride + token + i * rows.period + lane;
      store(to, load<F>(to) + sums[r][i]);
    }
}

// Whether ``score_rotated`` takes codes of this width in blocks of this length.
inline bool rotates_in_registers(const Spec& spec, const Segment& segment, Int length) {
  const Int widest = spec.widths[segment.low], narrowest = segment.high < 0 ? widest : spec.widths[segment.high];
  return !spec.float8_mantissa && widest > 1 && length * narrowest % 64 == 0;
}

inline void score_rotated(const Spec& spec, const Segment& segment, const Block& block, Int heads, const Rotated& with,
                          float* scores, Int stride) {
  with_segment_rows<KEYS>(spec, segment, block, [&]<class S>(Rows<S> rows, Int token) {
    if constexpr (S::AFFINE && S::PER <= 4)
      each_tile(heads, [&](auto size, Int head) {
        float* to = scores + head * stride;
        Int lane = 0;
        for (; lane + 16 <= rows.run; lane += 16) rotated_tile<S, size, 16>(rows, with, head, token, lane, to, stride);
        if (lane < rows.run) rotated_tile<S, size, 8>(rows, with, head, token, lane, to, stride);
      });
  });
}

}  // namespace
