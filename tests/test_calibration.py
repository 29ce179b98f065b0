"""Static scales: unit and calibrated fp8, per-layer overrides, and what they store."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvquant import KVQuantConfig, LayerOverride, QuantizedKVCache, TensorSpec, calibrated_fp8
from hf_kvquant._compat import native_layers
from tests import tiny

UNIT = TensorSpec("fp8_e4m3", "head", 64, scale_format="static", scale=1.0)


def test_unit_scale_is_a_plain_cast() -> None:
    keys, values = tiny.states(2, 2, 200, 40)
    layer = tiny.filled(KVQuantConfig(UNIT, UNIT, 8, 4), (keys * 30, values))
    for got, x in zip(layer.materialize(), (keys * 30, values), strict=True):
        assert torch.equal(got[:, :, 4:132], x[:, :, 4:132].to(torch.float8_e4m3fn).float())
    assert set(tiny.layer_tensors(layer)) == {"key.planes.0", "value.planes.0"}


def test_values_beyond_the_range_saturate() -> None:
    spec = TensorSpec("fp8_e4m3", "tensor", 64, scale_format="static", scale=(0.5, 2.0))
    keys, values = tiny.states(1, 2, 64, 40)
    got = tiny.filled(KVQuantConfig(spec, spec, 0, 0), (keys * 1e6, values)).materialize()[0]
    assert got.abs().amax((0, 2, 3)).tolist() == [224.0, 896.0]


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_calibrated_scales_are_twice_the_largest_magnitude(fmt) -> None:
    model = tiny.load("llama")
    prompts = [tiny.prompt(2, 30, seed) for seed in (1, 2)]
    config = calibrated_fp8(model, prompts, fmt)
    assert KVQuantConfig.from_json(config.to_json()) == config
    caches = [tiny.new_cache(model, None) for _ in prompts]
    for prompt, cache in zip(prompts, caches, strict=True):
        tiny.forward(model, prompt, cache)
    limit = torch.finfo(getattr(torch, "float8_e4m3fn" if fmt == "fp8_e4m3" else "float8_e5m2")).max
    for index, override in config.layers.items():
        for spec, name in ((override.key, "keys"), (override.value, "values")):
            seen = torch.stack([getattr(cache.layers[index], name).abs().amax((0, 2, 3)) for cache in caches]).amax(0)
            assert spec is not None
            assert spec.static_scales == pytest.approx((2 * seen / limit).tolist())
    assert sorted(config.layers) == list(range(len(native_layers(model.config))))


def test_calibrated_fp8_generates_and_stores_no_scales() -> None:
    full: Any
    model, prompt = tiny.load("llama"), tiny.prompt(2, 200)
    cache = QuantizedKVCache(model.config, calibrated_fp8(model, [prompt]))
    tiny.generate(model, prompt, cache, 8)
    report = cache.memory_report()
    assert report.sum.scales == report.sum.zeros == 0
    assert report.packed_bits_per_element == 8.0
    full = tiny.new_cache(model, None)
    tiny.forward(model, prompt, full)
    got, right = cache.layers[0].keys[:, :, :200], full.layers[0].keys
    assert float((got - right).norm() / right.norm()) < 2.0**-4


@pytest.mark.parametrize(
    ("prompts", "fields", "message"),
    [
        ([], {}, "prompts='nothing measured' is not valid: give at least one prompt"),
        ([tiny.prompt(1, 4)], {"format": "int8"}, "format='int8' is not valid: choose fp8_e4m3 or fp8_e5m2"),
        ([tiny.prompt(1, 4)], {"margin": 0.5}, "margin=0.5 is not valid: it must be at least 1"),
    ],
)
def test_bad_calibrations(prompts, fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        calibrated_fp8(tiny.load("llama"), prompts, **fields)


def test_static_scales_of_another_model_are_refused() -> None:
    spec = TensorSpec("fp8_e4m3", "head", 64, scale_format="static", scale=(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="layer 0: key_states has kv_heads=2, the format has 3 static scales"):
        tiny.filled(KVQuantConfig(spec, spec), tiny.states(1, 2, 10, 8))


# -------------------------------------------------------------------- per-layer overrides


def test_overrides_apply_to_their_layers_only() -> None:
    """Layer 1 keeps its keys in full precision and its values in 8 bits, in blocks of its own length."""
    own = LayerOverride(TensorSpec("none", "channel", 16), TensorSpec("int8", "token"))
    config = KVQuantConfig(TensorSpec("int2"), TensorSpec("int2", "token"), 0, 4, layers={1: own})
    assert KVQuantConfig.from_json(config.to_json()) == config
    assert config.for_layer(1).key is own.key
    assert config.for_layer(0).layers == config.for_layer(1).layers == {}
    cache = QuantizedKVCache(tiny.load("llama").config, config)
    keys, values = tiny.states(1, 2, 200, 32)
    for index in range(2):
        cache.update(keys, values, index)
    assert [layer.block_length for layer in cache.layers[:2]] == [64, 16]
    assert torch.equal(cache.layers[1].keys, keys)
    assert not torch.equal(cache.layers[0].keys, keys)
    assert "layer 1: quantized after RoPE, keys in full precision, values int8" in cache.summary()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({0: TensorSpec()}, r"layers\[0\]=TensorSpec.* is not valid: it must be a LayerOverride"),
        ({-1: LayerOverride()}, "layers=-1 is not valid: a layer index must be an integer of at least 0"),
        ([1], r"layers=\[1\] is not valid: it must map layer indices to LayerOverride"),
        ({0: LayerOverride(value=TensorSpec("int4", "token", center="rope"))}, "values carry no rotation"),
    ],
)
def test_bad_overrides(layers, message) -> None:
    with pytest.raises(ValueError, match=message):
        KVQuantConfig(layers=layers)


def test_an_override_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="layers=99 is not valid: the model has layers 0 to 2"):
        QuantizedKVCache(tiny.load("llama").config, KVQuantConfig(layers={99: LayerOverride()}))
