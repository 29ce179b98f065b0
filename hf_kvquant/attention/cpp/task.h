// One KV head of one row: scores, softmax and values.

#pragma once

#include "scores.h"

namespace {

// What has been attended to so far, relative to the maximum score so far.
struct Task : Scores {
  const Int value_dim;
  Head values;
  std::vector<float> scaled, top, packed_mass, exact_mass, packed, exact, block;

  Task(const Form& form, const Call& call, const Angles& angles, Int k)
      : Scores(form, call, angles, k), value_dim(form.value_dim),
        values(form.value, call.value, b, k, value_dim, length, false, form.value.tokens_per_group > 1, false),
        scaled(repeats * length), top(repeats, -INFINITY), packed_mass(repeats), exact_mass(repeats),
        packed(repeats * value_dim), exact(repeats * value_dim), block(repeats * value_dim) {}

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

  void sum_block(Int n) {
    const Spec& spec = form.value;
    if (spec.lossless)
      return multiply_exact<VALUES>(spec.element, at(call.value.planes[0], b, k, n), length, value_dim, repeats, scored,
                                    width, packed.data(), value_dim);
    values.read_metadata(n);
    if (values.in_pieces) values.unpack_block(n);
    if (spec.tokens_per_group == 1)
      for (Int g = 0; g < spec.groups; ++g) sum_scaled(n, g);
    else
      for (Int g = 0; g < values.groups; ++g) sum_group(n, g);
  }

  // Scales of tokens: they go into the weights.
  void sum_scaled(Int n, Int g) {
    const Spec& spec = form.value;
    const Int size = value_dim / spec.groups, first = g * size;
    std::fill(block.begin(), block.end(), 0.0f);
    const float* scale = &values.scale[g * length];
    for (Int r = 0; r < repeats; ++r) {
      const float* from = scored + r * width;
      float* to = &scaled[r * length];
      for (Int t = 0; t < length; ++t) to[t] = from[t] * scale[t];
    }
    if (!values.uniform) return sum_mixed(n);
    sum_codes(n, scaled.data(), length, 0, length, first, size);
    const float step = spec.segment[0].step, offset = spec.segment[0].offset;
    for (Int r = 0; r < repeats; ++r) {
      float added = -offset * total(&scaled[r * length], length);
      if (!values.zero.empty()) added += dot(scored + r * width, &values.zero[g * length], length);
      const float* from = &block[r * value_dim];
      float* to = &packed[r * value_dim];
      for (Int c = first; c < first + size; ++c) to[c] += from[c] * step + added;
    }
  }

  // block[r][channels] += weights [repeats, length] times the codes of tokens start .. stop
  void sum_codes(Int n, const float* weights, Int weight_stride, Int start, Int stop, Int first, Int size) {
    const Spec& spec = form.value;
    if (values.in_pieces)
      multiply<VALUES, Floats>({&values.numbers[start * value_dim + first], stop - start, value_dim, size, 0}, repeats,
                              weights + start, weight_stride, &block[first], value_dim);
    else
      multiply_uniform<VALUES>(spec, values.planes(n, first).data(), values.rows(0), value_dim, size, repeats,
                               weights, weight_stride, &block[first], value_dim);
  }

  // Channels of several widths, under one scale per token.
  void sum_mixed(Int n) {
    const Spec& spec = form.value;
    std::vector<float> sums(repeats * value_dim);
    for (Int index = 0; index < spec.planes; ++index) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      multiply_codes<VALUES>(spec, spec.widths[index], values.plane(index, n), values.rows(index), spec.channels[index],
                            spec.channels[index], repeats, scaled.data(), length, sums.data(), value_dim);
      for (Int p = 0; p < spec.parts; ++p) {
        const Part& part = spec.part[p];
        if (part.plane != index) continue;
        for (Int r = 0; r < repeats; ++r)
          add(&block[r * value_dim + part.start], 1 << part.shift, &sums[r * value_dim + part.place],
              part.stop - part.start);
      }
    }
    for (Int r = 0; r < repeats; ++r) {
      const float mass = total(&scaled[r * length], length);
      for (Int index = 0; index < spec.segments; ++index) {
        const Segment& segment = spec.segment[index];
        const float step = segment.step, added = -mass * (float)segment.offset;
        for (Int c = segment.start; c < segment.stop; ++c)
          packed[r * value_dim + c] += block[r * value_dim + c] * step + added;
      }
    }
  }

  // Scales of several tokens: applied to the sum over them.
  void sum_group(Int n, Int g) {
    const Spec& spec = form.value;
    const Int size = spec.tokens_per_group;
    std::fill(block.begin(), block.end(), 0.0f);
    sum_codes(n, scored, width, g * size, (g + 1) * size, 0, value_dim);
    const float step = spec.segment[0].step, offset = spec.segment[0].offset;
    for (Int r = 0; r < repeats; ++r) {
      const float mass = total(scored + r * width + g * size, size);
      for (Int c = 0; c < value_dim; ++c) {
        const Int place = g * spec.groups + (spec.groups > 1 ? c : 0);
        const float unit = block[r * value_dim + c] * step - offset * mass;
        packed[r * value_dim + c] += unit * values.scale[place] + (values.zero.empty() ? 0.0f : mass * values.zero[place]);
      }
    }
  }

  // ----------------------------------------------------------------------------------------------------------- runs

  // Weights and values.
  void sum_blocks(Int start, Int count, Int stop) {
    for (Int n = start; n < start + count; ++n) at_block(n - start), finish_block(n);
    weigh(width, packed_mass);
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
    std::vector<float> sums = packed;
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
