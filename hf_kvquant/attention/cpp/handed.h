// What Python hands over: hf_kvquant/attention/native.py has the same structures in the same order, and says on the
// command line how large it takes them to be.

#pragma once

#include <cstdint>

namespace {

typedef int64_t Int;

constexpr int MAX_PLANES = 4, MAX_SEGMENTS = 64;

// One tensor: batch, KV heads and blocks (or tokens) first, whatever lies within is contiguous.
struct Tensor {
  const char* data;
  Int batch, head, block;  // strides in bytes
};

// Channels that share a number format: u = code * step - offset, for codes that count from their middle. Their low bits
// are at the channels ``place`` .. of plane ``low``; those of codes that lie in two planes have their high bits in
// ``high``, else -1.
struct Segment {
  Int start, stop;
  double step, offset;
  Int low, place, high, high_place;
};

struct Spec {
  Int element;  // of sinks, window and lossless blocks
  Int lossless, float8_mantissa;  // the latter: of table formats, else 0
  Int tokens_per_group, channels_per_group, groups;
  Int scale_kind, zero_kind;
  Int planes, widths[MAX_PLANES], channels[MAX_PLANES];
  Int segments;
  const float* scales;  // of the 256 codes of 8-bit scales, or static ones
  Int static_scales;
  Segment segment[MAX_SEGMENTS];
};

struct Form {
  Int heads, repeats, key_dim, value_dim, block_length;
  Int angle;  // the element of cos and sin
  Int turns_centre, stores_raw, pairs;
  double sign, scaling, softcap;
  const Int *first, *second, *rest;  // channels of the pairs, and those that are in none
  Int rests;
  const float *fold_key, *fold_value;  // [D, D] matrices, or null
  Spec key, value;
};

struct Side {
  Tensor planes[MAX_PLANES], scale, zero, exponent, zero_exponent, zero_range;
  Tensor mean, deviation, order, sinks, recent;
};

struct Call {
  Int batch, blocks, sinks, recent, splits, threads;
  Int limbs;  // bytes of a weight as an integer
  const float *query, *block_mask, *exact_mask, *auxiliary;
  float* output;
  Side key, value;
  Tensor cos, sin;  // batch and blocks
};

static_assert(sizeof(Form) == FORM_SIZE && sizeof(Call) == CALL_SIZE, "handed.h and native.py differ");

enum Element { FLOAT32, BFLOAT16, FLOAT16 };
enum ScaleKind { STATIC, TABLE, HALF, SINGLE };
enum ZeroKind { NONE, ZERO_HALF, ZERO_SINGLE, ZERO_BYTE };

}  // namespace
