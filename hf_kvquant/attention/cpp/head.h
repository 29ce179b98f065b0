// The stored blocks of keys or values of one KV head of one row.

#pragma once

#include <array>
#include <cmath>
#include <vector>

#include "rows.h"

namespace {

inline const char* at(const Tensor& tensor, Int b, Int k, Int n = 0) {
  return tensor.data + b * tensor.batch + k * tensor.head + n * tensor.block;
}

inline float power(int8_t exponent) { return std::ldexp(1.0f, exponent); }

// Keys or values of one KV head of one row, block by block.
struct Head {
  const Spec& spec;
  const Side& side;
  Int b, k, dim, length;
  Int groups;                      // groups of tokens, by ``spec.groups`` of channels
  bool uniform, in_pieces;         // one width for all channels; codes have to be unpacked
  bool by_token, keys;
  // Of the block at hand: [groups, spec.groups], or the other way round where every token has its own (by_token).
  std::vector<float> scale, zero;
  std::vector<float> numbers;      // the block at hand, where it is unpacked

  // ``within``: scales that change within a block have to be applied before the sum. ``raw``: always unpacked.
  Head(const Spec& spec, const Side& side, Int b, Int k, Int dim, Int length, bool keys, bool within, bool raw)
      : spec(spec), side(side), b(b), k(k), dim(dim), length(length), groups(length / spec.tokens_per_group),
        uniform(spec.segments == 1 && spec.segment[0].stop == dim),
        in_pieces(!spec.lossless && (raw || (within && groups > 1))),
        by_token(spec.tokens_per_group == 1), keys(keys),
        scale(groups * spec.groups), zero(spec.zero_kind == NONE ? 0 : groups * spec.groups),
        numbers(in_pieces ? dim * length : 0) {
    if (spec.scale_kind == STATIC && !spec.lossless)
      std::fill(scale.begin(), scale.end(), spec.scales[spec.static_scales > 1 ? k : 0]);
  }

  const uint8_t* plane(Int index, Int n) const { return (const uint8_t*)at(side.planes[index], b, k, n); }

  // Of a uniform format, from a channel on.
  std::array<const uint8_t*, 2> planes(Int n, Int channel = 0) const {
    std::array<const uint8_t*, 2> found = {};
    for (Int index = 0; index < spec.planes; ++index)
      found[index] = plane(index, n) + channel * (keys ? rows(index) : 1);
    return found;
  }

  // Elements of a plane that hold one of its runs of tokens.
  Int rows(Int index) const { return length * spec.widths[index] / 8; }

  // Have the codes of a block brought to the cache while others are computed with.
  void prefetch(Int n) const {
    for (Int index = 0; index < spec.planes; ++index) {
      const char* from = (const char*)plane(index, n);
      for (Int byte = 0, count = rows(index) * spec.channels[index]; byte < count; byte += 64)
        __builtin_prefetch(from + byte);
    }
  }

  void read_metadata(Int n) {
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

  // The codes of a block of a uniform format, [dim, length] of keys and [length, dim] of values: to ``numbers``, by
  // way of ``change(channel, token, numbers)``.
  template <class Change>
  void unpack_block(Int n, Change change) {
    if (keys)
      with_uniform_rows<KEYS>(spec, planes(n).data(), dim, rows(0), rows(0), [&](auto rows, Int token) {
        each_number(rows, [&](Int row, Int i, Int lane, auto x) {
          const Int t = token + i * rows.period + lane;
          store(&numbers[row * length + t], change(row, t, x));
        });
      });
    else
      with_uniform_rows<VALUES>(spec, planes(n).data(), rows(0), dim, dim, [&](auto rows, Int token) {
        each_number(rows, [&](Int row, Int i, Int lane, auto x) {
          const Int t = token + i * rows.period + row;
          store(&numbers[t * dim + lane], change(lane, t, x));
        });
      });
  }

  void unpack_block(Int n) {
    unpack_block(n, [](Int, Int, auto x) { return x; });
  }
};

}  // namespace
