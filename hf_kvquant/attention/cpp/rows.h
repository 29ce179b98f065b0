// The inner loops over the planes of a format, which is known only at run time.

#pragma once

#include "loops.h"

namespace {

// Rows of codes of a width that is known only now; ``visit(rows)``.
template <class Visit>
void with_rows(const Spec& spec, Int width, const uint8_t* data, Int count, Int stride, Int run, Int period, Visit visit) {
  if (spec.float8_mantissa == 2) visit(Rows<Float8<2>>{data, count, stride, run, period});
  else if (spec.float8_mantissa) visit(Rows<Float8<3>>{data, count, stride, run, period});
  else if (width == 1) visit(Rows<Packed<1>>{data, count, stride, run, period});
  else if (width == 2) visit(Rows<Packed<2>>{data, count, stride, run, period});
  else if (width == 4) visit(Rows<Packed<4>>{data, count, stride, run, period});
  else visit(Rows<Packed<8>>{data, count, stride, run, period});
}

// Rows of codes in two planes, in as many passes as runs of high bits are in one of low bits; ``visit(rows, token)``
// with the first token of the pass.
template <Loop LOOP, int W, int H, class Visit>
void with_joint_rows(const uint8_t* low, const uint8_t* high, Int count, Int stride, Int run, Visit visit) {
  const Int period = LOOP == KEYS ? run : count, part = period / (W / H);
  for (int pass = 0; pass < W / H; ++pass) {
    const Int skipped = pass * part * (LOOP == KEYS ? 1 : stride), high_stride = LOOP == KEYS ? stride * H / W : stride;
    Rows<Joint<W, H>> rows = {low + skipped, count, stride, run, period, high, high_stride, pass * H};
    (LOOP == KEYS ? rows.run : rows.count) = part;
    visit(rows, pass * part);
  }
}

// Rows of codes of one width for all channels: ``planes`` as in Spec, the wider first; ``visit(rows, token)``.
template <Loop LOOP, class Visit>
void with_uniform_rows(const Spec& spec, const uint8_t* const* planes, Int count, Int stride, Int run, Visit visit) {
  if (spec.planes == 1)
    with_rows(spec, spec.widths[0], planes[0], count, stride, run, LOOP == KEYS ? run : count,
              [&](auto rows) { visit(rows, 0); });
  else if (spec.widths[0] == 2)
    with_joint_rows<LOOP, 2, 1>(planes[0], planes[1], count, stride, run, visit);
  else if (spec.widths[1] == 1)
    with_joint_rows<LOOP, 4, 1>(planes[0], planes[1], count, stride, run, visit);
  else
    with_joint_rows<LOOP, 4, 2>(planes[0], planes[1], count, stride, run, visit);
}

template <Loop LOOP>
void multiply_uniform(const Spec& spec, const uint8_t* const* planes, Int count, Int stride, Int run, Int heads,
                      const float* weights, Int weight_stride, float* output, Int output_stride) {
  with_uniform_rows<LOOP>(spec, planes, count, stride, run, [&](auto rows, Int token) {
    multiply<LOOP>(rows, heads, weights + (LOOP == KEYS ? 0 : token), weight_stride,
                   output + (LOOP == KEYS ? token : 0), output_stride);
  });
}

template <Loop LOOP>
void multiply_codes(const Spec& spec, Int width, const uint8_t* data, Int count, Int stride, Int run, Int heads,
                    const float* weights, Int weight_stride, float* output, Int output_stride) {
  with_rows(spec, width, data, count, stride, run, LOOP == KEYS ? run : count,
            [&](auto rows) { multiply<LOOP>(rows, heads, weights, weight_stride, output, output_stride); });
}

// ``visit(row, i, lane, numbers)`` for all numbers of all rows, a vector at a time.
template <class S, class Visit>
void each_number(Rows<S> rows, Visit visit) {
  const auto vectors = [&](Int row, Int lane, auto like) {
    constexpr int L = sizeof like / 4;
    const auto raw = S::template fetch<L>(rows.data + row * rows.stride + lane, rows.high + row * rows.high_stride + lane,
                                          rows.shift);
#pragma GCC unroll 8
    for (int i = 0; i < S::PER; ++i) visit(row, i, lane, S::template number<L>(raw, i));
  };
  for (Int row = 0; row < rows.count; ++row) {
    Int lane = 0;
    for (; lane + 16 <= rows.run; lane += 16) vectors(row, lane, Vector<16>::F{});
    for (; lane + 8 <= rows.run; lane += 8) vectors(row, lane, Vector<8>::F{});
    for (; lane < rows.run; ++lane) vectors(row, lane, Vector<1>::F{});
  }
}

}  // namespace
