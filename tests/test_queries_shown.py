"""Queries that attention shows after the update give the very statistics of those read before it, whatever happens in
between, and spare the second projection."""

from __future__ import annotations

import copy
import importlib
import itertools
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from hf_kvquant import PRESETS, KVQuantConfig, QuantizedKVCache, attach
from tests import tiny
from tests.test_recipe_operations import state

QUERY_HEADS, KEY_HEADS, DIM, TOTAL = 6, 2, 16, 230
NAMES = [name for name, preset in PRESETS.items() if preset.config.uses_queries]
CR4 = replace(PRESETS["cr4"].config, residual_length=8)


class GivenAttention(torch.nn.Module):
    """Attention whose queries, keys and values are parts of its input: element by element, so that a token has the same
    ones in every chunk, bit for bit."""

    layer_idx = 0
    is_causal = True
    num_key_value_groups = QUERY_HEADS // KEY_HEADS

    def __init__(self, previous: str = "sdpa", fails: bool = False):
        super().__init__()
        self.config = LlamaConfig(
            hidden_size=96, num_hidden_layers=1, num_attention_heads=QUERY_HEADS, num_key_value_heads=KEY_HEADS
        )
        self.config._attn_implementation = previous
        self.fails = fails

    def forward(self, hidden_states: Any, position_embeddings: Any, past_key_values: Any, **kwargs: Any) -> Any:
        heads = hidden_states.unflatten(2, (-1, DIM)).transpose(1, 2)
        query, key, value = heads.split([QUERY_HEADS, KEY_HEADS, KEY_HEADS], 1)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = past_key_values.update(key, value, self.layer_idx, kwargs=kwargs)
        if self.fails:
            raise MemoryError("between update and attention")
        return self.attend(query, key, value)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        function = ALL_ATTENTION_FUNCTIONS.get_interface(str(self.config._attn_implementation), eager_attention_forward)
        return function(self, query, key, value, None, scaling=DIM**-0.5)


class HiddenAttention(GivenAttention):
    """Goes through the interface for whoever reads its queries, but attends by itself."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        if str(self.config._attn_implementation).endswith("queries"):
            return super().attend(query, key, value)
        return query


def text(seed: int, batch: int = 1, tokens: int = TOTAL) -> torch.Tensor:
    width = (QUERY_HEADS + 2 * KEY_HEADS) * DIM
    return torch.randn(batch, tokens, width, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def call(module: GivenAttention, given: torch.Tensor, cache: Any, start: int, end: int, padding: Any = None) -> None:
    """The tokens ``start .. end`` of ``given``, behind ``padding`` tokens per row."""
    counts = torch.tensor(padding or [0] * given.shape[0])
    positions = (torch.arange(start, end) - counts[:, None]).clamp(min=0)
    angles = positions[..., None] * 10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
    tables = tuple(torch.cat([each, each], -1) for each in (angles.cos(), angles.sin()))
    module(given[:, start:end], position_embeddings=tables, past_key_values=cache, position_ids=positions)


def read_before(config: KVQuantConfig, given: torch.Tensor, padding: Any = None) -> QuantizedKVCache:
    """One prefill of a module that keeps its own attention: the queries are read by a second projection."""
    module = GivenAttention()
    cache = QuantizedKVCache(module.config, config)
    with attach(module, "full"):
        call(module, given, cache, 0, given.shape[1], padding)
    assert cache.layers[0].key_state.tables is not None
    assert cache.layers[0].energies.reason is None
    return cache


def assert_same(cache: QuantizedKVCache, right: QuantizedKVCache, rows: list[int]) -> None:
    for place, row in enumerate(rows):
        for one, other in zip(state(cache, place), state(right, row), strict=True):
            assert torch.equal(one, other)
    assert torch.equal(cache.layers[0].keys, right.layers[0].keys[rows])


@pytest.fixture
def reads(monkeypatch) -> list[tuple[int, int]]:
    """The tokens of every second projection."""
    module: Any = importlib.import_module("hf_kvquant.attach")
    wrapped, spans = module.read_queries, []

    def reading(called: Any, arguments: Any, name: str, start: int, stop: int) -> Any:
        spans.append((start, stop))
        return wrapped(called, arguments, name, start, stop)

    monkeypatch.setattr(module, "read_queries", reading)
    return spans


# -------------------------------------------------------------------- the same statistics


def copied(cache: QuantizedKVCache, path: Path) -> QuantizedKVCache:
    return copy.deepcopy(cache)


def pickled(cache: QuantizedKVCache, path: Path) -> QuantizedKVCache:
    return pickle.loads(pickle.dumps(cache))


def saved(cache: QuantizedKVCache, path: Path) -> QuantizedKVCache:
    cache.save(path)
    return QuantizedKVCache.load(path, GivenAttention().config)


def moved(cache: QuantizedKVCache, path: Path) -> QuantizedKVCache:
    return cache.to("cpu")


shown = st.builds(
    lambda name, window, sinks: replace(PRESETS[name].config, residual_length=window, sink_length=sinks),
    st.sampled_from(NAMES),
    st.sampled_from([0, 1, 60]),
    st.sampled_from([0, 1, 4]),
)


@settings(max_examples=40)
@given(st.data(), shown, st.lists(st.sampled_from([0, 3, 40]), min_size=1, max_size=3), st.integers(0, 2**31))
def test_statistics_are_those_of_queries_read_before(tmp_path_factory, data, config, padding, seed) -> None:
    """Chunks, with rows that wait differently long, and between them copies, files, crops and changes of the batch."""
    given_text, rows = text(seed, len(padding)), list(range(len(padding)))
    for row, count in enumerate(padding):
        given_text[row, :count] = 1e3
    right = read_before(config, given_text, padding)
    module = GivenAttention(data.draw(st.sampled_from(["sdpa", "eager"])))
    cache = QuantizedKVCache(module.config, config)
    cuts = data.draw(st.lists(st.integers(1, TOTAL - 1), max_size=6, unique=True).map(sorted))
    path = tmp_path_factory.getbasetemp() / "shown.safetensors"
    with attach(module, "reference"):
        for start, end in itertools.pairwise([0, *cuts, TOTAL]):
            own = given_text[rows], [padding[row] for row in rows]
            call(module, own[0], cache, start, end, own[1])
            operation = data.draw(st.sampled_from([copied, pickled, saved, moved, None]))
            cache = cache if operation is None else operation(cache, path)
            if end - start > 1 and start > 50 and data.draw(st.booleans()):
                cache.crop(-1)
                call(module, own[0], cache, end - 1, end, own[1])
            if data.draw(st.booleans()):
                cache.batch_select_indices(torch.arange(len(rows)).flip(0))
                rows = rows[::-1]
    assert_same(cache, right, rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("residual_length", [8, 80])
def test_token_by_token(name, residual_length, reads) -> None:
    """Without a second projection, but of the last calibration token where it closes the first block itself."""
    config = replace(PRESETS[name].config, residual_length=residual_length)
    given_text, padding = text(1, 2), [0, 21]
    right = read_before(config, given_text, padding)
    module, steps = GivenAttention(), []
    with attach(module, "reference"):
        cache = QuantizedKVCache(module.config, config)
        cache.set_padding(torch.arange(TOTAL) >= torch.tensor(padding)[:, None])
        for token in range(TOTAL):
            reads.clear()
            call(module, given_text, cache, token, token + 1, padding)
            steps += [token] * bool(reads)
    assert_same(cache, right, [0, 1])
    assert steps == ([131, 152] if residual_length == 8 else [])


@pytest.mark.parametrize("removed", [1, 7, 40])
def test_steps_that_are_taken_back_and_given_again(removed) -> None:
    given_text, module = text(1), GivenAttention()
    cache = QuantizedKVCache(module.config, CR4)
    with attach(module, "reference"):
        for start, end in ((0, 60), (60 - removed, TOTAL)):
            for token in range(start, end):
                call(module, text(2) if start == 0 and token >= 60 - removed else given_text, cache, token, token + 1)
            cache.crop(-removed if start == 0 else 0)
    assert_same(cache, read_before(CR4, given_text), [0])


def test_a_chunk_is_not_kept_for_the_few_tokens_that_are_wanted() -> None:
    """Queries of single tokens wait to be squared together; those of a chunk would hold all of it."""
    module, config = GivenAttention(), replace(CR4, residual_length=1000)
    cache = QuantizedKVCache(module.config, config)
    with attach(module, "reference"):
        call(module, text(1), cache, 0, 5)
        assert not cache.layers[0].energies._steps
        call(module, text(1), cache, 5, 6)
        assert cache.layers[0].energies._steps


def test_under_inference_mode_and_after_it() -> None:
    given_text, module = text(1), GivenAttention()
    cache = QuantizedKVCache(module.config, CR4)
    with attach(module, "reference"):
        with torch.inference_mode():
            for token in range(70):
                call(module, given_text, cache, token, token + 1)
        for token in range(70, TOTAL):
            call(module, given_text, cache, token, token + 1)
    assert_same(cache, read_before(CR4, given_text), [0])


def test_threads_with_a_cache_each() -> None:
    module, texts = GivenAttention(), [text(seed) for seed in range(4)]
    caches = [QuantizedKVCache(module.config, CR4) for _ in texts]

    def work(index: int) -> None:
        for token in range(TOTAL):
            call(module, texts[index], caches[index], token, token + 1)

    with attach(module, "reference"):
        call(module, texts[0], QuantizedKVCache(module.config, CR4), 0, 2)  # the rotation is probed
        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for cache, each in zip(caches, texts, strict=True):
        assert_same(cache, read_before(CR4, each), [0])


# -------------------------------------------------------------------- when a second projection is run


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_models_project_once_in_decode_steps(name, implementation, reads) -> None:
    model = copy.deepcopy(tiny.load(name))
    model.set_attn_implementation(implementation)
    ids = tiny.prompt(1, 150)
    cache = QuantizedKVCache(model.config, "cr4")
    with attach(model, "reference"):
        tiny.forward(model, ids[:, :20], cache)
        for token in range(20, 150):
            tiny.forward(model, ids[:, token : token + 1], cache)
    assert not reads
    assert "without queries" not in cache.summary()
    assert not [layer for layer in cache.layers if hasattr(layer, "energies") and layer.energies.held is None]


def test_a_prefill_that_closes_the_first_block_reads_before(reads) -> None:
    model, ids = tiny.load("llama"), tiny.prompt(1, 330)
    with attach(model, "reference"):
        tiny.forward(model, ids, QuantizedKVCache(model.config, CR4))
    assert reads == [(4, 132)] * 3


def test_a_module_that_attends_by_itself_is_read_after_all(reads) -> None:
    given_text, module = text(1), HiddenAttention()
    right = read_before(CR4, given_text)
    reads.clear()
    cache = QuantizedKVCache(module.config, CR4)
    with attach(module, "reference"):
        for start, end in ((0, 100), (100, 101), (101, 102), (102, TOTAL)):
            call(module, given_text, cache, start, end)
    assert_same(cache, right, [0])
    assert reads == [(4, 100), (0, 1), (0, 1), (0, 30)]


# -------------------------------------------------------------------- nothing stale


def test_after_an_exception_nothing_stale_is_noted() -> None:
    """The forward ends between update and attention: neither this module's next attention, with another cache or none,
    nor another module's is taken for it; the tokens given again are."""
    given_text, other = text(1), text(2)
    module, unattached = GivenAttention(), GivenAttention()
    cache = QuantizedKVCache(module.config, CR4)
    with attach(module, "reference"):
        call(module, given_text, cache, 0, 60)
        held = cache.layers[0].energies.held
        module.fails = True
        with pytest.raises(MemoryError):
            call(module, given_text, cache, 60, 61)
        module.fails = False
        unattached.config = module.config
        call(unattached, other, DynamicCache(), 0, 1)
        call(module, other, DynamicCache(), 0, 1)
        assert torch.equal(cache.layers[0].energies.held[:, :, :56], held[:, :, :56])
        assert cache.layers[0].energies.held[:, :, 56:].isnan().all()
        copies = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
        assert all(each.layers[0].energies.wanted is None for each in copies)
        cache.pending = tiny.pending(torch.zeros(1), torch.zeros(1, 1))  # as if interrupted before the update
        assert copy.deepcopy(cache).pending is None
        for each in (cache, *copies):
            each.crop(-1)
            for token in range(60, TOTAL):
                call(module, given_text, each, token, token + 1)
            assert_same(each, read_before(CR4, given_text), [0])


def test_tokens_whose_queries_were_never_seen_are_left_out() -> None:
    """Their place does not count as a query of zeros."""
    given_text, module = text(1), GivenAttention()
    cache = QuantizedKVCache(module.config, CR4)
    with attach(module, "reference"):
        call(module, given_text, cache, 0, 60)
        module.fails = True
        with pytest.raises(MemoryError):
            call(module, given_text, cache, 60, 61)
        module.fails = False
        call(module, given_text, cache, 61, 131)
    energies = cache.layers[0].energies
    seen = torch.cat([energies.held[:, :, :56], energies.held[:, :, 57:127]], 2)
    assert not seen.isnan().any()
    torch.testing.assert_close(energies.mean(slice(None)), seen.mean(2))
