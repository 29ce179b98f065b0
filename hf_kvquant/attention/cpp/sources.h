// Stored numbers -> fp32 in registers.

#pragma once

#include <type_traits>

#include "vectors.h"

namespace {

// Codes below 2^23 -> fp32, less ``middle``: as the low bits of the mantissa of 2^23, which costs no more than a
// conversion does, and centres the numbers: sums of thousands of codes as they are would lose to rounding what their
// offset takes away again (cr4 at 20,000 tokens: relative RMS 1.2e-5 instead of 3e-6).
template <int L>
inline typename Vector<L>::F centred(typename Vector<L>::I codes, int middle) {
  return as_float<L>(codes | 0x4b000000) - (8388608.0f + middle);
}

// Where the inner loops read numbers from: ``PER`` of them from each element, PER runs of numbers from a run of them.
// ``high`` and ``shift`` are for codes that lie in two planes.
struct Bytes {
  typedef uint8_t Element;
  template <int L>
  using Raw = typename Vector<L>::I;
  template <int L>
  static inline Raw<L> fetch(const uint8_t* from, const uint8_t*, int) {
    return widen<L, uint8_t>(from);
  }
};

template <int W>
struct Packed : Bytes {
  static constexpr bool AFFINE = true;
  static constexpr int PER = 8 / W;
  template <int L>
  static inline typename Vector<L>::F number(Raw<L> raw, int i) {
    if (i) raw >>= W * i;
    if (W * (i + 1) < 8) raw &= (1 << W) - 1;
    return centred<L>(raw, 1 << (W - 1));
  }
};

// Codes of W low bits in one plane and H high ones in another, of which a byte holds W / H times as many. The high bits
// of a vector, from bit ``shift`` on, are put 8 bits above the low ones, and are W bits apart as those are.
template <int W, int H>
struct Joint : Bytes {
  static constexpr bool AFFINE = true;
  static constexpr int PER = 8 / W;
  template <int L>
  static inline Raw<L> fetch(const uint8_t* from, const uint8_t* high, int shift) {
    return widen<L, uint8_t>(from) | ((widen<L, uint8_t>(high) >> shift) << 8);
  }
  template <int L>
  static inline typename Vector<L>::F number(Raw<L> raw, int i) {
    const Raw<L> low = (raw >> (W * i)) & ((1 << W) - 1), high = (raw >> (W * i + 8 - W)) & (((1 << H) - 1) << W);
    return centred<L>(low | high, 1 << (W + H - 1));
  }
};

// 8-bit floats of M bits of mantissa.
template <int M>
struct Float8 : Bytes {
  static constexpr bool AFFINE = false;
  static constexpr int PER = 1;
  template <int L>
  static inline typename Vector<L>::F number(Raw<L> raw, int) {
    // The shift to the right fills what lies between sign and exponent with the sign.
    const Raw<L> bits = ((raw << 24) >> (M + 1)) & ~(((2 << M) - 1) << (30 - M));
    return as_float<L>(bits) * (M == 2 ? 0x1p112f : 0x1p120f);
  }
};

// Full precision, of which element E is.
template <int E>
struct Exact {
  static constexpr bool AFFINE = false;
  typedef std::conditional_t<E == FLOAT32, float, uint16_t> Element;
  static constexpr int PER = 1;
  template <int L>
  using Raw = typename Vector<L>::F;
  template <int L>
  static inline Raw<L> fetch(const Element* from, const uint8_t* = nullptr, int = 0) {
    return read<L>((const char*)from, 0, E);
  }
  template <int L>
  static inline Raw<L> number(Raw<L> raw, int) {
    return raw;
  }
};
typedef Exact<FLOAT32> Floats;

}  // namespace
