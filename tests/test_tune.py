"""Widths by layer: the allocation against brute force, and a tuned configuration on a model."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_kvquant import PRESETS, KVQuantConfig, QuantizedKVCache, attach, tuned_widths
from hf_kvquant.formats import FORMATS
from hf_kvquant.tune import DISTORTION, allocate
from tests import tiny
from tests.test_formats import distortion


@pytest.mark.parametrize("bits", [bits for bits in DISTORTION if bits])
def test_distortions_are_those_of_the_grids(bits) -> None:
    assert DISTORTION[bits] == pytest.approx(distortion(FORMATS[f"midrise{bits}"].step, bits), rel=2e-3)


def test_allocation_is_the_best_there_is() -> None:
    """Two layers of two kinds of channels each: every way to spend the bits, by brute force."""
    energies = [(9.0, 0.3), (1.5, 0.05)]
    spectra = torch.tensor([[high] * 32 + [low] * 32 for high, low in energies])
    for bits in (1.0, 2.0, 3.0, 4.5):
        best = min(
            sum(e * DISTORTION[b] for e, b in zip(itertools.chain(*energies), choice, strict=True)) * 32
            for choice in itertools.product(DISTORTION, repeat=4)
            if sum(choice) * 32 <= bits * 128
        )
        found = allocate(spectra, bits)
        assert sum(b * n for widths in found for b, n in widths) <= bits * 128
        cost = 0.0
        for (high, low), widths in zip(energies, found, strict=True):
            places = [b for b, n in widths for _ in range(n)]
            cost += sum(e * DISTORTION[b] for e, b in zip([high] * 32 + [low] * 32, places, strict=True))
        assert cost <= best * (1 + 1e-9)


def test_tuned_configuration_spends_its_budget_and_runs() -> None:
    model = tiny.load("llama")
    config = tuned_widths(model, [tiny.prompt(2, 140), tiny.prompt(1, 150, seed=2)], 2.5)
    assert KVQuantConfig.from_json(config.to_json()) == config
    widths = [override.key.widths for override in config.layers.values() if override.key]
    assert len(widths) == len(tiny.new_cache(model, None).layers)
    spent = sum(b * n for each in widths for b, n in each or ()) / (64 * len(widths))
    assert 2.5 - 2 / (64 * len(widths)) <= spent <= 2.5
    cache = QuantizedKVCache(model.config, config)
    with attach(model):
        tiny.generate(model, tiny.prompt(1, 300), cache, 4)
    assert cache.layers[0].rows[0].blocks


@pytest.mark.parametrize(
    ("prompts", "bits", "base", "message"),
    [
        ([], 3, "cm3", "prompts='nothing measured' is not valid: give at least one prompt of 132 tokens"),
        ([tiny.prompt(1, 131)], 3, "cm3", "give at least one prompt of 132 tokens"),
        ([tiny.prompt(1, 140)], 0, "cm3", "bits=0 is not valid: it must be above 0 and at most 8"),
        ([tiny.prompt(1, 140)], 3, "cr4", "base='cr4' is not valid: its keys must have widths"),
        ([tiny.prompt(1, 140)], 3, PRESETS["k4v4"].config, "base=KVQuantConfig.* its keys must have widths"),
    ],
)
def test_bad_requests(prompts, bits, base, message) -> None:
    with pytest.raises(ValueError, match=message):
        tuned_widths(tiny.load("llama"), prompts, bits, base)
