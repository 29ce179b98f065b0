"""The formats that ``benchmarks.quality`` compares, and the bits that each of them really takes.

To add one: a line in ``CONFIGS``; presets are there by themselves.

Every format of ours runs twice: "closed", without a residual window, so that everything behind the sinks is quantized,
and "window", as configured. transformers' caches quantize the whole prompt, window included: they run once, "closed".

Bits (``hf_kvquant.schemes.bits_held``) are counted on caches filled in bfloat16, whatever dtype the quality is measured
in: window, sinks and tables of cos and sin would weigh double in a float32 run, which nobody deploys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import Cache

from benchmarks.common import QUANTO, SCHEMES, choose_schemes, package_version
from hf_kvquant import PRESETS, KVQuantConfig, QuantizedKVCache, TensorSpec

CLOSED, WINDOW = "closed", "window"
TUNED = Path(__file__).parent / "tuned"  # written by benchmarks.tune


def _config(key: str, value: str, key_axis: str = "channel") -> KVQuantConfig:
    return KVQuantConfig(TensorSpec(key, key_axis), TensorSpec(value, "token"))


def _hadamard(bits: int) -> KVQuantConfig:
    """Rotated keys and values without a centre, keys as delivered."""
    spec = TensorSpec(f"midrise{bits}", "token", None, scale_format="log2_8", rotation="hadamard")
    return KVQuantConfig(spec, spec)


def _unattached(preset: str) -> KVQuantConfig:
    """A recipe of ours with what it can know without attach: the mean of the delivered keys, no queries."""
    config = PRESETS[preset].config
    return replace(config, key=replace(config.key, center="plain"))


CONFIGS: dict[str, KVQuantConfig] = {
    **{name: preset.config for name, preset in PRESETS.items()},
    "k3v3": _config("int3", "int3"),
    "tok4": _config("int4", "int4", "token"),
    "tok3": _config("int3", "int3", "token"),
    "had4": _hadamard(4),
    "had3": _hadamard(3),
    **{f"{name}-unattached": _unattached(name) for name in ("cr4", "cm4", "cm3", "cm2")},
    **{f"{file.stem}-tuned": KVQuantConfig.from_json(file.read_text()) for file in sorted(TUNED.glob("*.json"))},
}
INCUMBENTS = (QUANTO, "transformers-hqq4")
NAMES = (*CONFIGS, *INCUMBENTS)


@dataclass(frozen=True)
class Candidate:
    """A scheme with one window; ``identity`` is everything that its results depend on."""

    scheme: str
    window: str
    build: Callable[[Any], Cache]
    identity: Any

    def key(self, *what: Any) -> str:
        """Names a result: the same only for the same candidate, sample and run."""
        text = json.dumps([self.scheme, self.window, self.identity, *what], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def known(name: str) -> list[Candidate]:
    """A scheme with each window that it runs with, whether or not it runs here."""
    return _ours(name, CONFIGS[name]) if name in CONFIGS else [_incumbent(name)]


def runnable(names: list[str], config: Any) -> tuple[list[Candidate], dict[str, str]]:
    """What runs here, and for each scheme that does not the reason."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"--schemes {unknown[0]}: unknown; choose from {', '.join(NAMES)}")
    _, skipped = choose_schemes([name for name in names if name in INCUMBENTS], config)
    return [each for name in names if name not in skipped for each in known(name)], skipped


def _ours(name: str, config: KVQuantConfig) -> list[Candidate]:
    windows = {CLOSED: replace(config, residual_length=0), WINDOW: config}
    return [
        Candidate(name, window, lambda model, own=own: QuantizedKVCache(model, own), own.to_dict())
        for window, own in windows.items()
    ]


def _incumbent(name: str) -> Candidate:
    scheme = SCHEMES[name]
    versions = [package_version(package) for package in ("transformers", scheme.package) if package]
    return Candidate(name, CLOSED, lambda model: scheme.build(model, 0), versions)
