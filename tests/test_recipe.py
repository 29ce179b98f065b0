"""Centred mixed-width keys, centred rotated keys and rotated values: the real cache against tests/reference.py, and
what the formats promise on keys of a known distribution."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from hf_kvquant import PRESETS, KVQuantConfig, QuantizedKVCache, TensorSpec
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.rotary import RotaryLayout
from tests import reference, tiny
from tests.test_config import CM2, CM3
from tests.test_formats import distortion
from tests.tolerances import TOLERANCES

LLAMA = LlamaConfig(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
# The presets, and the two profiles that the recipe was first measured with.
RECIPES = {name: PRESETS[name].config for name in ("cr4", "cm4", "cm3", "cm2")} | {
    f"{name} as first measured": replace(
        PRESETS[name].config, key=replace(PRESETS[name].config.key, format=f"midrise{widths[0][0]}", widths=widths)
    )
    for name, widths in (("cm3", CM3), ("cm2", CM2))
}
MEASURED = RECIPES["cm2 as first measured"]
BITS = {"cr4": 4, "cm4": 4, "cm3": 3, "cm2": 2}
# name -> head dimension, queries per key head, layout
SHAPES: dict[str, tuple[int, int, RotaryLayout]] = {
    "64 half": (64, 3, RotaryLayout("key", "half", 32, 0, 1, "single", False)),
    "80 half, one head each": (80, 1, RotaryLayout("key", "half", 40, 0, 1, "single", False)),
    "96 interleaved": (96, 2, RotaryLayout("key", "interleaved", 48, 0, 1, "single", False)),
    "128 sign turned, 7:1": (128, 7, RotaryLayout("key", "half", 64, 0, -1, "single", False)),
    "256 partial": (256, 2, RotaryLayout("key", "half", 32, 0, 1, "single", False)),
    "40 partial at the end": (40, 2, RotaryLayout("key", "interleaved", 8, 24, 1, "single", False)),
}


def tensors(dim: int, ratio: int, tokens: int = 300, bias: float = 4.0, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Keys with a mean and a spread per channel, values, and queries that look at some channels more than at others;
    before rotation. ``[1, 2 or 2 * ratio, T, D]``."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, 2, tokens, dim, generator=g) * torch.rand(1, 2, 1, dim, generator=g).mul(2).exp()
    keys = keys + torch.randn(1, 2, 1, dim, generator=g) * bias
    values = torch.randn(1, 2, tokens, dim, generator=g)
    looks = torch.rand(1, 2, 1, 1, dim, generator=g).mul(3).exp()
    queries = (torch.randn(1, 2, ratio, tokens, dim, generator=g) * looks).flatten(1, 2)
    return keys, values, queries


def angles(tokens: int, layout: RotaryLayout) -> torch.Tensor:
    return torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(layout.pairs) / layout.pairs)


def rotate(x: torch.Tensor, layout: RotaryLayout) -> torch.Tensor:
    turned = x.clone()
    layout.rotate_(turned, *(f(angles(x.shape[2], layout)) for f in (torch.cos, torch.sin)))
    return turned


def pairs_of(layout: RotaryLayout) -> reference.Pairs:
    """Channels of each pair, the second first where the model turns the other way."""
    start, h = layout.offset, layout.pairs
    pairs = [
        (start + i, start + h + i) if layout.pairing == "half" else (start + 2 * i, start + 2 * i + 1) for i in range(h)
    ]
    return [(a, b) if layout.sign == 1 else (b, a) for a, b in pairs]


def cached(config: KVQuantConfig, given: tuple[torch.Tensor, ...], layout: RotaryLayout, cuts: tuple[int, ...]) -> Any:
    """The layer of a cache that was handed rotated keys and queries in chunks."""
    keys, values, queries = given
    cache = QuantizedKVCache(LLAMA, replace(config, residual_length=0))
    tiny.feed(cache, (rotate(keys, layout), values, rotate(queries, layout)), cuts, layout=layout)
    return cache.layers[0]


def relative_rms(got: torch.Tensor, expected: np.ndarray) -> float:
    difference = got.double().numpy() - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def expected_keys(preset: str, keys: np.ndarray, queries: np.ndarray, layout: RotaryLayout) -> np.ndarray:
    turns, pairs = angles(len(keys), layout).double().numpy(), pairs_of(layout)
    if preset == "cr4":
        return reference.rotated_keys(keys, queries, turns, pairs, 4)
    return reference.mixed_keys(keys, queries, turns, pairs, RECIPES[preset].key.widths or ())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("preset", RECIPES)
def test_cache_equals_the_reference(preset, shape) -> None:
    """Relative RMS of what is read back, over all but the tokens of a tie: a gain or a level on the other side of one
    moves a whole token or channel, and float64 breaks ties otherwise than fp32."""
    dim, ratio, layout = SHAPES[shape]
    given = tensors(dim, ratio)
    layer = cached(RECIPES[preset], given, layout, (50, 51, 140))
    closed = 4 + 64 * len(layer.rows[0].blocks)
    assert closed == 260
    keys, values, queries = (
        x.double().numpy()[0] for x in (rotate(given[0], layout), given[1], rotate(given[2], layout))
    )
    bits = BITS[preset[:3]]
    for head in range(2):
        own = queries[head * ratio : (head + 1) * ratio]
        for got, right in (
            (layer.keys[0, head, :closed], expected_keys(preset, keys[head], own, layout)[:closed]),
            (layer.values[0, head, :closed], reference.rotated(values[head], bits)[:closed]),
        ):
            token_error = np.abs(got.double().numpy() - right).max(-1) / np.abs(right).max()
            tied = token_error > 1e-3
            assert tied.mean() <= TOLERANCES["share_of_ties"]
            assert relative_rms(got[torch.from_numpy(~tied)], right[~tied]) <= TOLERANCES["recipe"]


@pytest.mark.parametrize("preset", RECIPES)
def test_a_wrong_reference_would_be_seen(preset) -> None:
    """Queries of the other key head are not within the tolerance."""
    dim, ratio, layout = SHAPES["64 half"]
    given = tensors(dim, ratio)
    layer = cached(RECIPES[preset], given, layout, ())
    keys, queries = (rotate(x, layout).double().numpy()[0] for x in (given[0], given[2]))
    wrong = (
        expected_keys(preset, keys[0], queries[ratio:], layout) if preset != "cr4" else reference.rotated(keys[0], 4)
    )
    assert relative_rms(layer.keys[0, 0, :260], wrong[:260]) > 100 * TOLERANCES["recipe"]


def test_layers_without_rotation_take_the_plain_mean() -> None:
    keys, values, queries = tensors(64, 3)
    still = RotaryLayout("key", "half", 32, 0, 1, "single", False)
    cache = QuantizedKVCache(LLAMA, replace(MEASURED, residual_length=0))
    cache.pending = replace(tiny.pending(queries, torch.arange(300)[None], still), layout=None, reason="no rotation")
    cache.update(keys, values, 0)
    got = cache.layers[0].keys[0, 0, :260]
    turns = np.zeros((300, 32))
    right = reference.mixed_keys(keys[0, 0].double().numpy(), queries[0, :3].double().numpy(), turns, [], CM2)[:260]
    assert relative_rms(got, right) <= TOLERANCES["recipe"]
    assert "after RoPE (no rotation)" in cache.summary()


def test_unattached_form_takes_the_plain_mean_and_no_queries() -> None:
    keys, values, _ = tensors(64, 3)
    spec = replace(MEASURED.key, center="plain")
    cache = QuantizedKVCache(LLAMA, replace(MEASURED, key=spec, residual_length=0))
    cache.update(keys, values, 0)
    right = reference.mixed_keys(keys[0, 0].double().numpy(), None, np.zeros((300, 32)), [], CM2)[:260]
    assert relative_rms(cache.layers[0].keys[0, 0, :260], right) <= TOLERANCES["recipe"]
    assert not cache.quantization.needs_attach


def test_queries_that_are_not_seen_are_reported() -> None:
    keys, values, queries = tensors(64, 3)
    layout = SHAPES["64 half"][2]
    cache = QuantizedKVCache(LLAMA, MEASURED)
    for piece in (slice(0, 100), slice(100, 300)):
        seen = tiny.pending(queries, torch.arange(300)[None, piece], layout, source=1 + piece.start)
        cache.pending = (
            replace(seen, queries=lambda start, stop: "a reason")
            if piece.start
            else replace(seen, queries=lambda start, stop: queries[:, :, start:stop])
        )
        cache.update(rotate(keys, layout)[:, :, piece], values[:, :, piece], 0)
    assert "statistics without queries (a reason)" in cache.summary()
    right = reference.mixed_keys(
        rotate(keys, layout)[0, 0].double().numpy(), None, angles(300, layout).double().numpy(), pairs_of(layout), CM2
    )
    assert relative_rms(cache.layers[0].keys[0, 0, :132], right[:132]) <= TOLERANCES["recipe"]


# -------------------------------------------------------------------- what the formats promise


def read_back_error(spec: TensorSpec, dim: int) -> float:
    """Squared error per element of N(0, 1), closed blocks only."""
    cache = QuantizedKVCache(LLAMA, KVQuantConfig(spec, spec, residual_length=0))
    x = torch.randn(2, 4, 516, dim, generator=torch.Generator().manual_seed(3))
    cache.update(x, x, 0)
    return float((cache.layers[0].keys - x)[:, :, 4:].square().mean())


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("name", ["midrise2", "midrise3", "midrise4", "cm2", "cm3"])
def test_error_on_normal_keys_is_what_the_grid_predicts(name, dim) -> None:
    """RMS within 10 % of the distortion of the grids, channels without bits counting in full. Never above it: the
    searched gain follows a token's own deviation, which saves more than 10 % only of the finest grid on the shortest
    head (4 bits, 64 channels: 11.5 %)."""
    widths = {"cm2": CM2, "cm3": CM3}.get(name)
    if widths is None:
        spec = TensorSpec(name, "token", None, scale_format="log2_8", rotation="hadamard")
        predicted = distortion(spec.number_format.step, spec.number_format.bits)
    else:
        fmt = f"midrise{widths[0][0]}"
        spec = TensorSpec(fmt, "token", None, scale_format="log2_8", center="plain", widths=widths)
        coded = [(fmt, stop - start) for fmt, start, stop in spec.segments(dim)]
        kept = sum(n for _, n in coded)
        predicted = (sum(n * distortion(fmt.step, fmt.bits) for fmt, n in coded) + dim - kept) / dim
    ratio = math.sqrt(read_back_error(spec, dim) / predicted)
    assert (0.88 if (name, dim) == ("midrise4", 64) else 0.9) <= ratio <= 1.01


@pytest.mark.parametrize("preset", RECIPES)
def test_a_large_bias_costs_nothing(preset) -> None:
    """A key bias of norm 600, as of Qwen2's k_proj, changes the error of the keys by less than 2 %."""
    dim, ratio, layout = SHAPES["128 sign turned, 7:1"]
    errors = []
    for norm in (0.0, 600.0):
        keys, values, queries = tensors(dim, ratio, bias=0.0)
        keys = (
            keys
            + torch.nn.functional.normalize(
                torch.randn(1, 2, 1, dim, generator=torch.Generator().manual_seed(5)), dim=-1
            )
            * norm
        )
        layer = cached(RECIPES[preset], (keys, values, queries), layout, ())
        errors.append(float((layer.keys - rotate(keys, layout))[:, :, 4:260].norm()))
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


def test_widths_that_leave_no_channel_of_a_small_head_are_refused() -> None:
    spec = TensorSpec("midrise2", "token", None, center="plain", widths=((2, 1), (0, 63)))
    layer = QuantizedLayer(KVQuantConfig(spec, TensorSpec("int4"), 16))
    with pytest.raises(
        ValueError, match=r"key_states has head_dim=16, of which widths=\(\(2, 1\), \(0, 63\)\) keep no"
    ):
        layer.update(*torch.randn(2, 1, 1, 200, 16))


def test_widths_scale_to_every_head_dimension() -> None:
    """Average bits stay at the nominal ones within one channel of the widest, and every channel is counted once."""
    for name in (name for name in RECIPES if name.startswith("cm")):
        spec = RECIPES[name].key
        nominal = sum(bits * channels for bits, channels in spec.widths or ()) / 64
        for dim in (16, 40, 64, 80, 96, 112, 128, 192, 256, 512):
            segments = spec.segments(dim)
            assert all(a[2] == b[1] for a, b in itertools.pairwise(segments))
            bits = sum(fmt.bits * (stop - start) for fmt, start, stop in segments) / dim
            assert bits == pytest.approx(nominal, abs=8 / dim)
        assert [(fmt.bits, stop - start) for fmt, start, stop in spec.segments(64)] == [
            pair for pair in (spec.widths or ()) if pair[0]
        ]


@pytest.mark.parametrize("preset", RECIPES)
def test_short_sequences_stay_exact(preset) -> None:
    """Before the calibration tokens are complete nothing closes, window 0 or not."""
    dim, ratio, layout = SHAPES["64 half"]
    given = [x[:, :, :131] for x in tensors(dim, ratio)]
    layer = cached(RECIPES[preset], tuple(given), layout, (130,))
    assert not layer.rows[0].blocks
    assert torch.equal(layer.keys, rotate(given[0], layout))


@pytest.mark.parametrize("preset", RECIPES)
def test_true_bits(preset) -> None:
    """Codes and gains of closed blocks at D = 64, and the tables of a row and head: counted to the byte."""
    dim, ratio, layout = SHAPES["64 half"]
    cache = QuantizedKVCache(LLAMA, replace(RECIPES[preset], residual_length=0))
    keys, values, queries = tensors(dim, ratio, tokens=260)
    tiny.feed(cache, (rotate(keys, layout), values, rotate(queries, layout)), layout=layout)
    report = cache.memory_report()
    widths = RECIPES[preset].key.widths
    key_bits = 4 if widths is None else sum(bits * channels for bits, channels in widths) / 64
    assert report.packed_bits_per_element == (key_bits + BITS[preset[:3]]) / 2 + 8 / 64 + 8 / 4096
    per_channel = 2 * 4 if preset == "cr4" else 3 * 4 + 2
    assert report.sum.tables == 2 * 64 * per_channel
