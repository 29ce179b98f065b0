"""Cases that need a model: what generate says, on which architectures, in which of its modes."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache

from hf_kvquant import KVQuantConfig, QuantizedKVCache, TensorSpec
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.presets import UNATTACHED_PRESETS
from tests import tiny
from tests.tiny import assert_same_tensors, layer_tensors


def row_codes(layer: Any, row: int) -> dict[str, torch.Tensor]:
    blocks = len(layer.rows[row].blocks)
    return {name: tensor[row, :, :blocks] for name, tensor in layer_tensors(layer).items()}


def read(cache: Any, layer: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.layers[layer].keys, cache.layers[layer].values


# -------------------------------------------------------------------- 1: the window after prefill


@pytest.mark.parametrize("formats", [("int4", "int4"), ("int2", "int2"), ("fp8_e4m3", "fp8_e4m3")])
@pytest.mark.parametrize("window", [16, 21, 128, 4096])
def test_case_01_the_window_holds_the_newest_tokens_after_prefill(window: int, formats: tuple[str, str]) -> None:
    model, ids = tiny.load("llama"), tiny.prompt(2, 41)
    ours, dynamic = tiny.new_cache(model, tiny.quantized(*formats, window)), tiny.new_cache(model, None)
    prefill = [tiny.forward(model, ids[:, :40], cache) for cache in (ours, dynamic)]
    assert torch.equal(*prefill)
    kept = min(40, window)
    for got, right in zip(read(ours, 0), read(dynamic, 0), strict=True):
        assert torch.equal(got[:, :, -kept:], right[:, :, -kept:])
        assert torch.equal(got[:, :, :4], right[:, :, :4])
    step = [tiny.forward(model, ids[:, 40:], cache) for cache in (ours, dynamic)]
    assert torch.equal(*step) == (window >= 21)


def test_case_01_presets_keep_a_short_prompt_exact() -> None:
    model, ids = tiny.load("llama"), tiny.prompt(2, 41)
    dynamic = tiny.new_cache(model, None)
    tiny.forward(model, ids[:, :40], dynamic)
    exact = tiny.forward(model, ids[:, 40:], dynamic)
    for preset in UNATTACHED_PRESETS:
        cache = tiny.new_cache(model, preset)
        tiny.forward(model, ids[:, :40], cache)
        assert torch.equal(tiny.forward(model, ids[:, 40:], cache), exact)


# -------------------------------------------------------------------- 4, 5: neighbours and padding


class Spoiled(QuantizedKVCache):
    """Multiplies what rows from the second on deliver, or puts garbage in the padding of a prompt."""

    loud = 1.0
    padded = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        new = [key_states.clone(), value_states.clone()]
        for tensor in new:
            tensor[1:] *= self.loud
            if tensor.shape[2] > 1:
                tensor[:, :, : self.padded] = 1e4
        return super().update(new[0], new[1], layer_idx, *args, **kwargs)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("values", ["int4", "int2"])
def test_case_04_a_loud_neighbour_changes_nothing(values: str, name: str) -> None:
    """The same batch with a neighbour 1 and 30 times as large: the same matrix kernels, so identical bits."""
    model, ids, made = tiny.load(name), tiny.prompt(2, 90), []
    for loud in (1.0, 30.0):
        cache = Spoiled(model.config, tiny.quantized("int4", values))
        cache.loud = loud
        made.append((tiny.generate(model, ids, cache), cache))
    (quiet, first), (noisy, second) = made
    assert torch.equal(quiet[0], noisy[0])
    assert not torch.equal(quiet[1], noisy[1])
    for one, other in zip(first.layers, second.layers, strict=True):
        assert_same_tensors(row_codes(one, 0), row_codes(other, 0))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_case_04_a_batch_of_eight_against_alone(name: str) -> None:
    model, ids = tiny.load(name), tiny.prompt(8, 90)
    together = tiny.generate(model, ids, tiny.new_cache(model, tiny.quantized()))
    for row in range(0, 8, 2):
        alone = tiny.generate(model, ids[row : row + 1], tiny.new_cache(model, tiny.quantized()))
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("source", ["position_ids", "set_padding"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_case_05_a_padded_row_says_the_same(name: str, source: str) -> None:
    """40 tokens padded to 64, with 1e4 in the padding. The model computes in fp64: the two shapes take different
    matrix kernels, in fp32 one scale in some hundred comes out an fp16 step apart, by the model's rounding."""
    if source == "position_ids" and tiny.BEFORE_5_24:
        pytest.skip("the models of this transformers do not hand position ids to the cache")
    model = copy.deepcopy(tiny.load(name)).double()
    ids, mask = tiny.left_padded(tiny.prompt(1, 64), [24])
    config = tiny.quantized(residual_length=8)
    padded, alone = Spoiled(model.config, config), QuantizedKVCache(model.config, config)
    padded.padded = 24
    if source == "set_padding":
        padded.set_padding(mask)
    said = tiny.generate(model, ids, padded, attention_mask=mask)[0, 64:]
    assert torch.equal(said, tiny.generate(model, ids[:, 24:], alone)[0, 40:])
    assert padded.padding_source == source
    for one, other in zip(padded.layers, alone.layers, strict=True):
        if isinstance(one, QuantizedLayer):
            assert one.rows[0].blocks
            assert_same_tensors(row_codes(one, 0), row_codes(other, 0))


# -------------------------------------------------------------------- 14: architectures

NATIVE = {
    "gemma2": {0, 2},
    "gemma3": {0, 2},
    "mistral_sliding": {0, 1, 2},
    "phi3_sliding": {0, 1, 2},
    "gpt_oss": {0, 2},
    "llama4": {0, 1, 2},
    "qwen3_next": {0, 1, 2},
    "bamba": {0, 2},
    "llama": set(),
    "llama_mha": set(),
    "qwen3": set(),
    "gpt2": set(),
}


def layers_called(summary: str, kind: str) -> set[int]:
    """Layer numbers of the lines of ``summary`` that say ``kind``."""
    found: set[int] = set()
    for first, last in re.findall(rf"^layers? (\d+)(?:-(\d+))?: {kind}", summary, flags=re.MULTILINE):
        found |= set(range(int(first), int(last or first) + 1))
    return found


@pytest.mark.parametrize("name", NATIVE)
def test_case_14_full_attention_is_quantized_and_the_rest_native(name: str) -> None:
    model = tiny.load(name)
    ids, mask = tiny.left_padded(tiny.prompt(2, 90), [0, 11])
    cache: Any = tiny.new_cache(model, tiny.quantized())
    tiny.generate(model, ids, cache, attention_mask=mask)
    everything = set(range(len(cache.layers)))
    summary = cache.summary()
    assert layers_called(summary, "native") == NATIVE[name]
    assert layers_called(summary, "quantized") == everything - NATIVE[name]
    natives = DynamicCache(config=model.config).layers
    for index, layer in enumerate(cache.layers):
        if index in NATIVE[name]:
            assert type(layer) is type(natives[index])
        else:
            assert cache.get_seq_length(index) == 129
            assert [sum(row.blocks) for row in layer.rows] == [96, 96]
    if everything - NATIVE[name]:
        assert cache.memory_report().packed_bits_per_element == pytest.approx(4 + 2 * 16 / 16 + 8 / 256, abs=1e-9)


@pytest.mark.parametrize("name", NATIVE)
def test_case_14_lossless_equals_dynamic_cache(name: str) -> None:
    model = tiny.load(name)
    ids, mask = tiny.left_padded(tiny.prompt(2, 100), [0, 11])
    options = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
    expected, got = (
        tiny.generate(model, ids, tiny.new_cache(model, config), 40, **options) for config in (None, tiny.lossless())
    )
    assert torch.equal(expected.sequences, got.sequences)
    assert all(torch.equal(a, b) for a, b in zip(expected.logits, got.logits, strict=True))


# -------------------------------------------------------------------- 16: both names of the argument

NAMES = [("past_key_values",), ("cache",), ("past_key_values", "cache")]


@pytest.mark.parametrize("names", NAMES, ids="+".join)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_case_16_both_argument_names(name: str, names: tuple[str, ...]) -> None:
    model, ids = tiny.load(name), tiny.prompt(2, 100)
    if "cache" in names and tiny.BEFORE_5_24:
        pytest.skip("this transformers has no argument named cache")
    expected = tiny.generate(model, ids, tiny.new_cache(model, tiny.quantized()), 40)
    cache = QuantizedKVCache(model.config, tiny.quantized())
    fresh = QuantizedKVCache(model.config, tiny.quantized())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = dict.fromkeys(names, cache)
        said = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, **given)
        with torch.no_grad():
            out = model(ids, **dict.fromkeys(names, fresh))
    assert torch.equal(said, expected)
    assert cache.get_seq_length() == 139
    assert fresh.get_seq_length() == 100
    assert out.past_key_values is fresh
    assert not [
        each for each in caught if "hf_kvquant" in each.filename or "kvquant" in str(each.message).split("=")[0]
    ]
    assert names != ("cache",) or caught == []


# -------------------------------------------------------------------- 17, 18: beams and candidates


@pytest.mark.parametrize(("name", "window"), [("llama_mha", 3), ("llama_mha", 120), ("gemma2", 16), ("gpt_oss", 3)])
def test_case_17_beams_with_a_window_smaller_than_the_prompt(name: str, window: int) -> None:
    model, ids = tiny.load(name), tiny.prompt(2, 130)
    options = {"num_beams": 4, "num_return_sequences": 2}
    caches = [
        tiny.new_cache(model, config)
        for config in (None, tiny.lossless(window), tiny.quantized("int4", "int2", window))
    ]
    expected, lossless, quantized = (tiny.generate(model, ids, cache, 70, **options) for cache in caches)
    assert torch.equal(lossless, expected)
    assert quantized.shape == expected.shape == (4, 200)
    assert [cache.get_seq_length() for cache in caches] == [199] * 3


@pytest.mark.parametrize("mode", ["lookup", "assistant"])
@pytest.mark.parametrize("name", ["llama_mha", "gemma2"])
def test_case_18_candidates(name: str, mode: str) -> None:
    if tiny.BEFORE_5_24 and (name, mode) == ("gemma2", "assistant"):
        pytest.skip("this transformers cannot crop its own sliding layers here, in DynamicCache neither")
    model, ids = tiny.load(name), torch.cat([tiny.prompt(1, 80)] * 2, 1)
    options: dict[str, Any] = (
        {"prompt_lookup_num_tokens": 10} if mode == "lookup" else {"assistant_model": copy.deepcopy(model)}
    )
    caches = [tiny.new_cache(model, config) for config in (None, tiny.lossless(5), tiny.quantized("int4", "int2", 5))]
    expected, lossless, quantized = (tiny.generate(model, ids, cache, 70, **options) for cache in caches)
    assert torch.equal(lossless, expected)
    assert quantized.shape == expected.shape == (1, 230)
    assert [cache.get_seq_length() for cache in caches] == [caches[0].get_seq_length()] * 3


# -------------------------------------------------------------------- 19: turns


@pytest.mark.parametrize(
    "quantization", [tiny.lossless(), tiny.quantized(), "k4v4", "fp8"], ids=["none", "16", "k4v4", "fp8"]
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_case_19_turns_and_reset(name: str, quantization: Any) -> None:
    """Turns equal the same turns on a fresh cache, for the lossless format on DynamicCache; also after reset."""
    model = tiny.load(name)

    def turns(cache: Cache, *lengths: int) -> list[torch.Tensor]:
        logits = []
        for length in lengths:
            before = cache.get_seq_length()
            logits.append(tiny.forward(model, tiny.prompt(1, length, length), cache))
            assert cache.get_seq_length() == before + length
        return logits

    cache = tiny.new_cache(model, quantization)
    first = turns(cache, 210, 90)
    cache.reset()
    assert cache.get_seq_length() == 0
    third = turns(cache, 230, 60)
    reference = (
        None if isinstance(quantization, KVQuantConfig) and quantization.key == TensorSpec("none") else quantization
    )
    for logits, lengths in ((first, (210, 90)), (third, (230, 60))):
        expected = turns(tiny.new_cache(model, reference), *lengths)
        assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))


def test_layer_types_are_listed_for_every_tiny_model() -> None:
    assert set(NATIVE) | {"t5"} == set(tiny.MODELS)
