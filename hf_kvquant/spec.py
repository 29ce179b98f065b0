"""TensorSpec: how one tensor, keys or values, is stored in closed blocks.

Decision: frozen plain data that validates itself; whatever does not go together raises at construction, naming field,
value and what is allowed, so that no wrong combination reaches a layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_kvquant.formats import FORMATS, NumberFormat
from hf_kvquant.packing import PACK_MULTIPLE
from hf_kvquant.scales import SCALE_FORMATS, ZERO_FORMATS

AXES = ("channel", "token", "head", "tensor")
CENTERS = ("rope", "plain")
ROTATIONS = ("hadamard",)
PROFILE_CHANNELS = 64


def invalid(name: str, value: object, allowed: str) -> ValueError:
    """The one form of configuration error: field, value, what is allowed."""
    return ValueError(f"{name}={value!r} is not valid: {allowed}")


def first_line(error: Exception) -> str:
    """What an error of somebody else's says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def check_int(name: str, value: object, low: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise invalid(name, value, what)


def check_choice(name: str, value: object, allowed: Mapping[str, object] | tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise invalid(name, value, f"choose one of {', '.join(allowed)}")


def fields_from(cls: type, data: object, where: str) -> dict[str, Any]:
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
            the head dimension not above it is used, None means the whole head.
        symmetric: range symmetric about 0 and no zero point; None: what the format does by itself (integers
            asymmetric, fp8 and mid-rise grids symmetric).
        scale_format: a name in ``SCALE_FORMATS``: "fp16", "fp8" (e4m3), "log2_16" or "log2_8" (8 bits, 16 or 8 steps
            per octave), all with one 8-bit exponent per block and head, so that no magnitude over- or underflows;
            "fp32"; "static": the scale is ``scale`` and nothing is stored.
        zero_format: "fp16", "fp32" or "int8" (under one range per block and head); None: fp16, or fp32 beside fp32
            scales. Only for asymmetric codes.
        clip: range of a group. "minmax"; "mse": the one of least squared error among a few; a number such as 0.99:
            that central share of the elements. None: "mse" for mid-rise grids, else "minmax".
        center: subtract the mean of the first tokens (per row, head and channel) before quantizing. "rope": the mean
            before RoPE, rotated to each position (keys; the model must be attached); "plain": the mean as delivered.
        rotation: "hadamard": rotate the channels of a head by a Hadamard matrix before quantizing.
        normalize: divide each channel by its deviation over the first tokens; in front of a rotation, by the fourth
            root of (variance / query energy), which makes an error count alike in all channels. With ``center="rope"``
            the queries of those tokens are looked at.
        widths: ``(bits, channels)`` from the most to the least important channels, for 64 channels and scaled to
            others: static widths per channel on mid-rise grids; 0 bits drops a channel. Implies ``normalize``;
            ``format`` is the widest grid.
        scale: the scale of all elements, or one per key/value head, for ``scale_format="static"``.

    Statistics of center, normalize and widths are frozen with a row's first closed block.

    Raises:
        ValueError: a field that is not valid or does not go with another; the message names field, value and what is
            allowed.

    Source: ``axis`` from KIVI (Liu et al. 2024, arXiv 2402.02750, section 3); ``rotation`` from QuaRot (Ashkboos et al.
    2024, arXiv 2404.00456); mid-rise grids from Max 1960, "Quantizing for minimum distortion"; ``center``
    and ``widths`` for keys are this package's own.
    """

    format: str = "int4"
    axis: str = "channel"
    group_size: int | None = 64
    symmetric: bool | None = None
    scale_format: str = "fp16"
    zero_format: str | None = None
    clip: str | float | None = None
    center: str | None = None
    rotation: str | None = None
    normalize: bool = False
    widths: tuple[tuple[int, int], ...] | None = None
    scale: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_choice("format", self.format, FORMATS)
        check_choice("axis", self.axis, AXES)
        check_choice("scale_format", self.scale_format, SCALE_FORMATS)
        self._check_groups()
        self._check_symmetry()
        self._check_clip()
        self._check_transforms()
        self._check_static()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_groups(self) -> None:
        if self.group_size is None and self.axis == "token":
            return
        check_int("group_size", self.group_size, 1, "it must be an integer of at least 1")
        if self.axis != "token" and int(self.group_size or 0) % PACK_MULTIPLE:
            raise invalid(
                "group_size", self.group_size, f"along tokens (axis={self.axis!r}) it must be a multiple of 8"
            )

    def _check_symmetry(self) -> None:
        if self.symmetric not in (None, True, False):
            raise invalid("symmetric", self.symmetric, "choose True, False or None (the format's own)")
        if self.symmetric is None:
            self._set("symmetric", self.number_format.only_symmetric)
        if not self.symmetric and self.number_format.only_symmetric:
            raise invalid("symmetric", False, f"format {self.format!r} has no zero point; choose True or None")
        if not self.has_zero:
            if self.zero_format is not None:
                raise invalid("zero_format", self.zero_format, "symmetric codes have no zero point; choose None")
        elif self.zero_format is None:
            self._set("zero_format", "fp32" if self.scale_format == "fp32" else "fp16")
        else:
            check_choice("zero_format", self.zero_format, ZERO_FORMATS)

    def _check_clip(self) -> None:
        allowed = "choose 'minmax', 'mse', a share of the elements between 0.5 and 1, or None (the format's own)"
        stores_scale = not self.number_format.lossless and self.scale_format != "static"
        if self.clip is None:
            self._set("clip", ("mse" if self.number_format.midrise else "minmax") if stores_scale else None)
        elif not stores_scale:
            raise invalid("clip", self.clip, "nothing is clipped to a range of its own here; choose None")
        elif self.clip not in ("minmax", "mse") and not _is_share(self.clip):
            raise invalid("clip", self.clip, allowed)

    def _check_transforms(self) -> None:
        for name, allowed in (("center", CENTERS), ("rotation", ROTATIONS)):
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), allowed)
        if not isinstance(self.normalize, bool):
            raise invalid("normalize", self.normalize, "choose True or False")
        if self.widths is not None:
            self._check_widths()
        if self.widths and self.rotation:
            raise invalid("rotation", self.rotation, "it mixes the channels that widths tell apart; choose None")
        coded = (self.center, self.rotation, self.normalize, self.symmetric, self.scale_format != "fp16")
        if self.number_format.lossless and any(coded):
            raise invalid(
                "format", self.format, "scales, center, rotation and widths are for lossy formats; leave them out"
            )

    def _check_widths(self) -> None:
        try:
            widths = tuple((bits, channels) for bits, channels in self.widths or ())
        except (TypeError, ValueError):
            raise invalid("widths", self.widths, "it must be pairs (bits, channels)") from None
        self._set("widths", widths)
        numbers = [number for pair in widths for number in pair]
        if any(not isinstance(number, int) or isinstance(number, bool) or number < 0 for number in numbers):
            raise invalid("widths", widths, "bits and channels must be integers of at least 0")
        if not all(channels for _, channels in widths):
            raise invalid("widths", widths, "each width needs at least one channel")
        if sum(channels for _, channels in widths) != PROFILE_CHANNELS:
            raise invalid("widths", widths, f"the channels must add up to {PROFILE_CHANNELS}")
        if any(bits and f"midrise{bits}" not in FORMATS for bits, _ in widths):
            raise invalid("widths", widths, "bits must be 0 to 6, or 8")
        if list(widths) != sorted(widths, reverse=True) or f"midrise{widths[0][0]}" != self.format:
            raise invalid("widths", widths, f"they must fall, from the widest, which format={self.format!r} names")
        if self.axis != "token" or self.group_size is not None:
            raise invalid("widths", widths, "they need axis='token' and group_size=None: one scale per token and head")
        if self.clip != "mse":
            raise invalid("clip", self.clip, "with widths choose 'mse' or None")
        self._set("normalize", True)

    def _check_static(self) -> None:
        if self.scale_format != "static":
            if self.scale is not None:
                raise invalid("scale", self.scale, "it is only for scale_format='static'; choose None")
            return
        if not self.symmetric or self.axis not in ("head", "tensor"):
            raise invalid("scale_format", "static", "it needs symmetric codes and axis 'head' or 'tensor'")
        if isinstance(self.scale, list):
            self._set("scale", tuple(self.scale))
        if not self.static_scales or not all(_is_positive(scale) for scale in self.static_scales):
            raise invalid("scale", self.scale, "with scale_format='static' give a positive number, or one per head")

    @property
    def number_format(self) -> NumberFormat:
        """What one code means."""
        return FORMATS[self.format]

    @property
    def has_zero(self) -> bool:
        """Whether a zero point is stored beside each scale."""
        return not self.symmetric and not self.number_format.lossless

    @property
    def calibrates(self) -> bool:
        """Whether statistics of the first tokens are needed before a block can close."""
        return self.center is not None or self.normalize

    @property
    def static_scales(self) -> tuple[float, ...]:
        """``scale`` as one number or one per head."""
        if self.scale is None:
            return ()
        return self.scale if isinstance(self.scale, tuple) else (self.scale,)

    @property
    def tokens_per_group(self) -> int:
        """Tokens that share a scale."""
        return 1 if self.axis == "token" else int(self.group_size or 1)

    def channels_per_group(self, head_dim: int) -> int:
        """Channels that share a scale: for axis "token" the largest divisor of ``head_dim`` not above
        ``group_size``."""
        if self.axis == "channel":
            return 1
        if self.axis != "token" or self.group_size is None:
            return head_dim
        return next(size for size in range(min(self.group_size, head_dim), 0, -1) if head_dim % size == 0)

    def segments(self, head_dim: int) -> tuple[tuple[NumberFormat, int, int], ...]:
        """Number formats with the channels ``start .. stop`` of ``head_dim`` they store, in stored order; channels of
        0 bits in none."""
        if self.widths is None:
            return ((self.number_format, 0, head_dim),)
        found, start, channels = [], 0, 0
        for bits, count in self.widths:
            channels += count
            stop = (channels * head_dim + PROFILE_CHANNELS // 2) // PROFILE_CHANNELS
            if bits and stop > start:
                found.append((FORMATS[f"midrise{bits}"], start, stop))
            start = stop
        return tuple(found)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "TensorSpec") -> TensorSpec:
        """From the fields in ``data``; ``where`` names them in an error.

        Raises:
            ValueError: no mapping, an unknown field, or one that is not valid.
        """
        return cls(**fields_from(cls, data, where))


def _is_share(value: object) -> bool:
    return isinstance(value, float) and 0.5 < value < 1.0


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
