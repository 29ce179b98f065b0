"""Cases about what callers do to a cache between forwards: crop, batch operations, copies, early initialization."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cache

from hf_kvquant import KVQuantConfig, QuantizedKVCache
from hf_kvquant.presets import UNATTACHED_PRESETS
from tests import tiny
from tests.tiny import assert_same_tensors, layer_tensors, states

CONFIGS = {name: preset.config for name, preset in UNATTACHED_PRESETS.items()} | {"blocks of 16": tiny.quantized()}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
PADDING = (0, 5, 61)


def filled(config: KVQuantConfig, tokens: int, seed: int = 0) -> tuple[QuantizedKVCache, torch.Tensor, torch.Tensor]:
    """A cache of 3 layers and 3 rows, two of them left-padded, and what was delivered to each layer."""
    cache = QuantizedKVCache(tiny.load("llama").config, config)
    cache.set_padding(torch.tensor([[int(t >= pad) for t in range(62)] for pad in PADDING]))
    keys, values = states(3, 2, tokens, 16, seed)
    return update(cache, keys, values), keys, values


def update(cache: QuantizedKVCache, keys: torch.Tensor, values: torch.Tensor) -> QuantizedKVCache:
    for index in range(len(cache.layers)):
        cache.update(keys, values, index)
    return cache


def own(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Each row without its padding, which reads as zeros from some point on."""
    return [tensor[row, :, pad:] for row, pad in enumerate(PADDING)]


def contents(cache: QuantizedKVCache) -> list[list[torch.Tensor]]:
    layer: Any = cache.layers[1]
    return [own(tensor) for tensor in layer.materialize()]


def codes(cache: Cache) -> dict[str, torch.Tensor]:
    found = {f"{i}.{name}": t for i, layer in enumerate(cache.layers) for name, t in layer_tensors(layer).items()}
    return {name: tensor.clone() for name, tensor in found.items()}


def assert_equal(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> None:
    for one, other in zip(left, right, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


# -------------------------------------------------------------------- 10: crop


@configs
@pytest.mark.parametrize("removed", [0, 1, 2, 70, 128, 200, 237, 238, 297, 299])
def test_case_10_crop_keeps_the_rest(config: KVQuantConfig, removed: int) -> None:
    """Into the window, into closed blocks, into the sinks, into the padding of a row; the next updates are right."""
    cache, _, _ = filled(config, 300)
    before, codes_before = contents(cache), codes(cache)
    cache.crop(-removed)
    left = 300 - removed
    assert [cache.get_seq_length(index) for index in range(3)] == [left] * 3
    assert cache.get_mask_sizes(1, 0) == (left + 1, 0)
    kept = [[row[:, : max(0, left - pad)] for row, pad in zip(rows, PADDING, strict=True)] for rows in before]
    assert_equal(contents(cache), kept)
    for name, tensor in codes(cache).items():
        assert torch.equal(tensor, codes_before[name][:, :, : tensor.shape[2]])
    new = states(3, 2, 7, 16, seed=9)
    returned: Any = [cache.update(*new, index) for index in range(3)][1]
    for full, old, delivered in zip(returned, kept, new, strict=True):
        assert full.shape[2] == left + 7
        for row in range(3):
            assert torch.equal(full[row, :, -7:], delivered[row])
            assert torch.equal(full[row, :, PADDING[row] : left], old[row])


@configs
@pytest.mark.parametrize("removed", [2, 70, 150, 300])
def test_case_10_crop_by_a_tensor(config: KVQuantConfig, removed: int) -> None:
    """Prompt lookup in transformers 5.17 counts in tensors: lengths stay integers, its tensor stays as it is."""
    cache, reference = (filled(config, 300)[0] for _ in range(2))
    count = torch.tensor(-removed)
    cache.crop(count)  # pyright: ignore[reportArgumentType]
    reference.crop(-removed)
    assert int(count) == -removed
    for index in range(3):
        assert cache.get_seq_length(index) == reference.get_seq_length(index)
        assert isinstance(cache.get_seq_length(index), int)
    for each in (cache, reference):
        update(each, *states(3, 2, 90, 16, seed=9))
    assert_equal(contents(cache), contents(reference))
    assert_same_tensors(codes(cache), codes(reference))


@configs
def test_case_10_after_a_crop_blocks_go_on_closing(config: KVQuantConfig) -> None:
    cache, _, _ = filled(config, 300)
    cache.crop(-70)
    kept, closed = contents(cache), codes(cache)
    update(cache, *states(3, 2, 250, 16, seed=9))
    assert cache.get_seq_length() == 480
    layer: Any = cache.layers[0]
    most = max(len(row.blocks) for row in layer.rows)
    assert all(tensor.shape[2] == most > closed[name].shape[2] for name, tensor in codes(cache).items())
    first = config.sink_length + config.block_length
    for now, then in zip(contents(cache), kept, strict=True):
        assert all(torch.equal(a[:, :first], b[:, :first]) for a, b in zip(now, then, strict=True))


@configs
@pytest.mark.parametrize("removed", [300, 301, 10**6])
def test_case_10_removing_everything_empties(config: KVQuantConfig, removed: int) -> None:
    cache, keys, values = filled(config, 300)
    cache.crop(-removed)
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert cache.memory_report().total == 0
    cache.crop(-1)
    again = update(cache, keys, values)
    fresh = update(QuantizedKVCache(tiny.load("llama").config, config), keys, values)
    assert_same_tensors(codes(again), codes(fresh))


@configs
def test_case_10_crop_of_an_empty_cache(config: KVQuantConfig) -> None:
    cache, _, _ = filled(config, 300)
    cache.reset()
    for removed in (0, 1, 500):
        cache.crop(-removed)
        assert cache.get_seq_length() == 0
    update(cache, *states(3, 2, 20, 16))
    assert cache.get_seq_length() == 20


# -------------------------------------------------------------------- 11: batch operations

OPERATIONS: dict[str, tuple[Callable[[Any], None], list[int]]] = {
    "repeat": (lambda cache: cache.batch_repeat_interleave(4), [i for i in range(4) for _ in range(4)]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1, 3])), [1, 3]),
    "mask": (lambda cache: cache.batch_select_indices(torch.tensor([False, True, False, True])), [1, 3]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
}


@pytest.mark.parametrize("steps", [0, 3, 200])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_case_11_batch_operations_as_on_dynamic_cache(operation: str, steps: int) -> None:
    model, (change, order) = tiny.load("llama"), OPERATIONS[operation]
    ids, mask = tiny.left_padded(tiny.prompt(4, 100 + steps + 90), [0, 3, 61, 10])
    logits = []
    for quantization in (None, tiny.lossless()):
        cache = tiny.new_cache(model, quantization)
        tiny.forward(model, ids[:, :100], cache, attention_mask=mask[:, :100])
        for end in range(101, 101 + steps):
            tiny.forward(model, ids[:, end - 1 : end], cache, attention_mask=mask[:, :end])
        change(cache)
        parts = [tiny.forward(model, ids[order, 100 + steps : -1], cache, attention_mask=mask[order, :-1])]
        parts.append(tiny.forward(model, ids[order, -1:], cache, attention_mask=mask[order]))
        logits.append(torch.cat(parts, 1))
    assert torch.equal(logits[0], logits[1])


@configs
@pytest.mark.parametrize("steps", [0, 3, 200])
def test_case_11_codes_are_moved(config: KVQuantConfig, steps: int) -> None:
    cache, _, _ = filled(config, 260)
    for step in range(steps):
        update(cache, *states(3, 2, 1, 16, seed=step))
    for name, order in (("reorder", [1, 1, 0]), ("repeat", [i for i in range(3) for _ in range(4)])):
        fork, before = copy.deepcopy(cache), codes(cache)
        OPERATIONS[name][0](fork)
        assert_same_tensors(codes(fork), {key: tensor[order] for key, tensor in before.items()})
        for now, then in zip(fork.layers[2].materialize(), cache.layers[2].materialize(), strict=True):  # pyright: ignore[reportAttributeAccessIssue]
            assert torch.equal(now, then[order])
        assert fork.batch_size == len(order)


# -------------------------------------------------------------------- 12: copies and files


def pickled(cache: QuantizedKVCache, folder: Path) -> QuantizedKVCache:
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def saved(cache: QuantizedKVCache, folder: Path) -> QuantizedKVCache:
    cache.save(folder / "cache.safetensors")
    return QuantizedKVCache.load(folder / "cache.safetensors", tiny.load("llama").config)


COPIES = {"deepcopy": lambda cache, folder: copy.deepcopy(cache), "torch.save": pickled, "save": saved}


@configs
@pytest.mark.parametrize("way", COPIES)
def test_case_12_copies_are_equal_and_independent(config: KVQuantConfig, way: str, tmp_path: Path) -> None:
    model, prompt = tiny.load("llama"), tiny.prompt(2, 260)
    cache = QuantizedKVCache(model.config, config)
    tiny.forward(model, prompt, cache)
    other = COPIES[way](cache, tmp_path)
    original = codes(cache)
    assert original
    assert_same_tensors(codes(other), original)
    said = [tiny.forward(model, tiny.prompt(2, 90, seed), each) for seed, each in ((2, cache), (3, other))]
    assert not torch.equal(*said)
    for seed, each, expected in ((2, cache, said[0]), (3, other, said[1])):
        fresh = QuantizedKVCache(model.config, config)
        tiny.forward(model, prompt, fresh)
        assert torch.equal(tiny.forward(model, tiny.prompt(2, 90, seed), fresh), expected)
        assert_same_tensors(codes(each), codes(fresh))
        assert_same_tensors({name: t[:, :, : original[name].shape[2]] for name, t in codes(each).items()}, original)


# -------------------------------------------------------------------- 15: early initialization


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@configs
def test_case_15_early_initialization_changes_nothing(config: KVQuantConfig, name: str) -> None:
    model, made = tiny.load(name), []
    for early in (False, True):
        cache = QuantizedKVCache(model.config, config)
        if early:
            cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
            assert cache.get_seq_length() == 0
        logits = [tiny.forward(model, tiny.prompt(2, length, length), cache) for length in (210, 1, 30)]
        made.append((cache, torch.cat(logits, 1)))
    assert torch.equal(made[0][1], made[1][1])
    quantized = [index for index, layer in enumerate(made[0][0].layers) if hasattr(layer, "key_state")]
    assert quantized
    for index in quantized:
        assert_same_tensors(*(layer_tensors(cache.layers[index]) for cache, _ in made))
    assert made[0][0].memory_report().total == made[1][0].memory_report().total
