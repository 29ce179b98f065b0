// Weights as integers of signed bytes, for machines that multiply bytes (AVX-512 VNNI).
//
// A weight is LIMBS bytes, relative to the largest weight of its head: 3 limbs are the 24 bits of an fp32 mantissa; 2
// limbs, for bf16 models, err by 2^-16 of the largest weight at most, 128 times less than rounding that one to bf16 may.
// For fp16 they are too few: with keys of 8 bits beside keys of 1, the output errs by four times its own rounding.

#pragma once

#include <array>
#include <cmath>
#include <memory>
#include <vector>

#include "vectors.h"

namespace {

#if INTEGERS

// Sums that go through a call lie in memory.
#define INLINE inline __attribute__((always_inline))

// Orders of the 64 bytes of a register: those of four rows of 16 side by side, and the limbs of 16 integers apart.
INLINE __m512i rows_together() {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x01010101)) | _mm512_set1_epi32(0x30201000);
}

INLINE __m512i limbs_apart() {
  const __m512i firsts = _mm512_set_epi32(51, 35, 19, 3, 50, 34, 18, 2, 49, 33, 17, 1, 48, 32, 16, 0);
  return _mm512_add_epi32(_mm512_mullo_epi32(firsts, _mm512_set1_epi32(0x01010101)), _mm512_set1_epi32(0x0c080400));
}

// Weights [heads, count] as integers.
struct Limbs {
  // Bytes from limb to limb: known to the compiler, and such that the limbs do not all meet in one set of the cache.
  static constexpr Int ROOM = 1024 + 64;
  int number = 0;                   // of a weight
  std::unique_ptr<int8_t[]> bytes;  // [heads, number, ROOM], the lowest limb first; not set before it is written to
  std::vector<int32_t> totals;      // [heads, number]
  std::vector<float> units;         // [heads]

  const int8_t* of(Int head) const { return &bytes[head * number * ROOM]; }

  void begin(int limbs, Int heads) {
    if (!number) bytes.reset(new int8_t[heads * limbs * ROOM]);
    number = limbs;
    units.resize(heads), totals.assign(heads * number, 0);
  }

  // From all weights of a head, before any of them is set. NaN and infinities make NaN of all that the head sums.
  void set_unit(Int head, const float* weights, Int count) {
    __m512i top = _mm512_setzero_si512();
    for (Int i = 0; i < count; i += 16)
      top = _mm512_max_epi32(top, _mm512_castps_si512(read(weights, i, count)) & _mm512_set1_epi32(0x7fffffff));
    const float largest = as_float<1>(Vector<1>::I{_mm512_reduce_max_epi32(top)})[0];
    // The highest number whose limbs are all signed bytes, and a little less for what rounding adds.
    const float limit = number == 3 ? 8355000.0f : 32600.0f;
    units[head] = largest < INFINITY ? std::max(largest, 1e-30f) / limit : NAN;
  }

  // Some weights, to the bytes from ``at`` on; their sum, ``times`` as often, to the totals.
  void set(Int head, const float* weights, Int count, Int at, int times) {
    if (number == 3) set_part<3>(head, weights, count, at, times);
    else set_part<2>(head, weights, count, at, times);
  }

 private:
  static INLINE __m512 read(const float* weights, Int i, Int count) {
    return _mm512_maskz_loadu_ps(count - i < 16 ? (1 << (count - i)) - 1 : 0xffff, weights + i);
  }

  template <int LIMBS>
  void set_part(Int head, const float* weights, Int count, Int at, int times) {
    const __m512 factor = _mm512_set1_ps(units[head] > 0 ? 1 / units[head] : 0);
    const __m512i half = _mm512_set1_epi32(LIMBS == 3 ? 0x808080 : 0x8080);  // makes limbs unsigned, and back
    __m512i sums = _mm512_setzero_si512();
    int8_t* to = &bytes[head * LIMBS * ROOM + at];
    for (Int i = 0; i < count; i += 16, to += 16) {
      const __m512i all = _mm512_add_epi32(_mm512_cvtps_epi32(read(weights, i, count) * factor), half) ^ half;
      const __m512i apart = _mm512_permutexvar_epi8(limbs_apart(), all);
      sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), apart);
      store(to, _mm512_castsi512_si128(apart));
      store(to + ROOM, _mm512_extracti32x4_epi32(apart, 1));
      if (LIMBS == 3) store(to + 2 * ROOM, _mm512_extracti32x4_epi32(apart, 2));
    }
    const auto quarters = load<std::array<std::array<int32_t, 4>, 4>>(&sums);
    for (int limb = 0; limb < LIMBS; ++limb)
      totals[head * LIMBS + limb] +=
          times * ((quarters[limb][0] + quarters[limb][1]) + (quarters[limb][2] + quarters[limb][3]));
  }
};

// output += unit * sums, of the limbs of a weight
template <int LIMBS>
INLINE void add_sums(float* output, float unit, const __m512i* sums, __mmask16 lanes = 0xffff) {
  __m512 all = _mm512_cvtepi32_ps(sums[LIMBS - 1]);
#pragma GCC unroll 8
  for (int limb = LIMBS - 2; limb >= 0; --limb) all = all * 256.0f + _mm512_cvtepi32_ps(sums[limb]);
  _mm512_mask_storeu_ps(output, lanes, _mm512_maskz_loadu_ps(lanes, output) + unit * all);
}

#else

struct Limbs {
  static constexpr Int ROOM = 0;
  void begin(int, Int) {}
  void set_unit(Int, const float*, Int) {}
  void set(Int, const float*, Int, Int, int) {}
};

#endif

}  // namespace
