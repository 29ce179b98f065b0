"""Invariants of DESIGN section 6 on the layer and the cache, as properties over formats, shapes and operations."""

import copy
import gc
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig

from hf_kvquant import KVQuantConfig, QuantizedKVCache, TensorSpec
from hf_kvquant.formats import FORMATS
from hf_kvquant.layers import QuantizedLayer
from tests.test_config import specs

LLAMA = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
HEADS, KEY_DIM, VALUE_DIM = 2, 40, 24


every_format = pytest.mark.parametrize("name", sorted(FORMATS))


@st.composite
def configs(draw, name: str | None = None) -> KVQuantConfig:
    """Any valid configuration, with keys of one format if named."""
    key, value = draw(specs(name)), draw(specs())
    return KVQuantConfig(key, value, draw(st.sampled_from([0, 1, 16, 60])), draw(st.sampled_from([0, 1, 4])))


def states(seed: int, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, HEADS, tokens, KEY_DIM, generator=generator)
    return keys, torch.randn(batch, HEADS, tokens, VALUE_DIM, generator=generator)


def chunks(total: int, cuts: list[int]) -> list[slice]:
    edges = sorted({0, total, *(cut % total for cut in cuts)})
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def feed(layer: QuantizedLayer, keys: torch.Tensor, values: torch.Tensor, pieces: list[slice]) -> None:
    for piece in pieces:
        layer.update(keys[:, :, piece], values[:, :, piece])


def codes(layer: QuantizedLayer, row: int = 0) -> list[torch.Tensor]:
    """Every stored tensor of the closed blocks of one row."""
    count = len(layer.rows[row].blocks)
    found = []
    for state in (layer.key_state, layer.value_state):
        if count and state.packed.held is not None:
            found += [tensor[row, :, :count].clone() for tensor in state.packed.held.named().values()]
    return found


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@every_format
@settings(max_examples=15)
@given(st.data(), st.integers(1, 700), st.lists(st.integers(0, 700), max_size=6), st.integers(0, 2**31))
def test_state_depends_only_on_the_tokens(name, data, total, cuts, seed) -> None:
    """Invariants 1 and 2: any chunking gives identical codes; the newest tokens and the sinks are exact."""
    config = data.draw(configs(name))
    keys, values = states(seed, 2, total)
    whole, pieces = QuantizedLayer(config), QuantizedLayer(config)
    whole.update(keys, values)
    feed(pieces, keys, values, chunks(total, cuts))
    assert equal(codes(whole), codes(pieces))
    for got, other, full in zip(pieces.materialize(), whole.materialize(), (keys, values), strict=True):
        assert torch.equal(got, other)
        exact = config.residual_length
        assert torch.equal(got[:, :, max(0, total - exact) :], full[:, :, max(0, total - exact) :])
        assert torch.equal(got[:, :, : config.sink_length], full[:, :, : config.sink_length])
    beyond_sinks = total - config.sink_length
    closed = max(0, (beyond_sinks - config.residual_length) // config.block_length)
    assert len(whole.rows[0].blocks) == (closed if beyond_sinks >= config.needed_tokens else 0)


@every_format
@settings(max_examples=10)
@given(st.data(), st.integers(0, 2**31))
def test_closed_blocks_never_change_and_new_tokens_are_exact(name, data, seed) -> None:
    """Invariant 1 step by step, and that update returns what it was given, exactly, behind an unchanged past."""
    config = data.draw(configs(name))
    keys, values = states(seed, 1, 420)
    layer = QuantizedLayer(config)
    before: list[torch.Tensor] = []
    count = 0
    for piece in chunks(420, [200, 201, 202, 333, 334]):
        past = layer.materialize() if layer.length else None
        returned = layer.update(keys[:, :, piece], values[:, :, piece])
        for index, full in enumerate((keys, values)):
            assert torch.equal(returned[index][:, :, piece], full[:, :, piece])
            assert past is None or torch.equal(returned[index][:, :, : piece.start], past[index])
        assert equal([tensor[:, :count] for tensor in codes(layer)], before) or not before
        before, count = codes(layer), len(layer.rows[0].blocks)


@every_format
@settings(max_examples=12)
@given(
    st.data(),
    st.lists(st.integers(0, 150), min_size=2, max_size=4),
    st.integers(151, 500),
    st.lists(st.integers(0, 500), max_size=4),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_padding_and_neighbours_change_nothing(name, data, padding, total, cuts, learned, seed) -> None:
    """Invariant 6: a row alone and the same row left-padded in a batch hold the same codes, garbage in the padding or
    not."""
    config = data.draw(configs(name))
    keys, values = states(seed, len(padding), total)
    mask = torch.arange(total) >= torch.tensor(padding)[:, None]
    for tensor in (keys, values):
        tensor.masked_fill_(~mask[:, None, :, None], 1e4)
    cache = QuantizedKVCache(LLAMA, config)
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    if not learned:
        cache.set_padding(mask.long())
    for piece in chunks(total, cuts):
        kwargs = {"kwargs": {"position_ids": positions[:, piece]}} if learned else {}
        for index in range(2):
            cache.update(keys[:, :, piece], values[:, :, piece], index, **kwargs)
    for layer in cache.layers:
        full = layer.materialize()
        for row, pad in enumerate(padding):
            alone = QuantizedLayer(config)
            alone.update(keys[row : row + 1, :, pad:], values[row : row + 1, :, pad:])
            assert equal(codes(layer, row), codes(alone))
            for got, expected in zip(full, alone.materialize(), strict=True):
                assert torch.equal(got[row, :, pad:], expected[0])


# -------------------------------------------------------------------- operations against DynamicCache

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.sampled_from([1, 1, 2, 7, 63, 64, 65, 200])),
        st.tuples(st.just("crop"), st.sampled_from([0, 1, 2, 5, 20, 70, 150, 500])),
        st.tuples(st.just("select"), st.sampled_from([[0], [1, 0], [1, 1, 0], [0, 0]])),
        st.tuples(st.just("repeat"), st.sampled_from([1, 2])),
        st.tuples(st.just("reorder"), st.just(None)),
        st.tuples(st.sampled_from(["deepcopy", "offload", "file", "move"]), st.just(None)),
        st.tuples(st.just("reset"), st.just(None)),
    ),
    min_size=3,
    max_size=14,
)


def held_nbytes(root: Any) -> int:
    """Bytes of every storage reachable from ``root``, found by the garbage collector, not by the package's own walk."""
    seen, stack, storages = set(), [root], {}
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type) or (type(item).__module__ == "builtins" and callable(item)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if item.untyped_storage().nbytes():
                storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif not isinstance(item, LlamaConfig):
            stack.extend(gc.get_referents(item))
    return sum(storages.values())


def apply(cache: Any, name: str, argument: Any, batch: int, seed: int) -> Any:
    """One operation on either kind of cache; returns the cache to go on with."""
    if name == "update":
        for index in range(2):
            cache.update(*states(seed + index, batch, argument), index)
    elif name == "crop":
        cache.crop(-argument)
    elif name == "select":
        cache.batch_select_indices(torch.tensor([index % batch for index in argument]))
    elif name == "repeat":
        cache.batch_repeat_interleave(argument)
    elif name == "reorder":
        cache.reorder_cache(torch.arange(batch).flip(0))
    elif name == "reset":
        cache.reset()
    elif name == "deepcopy":
        return copy.deepcopy(cache)
    elif name == "offload":
        for index in range(2):
            cache.offload(index)
            cache.layers[index].prefetch()
    return cache


def own_operation(cache: QuantizedKVCache, name: str) -> QuantizedKVCache:
    """Operations that DynamicCache does not have."""
    if name == "move":
        return cache.to("cpu")
    if name == "file":
        with tempfile.TemporaryDirectory() as folder:
            cache.save(Path(folder) / "cache.safetensors")
            return QuantizedKVCache.load(Path(folder) / "cache.safetensors", LLAMA)
    return cache


def batch_after(name: str, argument: Any, batch: int, length: int) -> int:
    if not length:
        return 2
    return len(argument) if name == "select" else batch * argument if name == "repeat" else batch


PADDINGS = st.sampled_from([[0, 0], [50, 0], [0, 99], [97, 30]])


@settings(max_examples=120)
@given(OPERATIONS, st.sampled_from([0, 5, 40]), st.sampled_from([0, 4]), PADDINGS, st.integers(0, 2**31))
def test_lossless_equals_dynamic_cache_in_every_operation(operations, window, sinks, padding, seed) -> None:
    """Invariants 3 and 4: with format "none" every operation gives exactly what DynamicCache gives for all that is no
    padding, rows padded differently or not; bytes agree after each."""
    spec = TensorSpec("none", group_size=32)
    ours: Any = QuantizedKVCache(LLAMA, KVQuantConfig(spec, spec, window, sinks))
    theirs: Any = DynamicCache(config=LLAMA)
    ours.set_padding(torch.arange(100) >= torch.tensor(padding)[:, None])
    batch = 2
    for step, (name, argument) in enumerate([("update", 100), *operations]):
        ours = own_operation(apply(ours, name, argument, batch, seed + 10 * step), name)
        theirs = apply(theirs, name, argument, batch, seed + 10 * step)
        length = theirs.get_seq_length()
        padding = [padding[row] for row in _surviving_rows(name, argument, batch)] if length else [0, 0]
        batch = batch_after(name, argument, batch, length)
        assert ours.get_seq_length() == length
        assert ours.get_mask_sizes(3, 0) == theirs.get_mask_sizes(3, 0)
        assert ours.memory_report().total == held_nbytes(ours)
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            for row in range(batch if length else 0):
                assert torch.equal(mine.keys[row, :, padding[row] :], other.keys[row, :, padding[row] :])
                assert torch.equal(mine.values[row, :, padding[row] :], other.values[row, :, padding[row] :])


@every_format
@settings(max_examples=12)
@given(st.data(), OPERATIONS, st.integers(0, 2**31))
def test_quantized_operations_move_codes_and_never_recompute_them(name, data, operations, seed) -> None:
    """Invariant 3, and what a quantized cache reads back of surviving tokens is bit-identical across everything but
    closing."""
    config = data.draw(configs(name))
    cache: Any = QuantizedKVCache(LLAMA, config)
    batch, last = 2, None
    for step, (name, argument) in enumerate([("update", 300), *operations]):
        closed = [sum(row.blocks) for row in cache.layers[0].rows]
        cache = own_operation(apply(cache, name, argument, batch, seed + 10 * step), name)
        rows = _surviving_rows(name, argument, batch)
        length = cache.get_seq_length()
        if last is not None and length:
            kept = min(length, last.shape[2])
            stable = min((closed[0] + config.sink_length if closed[0] else 0), kept) if name == "update" else kept
            assert torch.equal(cache.layers[0].keys[:, :, :stable], last[rows][:, :, :stable])
        batch = batch_after(name, argument, batch, length)
        last = cache.layers[0].keys if length else None
        assert cache.memory_report().total == held_nbytes(cache)


def _surviving_rows(name: str, argument: Any, batch: int) -> list[int]:
    if name == "select":
        return [index % batch for index in argument]
    if name == "repeat":
        return [row for row in range(batch) for _ in range(argument)]
    return list(reversed(range(batch))) if name == "reorder" else list(range(batch))


def test_capacity_grows_by_an_eighth_and_is_exact_at_prefill() -> None:
    layer = QuantizedLayer(KVQuantConfig(residual_length=0, sink_length=0))
    layer.update(*states(0, 1, 64 * 100))
    assert layer.key_state.packed.capacity == 100
    assert layer.key_state.window is not None
    assert layer.key_state.window.shape[2] == 0
    feed(layer, *states(1, 1, 64 * 20), [slice(64 * n, 64 * n + 64) for n in range(20)])
    assert layer.key_state.packed.capacity == 126
    assert len(layer.rows[0].blocks) == 120


def test_storage_is_written_in_place() -> None:
    """No copy of the past per step: between growths every step leaves the packed storage and the window where they
    are."""
    layer = QuantizedLayer(KVQuantConfig())
    layer.update(*states(0, 1, 2000))
    feed(layer, *states(1, 1, 200), [slice(t, t + 1) for t in range(200)])
    pointers = set()
    for step in range(64):
        layer.update(*states(2 + step, 1, 1))
        assert layer.key_state.window is not None
        assert layer.key_state.packed.held is not None
        pointers.add((layer.key_state.window.data_ptr(), layer.key_state.packed.held.planes[0].data_ptr()))
    assert len(pointers) <= 2


def test_crop_into_a_closed_block_keeps_the_codes_of_the_rest() -> None:
    config = KVQuantConfig(TensorSpec("int2"), TensorSpec("int2", "token"), 16, 4)
    keys, values = states(0, 1, 300)
    layer = QuantizedLayer(config)
    layer.update(keys, values)
    before = layer.materialize()[0]
    assert layer.rows[0].blocks == [64, 64, 64, 64]
    layer.crop(-100)
    assert layer.rows[0].blocks == [64, 64, 64, 4]
    assert torch.equal(layer.materialize()[0], before[:, :, :200])
    layer.update(*states(1, 1, 100))
    assert layer.rows[0].blocks == [64, 64, 64, 4, 64]
    assert torch.equal(layer.materialize()[0][:, :, :200], before[:, :, :200])
    layer.crop(-298)
    assert layer.rows[0].blocks == []
    assert torch.equal(layer.materialize()[0], keys[:, :, :2])


@pytest.mark.parametrize("positive", [True, False])
def test_crop_accepts_both_meanings(positive) -> None:
    cache = QuantizedKVCache(LLAMA)
    for index in range(2):
        cache.update(*states(0, 1, 50), index)
    cache.crop(30 if positive else -20)
    assert cache.get_seq_length() == 30
    cache.crop(99 if positive else 0)
    assert cache.get_seq_length() == 30
    cache.crop(-1000)
    assert cache.get_seq_length() == 0


def test_inference_mode_then_no_grad() -> None:
    """A cache filled under inference mode goes on under no_grad and with gradients: its storage is made of normal
    tensors."""
    cache = QuantizedKVCache(LLAMA, KVQuantConfig(residual_length=8))
    with torch.inference_mode():
        for index in range(2):
            cache.update(*states(0, 1, 150), index)
            cache.update(*states(1, 1, 1), index)
    keys, values = states(2, 1, 80)
    full, _ = cache.update(keys.requires_grad_(), values, 0)
    full.sum().backward()
    assert torch.equal(keys.grad, torch.ones_like(keys))  # pyright: ignore[reportArgumentType]
    assert not any(tensor.requires_grad for tensor in codes(cache.layers[0]))


def test_what_an_update_returned_stays_as_it_was() -> None:
    """Before the first block closes it is the window itself, without a copy; later tokens stand behind it, and a window
    that moves on leaves it behind. With gradients it is a tensor of its own."""
    config = KVQuantConfig(TensorSpec("int4"), TensorSpec("int4", "token"), 16, 4)
    layer, (keys, values) = QuantizedLayer(config), states(0, 2, 140)
    with torch.no_grad():
        returned = [layer.update(keys[:, :, t : t + 1], values[:, :, t : t + 1]) for t in range(140)]
    assert layer.rows[0].blocks == [64]
    for index, (key, value) in enumerate(returned[:84]):
        assert torch.equal(key, keys[:, :, : index + 1])
        assert torch.equal(value, values[:, :, : index + 1])
    own = QuantizedLayer(config)
    own.update(keys[:, :, :10], values[:, :, :10])
    new = keys[:, :, 10:11].clone().requires_grad_()
    full, _ = own.update(new, values[:, :, 10:11])
    full.sum().backward()
    assert new.grad is not None
    assert torch.equal(new.grad, torch.ones_like(new))
    with torch.no_grad():
        again, _ = own.update(keys[:, :, 11:12], values[:, :, 11:12])
    assert own.key_state.window is not None
    assert again.data_ptr() == own.key_state.window.data_ptr() != full.data_ptr()
