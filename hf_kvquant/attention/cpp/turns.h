// The rotated centre of the keys by integers, for tables of cos and sin of 16 bits.

#pragma once

#include "limbs.h"
#include "loops.h"

namespace {

#if INTEGERS

// Products with cos and sin of 16 bits as integers of 16 bits, two of which are multiplied and added at a time: 14 bits
// behind the point, so that numbers of bf16 are what they were unless they are below 2^-7.
struct Turns {
  std::vector<int32_t> both;  // of a block: cos in the low half of each, sin in the high one

  // Whether all are below 2.
  bool set(const char* cos, const char* sin, Int count, Int element) {
    both.resize(count);
    __m512i seen = _mm512_setzero_si512();
    for (Int i = 0; i < count; i += 16) {
      const __mmask16 lanes = count - i < 16 ? (1 << (count - i)) - 1 : 0xffff;
      const auto fixed = [&](const char* from) {
        const __m256i bits = _mm256_maskz_loadu_epi16(lanes, from + 2 * i);
        const __m512 x = element == FLOAT16 ? _mm512_cvtph_ps(bits)
                                            : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
        const __m512i y = _mm512_cvtps_epi32(x * 16384.0f);
        seen |= y ^ _mm512_srai_epi32(y, 31);
        return y;
      };
      const __m512i x = fixed(cos), y = fixed(sin);
      _mm512_mask_storeu_epi32(&both[i], lanes, (x & _mm512_set1_epi32(0xffff)) | _mm512_slli_epi32(y, 16));
    }
    return _mm512_reduce_or_epi32(seen) < 32768;
  }

  // Weights of a head as integers whose products add up to less than 2^31: their sizes to at most 64000, and half of one
  // more for the rounding of each of 2048, times 2^15. To ``words``, of both terms of a pair.
  static float set_weights(const float* along, const float* across, Int count, int32_t* words) {
    float size = 1e-30f, highest = 0;
    for (const float* weights : {along, across})
      for (Int i = 0; i < count; ++i) {
        size += std::abs(weights[i]);
        highest = std::max(highest, std::abs(weights[i]));
      }
    const float unit = std::max(size / 64000, highest / 32767);
    for (Int i = 0; i < count; ++i)
      words[i] = (uint16_t)std::lrint(along[i] / unit) | (uint32_t)std::lrint(across[i] / unit) << 16;
    return unit / 16384;
  }

  // scores[r][token] += unit of r times the sum over pairs of their words times cos and sin.
  template <int R, int P>
  void add(const int32_t* words, const float* units, Int pairs, Int length, Int token, float* scores, Int stride) const {
    const __mmask16 lanes = length - token < 16 ? (1 << (length - token)) - 1 : 0xffff;
    __m512i sums[R][P] = {};
    const int32_t* from = &both[token];
    for (Int i = 0; i < pairs; ++i, from += length) {
      __m512i x[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p)
        x[p] = P > 1 ? _mm512_loadu_si512(from + 16 * p) : _mm512_maskz_loadu_epi32(lanes, from);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i word = _mm512_set1_epi32(words[r * pairs + i]);
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) sums[r][p] = _mm512_dpwssd_epi32(sums[r][p], x[p], word);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) add_sums<1>(scores + r * stride + token + 16 * p, units[r], &sums[r][p], lanes);
  }

  void add(Int heads, const int32_t* words, const float* units, Int pairs, Int length, float* scores, Int stride) const {
    each_tile(heads, [&](auto size, Int head) {
      Int token = 0;
      const auto tile = [&](auto vectors) {
        add<size, vectors>(words + head * pairs, units + head, pairs, length, token, scores + head * stride, stride);
        token += 16 * vectors;
      };
      while (token + 64 <= length) tile(Constant<4>());
      while (token < length) tile(Constant<1>());
    });
  }
};

#else

struct Turns {
  bool set(const char*, const char*, Int, Int) { return false; }
  static float set_weights(const float*, const float*, Int, int32_t*) { return 0; }
  void add(Int, const int32_t*, const float*, Int, Int, float*, Int) const {}
};

#endif

}  // namespace
