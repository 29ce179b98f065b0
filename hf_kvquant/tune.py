"""Static widths per layer, measured on a few prompts: bits go where an error of the keys would move scores most.

Decision: what an error in a channel does to the scores is known without trying formats. A key channel of residual
variance S met by query energy H, coded with b bits, adds ``H S d(b) / D`` to the variance of a score, d(b) being the
distortion of the b-bit grid for N(0, 1). Summed over channels and layers this is to be small for a given number of
bits, and since each further bit gains less than the one before, taking the largest gains first is optimal (reverse
water-filling; Cover and Thomas, Elements of Information Theory, section 10.3). The spectra ``H S`` are what centred
mixed-width keys keep as their statistics; they are averaged over heads and prompts, so a layer's heads share one
profile and the storage stays rectangular.

The result is an ordinary :class:`KVQuantConfig`. It belongs to the model that it was measured on, not to the prompts:
the benchmark measures on other text than it judges by.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import torch

from hf_kvquant._compat import cache_argument
from hf_kvquant.attach import attach
from hf_kvquant.cache import QuantizedKVCache
from hf_kvquant.config import KVQuantConfig, LayerOverride
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.presets import resolve
from hf_kvquant.spec import PROFILE_CHANNELS, TensorSpec, invalid

DISTORTION = {0: 1.0, 1: 0.36338, 2: 0.11885, 3: 0.037440, 4: 0.011543, 5: 0.0034952, 6: 0.0010400, 8: 0.00008777}
"""Bits -> mean squared error of the mid-rise grid for N(0, 1); tests integrate them anew."""

Widths = tuple[tuple[int, int], ...]


@torch.no_grad()
def tuned_widths(
    model: Any, prompts: Iterable[torch.Tensor], bits: float, base: str | KVQuantConfig = "cm3"
) -> KVQuantConfig:
    """``base`` with a profile of widths for each layer, ``bits`` per key element on average over the layers. Layers
    whose keys ``base`` overrides with a format without widths keep that; the average is over the others.

    Args:
        model: a transformers model in eval mode; it is attached while this runs.
        prompts: token ids ``[B, T]`` without padding, each longer than sinks and calibration tokens of ``base``.
        bits: average width of a key channel, codes only, above 0 and at most 8.
        base: a configuration whose keys have ``widths``, or the name of such a preset.

    Raises:
        ValueError: keys without widths, bits out of range, or nothing measured (no prompt, prompts too short).

    Source: reverse water-filling, Cover and Thomas, Elements of Information Theory, section 10.3.
    """
    config = resolve(base)
    if config.key.widths is None:
        raise invalid("base", base, "its keys must have widths, as those of preset 'cm3'")
    if not 0 < bits <= 8:
        raise invalid("bits", bits, "it must be above 0 and at most 8")
    spectra = _spectra(model, prompts, replace(config, residual_length=0))
    if not spectra:
        needed = config.sink_length + config.calibration_length
        raise invalid("prompts", "nothing measured", f"give at least one prompt of {needed} tokens or more")
    profiles = allocate(torch.stack(list(spectra.values())), bits)
    overrides = dict(config.layers)
    for index, widths in zip(spectra, profiles, strict=True):
        own = config.layers.get(index, LayerOverride())
        overrides[index] = replace(own, key=_with_widths(own.key or config.key, widths))
    return replace(config, layers=overrides)


def _spectra(model: Any, prompts: Iterable[torch.Tensor], config: KVQuantConfig) -> dict[int, torch.Tensor]:
    """By layer: score variance per place of the stored order, ``[64]``, mean over heads, rows and prompts."""
    found: dict[int, list[torch.Tensor]] = {}
    with attach(model):
        for prompt in prompts:
            cache = QuantizedKVCache(model.config, config)
            model(prompt, **{cache_argument(model.forward): cache})
            for index, layer in enumerate(cache.layers):
                if not isinstance(layer, QuantizedLayer) or layer.config.key.widths is None:
                    continue
                if layer.key_state.tables is not None:
                    seen = layer.key_state.tables.importance
                    assert seen is not None
                    found.setdefault(index, []).append(_resampled(seen.square().mean((0, 1)) / seen.shape[-1]))
    return {index: torch.stack(each).mean(0) for index, each in found.items()}


def _resampled(spectrum: torch.Tensor) -> torch.Tensor:
    """A falling spectrum of D places read at the 64 places of a profile."""
    dim = spectrum.shape[0]
    places = (torch.arange(PROFILE_CHANNELS, device=spectrum.device) * dim + dim // 2) // PROFILE_CHANNELS
    return spectrum[places.clamp_max(dim - 1)].cpu()


def allocate(spectra: torch.Tensor, bits: float) -> list[Widths]:
    """Profiles of widths for layers, the largest gains first.

    Args:
        spectra: ``[layers, 64]``, score variance by place of the stored order, each falling.
        bits: average width of a channel over all layers.

    Returns:
        By layer what ``TensorSpec.widths`` takes, ``(bits, channels)`` from the widest, 64 channels in all.
    """
    levels = list(DISTORTION)
    steps = list(pairwise(levels))
    costs = torch.tensor([after - before for before, after in steps], dtype=torch.float64)
    saved = torch.tensor([DISTORTION[before] - DISTORTION[after] for before, after in steps], dtype=torch.float64)
    gains = spectra.double()[..., None] * saved / costs
    order = gains.flatten().argsort(descending=True, stable=True)
    spent = costs.expand_as(gains).flatten()[order].cumsum(0)
    taken = torch.zeros(gains.numel(), dtype=torch.bool)
    taken[order[spent <= bits * spectra.numel()]] = True
    counts = taken.view_as(gains).sum(-1)
    counts[:, 0] = counts[:, 0].clamp_min(1)  # a layer stores something of its keys
    return [_run_lengths([levels[count] for count in layer]) for layer in counts.tolist()]


def _run_lengths(widths: list[int]) -> Widths:
    return tuple((bits, len(list(run))) for bits, run in groupby(sorted(widths, reverse=True)))


def _with_widths(spec: TensorSpec, widths: Widths) -> TensorSpec:
    return replace(spec, format=f"midrise{widths[0][0]}", widths=widths)
