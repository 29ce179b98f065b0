"""One decode step of attention of one layer, on random data: over packed codes, and over full tensors.

Decisions:
- Timed is what a layer of an attached model calls, ``backends.native``: plan, tensors and the step in C++; for a few
  formats also the same step by torch.compile.
- Full tensors are attended to in three ways that read them grouped (``enable_gqa`` is 3 to 15 times slower on CPU and
  left out); a ratio is against the one that was fastest in this group.
- The limit of the machine is measured beside, in the same rounds: a copy of a tensor far larger than any cache, and a
  matrix product of 1,024 squared. No attention can be faster than its bytes by the one and its multiply-adds by the
  other, whichever takes longer.
- Between two calls of one form all others run, over hundreds of megabytes: codes come from memory, as they do in a
  model, whose other layers run between two steps of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from hf_kvquant import PRESETS, KVQuantConfig
from hf_kvquant.attention import backends, reference
from hf_kvquant.attention.plan import Plan, held_of, plan_of, tensors_of
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.past import Past, PastTensor
from hf_kvquant.rotary import LayerRotary, RotaryLayout, RotaryTable
from hf_kvquant.spec import first_line

CONFIGS = {
    **{name: PRESETS[name].config for name in ("k4v4", "cr4", "cm3", "cm2", "k4v4-pre", "fp8", "int8")},
    "int3": replace(PRESETS["k3v3-pre"].config, pre_rope=False),
    "int2": PRESETS["k2v2"].config,
}
# The same step by torch.compile, of a few formats.
COMPILED = {f"{name} compiled": name for name in ("k4v4", "cr4", "k4v4-pre")}
COPIED_FLOATS, SQUARE = 2**25, 1024
COPY, PRODUCT = "copy", "matmul"
WRONG = 0.02  # relative RMS against the oracle, far above bf16's rounding: such a time would mean nothing

Call = Callable[[], Any]
Facts = dict[str, float]


@dataclass(frozen=True)
class Shape:
    """Of one layer: KV heads K, query heads R of each, head dimension D, tokens T."""

    kv_heads: int
    repeats: int
    head_dim: int
    tokens: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.repeats

    def __str__(self) -> str:
        return f"H={self.heads} K={self.kv_heads} D={self.head_dim} T={self.tokens}"


def groups_of(tokens: int, quick: bool) -> list[tuple[Shape, list[str]]]:
    """Shapes with the formats that are timed there; other shapes than the first are half as long."""
    main = Shape(8, 4, 128, tokens)
    if quick:
        return [(main, ["k4v4"])]
    shorter = replace(main, tokens=tokens // 2)
    others = [replace(shorter, repeats=repeats) for repeats in (1, 3, 7)]
    others += [replace(shorter, head_dim=head_dim) for head_dim in (64, 80, 256)]
    return [(main, [*CONFIGS, *COMPILED]), *((shape, ["k4v4"]) for shape in others)]


def make_past(config: KVQuantConfig, shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, Past]:
    """The query ``[1, H, 1, D]`` of the newest token, and the past of a layer that read all others in one prefill."""
    generator = torch.Generator().manual_seed(0)
    size = (1, shape.kv_heads, shape.tokens, shape.head_dim)
    keys, values = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    queries = torch.randn(1, shape.heads, shape.tokens, shape.head_dim, generator=generator).to(dtype)
    layer = QuantizedLayer(config)
    if config.needs_attach:
        layer.set_rotary(_rotation(shape, dtype, layer.block_length))
        layer.note_queries(lambda start, stop: queries[:, :, start:stop], keys[:, :, :-1])
    layer.update(keys[:, :, :-1], values[:, :, :-1])
    handle, _ = layer.update_for_attention(keys[:, :, -1:], values[:, :, -1:])
    assert isinstance(handle, PastTensor)
    return queries[:, :, -1:].contiguous(), handle.past


def _rotation(shape: Shape, dtype: torch.dtype, block_length: int) -> LayerRotary:
    pairs = shape.head_dim // 2
    angles = torch.arange(shape.tokens)[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
    table = RotaryTable.empty_like(angles[None].to(dtype), 0, block_length)
    table.append(angles.cos()[None].to(dtype), angles.sin()[None].to(dtype))
    return LayerRotary(RotaryLayout("key", "half", pairs, 0, 1, "single", False), table)


def full_calls(shape: Shape, dtype: torch.dtype) -> tuple[dict[str, Call], dict[str, Facts]]:
    """Attention over full tensors, in several forms."""
    keys, values = (torch.randn(1, shape.kv_heads, shape.tokens, shape.head_dim).to(dtype) for _ in range(2))
    query = torch.randn(1, shape.kv_heads, shape.repeats, shape.head_dim).to(dtype)
    single, scale = query.view(1, shape.heads, 1, shape.head_dim), shape.head_dim**-0.5

    def spread(states: torch.Tensor) -> torch.Tensor:
        wide = states[:, :, None].expand(-1, -1, shape.repeats, -1, -1)
        return wide.reshape(1, shape.heads, shape.tokens, shape.head_dim)

    calls = {
        "sdpa-grouped": lambda: F.scaled_dot_product_attention(query, keys, values),
        "products-grouped": lambda: torch.softmax(query @ keys.transpose(-1, -2) * scale, -1) @ values,
        "sdpa-repeated": lambda: F.scaled_dot_product_attention(single, spread(keys), spread(values)),
    }
    facts: Facts = {
        "bytes": keys.nbytes + values.nbytes,
        "multiply_adds": 2 * shape.heads * shape.tokens * shape.head_dim,
    }
    return calls, dict.fromkeys(calls, facts)


def packed_call(name: str, shape: Shape, dtype: torch.dtype) -> tuple[Call, Facts]:
    """Attention over the codes of a format, checked against the oracle once."""
    query, past = make_past(CONFIGS[COMPILED.get(name, name)], shape, dtype)
    scale = shape.head_dim**-0.5
    attend = backends.compiled if name in COMPILED else backends.native

    def call() -> torch.Tensor:
        return attend(query, past, scale)

    right, got = reference.decode(query.float(), past, scale), call().float()
    error = float((got - right).norm() / right.norm())
    if not error < WRONG:
        raise RuntimeError(f"relative error {error:.2g} to the oracle, not below {WRONG}; mend it first")
    plan = plan_of(past, shape.heads, scale, 0.0, False, False)
    tensors = held_of(past, plan).tensors | tensors_of(past, plan, past.length - past.window_start)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return call, {"bytes": nbytes, "multiply_adds": multiply_adds(plan, shape), "error": error}


def multiply_adds(plan: Plan, shape: Shape) -> float:
    """What the algebra asks for: one per stored channel, token and query head, for keys and for values; two per pair
    for a rotated centre; four per pair and KV head for keys rotated on reading."""
    stored = sum(_stored_channels(spec, dim) for spec, dim in zip((plan.key, plan.value), plan.head_dims, strict=True))
    pairs = plan.layout.pairs if plan.layout is not None else 0
    per_token = shape.heads * (stored + 2 * pairs * plan.turns_centre) + shape.kv_heads * 4 * pairs * plan.stores_raw
    return shape.tokens * per_token


def _stored_channels(spec: Any, head_dim: int) -> int:
    return sum(stop - start for _, start, stop in spec.segments(head_dim))


def limit_calls() -> tuple[dict[str, Call], dict[str, Facts]]:
    """A copy, which reads and writes its bytes, and a matrix product."""
    source, target = torch.randn(COPIED_FLOATS), torch.empty(COPIED_FLOATS)
    left, right, product = (torch.randn(SQUARE, SQUARE) for _ in range(3))
    calls: dict[str, Call] = {
        COPY: lambda: target.copy_(source),
        PRODUCT: lambda: torch.mm(left, right, out=product),
    }
    return calls, {COPY: {"bytes": 2 * source.nbytes}, PRODUCT: {"multiply_adds": SQUARE**3}}


def measure(shape: Shape, formats: list[str], dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Samples and facts of one group, and the formats that failed, with the error."""
    (calls, facts), (limits, limit_facts), failed = full_calls(shape, dtype), limit_calls(), {}
    for name in formats:
        try:
            calls[name], facts[name] = packed_call(name, shape, dtype)
        except RuntimeError as error:
            failed[name] = f"failed: {first_line(error)}"
    samples = timed_rounds(calls | limits, rounds)
    return {"samples": samples, "facts": facts | limit_facts, "failed": failed}


def timed_rounds(calls: dict[str, Call], rounds: int) -> list[dict[str, Any]]:
    """All calls, one after the other, in rotating order; an untimed round first."""
    names, samples = list(calls), []
    for number in range(-1, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            spent = timed(calls[name])
            if number >= 0:
                samples.append({"round": number, "offset": 0, "scheme": name, "closes": False} | spent)
    return samples


def timed(call: Call) -> dict[str, float]:
    begin, begin_cpu = time.perf_counter(), time.process_time()
    call()
    return {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - begin_cpu}
