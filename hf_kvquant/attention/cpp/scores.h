// Scores of one KV head of one row: of its query heads against its blocks.

#pragma once

#include "head.h"
#include "rotated.h"
#include "turns.h"

namespace {

// cos and sin of the blocks at hand; to rotate keys by, in fp32, read once for all heads of a row.
struct Angles {
  const Form& form;
  const Call& call;
  Int b, first = 0;
  std::vector<float> numbers[2] = {};

  Int size() const { return form.pairs * form.block_length; }

  void bring(Int start, Int count) {
    first = start;
    if (form.angle == FLOAT32 || !form.stores_raw) return;
    for (int index = 0; index < 2; ++index) {
      numbers[index].resize(count * size());
      for (Int n = 0; n < count; ++n) read_all(&numbers[index][n * size()], stored(start + n, index), 0, size(), form.angle);
    }
  }

  // Where what is read next lies.
  Ahead ahead = {};

  // One of the two of ``count`` blocks from n on.
  void look_ahead(Int n, Int count, int index) {
    if (!call.cos.data) return;
    ahead.angles = stored(n, index), ahead.angles_end = stored(std::min(n + count, call.blocks), index);
  }

  bool by_integers() const { return INTEGERS && form.angle != FLOAT32 && call.limbs == 2; }

  // Those of a block as integers, if they can be.
  bool fix(Int n) {
    return by_integers() && turns.set(stored(n, 0), stored(n, 1), size(), form.angle);
  }
  Turns turns = {};

  const char* stored(Int n, int index) const { return at(index ? call.sin : call.cos, b, n); }

  // cos or sin [pairs, length] of a block.
  const float* of(Int n, int index) const {
    return form.angle == FLOAT32 ? (const float*)stored(n, index) : &numbers[index][(n - first) * size()];
  }
};

// One KV head of one row: its queries, and the scores of the blocks at hand.
struct Scores {
  const Form& form;
  const Call& call;
  Angles& angles;
  const Int b, k, repeats, length, key_dim;
  Head keys;
  std::vector<float> query, folded, weights, scale, shift, along, across, constant, masses, grouped;
  std::vector<Weights> multiplied;  // the weights by group of channels
  std::vector<int32_t> turned;  // along and across as integers
  std::vector<float> turned_units;
  std::vector<float> scores;
  float* scored = nullptr;  // of the block at hand, ``width`` from head to head
  Int width = 0;

  Scores(const Form& form, const Call& call, Angles& angles, Int k)
      : form(form), call(call), angles(angles), b(angles.b), k(k), repeats(form.repeats), length(form.block_length),
        key_dim(form.key_dim),
        keys(form.key, call.key, call.limbs, b, k, key_dim, length, true,
             form.stores_raw || (per_channel() && length > form.key.tokens_per_group), angles.ahead),
        query(repeats * key_dim), folded(repeats * key_dim), weights(repeats * key_dim),
        scale(form.stores_raw ? key_dim : 0), shift(form.stores_raw ? key_dim : 0), along(repeats * form.pairs),
        across(repeats * form.pairs), constant(repeats), masses(repeats * form.key.groups),
        multiplied(form.key.groups), turned(repeats * form.pairs), turned_units(repeats),
        scores(repeats * std::max({length, STEP, call.sinks + call.recent})) {
    read_query();
  }

  void read_query() {
    const float* given = call.query + (b * form.heads + k) * repeats * key_dim;
    const float scaling = form.scaling;
    for (Int i = 0; i < repeats * key_dim; ++i) query[i] = given[i] * scaling;
    const float* deviation = (const float*)(call.key.deviation.data ? at(call.key.deviation, b, k) : nullptr);
    const int16_t* order = (const int16_t*)(call.key.order.data ? at(call.key.order, b, k) : nullptr);
    std::vector<float> stored(repeats * key_dim);
    for (Int r = 0; r < repeats; ++r)
      for (Int c = 0; c < key_dim; ++c) {
        const Int channel = order ? order[c] : c;
        stored[r * key_dim + c] = query[r * key_dim + channel] * (deviation ? deviation[channel] : 1.0f);
      }
    if (form.fold_key)
      transform(form.fold_key, key_dim, repeats, stored.data(), folded.data());
    else
      folded = stored;
    if (form.stores_raw) split_query();
    else fold_centre();
    fold_codes();
  }

  // Of keys before RoPE: ``along`` and ``across`` are the queries of the two channels of each pair.
  void split_query() {
    for (Int r = 0; r < repeats; ++r)
      for (Int i = 0; i < form.pairs; ++i) {
        along[r * form.pairs + i] = query[r * key_dim + form.first[i]];
        across[r * form.pairs + i] = query[r * key_dim + form.second[i]] * (float)form.sign;
      }
  }

  // What the centre adds to every score: a constant, and where it is rotated terms along cos and sin.
  void fold_centre() {
    if (!call.key.mean.data) return;
    const float* mean = (const float*)at(call.key.mean, b, k);
    for (Int r = 0; r < repeats; ++r) {
      const float* q = &query[r * key_dim];
      if (!form.turns_centre) {
        constant[r] = dot(q, mean, key_dim);
        continue;
      }
      for (Int i = 0; i < form.rests; ++i) constant[r] += q[form.rest[i]] * mean[form.rest[i]];
      for (Int i = 0; i < form.pairs; ++i) {
        const Int one = form.first[i], other = form.second[i];
        along[r * form.pairs + i] = q[one] * mean[one] + q[other] * mean[other];
        across[r * form.pairs + i] = (q[other] * mean[one] - q[one] * mean[other]) * (float)form.sign;
      }
      if (angles.by_integers()) {
        const Int from = r * form.pairs;
        turned_units[r] = Turns::set_weights(&along[from], &across[from], form.pairs, &turned[from]);
      }
    }
  }

  // Whether scales belong to channels, so that they go into the query block by block.
  bool per_channel() const { return form.key.channels_per_group == 1 && form.key.tokens_per_group > 1; }

  // Queries as they meet the codes, at ``weights``, and what offsets take away, by group of channels.
  void fold_codes() {
    const Spec& spec = form.key;
    if (spec.lossless || form.stores_raw || per_channel()) return;
    const Int size = key_dim / spec.groups;
    for (Int g = 0; g < spec.groups; ++g) {
      keys.each_part(g * size, (g + 1) * size, [&](const Segment& segment, Int start, Int stop) {
        for (Int r = 0; r < repeats; ++r) {
          const float* q = &folded[r * key_dim];
          for (Int c = start; c < stop; ++c) weights[r * key_dim + c] = q[c] * (float)segment.step;
          masses[r * spec.groups + g] -= total(q + start, stop - start) * (float)segment.offset;
        }
      });
      keys.set_channels(multiplied[g], &weights[g * size], key_dim, repeats, g * size, (g + 1) * size);
    }
  }

  // --------------------------------------------------------------------------------------------------------- scores

  void score_block(Int n) {
    for (Int r = 0; r < repeats; ++r) std::fill(scored + r * width, scored + r * width + length, 0.0f);
    if (form.key.lossless) {
      multiply_exact<DOTS>(form.key.element, at(call.key.planes[0], b, k, n), length, key_dim, repeats, folded.data(),
                           key_dim, scored, width);
    } else {
      keys.read_metadata(n);
      if (form.stores_raw) score_raw(n);
      else if (per_channel()) score_channels(n);
      else score_scaled(n);
    }
  }

  void finish_block(Int n) {
    const float* mask = call.block_mask ? call.block_mask + (b * call.blocks + n) * length : nullptr;
    for (Int r = 0; r < repeats; ++r) finish(scored + r * width, length, constant[r], mask);
  }

  // Adds the constant and the mask, with the softcap between them.
  void finish(float* row, Int count, float constant, const float* mask) {
    if (!constant && !form.softcap && !mask) return;
    const float cap = form.softcap;
    for (Int i = 0; i < count; ++i) {
      float score = row[i] + constant;
      if (cap) score = std::tanh(score / cap) * cap;
      row[i] = mask ? score + mask[i] : score;
    }
  }

  // One scale per channel and group of tokens: it goes into the query.
  void score_channels(Int n) {
    const Spec& spec = form.key;
    const float step = spec.segment[0].step, offset = spec.segment[0].offset / spec.segment[0].step;
    const Int size = spec.tokens_per_group;
    if (keys.groups > 1) keys.unpack(spec.segment[0], n);
    for (Int g = 0; g < keys.groups; ++g) {
      const float *scale = &keys.scale[g * key_dim], *zero = keys.zero.empty() ? nullptr : &keys.zero[g * key_dim];
      for (Int r = 0; r < repeats; ++r) {
        const float* q = &folded[r * key_dim];
        float* to = &weights[r * key_dim];
        for (Int c = 0; c < key_dim; ++c) to[c] = q[c] * scale[c] * step;
        const float added = (zero ? dot(q, zero, key_dim) : 0.0f) - total(to, key_dim) * offset;
        for (Int t = 0; t < size; ++t) scored[r * width + g * size + t] = added;
      }
      if (keys.groups > 1) {
        multiply<KEYS, Floats>({&keys.numbers[g * size], key_dim, length, size, 0}, repeats, weights.data(), key_dim,
                               scored + g * size, width);
      } else {
        keys.set_channels(multiplied[0], weights.data(), key_dim, repeats, 0, key_dim);
        keys.multiply_keys(multiplied[0], n, 0, key_dim, scored, width);
      }
    }
  }

  // Scales of tokens, for groups of channels: applied to the sum.
  void score_scaled(Int n) {
    const Spec& spec = form.key;
    const Int groups = spec.groups, size = key_dim / groups;
    float* sums = scored;  // of one group of channels
    Int stride = width;
    if (groups > 1) sums = group_scores(), stride = length;
    for (Int g = 0; g < groups; ++g) {
      if (groups > 1) std::fill(sums, sums + repeats * length, 0.0f);
      keys.multiply_keys(multiplied[g], n, g * size, (g + 1) * size, sums, stride);
      for (Int r = 0; r < repeats; ++r) {
        const float offset = masses[r * groups + g];
        const float mass = keys.zero.empty() ? 0.0f : total(&folded[r * key_dim + g * size], size);
        const float* from = sums + r * stride;
        float* to = scored + r * width;
        if (keys.by_token) {
          const float* scale = &keys.scale[g * length];
          if (groups > 1) for (Int t = 0; t < length; ++t) to[t] += (from[t] + offset) * scale[t];
          else for (Int t = 0; t < length; ++t) to[t] = (from[t] + offset) * scale[t];
          if (!keys.zero.empty()) add(to, mass, &keys.zero[g * length], length);
          continue;
        }
        for (Int place = 0; place < keys.groups; ++place, from += spec.tokens_per_group, to += spec.tokens_per_group) {
          const float scale = keys.scale[place], zero = keys.zero.empty() ? 0.0f : mass * keys.zero[place];
          const float added = offset * scale + zero;
          for (Int t = 0; t < spec.tokens_per_group; ++t) to[t] = from[t] * scale + added;
        }
      }
    }
  }

  float* group_scores() {
    grouped.resize(repeats * length);
    return grouped.data();
  }

  // Keys before RoPE: dequantized and rotated, once for all query heads.
  void score_raw(Int n) {
    const Spec& spec = form.key;
    const float* mean = (const float*)(call.key.mean.data ? at(call.key.mean, b, k) : nullptr);
    const float step = spec.segment[0].step, offset = spec.segment[0].offset;
    const Int tokens = spec.tokens_per_group, channels = spec.channels_per_group;
    const auto row = [&](const std::vector<float>& metadata, Int c) {
      return metadata.empty() ? nullptr : &metadata[c / channels * (keys.by_token ? length : 1)];
    };
    const auto centre = [&](Int c) { return mean ? mean[c] : 0.0f; };
    if (keys.groups == 1 && !keys.by_token) {
      for (Int c = 0; c < key_dim; ++c) {
        scale[c] = *row(keys.scale, c) * step;
        shift[c] = (keys.zero.empty() ? 0.0f : *row(keys.zero, c)) - offset * *row(keys.scale, c) + centre(c);
      }
      if (rotates_in_registers(spec, spec.segment[0], length)) return score_in_registers(n);
    }
    if (keys.by_token) {
      keys.unpack(spec.segment[0], n, [&](Int c, Int t, auto x) {
        x = (x * step - offset) * load<decltype(x)>(row(keys.scale, c) + t) + centre(c);
        return keys.zero.empty() ? x : x + load<decltype(x)>(row(keys.zero, c) + t);
      });
    } else if (keys.groups == 1) {
      keys.unpack(spec.segment[0], n, [&](Int c, Int, auto x) { return x * scale[c] + shift[c]; });
    } else {
      keys.unpack(spec.segment[0], n);
      for (Int c = 0; c < key_dim; ++c)
        for (Int g = 0; g < keys.groups; ++g) {
          const Int place = g * spec.groups + c / channels;
          const float scale = keys.scale[place], zero = keys.zero.empty() ? 0.0f : keys.zero[place];
          const float added = zero - offset * scale + centre(c);
          float* key = &keys.numbers[c * length + g * tokens];
          for (Int t = 0; t < tokens; ++t) key[t] = key[t] * (scale * step) + added;
        }
    }
    rotate(n);
    multiply<KEYS, Floats>({keys.numbers.data(), key_dim, length, length, 0}, repeats, query.data(), key_dim, scored,
                           width);
  }

  void score_in_registers(Int n) {
    if (form.sign < 0)
      for (Int i = 0; i < form.pairs; ++i) scale[form.second[i]] *= -1, shift[form.second[i]] *= -1;
    const Rotated with = {form.first, form.second, form.rest, form.pairs, form.rests, length, scale.data(), shift.data(),
                          along.data(), across.data(), query.data(), key_dim, angles.of(n, 0), angles.of(n, 1)};
    const Segment& all = form.key.segment[0];
    score_rotated(form.key, all, keys.block(all, n, 0, key_dim), repeats, with, scored, width);
  }

  void rotate(Int n) {
    const float *cos = angles.of(n, 0), *sin = angles.of(n, 1);
    const float sign = form.sign;
    for (Int i = 0; i < form.pairs; ++i, cos += length, sin += length) {
      float* __restrict one = &keys.numbers[form.first[i] * length];
      float* __restrict other = &keys.numbers[form.second[i] * length];
      for (Int t = 0; t < length; ++t) {
        const float c = cos[t], s = sin[t] * sign, x = one[t], y = other[t];
        one[t] = x * c - y * s;
        other[t] = y * c + x * s;
      }
    }
  }

  // The rotated centre, with the angles of a block as integers.
  void add_fixed_centre() {
    angles.turns.add(repeats, turned.data(), turned_units.data(), form.pairs, length, scored, width);
  }

  // One of its two terms.
  void add_centre(Int n, int index) {
    multiply_exact<KEYS>(form.angle, angles.stored(n, index), form.pairs, length, repeats,
                         index ? across.data() : along.data(), form.pairs, scored, width);
  }

  // Blocks start .. start + count, of a run that goes on to ``stop``: scores.
  void score_blocks(Int start, Int count, Int stop) {
    width = count * length;
    for (Int n = start; n < start + count; ++n) {
      if (n + 1 < stop) keys.prefetch(n + 1);
      at_block(n - start);
      score_block(n);
    }
  }

  void at_block(Int index) { scored = &scores[index * length]; }
};

}  // namespace
