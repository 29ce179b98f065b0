"""What a cache stores: frozen, self-validating descriptions, and the presets.

Decision: a configuration is plain data that round-trips through JSON; everything invalid raises at construction, naming
field, value and what is allowed, so that no wrong combination reaches a layer. Defaults follow KIVI (Liu et al. 2024,
arXiv 2402.02750, section 3): keys per channel, values per token, a full-precision window; plus the first tokens kept
exact (attention sinks, Xiao et al. 2023, arXiv 2309.17453).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_kvquant.formats import FORMATS, NumberFormat
from hf_kvquant.packing import PACK_MULTIPLE

AXES = ("channel", "token", "head", "tensor")
SCALE_DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
DEFAULT_BLOCK_LENGTH = 64


def invalid(name: str, value: object, allowed: str) -> ValueError:
    """The one form of configuration error: field, value, what is allowed."""
    return ValueError(f"{name}={value!r} is not valid: {allowed}")


def _check_int(name: str, value: object, low: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise invalid(name, value, what)


def _check_choice(name: str, value: object, allowed: Mapping[str, object] | tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise invalid(name, value, f"choose one of {', '.join(allowed)}")


def _from_mapping(cls: type, data: object, where: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise invalid(where, data, "it must be a mapping of fields")
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(data) - known)
    if unknown:
        raise invalid(where, unknown[0], f"unknown field; known fields are {', '.join(sorted(known))}")
    return dict(data)


@dataclass(frozen=True)
class TensorSpec:
    """How one tensor, keys or values, is stored in closed blocks.

    Attributes:
        format: a name in ``FORMATS``.
        axis: which elements share a scale. "channel": ``group_size`` tokens of one channel; "token": ``group_size``
            channels of one token; "head": ``group_size`` tokens, all channels of one head; "tensor": ``group_size``
            tokens, all heads and channels of one batch row. Groups never cross batch rows.
        group_size: see ``axis``. In tokens a multiple of 8 (packing); in channels at least 1: the largest divisor of
            the head dimension not above it is used.
        symmetric: range symmetric about 0 and no zero point; None: what the format does by itself (integers
            asymmetric, fp8 symmetric).
        scale_format: "fp16" (with one 8-bit exponent per block and head, so that no magnitude over- or underflows) or
            "fp32".
    """

    format: str = "int4"
    axis: str = "channel"
    group_size: int = 64
    symmetric: bool | None = None
    scale_format: str = "fp16"

    def __post_init__(self) -> None:
        _check_choice("format", self.format, FORMATS)
        _check_choice("axis", self.axis, AXES)
        _check_choice("scale_format", self.scale_format, tuple(SCALE_DTYPES))
        _check_int("group_size", self.group_size, 1, "it must be an integer of at least 1")
        if self.axis != "token" and self.group_size % PACK_MULTIPLE:
            raise invalid(
                "group_size", self.group_size, f"along tokens (axis={self.axis!r}) it must be a multiple of 8"
            )
        if self.symmetric not in (None, True, False):
            raise invalid("symmetric", self.symmetric, "choose True, False or None (the format's own)")
        if self.symmetric is None:
            object.__setattr__(self, "symmetric", self.number_format.kind == "table")
        if not self.symmetric and self.number_format.kind == "table":
            raise invalid("symmetric", False, f"format {self.format!r} has no zero point; choose True or None")

    @property
    def number_format(self) -> NumberFormat:
        return FORMATS[self.format]

    @property
    def scale_dtype(self) -> torch.dtype:
        return SCALE_DTYPES[self.scale_format]

    @property
    def has_zero(self) -> bool:
        return not self.symmetric and not self.number_format.lossless

    @property
    def tokens_per_group(self) -> int:
        return 1 if self.axis == "token" else self.group_size

    def channels_per_group(self, head_dim: int) -> int:
        """Channels that share a scale: for axis "token" the largest divisor of ``head_dim`` not above
        ``group_size``."""
        if self.axis == "channel":
            return 1
        if self.axis != "token":
            return head_dim
        return next(size for size in range(min(self.group_size, head_dim), 0, -1) if head_dim % size == 0)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "TensorSpec") -> TensorSpec:
        return cls(**_from_mapping(cls, data, where))


@dataclass(frozen=True)
class KVQuantConfig:
    """A cache format.

    Attributes:
        key, value: how closed blocks are stored.
        residual_length: the newest tokens of each row, at least this many, stay in full precision (the residual
            window).
        sink_length: the first tokens of each row that stay in full precision and out of all ranges.
        pre_rope: store keys before RoPE; the model must be attached (``with attach(model): ...``).
    """

    key: TensorSpec = field(default_factory=TensorSpec)
    value: TensorSpec = field(default_factory=lambda: TensorSpec(axis="token"))
    residual_length: int = 128
    sink_length: int = 4
    pre_rope: bool = False

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            if not isinstance(getattr(self, name), TensorSpec):
                raise invalid(name, getattr(self, name), "it must be a TensorSpec")
        _check_int("residual_length", self.residual_length, 0, "it must be an integer of at least 0")
        if not isinstance(self.pre_rope, bool):
            raise invalid("pre_rope", self.pre_rope, "choose True or False")
        _check_int("sink_length", self.sink_length, 0, "it must be an integer of at least 0")

    @property
    def block_length(self) -> int:
        """Tokens in a block: a whole number of groups of both keys and values (64 where neither groups along
        tokens)."""
        sizes = [spec.group_size for spec in (self.key, self.value) if spec.axis != "token"]
        return math.lcm(*sizes) if sizes else DEFAULT_BLOCK_LENGTH

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KVQuantConfig:
        fields = _from_mapping(cls, data, "KVQuantConfig")
        for name in ("key", "value"):
            if name in fields:
                fields[name] = TensorSpec.from_dict(fields[name], where=name)
        return cls(**fields)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> KVQuantConfig:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"KVQuantConfig: not valid JSON ({error}); expected what to_json() writes") from error
        return cls.from_dict(data)


@dataclass(frozen=True)
class Preset:
    """A named configuration and one line on when to use it."""

    config: KVQuantConfig
    description: str


def _per_channel_per_token(key_format: str, value_format: str, pre_rope: bool = False) -> KVQuantConfig:
    key, value = TensorSpec(key_format, "channel", 64), TensorSpec(value_format, "token", 64)
    return KVQuantConfig(key, value, pre_rope=pre_rope)


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
        "4.5 bits in closed blocks: the default, for long contexts on less memory",
    ),
    "k4v2": Preset(
        _per_channel_per_token("int4", "int2"), "3.5 bits in closed blocks: values bear fewer bits than keys do"
    ),
    "k2v2": Preset(
        _per_channel_per_token("int2", "int2"), "2.5 bits in closed blocks: for comparison only, facts are lost"
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
}
UNATTACHED_PRESETS = {name: preset for name, preset in PRESETS.items() if not preset.config.pre_rope}
DEFAULT_PRESET = "k4v4"


def resolve(config: str | KVQuantConfig | None) -> KVQuantConfig:
    """Preset name, configuration or None (the default preset) -> configuration; ValueError names the presets."""
    if config is None:
        config = DEFAULT_PRESET
    if isinstance(config, KVQuantConfig):
        return config
    if isinstance(config, str) and config in PRESETS:
        return PRESETS[config].config
    raise invalid("preset", config, f"choose one of {', '.join(PRESETS)} or pass a KVQuantConfig")
