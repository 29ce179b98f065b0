"""Formats that need an attached model, in every cache operation: codes depend on the tokens alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig

from hf_kvquant import PRESETS, KVQuantConfig, QuantizedKVCache, attach
from tests import tiny
from tests.test_layers import codes, equal, held_nbytes

LLAMA = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
DIM, TOTAL = 24, 420
NAMES = [name for name, preset in PRESETS.items() if preset.config.needs_attach]
attached = st.builds(
    lambda name, window, sinks: replace(PRESETS[name].config, residual_length=window, sink_length=sinks),
    st.sampled_from(NAMES),
    st.sampled_from([0, 1, 60]),
    st.sampled_from([0, 1, 4]),
)


def tensors(seed: int, batch: int, tokens: int = TOTAL) -> list[torch.Tensor]:
    """Keys, values and queries; 2 key heads, 6 query heads."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, tokens, DIM, generator=generator) for heads in (2, 2, 6)]


def state(cache: QuantizedKVCache, row: int = 0) -> list[torch.Tensor]:
    """Codes and tables of one row, all layers."""
    found: list[torch.Tensor] = []
    for layer in cache.layers:
        found += codes(layer, row)
        for part in (layer.key_state, layer.value_state):
            found += [tensor[row] for tensor in part.tables.named().values()] if part.tables else []
    return found


@settings(max_examples=40)
@given(attached, st.lists(st.integers(1, TOTAL - 1), max_size=6), st.integers(0, 2**31))
def test_chunks_give_the_same_codes_and_statistics(config, cuts, seed) -> None:
    given_tensors = tensors(seed, 2)
    whole, pieces = (QuantizedKVCache(LLAMA, config) for _ in range(2))
    tiny.feed(whole, given_tensors)
    tiny.feed(pieces, given_tensors, sorted(set(cuts)))
    assert whole.layers[0].rows[0].blocks
    for row in range(2):
        assert equal(state(whole, row), state(pieces, row))
    for one, other in zip(whole.layers, pieces.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert one.energies.held is None
        assert other.energies.held is None


@settings(max_examples=25)
@given(
    attached,
    st.lists(st.integers(0, 250), min_size=2, max_size=3),
    st.lists(st.integers(1, TOTAL - 1), max_size=4),
    st.integers(0, 2**31),
)
def test_padding_and_neighbours_change_nothing(config, padding, cuts, seed) -> None:
    given_tensors = tensors(seed, len(padding))
    for tensor in given_tensors:
        for row, pad in enumerate(padding):
            tensor[row, :, :pad] = 1e4
    batch = QuantizedKVCache(LLAMA, config)
    tiny.feed(batch, given_tensors, sorted(set(cuts)), padding)
    for row, pad in enumerate(padding):
        alone = QuantizedKVCache(LLAMA, config)
        tiny.feed(alone, [tensor[row : row + 1, :, pad:] for tensor in given_tensors])
        closed = batch.layers[0].rows[row].blocks
        assert closed == alone.layers[0].rows[0].blocks
        if closed:
            assert equal(state(batch, row), state(alone))
        for one, other in zip(batch.layers, alone.layers, strict=True):
            assert torch.equal(one.keys[row, :, pad:], other.keys[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at", [60, 133, 200, 300])
def test_operations_at_any_stage_of_the_statistics(name, at, tmp_path) -> None:
    """Rows selected, copied, saved or moved before, while and after the statistics of differently padded rows are
    frozen go on as each would alone."""
    config = replace(PRESETS[name].config, residual_length=8)
    padding, given_tensors = [0, 120], tensors(1, 2)
    cache = QuantizedKVCache(LLAMA, config)
    tiny.feed(cache, [tensor[:, :, :at] for tensor in given_tensors], padding=padding)
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    variants: list[tuple[Any, list[int]]] = [
        (copy.deepcopy(cache), [0, 1]),
        (QuantizedKVCache.load(path, LLAMA), [0, 1]),
        (copy.deepcopy(cache), [1, 0, 1]),
        (copy.deepcopy(cache).to("cpu"), [0, 0, 1, 1]),
    ]
    variants[2][0].batch_select_indices(torch.tensor([1, 0, 1]))
    variants[3][0].batch_repeat_interleave(2)
    tiny.feed(cache, given_tensors, padding=padding, start=at)
    for other, rows in variants:
        tiny.feed(other, [tensor[rows] for tensor in given_tensors], padding=[padding[row] for row in rows], start=at)
        assert other.memory_report().total == held_nbytes(other)
        for place, row in enumerate(rows):
            assert equal(state(other, place), state(cache, row))
            assert torch.equal(other.layers[1].keys[place], cache.layers[1].keys[row])


def test_statistics_stay_while_any_of_the_first_block_is_held() -> None:
    """What is closed later is coded under the same tables, and read back right."""
    config = replace(PRESETS["cm3"].config, residual_length=0)
    cache, (keys, values, queries) = QuantizedKVCache(LLAMA, config), tensors(1, 1)
    tiny.feed(cache, [keys, values, queries])
    tables = cache.layers[0].key_state.tables.map(torch.clone)
    cache.crop(-(TOTAL - 20))
    tiny.feed(cache, [keys, values, queries], start=20)
    for name, tensor in cache.layers[0].key_state.tables.named().items():
        assert torch.equal(tensor, tables.named()[name])
    assert float((cache.layers[0].keys - keys).norm() / keys.norm()) < 0.6


@pytest.mark.parametrize("name", NAMES)
def test_a_crop_to_the_sinks_forgets_the_statistics(name) -> None:
    """Then no token that they were made of is left: other text gets what it would get in a new cache."""
    config = replace(PRESETS[name].config, residual_length=0, sink_length=4)
    first, then = tensors(1, 1), [tensor * 9 + 3 for tensor in tensors(2, 1)]
    then = [torch.cat([a[:, :, :4], b[:, :, 4:]], 2) for a, b in zip(first, then, strict=True)]
    again, fresh = (QuantizedKVCache(LLAMA, config) for _ in range(2))
    tiny.feed(again, first)
    again.crop(-(TOTAL - 4))
    tiny.feed(again, then, start=4)
    tiny.feed(fresh, then, cuts=(4,))
    assert equal(state(again), state(fresh))


def test_the_statistics_of_a_late_row_take_little() -> None:
    """A row behind 3,000 tokens of padding makes the others keep 128 tokens' worth of queries, not 3,000."""
    cache = QuantizedKVCache(LLAMA, "cm3")
    tiny.feed(cache, tensors(1, 3, 3100), padding=[0, 0, 3000])
    layer = cache.layers[0]
    assert layer.energies.held is not None
    assert layer.energies.held.shape == (3, 2, 128, DIM)
    cache.batch_select_indices(torch.tensor([1]))
    assert layer.energies.held is None


def test_layers_that_take_no_update_leave_nothing_behind() -> None:
    """Cross-attention and layers that share keys are hooked as well; a cache with what they showed would keep
    activations alive and could not be copied."""
    model: Any = tiny.load("t5")
    own = QuantizedKVCache(model.config)
    cache = EncoderDecoderCache(own, DynamicCache(config=model.config))
    with attach(model):
        model(input_ids=tiny.prompt(1, 10), decoder_input_ids=tiny.prompt(1, 5), past_key_values=cache)
    assert own.pending is None
    copy.deepcopy(own)


def test_a_crop_within_the_calibration_tokens_takes_their_queries_along() -> None:
    config = replace(PRESETS["cm2"].config, residual_length=0)
    given_tensors, other = tensors(1, 1), tensors(2, 1)
    straight, back = (QuantizedKVCache(LLAMA, config) for _ in range(2))
    tiny.feed(straight, given_tensors)
    tiny.feed(back, [torch.cat([a[:, :, :60], b[:, :, 60:100]], 2) for a, b in zip(given_tensors, other, strict=True)])
    back.crop(-40)
    tiny.feed(back, given_tensors, start=60)
    assert equal(state(straight), state(back))


def test_configurations_with_tables_are_hashable_by_their_formats() -> None:
    assert hash(PRESETS["cm3"].config) == hash(KVQuantConfig.from_json(PRESETS["cm3"].config.to_json()))
