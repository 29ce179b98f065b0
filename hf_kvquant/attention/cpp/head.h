// The stored blocks of keys or values of one KV head of one row.

#pragma once

#include "rows.h"

namespace {

inline const char* at(const Tensor& tensor, Int b, Int k, Int n = 0) {
  return tensor.data + b * tensor.batch + k * tensor.head + n * tensor.block;
}

inline float power(int8_t exponent) { return std::ldexp(1.0f, exponent); }

// Tokens of the blocks that share a step of softmax.
constexpr Int STEP = 512;

// Weights [heads, count] that codes are multiplied with.
struct Weights {
  const float* numbers = nullptr;
  Int stride = 0, heads = 0;
  Limbs limbs;
  std::vector<Codes> parts;  // of keys, from block 0 on
};

// Keys or values of one KV head of one row, block by block.
struct Head {
  const Spec& spec;
  const Side& side;
  Int limbs, b, k, dim, length;
  Int groups;                      // groups of tokens, by ``spec.groups`` of channels
  bool by_token, keys;
  bool integers;                   // codes are multiplied as integers
  bool in_pieces;                  // codes have to be unpacked
  // Of the block at hand: [groups, spec.groups], or the other way round where every token has its own (by_token).
  std::vector<float> scale, zero;
  std::vector<float> numbers;      // of the block at hand, where it is unpacked: [dim, length] or [length, dim]
  Ahead& ahead;

  // ``singly``: numbers are needed one by one, since scales change within a block or keys are rotated.
  Head(const Spec& spec, const Side& side, Int limbs, Int b, Int k, Int dim, Int length, bool keys, bool singly,
       Ahead& ahead)
      : spec(spec), side(side), limbs(limbs), b(b), k(k), dim(dim), length(length), groups(length / spec.tokens_per_group),
        by_token(spec.tokens_per_group == 1), keys(keys),
        integers(!spec.lossless && !singly && by_integers()),
        in_pieces(!spec.lossless && !integers && (singly || (INTEGERS && !spec.float8_mantissa))),
        scale(groups * spec.groups), zero(spec.zero_kind == NONE ? 0 : groups * spec.groups), ahead(ahead) {
    if (spec.scale_kind == STATIC && !spec.lossless)
      std::fill(scale.begin(), scale.end(), spec.scales[spec.static_scales > 1 ? k : 0]);
  }

  // Whether tokens lie as the tiles of integers.h take them, and there is room for the weights.
  bool by_integers() const {
    const Int weights = keys ? dim + 15 * spec.segments : std::max(length, STEP);
    bool fits = INTEGERS && !spec.float8_mantissa && length % 32 == 0 && weights <= Limbs::ROOM;
    for (Int index = 0; index < spec.planes; ++index) fits = fits && (!keys || rows(index) % 8 == 0);
    return fits;
  }

  const uint8_t* plane(Int index, Int n) const { return (const uint8_t*)at(side.planes[index], b, k, n); }

  // Elements of a plane that hold one of its runs of tokens.
  Int rows(Int index) const { return length * spec.widths[index] / 8; }

  // Some channels of a segment.
  Block block(const Segment& segment, Int n, Int channel, Int size) const {
    Block found = {};
    const Int run = rows(segment.low), from = channel - segment.start;
    found.low = plane(segment.low, n) + (segment.place + from) * (keys ? run : 1);
    found.low_stride = keys ? run : spec.channels[segment.low];
    found.count = keys ? size : run, found.run = keys ? run : size;
    if (segment.high < 0) return found;
    found.high = plane(segment.high, n) + (segment.high_place + from) * (keys ? rows(segment.high) : 1);
    found.high_stride = keys ? rows(segment.high) : spec.channels[segment.high];
    return found;
  }

  // The codes of the channels first .. last of a segment, from block n on.
  Codes codes(const Segment& segment, Int n, Int first, Int last) const {
    Codes found = {block(segment, n, first, last - first), spec.widths[segment.low], 0, last - first};
    found.low_step = side.planes[segment.low].block;
    if (segment.high >= 0) found.high = spec.widths[segment.high], found.high_step = side.planes[segment.high].block;
    return found;
  }

  // ``visit(segment, start, stop)``: the part of each segment that is in the channels first .. last.
  template <class Visit>
  void each_part(Int first, Int last, Visit visit) const {
    for (Int index = 0; index < spec.segments; ++index) {
      const Int start = std::max(spec.segment[index].start, first), stop = std::min(spec.segment[index].stop, last);
      if (start < stop) visit(spec.segment[index], start, stop);
    }
  }

  void set(Weights& weights, const float* numbers, Int stride, Int heads) const {
    weights.numbers = numbers, weights.stride = stride, weights.heads = heads;
    if (integers) weights.limbs.begin(limbs, heads);
  }

  // Weights [heads, last - first] of the channels first .. last of keys.
  void set_channels(Weights& weights, const float* numbers, Int stride, Int heads, Int first, Int last) const {
    set(weights, numbers, stride, heads);
    if (!integers) return;
    if (weights.parts.empty())  // they do not change with the block
      each_part(first, last, [&](const Segment& segment, Int start, Int stop) {
        weights.parts.push_back(codes(segment, 0, start, stop));
        // Behind the parts before it, with room for 15 more weights each: limbs are written by sixteens.
        weights.parts.back().from = start - first + 15 * (weights.parts.size() - 1);
      });
    for (Int head = 0; head < heads; ++head, numbers += stride) {
      weights.limbs.set_unit(head, numbers, last - first);
      auto part = weights.parts.begin();
      each_part(first, last, [&](const Segment& segment, Int start, Int stop) {
        weights.limbs.set(head, numbers + start - first, stop - start, (part++)->from, middle(segment));
      });
    }
  }

  int middle(const Segment& segment) const {
    return 1 << (spec.widths[segment.low] + (segment.high < 0 ? 0 : spec.widths[segment.high]) - 1);
  }

  // Weights [heads, count] of the tokens of values.
  void set_tokens(Weights& weights, const float* numbers, Int stride, Int heads, Int count) const {
    set(weights, numbers, stride, heads);
    for (Int head = 0; integers && head < heads; ++head, numbers += stride)
      weights.limbs.set_unit(head, numbers, count), weights.limbs.set(head, numbers, count, 0, 1);
  }

  // scores [heads, tokens] += weights times the codes of the channels first .. last in block n.
  void multiply_keys(const Weights& weights, Int n, Int first, Int last, float* scores, Int stride) {
    if (integers) return ::multiply_keys(weights.parts, n, length, weights.limbs, scores, stride, ahead);
    each_part(first, last, [&](const Segment& segment, Int start, Int stop) {
      const float* numbers = weights.numbers + start - first;
      if (in_pieces) {
        unpack(segment, n);
        multiply<KEYS, Floats>({&this->numbers[start * length], stop - start, length, length, 0}, weights.heads,
                               numbers, weights.stride, scores, stride);
      } else {
        multiply_segment<KEYS>(spec, segment, block(segment, n, start, stop - start), weights.heads, numbers,
                               weights.stride, scores, stride);
      }
    });
  }

  // sums [heads, last - first] += weights times the codes of the channels first .. last of a segment, in ``blocks``
  // blocks from n on.
  void multiply_values(const Weights& weights, const Segment& segment, Int n, Int blocks, Int first, Int last,
                       float* sums, Int stride) {
    if (integers) {
      Codes all = codes(segment, n, first, last);
      all.blocks = blocks;
      return ::multiply_values(all, middle(segment), length, weights.limbs, sums, stride, ahead);
    }
    const float* from = weights.numbers;
    for (Int end = n + blocks; n < end; ++n, from += length)
      if (in_pieces) {
        unpack(segment, n);
        multiply<VALUES, Floats>({&numbers[first], length, dim, last - first, 0}, weights.heads, from, weights.stride,
                                 sums, stride);
      } else {
        multiply_segment<VALUES>(spec, segment, block(segment, n, first, last - first), weights.heads, from,
                                 weights.stride, sums, stride);
      }
  }

  // Have the codes of a block brought to the cache while others are computed with.
  void prefetch(Int n) const {
    if (integers) return;  // which do so themselves
    for (Int index = 0; index < spec.planes; ++index) {
      const char* from = (const char*)plane(index, n);
      for (Int byte = 0, count = rows(index) * spec.channels[index]; byte < count; byte += 64)
        __builtin_prefetch(from + byte);
    }
  }

  // Scales and zero points; those of the next block are on their way.
  void read_metadata(Int n) {
    prefetch(side.scale, n + 1);
    prefetch(side.zero, n + 1);
    if (spec.scale_kind != STATIC) {
      const char* stored = at(side.scale, b, k, n);
      float factor = side.exponent.data ? power(*at(side.exponent, b, k, n)) : 1.0f;
      if (spec.scale_kind == TABLE)
        sorted(scale, [&](Int i) { return spec.scales[(uint8_t)stored[i]] * factor; });
      else
        read_numbers(scale, stored, spec.scale_kind == HALF ? FLOAT16 : FLOAT32, factor);
    }
    if (spec.zero_kind == NONE) return;
    const char* stored = at(side.zero, b, k, n);
    if (spec.zero_kind == ZERO_BYTE) {
      const float unit = load<float>(at(side.zero_range, b, k, n)) / 127;
      sorted(zero, [&](Int i) { return (int8_t)stored[i] * unit; });
      return;
    }
    const Tensor& exponent = side.zero_exponent.data ? side.zero_exponent : side.exponent;
    const bool relative = spec.zero_kind == ZERO_HALF && exponent.data;
    read_numbers(zero, stored, spec.zero_kind == ZERO_HALF ? FLOAT16 : FLOAT32,
                 relative ? power(*at(exponent, b, k, n)) : 1.0f);
  }

  void prefetch(const Tensor& metadata, Int n) const {
    const char* from = metadata.data ? at(metadata, b, k, n) : nullptr;
    for (Int byte = 0; from && byte < metadata.block; byte += 64) __builtin_prefetch(from + byte);
  }

  template <class Read>
  void sorted(std::vector<float>& to, Read number) {
    if (!by_token || spec.groups == 1)
      for (Int i = 0, count = to.size(); i < count; ++i) to[i] = number(i);
    else
      for (Int t = 0; t < groups; ++t)
        for (Int g = 0; g < spec.groups; ++g) to[g * groups + t] = number(t * spec.groups + g);
  }

  void read_numbers(std::vector<float>& to, const char* stored, Int element, float factor) {
    if (!by_token || spec.groups == 1) return read_all(to.data(), stored, 0, to.size(), element, factor);
    stored_numbers.resize(to.size());
    read_all(stored_numbers.data(), stored, 0, to.size(), element, factor);
    sorted(to, [&](Int i) { return stored_numbers[i]; });
  }
  std::vector<float> stored_numbers;

  // The codes of a segment in a block to ``numbers``, by way of ``change(channel, token, numbers)``.
  template <class Change>
  void unpack(const Segment& segment, Int n, Change change) {
    numbers.resize(dim * length);
    const Int first = segment.start;
    const Block codes = block(segment, n, first, segment.stop - first);
    if (keys)
      with_segment_rows<KEYS>(spec, segment, codes, [&](auto rows, Int token) {
        each_number(rows, [&](Int row, Int i, Int lane, auto x) {
          const Int c = first + row, t = token + i * rows.period + lane;
          store(&numbers[c * length + t], change(c, t, x));
        });
      });
    else
      with_segment_rows<VALUES>(spec, segment, codes, [&](auto rows, Int token) {
        each_number(rows, [&](Int row, Int i, Int lane, auto x) {
          const Int c = first + lane, t = token + i * rows.period + row;
          store(&numbers[t * dim + c], change(c, t, x));
        });
      });
  }

  void unpack(const Segment& segment, Int n) {
    unpack(segment, n, [](Int, Int, auto x) { return x; });
  }
};

}  // namespace
