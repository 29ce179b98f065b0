"""The named configurations, by the bits they truly take, each with when to use it.

Decision: a preset's description counts everything in a closed block: codes, scales, zero points and exponents. Which
one serves by default depends on whether the model is attached: keys per channel as delivered where it is not, centred
and rotated keys where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hf_kvquant.config import KVQuantConfig
from hf_kvquant.spec import TensorSpec, invalid


@dataclass(frozen=True)
class Preset:
    """A named configuration.

    Attributes:
        config: what a cache of that name stores.
        description: its true bits in closed blocks, and when to use it, in one line.
    """

    config: KVQuantConfig
    description: str


def _per_channel_per_token(
    key_format: str, value_format: str, pre_rope: bool = False, group_size: int = 64
) -> KVQuantConfig:
    key, value = TensorSpec(key_format, "channel", group_size), TensorSpec(value_format, "token", group_size)
    return KVQuantConfig(key, value, pre_rope=pre_rope)


def _rotated(bits: int, **centre: Any) -> TensorSpec:
    """Hadamard rotation, mid-rise grid, one 8-bit logarithmic gain per token and head."""
    return TensorSpec(f"midrise{bits}", "token", None, scale_format="log2_8", rotation="hadamard", **centre)


def _centred_widths(*widths: tuple[int, int]) -> TensorSpec:
    """Keys around their rotated mean, with static widths per channel (DESIGN section 8)."""
    return TensorSpec(f"midrise{widths[0][0]}", "token", None, scale_format="log2_8", center="rope", widths=widths)


PRESETS: dict[str, Preset] = {
    "none": Preset(
        KVQuantConfig(TensorSpec("none"), TensorSpec("none", axis="token")),
        "lossless, saves nothing: for checking a pipeline bit for bit against DynamicCache",
    ),
    "fp8": Preset(
        KVQuantConfig(TensorSpec("fp8_e4m3", "head", 64), TensorSpec("fp8_e4m3", "head", 64)),
        "8.0 bits in closed blocks: where 8-bit floats are wanted; int8 errs less for half a bit more",
    ),
    "int8": Preset(
        _per_channel_per_token("int8", "int8"), "8.5 bits in closed blocks: when the output must stay what it was"
    ),
    "k4v4": Preset(
        _per_channel_per_token("int4", "int4"),
        "4.5 bits in closed blocks: the default where the model is not attached",
    ),
    "k4v2": Preset(
        _per_channel_per_token("int4", "int2"), "3.5 bits in closed blocks: values bear fewer bits than keys do"
    ),
    "k2v2": Preset(
        _per_channel_per_token("int2", "int2"), "2.5 bits in closed blocks: for comparison only, facts are lost"
    ),
    "cr4": Preset(
        KVQuantConfig(_rotated(4, center="rope", normalize=True), _rotated(4)),
        "4.1 bits in closed blocks: the default where the model is attached",
    ),
    "cm4": Preset(
        KVQuantConfig(_centred_widths((6, 16), (5, 6), (4, 18), (3, 14), (2, 8), (0, 2)), _rotated(4)),
        "4.1 bits in closed blocks: cr4 with bits where queries look, for retrieval; needs attach(model)",
    ),
    "cm3": Preset(
        KVQuantConfig(_centred_widths((6, 14), (4, 13), (3, 16), (2, 10), (0, 11)), _rotated(3)),
        "3.2 bits in closed blocks: copies and finds nearly as k4v4 does at 4.5; needs attach(model)",
    ),
    "cm2": Preset(
        KVQuantConfig(_centred_widths((6, 6), (4, 9), (3, 8), (2, 20), (1, 6), (0, 15)), _rotated(2)),
        "2.2 bits in closed blocks: the smallest that still finds most facts; needs attach(model)",
    ),
    "k4v4-pre": Preset(
        _per_channel_per_token("int4", "int4", True), "k4v4 with keys stored before RoPE; needs attach(model)"
    ),
    "k3v3-pre": Preset(
        _per_channel_per_token("int3", "int3", True), "3-bit codes with keys stored before RoPE; needs attach(model)"
    ),
    "k2v2-pre": Preset(
        _per_channel_per_token("int2", "int2", True), "k2v2 with keys stored before RoPE; needs attach(model)"
    ),
    "kivi4": Preset(
        replace(_per_channel_per_token("int4", "int4", group_size=32), sink_length=0),
        "5.0 bits in closed blocks: KIVI as published (groups of 32, no sinks), for comparison",
    ),
    "kvquant-like": Preset(
        KVQuantConfig(
            TensorSpec("int4", "channel", 64, clip="mse"),
            TensorSpec("int4", "token", 64, clip="mse"),
            residual_length=0,
            sink_length=1,
            pre_rope=True,
        ),
        "4.5 bits in closed blocks: KVQuant without its k-means levels and outlier store, for comparison",
    ),
    "kivi2": Preset(
        replace(_per_channel_per_token("int2", "int2", group_size=32), sink_length=0),
        "3.0 bits in closed blocks: KIVI as published at 2-bit codes, for comparison",
    ),
}
"""Name -> preset: what ``QuantizedKVCache(config, name)`` and ``kv_cache=name`` take."""
UNATTACHED_PRESETS = {name: preset for name, preset in PRESETS.items() if not preset.config.needs_attach}
"""Those of ``PRESETS`` that need no attached model."""
DEFAULT_PRESET, ATTACHED_DEFAULT = "k4v4", "cr4"


def resolve(config: str | KVQuantConfig | None) -> KVQuantConfig:
    """The configuration that ``config`` stands for: a preset's name, a configuration, or None (the unattached default).

    Raises:
        ValueError: anything else; the message names the presets.
    """
    if config is None:
        config = DEFAULT_PRESET
    if isinstance(config, KVQuantConfig):
        return config
    if isinstance(config, str) and config in PRESETS:
        return PRESETS[config].config
    raise invalid("preset", config, f"choose one of {', '.join(PRESETS)} or pass a KVQuantConfig")
