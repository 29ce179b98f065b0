"""``generate`` in all its modes: the lossless format says what DynamicCache says, to the bit; quantized formats keep
its accounting.

A scenario is a function of a model and of a maker of caches, and returns all it has seen: tokens, logits, lengths.
Prompts are long enough for blocks to close behind a window of 16 tokens. The first tests make sure that equality means
something: the models are diverse, and a damaged block changes what they say.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cache

from hf_kvquant import KVQuantConfig, QuantizedKVCache
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.presets import UNATTACHED_PRESETS
from tests import tiny

MODELS = ("llama", "qwen3", "gemma3")
PROMPT, NEW = 150, 20
QUANTIZED_PRESETS = [name for name in UNATTACHED_PRESETS if name != "none"]


def quantized_layers(cache: Any) -> list[QuantizedLayer]:
    own = getattr(cache, "self_attention_cache", cache)
    return [layer for layer in own.layers if isinstance(layer, QuantizedLayer)]


@dataclass
class Seen:
    """What a scenario shows of its cache."""

    make: Callable[[], Cache]
    folder: Path
    tokens: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def note(self, cache: Any) -> None:
        own = getattr(cache, "self_attention_cache", cache)
        self.lengths.append([own.get_seq_length(index) for index in range(len(own.layers))])
        self.blocks.append(max((len(row.blocks) for layer in quantized_layers(cache) for row in layer.rows), default=0))

    def generate(self, model: Any, ids: torch.Tensor, cache: Cache, new: int = NEW, **options: Any) -> torch.Tensor:
        """One call of generate on ``cache``, noted; returns the ids of all sequences."""
        out = tiny.generate(model, ids, cache, new, output_logits=True, return_dict_in_generate=True, **options)
        self.tokens.append(out.sequences)
        self.logits.extend(out.logits)
        self.note(cache)
        return out.sequences

    def reloaded(self, cache: Any, model: Any) -> Cache:
        if not isinstance(cache, QuantizedKVCache):
            return copy.deepcopy(cache)
        cache.save(self.folder / "cache.safetensors")
        return QuantizedKVCache.load(self.folder / "cache.safetensors", model.config)


# -------------------------------------------------------------------- scenarios


def greedy(model: Any, seen: Seen) -> None:
    seen.generate(model, tiny.prompt(2, PROMPT), seen.make(), 80)


def sampling(model: Any, seen: Seen) -> None:
    torch.manual_seed(0)
    seen.generate(model, tiny.prompt(2, PROMPT), seen.make(), do_sample=True, temperature=3.0, top_k=0)


def beams(model: Any, seen: Seen) -> None:
    seen.generate(model, tiny.prompt(2, PROMPT), seen.make(), 70, num_beams=4, num_return_sequences=2)


def sampled_beams(model: Any, seen: Seen) -> None:
    torch.manual_seed(0)
    seen.generate(model, tiny.prompt(1, PROMPT), seen.make(), num_beams=3, do_sample=True, temperature=3.0)


def prompt_lookup(model: Any, seen: Seen) -> None:
    """The model's own words stand in the prompt already, followed by what it did not say."""
    ids = tiny.prompt(1, 100)
    said = tiny.generate(model, ids, tiny.new_cache(model, None), 40)[:, 100:]
    own_words = torch.cat([ids, said[:, :12], said[:, 30:], ids], 1)
    seen.generate(model, own_words, seen.make(), 70, prompt_lookup_num_tokens=10, max_matching_ngram_size=2)


def assistant(model: Any, seen: Seen) -> None:
    """An assistant that is right most of the time: the model itself with a little noise on its weights."""
    helper, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for parameter in helper.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
    seen.generate(model, tiny.prompt(1, PROMPT), seen.make(), 70, assistant_model=helper)


def chunked_prefill(model: Any, seen: Seen) -> None:
    seen.generate(model, tiny.prompt(2, PROMPT), seen.make(), prefill_chunk_size=37)


def left_padding(model: Any, seen: Seen) -> None:
    ids, mask = tiny.left_padded(tiny.prompt(3, PROMPT), [0, 7, 61])
    seen.generate(model, ids, seen.make(), 80, attention_mask=mask)


def left_padding_in_chunks(model: Any, seen: Seen) -> None:
    ids, mask = tiny.left_padded(tiny.prompt(3, PROMPT), [0, 7, 61])
    seen.generate(model, ids, seen.make(), attention_mask=mask, prefill_chunk_size=16)


def several_turns(model: Any, seen: Seen) -> None:
    cache, ids = seen.make(), tiny.prompt(2, 90)
    for turn in range(3):
        said = seen.generate(model, ids, cache, 30)
        ids = torch.cat([said, tiny.prompt(2, 40, seed=10 + turn)], 1)


def reset(model: Any, seen: Seen) -> None:
    cache = seen.make()
    for batch in (2, 1, 3):
        seen.generate(model, tiny.prompt(batch, PROMPT), cache)
        if isinstance(cache, QuantizedKVCache):
            cache.reset()
        else:  # transformers 5.17 resets its layers to zeros, for the same batch size only
            cache = seen.make()
        seen.note(cache)


def fork(model: Any, seen: Seen) -> None:
    """Two continuations of one prefix, then the prefix itself again: no fork has touched another."""
    prefix, cache = tiny.prompt(1, PROMPT), seen.make()
    tiny.forward(model, prefix, cache)
    for seed in (2, 3):
        seen.generate(model, torch.cat([prefix, tiny.prompt(1, 20, seed)], 1), copy.deepcopy(cache))
    seen.generate(model, torch.cat([prefix, tiny.prompt(1, 20, 2)], 1), cache)


def save_and_load(model: Any, seen: Seen) -> None:
    cache = seen.make()
    ids = seen.generate(model, tiny.prompt(2, PROMPT), cache)
    again = seen.reloaded(cache, model)
    for each in (again, cache):
        seen.generate(model, ids, each, 70)


def fan_out(model: Any, seen: Seen) -> None:
    """One prefill of two prompts, each continued three times."""
    prefix, cache = tiny.prompt(2, PROMPT), seen.make()
    tiny.forward(model, prefix, cache)
    cache.batch_repeat_interleave(3)
    seen.generate(model, torch.cat([prefix.repeat_interleave(3, 0), tiny.prompt(6, 20, 2)], 1), cache, 50)
    cache.batch_select_indices(torch.tensor([1, 4]))
    seen.note(cache)


def crop_and_regenerate(model: Any, seen: Seen) -> None:
    """Back into the window and into closed blocks; another turn after each. A sliding layer cannot go further back than
    its own window, in DynamicCache neither."""
    cache = seen.make()
    cache.activate_past_recording()
    ids = seen.generate(model, tiny.prompt(2, PROMPT), cache)
    for removed in (3, 1, 5) if any(cache.is_sliding) else (3, 70, 120):
        cache.crop(-removed)
        seen.note(cache)
        ids = torch.cat([ids[:, : cache.get_seq_length()], tiny.prompt(2, 15, removed)], 1)
        ids = seen.generate(model, ids, cache)


def inference_mode_then_no_grad(model: Any, seen: Seen) -> None:
    cache, ids = seen.make(), tiny.prompt(2, PROMPT)
    with torch.inference_mode():
        seen.logits.append(model(ids, past_key_values=cache).logits.clone())
    for start in range(0, 90, 30):
        seen.logits.append(tiny.forward(model, tiny.prompt(2, 30, start), cache))
    with torch.inference_mode():
        seen.logits.append(model(ids, past_key_values=cache).logits.clone())
    seen.note(cache)


Scenario = Callable[[Any, Seen], None]
SCENARIOS: tuple[Scenario, ...] = (
    greedy, sampling, beams, sampled_beams, prompt_lookup, assistant, chunked_prefill, left_padding,
    left_padding_in_chunks, several_turns, reset, fork, save_and_load, fan_out, crop_and_regenerate,
    inference_mode_then_no_grad,
)  # fmt: skip
HYBRID_SCENARIOS: tuple[Scenario, ...] = (beams, prompt_lookup, assistant, left_padding, crop_and_regenerate)


def observe(scenario: Scenario, name: str, quantization: KVQuantConfig | None, folder: Path) -> Seen:
    model = tiny.load(name)
    seen = Seen(lambda: tiny.new_cache(model, quantization), folder)
    with torch.random.fork_rng():
        scenario(model, seen)
    return seen


@functools.cache
def observe_dynamic(scenario: Scenario, name: str) -> Seen:
    if tiny.BEFORE_5_24 and name == "gemma3" and scenario in (assistant, crop_and_regenerate):
        pytest.skip("sliding layers of this transformers cannot be cropped in these scenarios, in DynamicCache neither")
    return observe(scenario, name, None, Path())


# -------------------------------------------------------------------- tests


@pytest.mark.parametrize("name", sorted(tiny.MODELS))
def test_tiny_models_say_many_tokens(name: str) -> None:
    model = tiny.load(name)
    tokens = tiny.generate(model, tiny.prompt(2, 80), tiny.new_cache(model, None))[:, -40:]
    assert min(len(set(row.tolist())) for row in tokens) >= 10


@pytest.mark.parametrize(
    "name", [name for name in sorted(tiny.MODELS) if name != "t5" and not name.endswith("sliding")]
)
def test_a_damaged_block_changes_the_tokens(name: str) -> None:
    model, ids, said = tiny.load(name), tiny.prompt(1, 100), []
    for factor in (1.0, 1.5):
        cache = tiny.new_cache(model, tiny.lossless())
        tiny.forward(model, ids[:, :-1], cache)
        blocks = quantized_layers(cache)[-1].value_state.packed.held
        assert blocks is not None
        blocks.planes[0].mul_(factor)
        said.append(tiny.generate(model, ids, cache)[0, 100:].tolist())
    assert said[0] != said[1]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda function: function.__name__)
def test_lossless_equals_dynamic_cache(scenario: Scenario, name: str, tmp_path: Path) -> None:
    expected, seen = observe_dynamic(scenario, name), observe(scenario, name, tiny.lossless(), tmp_path)
    assert max(seen.blocks) >= 2
    assert seen.lengths == expected.lengths
    for got, right in zip(seen.tokens + seen.logits, expected.tokens + expected.logits, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=0)


def assert_same_accounting(scenario: Scenario, name: str, quantization: KVQuantConfig, folder: Path) -> None:
    expected, seen = observe_dynamic(scenario, name), observe(scenario, name, quantization, folder)
    assert max(seen.blocks) >= 2
    assert seen.lengths == expected.lengths
    assert [tokens.shape for tokens in seen.tokens] == [tokens.shape for tokens in expected.tokens]
    assert all(bool(logits.isfinite().all()) for logits in seen.logits)


@pytest.mark.parametrize(
    ("scenario", "name"),
    [(each, "llama") for each in SCENARIOS] + [(each, "gemma3") for each in HYBRID_SCENARIOS],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_quantized_keeps_the_accounting(scenario: Scenario, name: str, tmp_path: Path) -> None:
    assert_same_accounting(scenario, name, tiny.quantized("int3", "int4"), tmp_path)


@pytest.mark.parametrize("preset", QUANTIZED_PRESETS)
@pytest.mark.parametrize("scenario", [prompt_lookup, left_padding], ids=lambda function: function.__name__)
def test_presets_keep_the_accounting(scenario: Scenario, preset: str, tmp_path: Path) -> None:
    config = UNATTACHED_PRESETS[preset].config
    assert_same_accounting(scenario, "llama", KVQuantConfig(config.key, config.value, residual_length=16), tmp_path)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_encoder_decoder_lossless_equals_dynamic_cache(options: dict[str, int], tmp_path: Path) -> None:
    model, ids, made = tiny.load("t5"), tiny.prompt(2, 30), []
    for quantization in (None, tiny.lossless()):
        seen = Seen(lambda quantization=quantization: tiny.new_cache(model, quantization), tmp_path)
        seen.generate(model, ids, seen.make(), 180, **options)
        made.append(seen)
    assert made[1].blocks[0] >= 2
    assert made[0].lengths == made[1].lengths
    assert torch.equal(made[0].tokens[0], made[1].tokens[0])
    assert all(torch.equal(a, b) for a, b in zip(made[0].logits, made[1].logits, strict=True))
