"""Static fp8 scales from a few prompts: one range per layer and key/value head, measured once, nothing stored beside
the codes.

Decision: the result is an ordinary :class:`KVQuantConfig` whose ``layers`` carry the scales, so it is saved as JSON,
passed and reported like any other configuration. Floats lose no precision to a range taken too wide (until codes become
subnormal, 14 octaves down), so the measured maximum is doubled: later text may go beyond it, and saturating is the only
real loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import DynamicCache

from hf_kvquant._compat import cache_argument, is_full_attention
from hf_kvquant.config import KVQuantConfig, LayerOverride
from hf_kvquant.formats import FORMATS
from hf_kvquant.spec import TensorSpec, invalid

_GROUP = 64


@torch.no_grad()
def calibrated_fp8(
    model: Any, prompts: Iterable[torch.Tensor], format: str = "fp8_e4m3", margin: float = 2.0
) -> KVQuantConfig:
    """A configuration with static fp8 scales measured on ``prompts``.

    Args:
        model: a transformers model in eval mode.
        prompts: token ids ``[B, T]`` without padding, as the model takes them.
        format: "fp8_e4m3" or "fp8_e5m2".
        margin: the range stored, relative to the largest magnitude seen in a layer and head; at least 1.

    Raises:
        ValueError: no prompt, another format, a margin below 1, or a model without full-attention layers.

    Source: 8-bit floats from Micikevicius et al. 2022, arXiv 2209.05433.
    """
    if format not in FORMATS or FORMATS[format].dtype is None:
        raise invalid("format", format, "choose fp8_e4m3 or fp8_e5m2")
    if not margin >= 1:
        raise invalid("margin", margin, "it must be at least 1")
    largest: dict[int, list[torch.Tensor]] = {}
    for prompt in prompts:
        cache: Any = DynamicCache(config=model.config)
        model(prompt, **{cache_argument(model.forward): cache})
        for index, layer in enumerate(cache.layers):
            if is_full_attention(layer) and layer.keys is not None and layer.values is not None:
                found = [tensor.abs().amax((0, 2, 3)).float() for tensor in (layer.keys, layer.values)]
                seen = largest.get(index, found)
                largest[index] = [torch.maximum(*pair) for pair in zip(seen, found, strict=True)]
    if not largest:
        raise invalid("prompts", "nothing measured", "give at least one prompt and a model with full-attention layers")
    unit = TensorSpec(format, "head", _GROUP, scale_format="static", scale=1.0)
    layers = {
        index: LayerOverride(*(_static(format, each, margin) for each in pair)) for index, pair in largest.items()
    }
    return KVQuantConfig(unit, unit, layers=layers)


def _static(format: str, largest: torch.Tensor, margin: float) -> TensorSpec:
    limit = FORMATS[format].unit_limit(True)
    scales = tuple(float(value) * margin / limit or 1.0 for value in largest)
    return TensorSpec(format, "head", _GROUP, scale_format="static", scale=scales)
