"""Cases about codes: the same tokens give the same codes, whatever stands beside, before or after them.

Everything here feeds keys and values to a layer or a cache directly, so that "identical" means identical bits.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hf_kvquant import KVQuantConfig, QuantizedKVCache, TensorSpec
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.presets import PRESETS, UNATTACHED_PRESETS
from tests import tiny
from tests.tiny import alike, assert_same_tensors, filled, layer_tensors, relative_error, states
from tests.tolerances import TOLERANCES

AXES = ("channel", "token", "head", "tensor")
# At the level of layers a format that needs attach works as for a model without rotation.
LAYOUTS = {name: preset.config for name, preset in PRESETS.items()} | {
    axis: alike("int4", axis, residual=8, sinks=4) for axis in AXES
}
layouts = pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS)


def row_tensors(layer: QuantizedLayer, row: int) -> dict[str, torch.Tensor]:
    """The closed blocks of one row."""
    blocks = len(layer.rows[row].blocks)
    return {name: tensor[row : row + 1, :, :blocks] for name, tensor in layer_tensors(layer).items()}


# -------------------------------------------------------------------- 2: closed blocks stay as they are


@pytest.mark.parametrize("preset", PRESETS)
def test_case_02_many_closings_leave_the_oldest_tokens_alone(preset: str) -> None:
    keys, values = states(1, 1, 2048, 16)
    config = PRESETS[preset].config
    layer = filled(config, (keys[:, :, :1024], values[:, :, :1024]))
    closed = len(layer.rows[0].blocks)
    codes = {name: tensor.clone() for name, tensor in layer_tensors(layer).items()}
    oldest = slice(0, config.sink_length + config.block_length * closed)
    errors = [
        relative_error(got[:, :, oldest], x[:, :, oldest])
        for got, x in zip(layer.materialize(), (keys, values), strict=True)
    ]
    for step in range(1024, 2048):
        layer.update(keys[:, :, step : step + 1], values[:, :, step : step + 1])
    exact = config.sink_length + config.residual_length
    counts = [(length - exact) // config.block_length for length in (1024, 2048)]
    assert [closed, len(layer.rows[0].blocks)] == counts
    assert_same_tensors({name: tensor[:, :, :closed] for name, tensor in layer_tensors(layer).items()}, codes)
    after = [
        relative_error(got[:, :, oldest], x[:, :, oldest])
        for got, x in zip(layer.materialize(), (keys, values), strict=True)
    ]
    assert after == errors
    assert (max(errors) > 0) == (preset != "none")


# -------------------------------------------------------------------- 3: every length and head size


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 96, 112, 128, 256])
def test_case_03_every_prompt_length_and_shape(head_dim: int, group: int) -> None:
    """A prompt of each length, read back by the step after it."""
    config = KVQuantConfig(TensorSpec("int4", "channel", group), TensorSpec("int4", "token", group), 0, 0)
    for heads in (1, 2, 3, 8):
        pair = states(1, heads, 131, head_dim)
        limit = max(float(t.amax() - t.amin()) for t in pair) / 30 * (1 + TOLERANCES["metadata_rounding"])
        for length in range(1, 131):
            layer = filled(config, [t[:, :, :length] for t in pair])
            full = layer.update(*(t[:, :, length : length + 1] for t in pair))
            assert layer.get_seq_length() == length + 1
            assert len(layer.rows[0].blocks) == (length + 1) // group
            assert all(
                float((got - t[:, :, : length + 1]).abs().amax()) <= limit for got, t in zip(full, pair, strict=True)
            )


def test_case_03_every_length_as_one_prompt() -> None:
    keys, values = states(2, 3, 130, 40)
    for preset, length in itertools.product(UNATTACHED_PRESETS, range(1, 131)):
        config = UNATTACHED_PRESETS[preset].config
        layer = filled(KVQuantConfig(config.key, config.value, 0, 3), (keys[:, :, :length], values[:, :, :length]))
        assert layer.get_seq_length() == length
        assert all(t.shape[2] == length and bool(t.isfinite().all()) for t in layer.materialize())


# -------------------------------------------------------------------- 4, 5: neighbours and padding


@layouts
def test_case_04_neighbours_do_not_change_a_row(config: KVQuantConfig) -> None:
    keys, values = states(8, 2, 300, 40)
    loud = torch.tensor([1.0, 30.0, 1e-3, 1.0, 900.0, 1.0, 0.0, 30.0])[:, None, None, None]
    keys, values = keys * loud, values * loud
    pair, eight = filled(config, (keys[:2], values[:2]), chunk=37), filled(config, (keys, values))
    for row in range(8):
        alone = filled(config, (keys[row : row + 1], values[row : row + 1]))
        for layer in (eight, pair)[: 2 if row < 2 else 1]:
            assert_same_tensors(row_tensors(layer, row), row_tensors(alone, 0))
            for got, right in zip(layer.materialize(), alone.materialize(), strict=True):
                assert torch.equal(got[row], right[0])


@pytest.mark.parametrize("source", ["position_ids", "set_padding"])
@layouts
def test_case_05_garbage_in_the_padding_is_never_seen(config: KVQuantConfig, source: str) -> None:
    """A prompt of 40 tokens, padded to 64 and to 41, and 250 more: blocks close in the default preset as well."""
    pads, total = (24, 0, 1), 24 + 40 + 250
    keys, values = states(3, 2, total, 40)
    for row, pad in enumerate(pads):
        keys[row, :, :pad], values[row, :, :pad] = 1e4, -1e4
    queries = states(3, 4, total, 40, seed=9)[0]
    cache = QuantizedKVCache(tiny.load("llama").config, config)
    if source == "set_padding":
        cache.set_padding(torch.tensor([[int(t >= pad) for t in range(64)] for pad in pads]))
    given: dict[str, Any] = {} if source == "position_ids" else {"kwargs": {}}
    tiny.feed(cache, (keys, values, queries), (64, 65, 200), pads, **given)
    layer: Any = cache.layers[0]
    for row, pad in enumerate(pads):
        own = [tensor[row : row + 1, :, pad:] for tensor in (keys, values, queries)]
        alone = QuantizedKVCache(tiny.load("llama").config, config)
        tiny.feed(alone, own)
        assert layer.rows[row].blocks
        assert_same_tensors(row_tensors(layer, row), row_tensors(alone.layers[0], 0))
        for got, right in zip(layer.materialize(), alone.layers[0].materialize(), strict=True):
            assert torch.equal(got[row, :, pad:], right[0])


# -------------------------------------------------------------------- 13: chunks


@layouts
def test_case_13_chunks_give_the_same_codes(config: KVQuantConfig) -> None:
    keys, values = states(2, 1, 1024, 24)
    whole = filled(config, (keys, values))
    for chunk in (1, 7, 48, 64, 256):
        layer = filled(config, (keys, values), chunk)
        assert [row.blocks for row in layer.rows] == [row.blocks for row in whole.rows]
        assert_same_tensors(layer_tensors(layer), layer_tensors(whole))
        assert all(torch.equal(a, b) for a, b in zip(layer.materialize(), whole.materialize(), strict=True))
