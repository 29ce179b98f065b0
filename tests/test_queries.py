"""Queries read beside the forward are those that attention gets, and nothing of the model or transformers changes."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvquant import PRESETS, QuantizedKVCache, attach
from hf_kvquant.attach import attention_modules
from hf_kvquant.attention import interface
from hf_kvquant.queries import read_queries
from tests import tiny

KINDS = ("llama", "llama_mha", "qwen3", "gemma3", "phi3_sliding", "gpt2", "llama4", "qwen3_next")
CM2 = PRESETS["cm2"].config


class Spying:
    """Keeps the queries of every attention call of sdpa or eager models while it is in force."""

    def __init__(self, model: Any):
        self.seen: list[torch.Tensor] = []
        self.before = model.config._attn_implementation
        self.model = model

    def __enter__(self) -> list[torch.Tensor]:
        wrapped = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def keeping(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(query)
            return wrapped(module, query, *args, **kwargs)

        ALL_ATTENTION_FUNCTIONS["sdpa"] = keeping
        return self.seen

    def __exit__(self, *_: object) -> None:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


class Asking(QuantizedKVCache):
    """Reads the queries of 17 tokens in every update."""

    def __init__(self, config: Any):
        super().__init__(config, CM2)
        self.asked: list[torch.Tensor | str] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kw: Any
    ) -> Any:
        assert self.pending is not None
        self.asked.append(self.pending.queries(3, 20))
        return super().update(key_states, value_states, layer_idx, *args, **kw)


@pytest.mark.parametrize("name", KINDS)
def test_queries_are_those_of_the_attention(name) -> None:
    model = copy.deepcopy(tiny.load(name))
    model.set_attn_implementation("sdpa")
    cache = Asking(model.config)
    interface.register()  # what attaching adds for good, once a process
    names, state = sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()), copy.deepcopy(model.config.to_dict())
    with attach(model), Spying(model) as seen:
        tiny.forward(model, tiny.prompt(2, 30), cache)
    assert cache.asked
    assert len(cache.asked) == len(seen)
    for asked, query in zip(cache.asked, seen, strict=True):
        assert isinstance(asked, torch.Tensor)
        torch.testing.assert_close(asked, query[:, :, 3:20], rtol=1e-5, atol=1e-5)
    assert sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()) == names
    assert model.config.to_dict() == state


class OwnAttention(torch.nn.Module):
    """Attention written out, as models did before transformers' interface."""

    config = tiny.load("llama").config

    def forward(self, hidden_states: torch.Tensor, past_key_values: Any, attention_mask: Any = None) -> torch.Tensor:
        states = hidden_states[:, None]
        keys, values = past_key_values.update(states, states, 0)
        return (states @ keys.mT).softmax(-1) @ values


def test_attention_outside_the_interface_shows_no_queries() -> None:
    found = read_queries(OwnAttention(), {"hidden_states": torch.ones(1, 4, 8)}, "past_key_values", 0, 2)
    assert found == "attention does not go through transformers' interface"


def test_failing_modules_give_their_reason() -> None:
    model = tiny.load("llama")
    module = attention_modules(model)[0]
    hidden = torch.zeros(1, 4, model.config.hidden_size)
    found = read_queries(module, {"hidden_states": hidden, "position_embeddings": None}, "past_key_values", 0, 2)
    assert isinstance(found, str)
    assert found.startswith("reading the queries failed: TypeError")
    assert "hf_kvquant_queries" not in ALL_ATTENTION_FUNCTIONS.valid_keys()


def test_codes_do_not_depend_on_how_tokens_arrive_through_the_model() -> None:
    """One prefill and chunks that cut the calibration tokens give the same statistics up to the model's own rounding,
    and short sequences keep their queries until the statistics are complete, through save and load as well."""
    model, ids = tiny.load("llama"), tiny.prompt(2, 330)
    whole, pieces = (QuantizedKVCache(model.config, CM2) for _ in range(2))
    with attach(model):
        tiny.forward(model, ids, whole)
        for start, end in ((0, 3), (3, 4), (4, 90), (90, 131), (131, 330)):
            tiny.forward(model, ids[:, start:end], pieces)
    for one, other in zip(whole.layers, pieces.layers, strict=True):
        assert one.energies.held is None
        for name, tensor in one.key_state.tables.named().items():
            if name != "order":  # two channels may tie
                torch.testing.assert_close(tensor, other.key_state.tables.named()[name], rtol=1e-4, atol=1e-5)


def test_half_a_calibration_is_saved_and_goes_on(tmp_path) -> None:
    model, ids = tiny.load("llama"), tiny.prompt(1, 330)
    whole, first = (QuantizedKVCache(model.config, CM2) for _ in range(2))
    with attach(model):
        for start, end in ((0, 90), (90, 330)):
            tiny.forward(model, ids[:, start:end], whole)
        tiny.forward(model, ids[:, :90], first)
        first.save(tmp_path / "half.safetensors")
        loaded = QuantizedKVCache.load(tmp_path / "half.safetensors", model.config)
        tiny.forward(model, ids[:, 90:], loaded)
    for one, other in zip(whole.layers, loaded.layers, strict=True):
        assert one.rows[0].blocks
        for name, tensor in one.key_state.tables.named().items():
            assert torch.equal(tensor, other.key_state.tables.named()[name])
        assert torch.equal(one.keys, other.keys)


def test_threads_read_queries_at_the_same_time() -> None:
    model, ids = tiny.load("llama"), tiny.prompt(1, 330)
    caches = [QuantizedKVCache(model.config, CM2) for _ in range(6)]
    with attach(model):
        threads = [threading.Thread(target=tiny.forward, args=(model, ids, cache)) for cache in caches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(cache.layers[1].keys, caches[0].layers[1].keys) for cache in caches)
    assert all("without queries" not in cache.summary() for cache in caches)
    assert "hf_kvquant_queries" not in ALL_ATTENTION_FUNCTIONS.valid_keys()


# -------------------------------------------------------------------- the default preset


def test_the_default_depends_on_whether_the_model_is_attached() -> None:
    model, ids = tiny.load("llama"), tiny.prompt(1, 330)
    cache = QuantizedKVCache(model.config)
    assert "default preset, chosen at the first forward: k4v4, or cr4 if attached" in cache.summary()
    tiny.forward(model, ids, cache)
    assert cache.quantization == PRESETS["k4v4"].config
    assert "default preset k4v4 (the model is not attached)" in cache.summary()
    cache.reset()
    with attach(model):
        tiny.forward(model, ids, cache)
        assert cache.quantization == PRESETS["cr4"].config
        assert "default preset cr4 (the model is attached)" in cache.summary()
        assert "rope centre, channel deviations, hadamard, midrise4" in cache.summary()
        explicit = QuantizedKVCache(model.config, "cr4")
        tiny.forward(model, ids, explicit)
        for one, other in zip(cache.layers, explicit.layers, strict=True):
            assert torch.equal(one.keys, other.keys)
    cache.reset()
    tiny.forward(model, ids, cache)
    assert cache.quantization == PRESETS["k4v4"].config


def test_attaching_later_does_not_change_a_sequence() -> None:
    model, ids = tiny.load("llama"), tiny.prompt(1, 330)
    cache, plain = QuantizedKVCache(model.config), QuantizedKVCache(model.config, "k4v4")
    tiny.forward(model, ids[:, :200], cache)
    tiny.forward(model, ids[:, :200], plain)
    with attach(model):
        tiny.forward(model, ids[:, 200:], cache)
    tiny.forward(model, ids[:, 200:], plain)
    assert torch.equal(cache.layers[0].keys, plain.layers[0].keys)


def test_the_default_keeps_a_given_padding() -> None:
    model, (ids, mask) = tiny.load("llama"), tiny.left_padded(tiny.prompt(2, 330), [0, 40])
    cache = QuantizedKVCache(model.config)
    cache.set_padding(mask)
    with attach(model):
        tiny.forward(model, ids, cache, attention_mask=mask)
    assert [row.padding for row in cache.layers[0].rows] == [0, 40]
    assert cache.quantization == PRESETS["cr4"].config


def test_an_unattached_model_is_told_what_to_do() -> None:
    model = tiny.load("llama")
    cache = QuantizedKVCache(model.config, "cm3")
    with pytest.raises(ValueError, match=r"not attached; write `with attach\(model\): model.generate"):
        tiny.forward(model, tiny.prompt(1, 20), cache)
    tiny.forward(model, tiny.prompt(1, 20), DynamicCache(config=model.config))
