// One KV head of one row: scores, softmax and values.

#pragma once

#include "scores.h"

namespace {

// What has been attended to so far, relative to the maximum score so far.
struct Task : Scores {
  const Int value_dim;
  Head values;
  Weights multiplied;
  std::vector<float> scaled, constants, sums, top, packed_mass, exact_mass, packed, exact;

  Task(const Form& form, const Call& call, Angles& angles, Int k)
      : Scores(form, call, angles, k), value_dim(form.value_dim),
        values(form.value, call.value, call.limbs, b, k, value_dim, length, false,
               form.value.tokens_per_group > 1 && length > form.value.tokens_per_group, angles.ahead),
        scaled(values.by_token ? repeats * form.value.groups * std::max(STEP, length) : 0),
        constants(repeats * form.value.groups), sums(repeats * value_dim),
        top(repeats, -INFINITY), packed_mass(repeats), exact_mass(repeats), packed(repeats * value_dim),
        exact(repeats * value_dim) {}

  // -------------------------------------------------------------------------------------------------------- softmax

  // Scores [repeats, count] -> weights relative to the maximum so far, which what was summed is brought to.
  void weigh(Int count, std::vector<float>& mass) {
    typedef Vector<16>::F F;
    for (Int r = 0; r < repeats; ++r) {
      float* row = &scores[r * count];
      float highest = top[r];
      Int i = 0;
      F tops = F{} + highest;
      for (; i + 16 <= count; i += 16) {
        const F x = load<F>(row + i);
        tops = x > tops ? x : tops;
      }
      highest = max16(tops);
      for (; i < count; ++i) highest = std::max(highest, row[i]);
      raise(r, highest);
      if (highest == -INFINITY) highest = 0;  // nothing to attend to so far: -inf less itself would be NaN
      F sums = {};
      float rest = 0;
      for (i = 0; i + 16 <= count; i += 16) {
        const F x = exponential<16>(load<F>(row + i) - highest);
        store(row + i, x);
        sums += x;
      }
      for (; i < count; ++i) rest += row[i] = exponential<1>(load<Vector<1>::F>(row + i) - highest)[0];
      mass[r] += sum16(sums) + rest;
    }
  }

  void raise(Int r, float highest) {
    if (!(highest > top[r])) return;
    const float factor = exponential<1>(Vector<1>::F{top[r] - highest})[0];
    top[r] = highest;
    packed_mass[r] *= factor;
    exact_mass[r] *= factor;
    for (Int d = 0; d < value_dim; ++d) packed[r * value_dim + d] *= factor, exact[r * value_dim + d] *= factor;
  }

  // --------------------------------------------------------------------------------------------------------- values

  // Scales of tokens: they go into the weights, of all blocks of a piece at once.
  void sum_scaled(Int start, Int count, Int stop) {
    const Int groups = form.value.groups, size = value_dim / groups;
    std::fill(constants.begin(), constants.end(), 0.0f);
    for (Int index = 0; index < count; ++index) {
      const Int n = start + index;
      if (n + 1 < stop) values.prefetch(n + 1);
      values.read_metadata(n);
      at_block(index);
      for (Int place = 0; place < groups * repeats; ++place) {
        const float *from = scored + place % repeats * width, *scale = &values.scale[place / repeats * length];
        float* to = &scaled[place * width + index * length];
        for (Int t = 0; t < length; ++t) to[t] = from[t] * scale[t];
        if (!values.zero.empty()) constants[place] += dot(from, &values.zero[place / repeats * length], length);
      }
    }
    for (Int g = 0; g < groups; ++g) {
      const float* weights = &scaled[g * repeats * width];
      values.set_tokens(multiplied, weights, width, repeats, width);
      std::fill(sums.begin(), sums.end(), 0.0f);
      values.each_part(g * size, (g + 1) * size, [&](const Segment& segment, Int first, Int last) {
        values.multiply_values(multiplied, segment, start, count, first, last, &sums[first], value_dim);
        for (Int r = 0; r < repeats; ++r) {
          const float added = constants[g * repeats + r] - total(weights + r * width, width) * (float)segment.offset;
          for (Int c = r * value_dim + first; c < r * value_dim + last; ++c)
            packed[c] += sums[c] * (float)segment.step + added;
        }
      });
    }
  }

  void sum_block(Int n) {
    if (form.value.lossless)
      return multiply_exact<VALUES>(form.value.element, at(call.value.planes[0], b, k, n), length, value_dim, repeats,
                                    scored, width, packed.data(), value_dim);
    values.read_metadata(n);
    if (values.groups > 1) values.unpack(form.value.segment[0], n);
    for (Int g = 0; g < values.groups; ++g) sum_group(n, g);
  }

  // Scales of several tokens: applied to the sum over them.
  void sum_group(Int n, Int g) {
    const Spec& spec = form.value;
    const Int size = spec.tokens_per_group;
    std::fill(sums.begin(), sums.end(), 0.0f);
    if (values.groups > 1) {
      multiply<VALUES, Floats>({&values.numbers[g * size * value_dim], size, value_dim, value_dim, 0}, repeats,
                               scored + g * size, width, sums.data(), value_dim);
    } else {
      values.set_tokens(multiplied, scored, width, repeats, length);
      values.multiply_values(multiplied, spec.segment[0], n, 1, 0, value_dim, sums.data(), value_dim);
    }
    const float step = spec.segment[0].step, offset = spec.segment[0].offset;
    for (Int r = 0; r < repeats; ++r) {
      const float mass = total(scored + r * width + g * size, size);
      for (Int c = 0; c < value_dim; ++c) {
        const Int place = g * spec.groups + (spec.groups > 1 ? c : 0);
        const float unit = sums[r * value_dim + c] * step - offset * mass;
        packed[r * value_dim + c] += unit * values.scale[place] + (values.zero.empty() ? 0.0f : mass * values.zero[place]);
      }
    }
  }

  // ----------------------------------------------------------------------------------------------------------- runs

  void score(Int start, Int count, Int stop) {
    keys.ahead.codes = (const char*)values.plane(0, start);
    score_blocks(start, count, stop);
  }

  // Weights and values.
  void sum_blocks(Int start, Int count, Int stop) {
    for (Int n = start; n < start + count; ++n) at_block(n - start), finish_block(n);
    weigh(width, packed_mass);
    values.ahead.codes = (const char*)keys.plane(0, std::min(start + count, call.blocks - 1));
    if (values.by_token && !form.value.lossless) return sum_scaled(start, count, stop);
    for (Int n = start; n < start + count; ++n) {
      if (n + 1 < stop) values.prefetch(n + 1);
      at_block(n - start);
      sum_block(n);
    }
  }

  // Sinks and window.
  void attend_exact() {
    const Int count = call.sinks + call.recent;
    float* recent = &scores[call.sinks];
    const auto both = [&](auto visit) {
      if (call.sinks) visit(call.key.sinks, call.value.sinks, call.sinks, scores.data());
      visit(call.key.recent, call.value.recent, call.recent, recent);
    };
    both([&](const Tensor& keys, const Tensor&, Int tokens, float* to) {
      multiply_exact<DOTS>(form.key.element, at(keys, b, k), tokens, key_dim, repeats, query.data(), key_dim, to, count);
    });
    const float* mask = call.exact_mask ? call.exact_mask + b * count : nullptr;
    for (Int r = 0; r < repeats; ++r) finish(&scores[r * count], count, 0.0f, mask);
    weigh(count, exact_mass);
    both([&](const Tensor&, const Tensor& values, Int tokens, const float* weights) {
      multiply_exact<VALUES>(form.value.element, at(values, b, k), tokens, value_dim, repeats, weights, count,
                             exact.data(), value_dim);
    });
  }

  void merge(Task& other) {
    for (Int r = 0; r < repeats; ++r) {
      raise(r, other.top[r]);
      other.raise(r, top[r]);
      packed_mass[r] += other.packed_mass[r];
      exact_mass[r] += other.exact_mass[r];
      add(&packed[r * value_dim], 1.0f, &other.packed[r * value_dim], value_dim);
      add(&exact[r * value_dim], 1.0f, &other.exact[r * value_dim], value_dim);
    }
  }

  void write() {
    const float* mean = (const float*)(call.value.mean.data ? at(call.value.mean, b, k) : nullptr);
    const float* deviation = (const float*)(call.value.deviation.data ? at(call.value.deviation, b, k) : nullptr);
    const int16_t* order = (const int16_t*)(call.value.order.data ? at(call.value.order, b, k) : nullptr);
    if (call.auxiliary)
      for (Int r = 0; r < repeats; ++r) raise(r, call.auxiliary[k * repeats + r]);
    sums = packed;
    if (form.fold_value) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      transform(form.fold_value, value_dim, repeats, packed.data(), sums.data());
    }
    for (Int r = 0; r < repeats; ++r) {
      const Int head = k * repeats + r;
      float all = packed_mass[r] + exact_mass[r];
      if (call.auxiliary) all += exponential<1>(Vector<1>::F{call.auxiliary[head] - top[r]})[0];
      float* to = call.output + (b * form.heads * repeats + head) * value_dim;
      for (Int c = 0; c < value_dim; ++c) {
        const Int channel = order ? order[c] : c;
        float folded = sums[r * value_dim + c] * (deviation ? deviation[channel] : 1.0f);
        if (mean) folded += mean[channel] * packed_mass[r];
        to[channel] = (folded + exact[r * value_dim + channel]) / all;
      }
    }
  }
};

}  // namespace
