// The inner loops over the codes of a segment, whose format is known only at run time.

#pragma once

#include "integers.h"

namespace {

// Codes of one plane; ``visit(rows)``.
template <class Visit>
void with_rows(const Spec& spec, Int width, const Block& block, Int period, Visit visit) {
  const Int count = block.count, stride = block.low_stride, run = block.run;
  if (spec.float8_mantissa == 2) visit(Rows<Float8<2>>{block.low, count, stride, run, period});
  else if (spec.float8_mantissa) visit(Rows<Float8<3>>{block.low, count, stride, run, period});
  else if (width == 1) visit(Rows<Packed<1>>{block.low, count, stride, run, period});
  else if (width == 2) visit(Rows<Packed<2>>{block.low, count, stride, run, period});
  else if (width == 4) visit(Rows<Packed<4>>{block.low, count, stride, run, period});
  else visit(Rows<Packed<8>>{block.low, count, stride, run, period});
}

// Codes in two planes, in as many passes as runs of high bits are in one of low bits; ``visit(rows, token)`` with the
// first token of the pass.
template <Loop LOOP, int W, int H, class Visit>
void with_joint_rows(const Block& block, Visit visit) {
  const Int period = LOOP == KEYS ? block.run : block.count, part = period / (W / H);
  for (int pass = 0; pass < W / H; ++pass) {
    const Int skipped = pass * part * (LOOP == KEYS ? 1 : block.low_stride);
    Rows<Joint<W, H>> rows = {block.low + skipped, block.count, block.low_stride, block.run, period,
                              block.high, block.high_stride, pass * H};
    (LOOP == KEYS ? rows.run : rows.count) = part;
    visit(rows, pass * part);
  }
}

template <Loop LOOP, class Visit>
void with_segment_rows(const Spec& spec, const Segment& segment, const Block& block, Visit visit) {
  const Int width = spec.widths[segment.low];
  if (segment.high < 0)
    with_rows(spec, width, block, LOOP == KEYS ? block.run : block.count, [&](auto rows) { visit(rows, 0); });
  else if (width == 2)
    with_joint_rows<LOOP, 2, 1>(block, visit);
  else if (spec.widths[segment.high] == 1)
    with_joint_rows<LOOP, 4, 1>(block, visit);
  else
    with_joint_rows<LOOP, 4, 2>(block, visit);
}

// The products of a block, as floats: of what integers do not serve for.
template <Loop LOOP>
void multiply_segment(const Spec& spec, const Segment& segment, const Block& block, Int heads, const float* weights,
                      Int weight_stride, float* output, Int output_stride) {
  with_segment_rows<LOOP>(spec, segment, block, [&](auto rows, Int token) {
    if constexpr (!rows.BY_INTEGERS)
      multiply<LOOP>(rows, heads, weights + (LOOP == KEYS ? 0 : token), weight_stride,
                     output + (LOOP == KEYS ? token : 0), output_stride);
  });
}

// ``visit(row, i, lane, numbers)`` for all numbers of all rows, a vector at a time.
template <class S, class Visit>
void each_number(Rows<S> rows, Visit visit) {
  const auto vectors = [&](Int row, Int lane, auto like) {
    constexpr int L = sizeof like / 4;
    const auto raw = S::template fetch<L>(rows.data + row * rows.stride + lane,
                                          rows.high + row * rows.high_stride + lane, rows.shift);
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
