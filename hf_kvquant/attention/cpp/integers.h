// Products with codes as integers, where the machine multiplies bytes (AVX-512 VNNI): codes need no conversion, and one
// instruction multiplies 64 of them and adds the products up by fours. Sums of integers are exact.
//
// For keys, four channels of a token lie side by side in a register; for values, four tokens of a channel.

#pragma once

#include "limbs.h"
#include "loops.h"

namespace {

// The codes of some channels of a segment in one block: ``count`` rows of ``run`` bytes of low bits, strides in bytes.
struct Block {
  const uint8_t *low, *high;
  Int count, run, low_stride, high_stride;
};

// Codes of ``low`` bits in one plane and ``high`` more in another.
struct Codes {
  Block block;
  Int low, high, size;  // size: channels
  Int from = 0;         // of keys: where the weights of these channels begin
  Int low_step = 0, high_step = 0;  // bytes from block to block
  Int blocks = 1;                   // of values: that follow one another
};

// What is brought to the second-level cache while codes are multiplied, which leaves the way to memory idle.
struct Ahead {
  const char *codes = nullptr, *angles = nullptr, *angles_end = nullptr;

  void next_codes() { __builtin_prefetch(codes, 0, 2), codes += 64; }
  void next_angles() {
    __builtin_prefetch(angles, 0, 2);
    angles += angles < angles_end ? 64 : 0;
  }
};

#if INTEGERS

// ``visit(low, high)`` with the widths of codes as constants.
template <class Visit>
INLINE void with_widths(const Codes& codes, Visit visit) {
  if (codes.low == 1) visit(Constant<1>(), Constant<0>());
  else if (codes.low == 2 && codes.high) visit(Constant<2>(), Constant<1>());
  else if (codes.low == 2) visit(Constant<2>(), Constant<0>());
  else if (codes.low == 4 && codes.high == 2) visit(Constant<4>(), Constant<2>());
  else if (codes.low == 4 && codes.high) visit(Constant<4>(), Constant<1>());
  else if (codes.low == 4) visit(Constant<4>(), Constant<0>());
  else visit(Constant<8>(), Constant<0>());
}

// The bytes of 16 lanes in four rows, those of a lane side by side.
template <class Row>
INLINE __m512i gather(Row row) {
  __m512i x = _mm512_castsi128_si512(row(0));
  x = _mm512_inserti32x4(x, row(1), 1);
  x = _mm512_inserti32x4(x, row(2), 2);
  x = _mm512_inserti32x4(x, row(3), 3);
  return _mm512_permutexvar_epi8(rows_together(), x);
}

// The first 8 lanes are at ``one``, the others at ``two``. Rows that are not ``there`` have weights of 0, so that any
// others serve.
INLINE __m512i gather(const uint8_t* one, const uint8_t* two, Int stride, Int there) {
  if (two == one + 8 && there > 3) return gather([=](Int i) { return load<__m128i>(one + i * stride); });
  return gather([=](Int i) {
    const Int skipped = i < there ? i * stride : 0;
    return _mm_set_epi64x(load<int64_t>(two + skipped), load<int64_t>(one + skipped));
  });
}

// No byte behind ``lanes`` is touched.
INLINE __m512i gather(const uint8_t* from, Int stride, __mmask16 lanes) {
  if (lanes == 0xffff) return gather([=](Int i) { return load<__m128i>(from + i * stride); });
  return gather([=](Int i) { return _mm_maskz_loadu_epi8(lanes, from + i * stride); });
}

// Codes of LOW bits from bit 0 of each byte of ``low`` on, and HIGH more of ``high``, which are from bit LOW on.
template <int LOW, int HIGH>
INLINE __m512i codes_of(__m512i low, __m512i high) {
  const __m512i lows = _mm512_set1_epi32(((1u << LOW) - 1) * 0x01010101u);
  const __m512i highs = _mm512_set1_epi32((((1u << HIGH) - 1) << LOW) * 0x01010101u);
  if (LOW == 8) return low;
  return HIGH ? (low & lows) | (high & highs) : low & lows;
}

// Sums of R query heads, 2 times 16 numbers each, that begin with what the middle of the codes takes away.
template <int LIMBS, int R>
struct Sums {
  __m512i sums[R][2][LIMBS];

  INLINE Sums(const Limbs& limbs, Int head, int middle) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int limb = 0; limb < LIMBS; ++limb)
        sums[r][0][limb] = sums[r][1][limb] = _mm512_set1_epi32(-middle * limbs.totals[(head + r) * LIMBS + limb]);
  }

  // Four codes of each number at a time, with the same weights for both times 16.
  INLINE void add(const int8_t* weights, __m512i one, __m512i two) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int limb = 0; limb < LIMBS; ++limb) {
        const __m512i weight = _mm512_set1_epi32(load<int32_t>(weights + (r * LIMBS + limb) * Limbs::ROOM));
        sums[r][0][limb] = _mm512_dpbusd_epi32(sums[r][0][limb], one, weight);
        sums[r][1][limb] = _mm512_dpbusd_epi32(sums[r][1][limb], two, weight);
      }
  }
};

// Where codes of W bits of a token of a half block are: the element of its run, and the bit.
template <int W>
struct Place {
  Int at;
  int bit;
  Place(Int token, Int length) : at(token % (length * W / 8)), bit(token / (length * W / 8) * W) {}
};

// Keys: to the sums of 16 tokens from ``token`` on and of those half a block behind them, which lie four bits above, if
// not in bytes of their own.
template <int LOW, int HIGH, int LIMBS, int R>
INLINE void add_keys(Sums<LIMBS, R>& sums, const Codes& codes, Int n, const int8_t* weights, Int token, Int length,
                     Ahead& ahead) {
  const Block& block = codes.block;
  const auto both = [](int one, int two) {
    return _mm512_inserti64x4(_mm512_set1_epi32(one), _mm256_set1_epi32(two), 1);
  };
  const Place<LOW> one(token, length), two(token + 8, length);
  const Place<HIGH ? HIGH : 1> high_one(token, length), high_two(token + 8, length);
  const __m512i shift = both(one.bit, two.bit), turn = both((high_one.bit - LOW) & 31, (high_two.bit - LOW) & 31);
  const uint8_t *low = block.low + n * codes.low_step, *high = block.high + n * codes.high_step;
  weights += codes.from;
  for (Int c = 0; c < block.count; c += 4, weights += 4) {
    ahead.next_codes(), ahead.next_angles();
    const Int there = block.count - c;
    __m512i x = gather(low + one.at, low + two.at, block.low_stride, there), y = x, z = {}, w = {};
    if constexpr (LOW == 8) {
      y = gather(low + one.at + length / 2, low + two.at + length / 2, block.low_stride, there);
    } else {
      x = _mm512_srlv_epi32(x, shift), y = _mm512_srli_epi32(x, 4);
    }
    if constexpr (HIGH) {
      z = _mm512_rorv_epi32(gather(high + high_one.at, high + high_two.at, block.high_stride, there), turn);
      w = _mm512_ror_epi32(z, 4);
      high += 4 * block.high_stride;
    }
    sums.add(weights, codes_of<LOW, HIGH>(x, z), codes_of<LOW, HIGH>(y, w));
    low += 4 * block.low_stride;
  }
}

// output[r][token] += sum over channels of weights[r][channel] * code, of all tokens of block n of ``parts``.
template <int LIMBS, int R>
void key_integers(const std::vector<Codes>& parts, Int n, Int length, const Limbs& limbs, Int head, float* output,
                  Int stride, Ahead& ahead) {
  const int8_t* weights = limbs.of(head);
  for (Int token = 0; token < length / 2; token += 16) {
    Sums<LIMBS, R> sums(limbs, head, 1);
    for (const Codes& codes : parts)
      with_widths(codes, [&](auto low, auto high) __attribute__((always_inline)) {
        add_keys<low, high>(sums, codes, n, weights, token, length, ahead);
      });
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      add_sums<LIMBS>(output + r * stride + token, limbs.units[head + r], sums.sums[r][0]);
      add_sums<LIMBS>(output + r * stride + token + length / 2, limbs.units[head + r], sums.sums[r][1]);
    }
  }
}

// output[r][channel] += sum over tokens of weights[r][token] * code, for the 32 channels from ``channel`` on, or as
// many as there are.
template <int LOW, int HIGH, int LIMBS, int R>
void value_integers(const Codes& codes, int middle, Int length, const Limbs& limbs, Int head, Int channel,
                    float* output, Int stride, Ahead& ahead) {
  const Block& block = codes.block;
  const Int half = length / 2, left = codes.size - channel;
  const auto first = [](Int count) { return count < 16 ? (1 << count) - 1 : 0xffff; };
  const Int next = left > 16 ? channel + 16 : channel;  // the same again, where there are no more
  const __mmask16 lanes = first(left), others = first(left > 16 ? left - 16 : left);
  Sums<LIMBS, R> sums(limbs, head, middle);
  for (Int n = 0; n < codes.blocks; ++n) {
    const int8_t* weights = limbs.of(head) + n * length;
    const uint8_t *low = block.low + n * codes.low_step, *high = block.high + n * codes.high_step;
    for (Int token = 0; token < half; token += 4) {
      ahead.next_codes(), ahead.next_codes(), ahead.next_angles();
      const Place<LOW> place(token, length);
      const uint8_t* from = low + place.at * block.low_stride;
      const __m512i shift = _mm512_set1_epi32(place.bit);
      __m512i x[2] = {gather(from + channel, block.low_stride, lanes), gather(from + next, block.low_stride, others)};
      __m512i z[2] = {};
      if constexpr (HIGH) {
        const Place<HIGH ? HIGH : 1> high_place(token, length);
        const uint8_t* at = high + high_place.at * block.high_stride;
        const __m512i turn = _mm512_set1_epi32((high_place.bit - LOW) & 31);
        z[0] = _mm512_rorv_epi32(gather(at + channel, block.high_stride, lanes), turn);
        z[1] = _mm512_rorv_epi32(gather(at + next, block.high_stride, others), turn);
      }
      if constexpr (LOW != 8) x[0] = _mm512_srlv_epi32(x[0], shift), x[1] = _mm512_srlv_epi32(x[1], shift);
      sums.add(weights + token, codes_of<LOW, HIGH>(x[0], z[0]), codes_of<LOW, HIGH>(x[1], z[1]));
      if constexpr (LOW == 8) {
        from += half * block.low_stride;
        x[0] = gather(from + channel, block.low_stride, lanes), x[1] = gather(from + next, block.low_stride, others);
      } else {
        x[0] = _mm512_srli_epi32(x[0], 4), x[1] = _mm512_srli_epi32(x[1], 4);
        z[0] = _mm512_ror_epi32(z[0], 4), z[1] = _mm512_ror_epi32(z[1], 4);
      }
      sums.add(weights + token + half, codes_of<LOW, HIGH>(x[0], z[0]), codes_of<LOW, HIGH>(x[1], z[1]));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    add_sums<LIMBS>(output + r * stride + channel, limbs.units[head + r], sums.sums[r][0], lanes);
    if (left > 16) add_sums<LIMBS>(output + r * stride + next, limbs.units[head + r], sums.sums[r][1], others);
  }
}

inline void multiply_keys(const std::vector<Codes>& parts, Int n, Int length, const Limbs& limbs, float* output,
                          Int stride, Ahead& ahead) {
  each_tile(limbs.units.size(), [&](auto size, Int head) {
    float* to = output + head * stride;
    if (limbs.number == 3) key_integers<3, size>(parts, n, length, limbs, head, to, stride, ahead);
    else key_integers<2, size>(parts, n, length, limbs, head, to, stride, ahead);
  });
}

inline void multiply_values(const Codes& codes, int middle, Int length, const Limbs& limbs, float* output, Int stride,
                            Ahead& ahead) {
  each_tile(limbs.units.size(), [&](auto size, Int head) {
    float* to = output + head * stride;
    with_widths(codes, [&](auto low, auto high) {
      for (Int c = 0; c < codes.size; c += 32)
        if (limbs.number == 3)
          value_integers<low, high, 3, size>(codes, middle, length, limbs, head, c, to, stride, ahead);
        else
          value_integers<low, high, 2, size>(codes, middle, length, limbs, head, c, to, stride, ahead);
    });
  });
}

#else

inline void multiply_keys(const std::vector<Codes>&, Int, Int, const Limbs&, float*, Int, Ahead&) {}
inline void multiply_values(const Codes&, int, Int, const Limbs&, float*, Int, Ahead&) {}

#endif

}  // namespace
