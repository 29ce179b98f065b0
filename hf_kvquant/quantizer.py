"""Blocks of full-precision tensors -> codes, scales, zero points; and back. Pure functions.

Decision: one code path for every axis. A block ``[..., G, D]`` is viewed as ``[..., G/g, g, D/c, c]`` (token groups,
tokens per group, channel groups, channels per group) and every axis is a choice of g and c, so ranges are one
reduction and the inverse is one broadcast. Ranges and scales are computed in fp32; codes are chosen with the scale
and zero point *as stored*, so rounding the metadata never adds an unseen error.

Stored per block (``n`` blocks, ``[B, K, n, ...]``)::

    key planes   [B, K, n, D, G*w/8]   tokens innermost: a per-channel scale is a constant of a row
    value planes [B, K, n, G*w/8, D]   channels innermost
    scale, zero  [B, K, n, G/g, D/c]   K = 1 for axis "tensor"; zero only for asymmetric codes
    exponent     [B, K, n]             int8, only with fp16 scales: scale and zero are stored divided by 2**exponent

The exponent is chosen so that the largest scale or zero of a block and head lies just below the fp16 maximum: keys of
6e4 do not overflow, values of 1e-6 do not underflow, and an fp16 constant, or a bf16 one above 2^-30 of the largest
magnitude in its block and head, comes back exactly. It costs 8 bits per block and head, 0.002 bits per element at 64
x 64. Magnitudes up to 1e38. The zero point is rounded down and the scale up, so the stored range covers the true one
and the error stays within half a step; for keys with a bias of 300 and a range of 6 that widens the step by 4 % at
most. NaN and Inf stay inside the group they arrive in, which reads back as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_kvquant.config import TensorSpec
from hf_kvquant.formats import NumberFormat
from hf_kvquant.packing import pack, unpack

# Largest metadata magnitude after division by 2**exponent: the fp16 maximum less room for rounding up twice.
_FP16_TARGET = 65024.0
_EXPONENT_RANGE = (-100, 127)
# Elements of the past dequantized at a time: bounds the temporaries (codes, fp32 of a bf16 result) at about 10 MB.
# Measured on one core, 126 blocks of 3 x 64 x 64 int4: 0.38 ms at once, 0.50 / 0.78 / 1.19 ms in pieces of 32 / 8 / 4
# blocks.
CHUNK_ELEMENTS = 2**21


@dataclass
class QuantizedBlocks:
    """``n`` quantized blocks; tensors as drawn in the module docstring. A lossless format has one plane: the tensor
    itself."""

    planes: tuple[torch.Tensor, ...]
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    exponent: torch.Tensor | None = None

    def named(self) -> dict[str, torch.Tensor]:
        """Every tensor held, by name; batch is dimension 0 and blocks are dimension 2 of each."""
        tensors = {f"planes.{index}": plane for index, plane in enumerate(self.planes)}
        others = {"scale": self.scale, "zero": self.zero, "exponent": self.exponent}
        return tensors | {name: tensor for name, tensor in others.items() if tensor is not None}

    @classmethod
    def from_named(cls, tensors: dict[str, torch.Tensor]) -> QuantizedBlocks:
        """Inverse of :meth:`named`."""
        planes = tuple(tensors[name] for name in sorted(tensors) if name.startswith("planes."))
        return cls(planes, tensors.get("scale"), tensors.get("zero"), tensors.get("exponent"))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedBlocks:
        """The same blocks with ``function`` applied to every tensor."""
        return self.from_named({name: function(tensor) for name, tensor in self.named().items()})


def quantize(blocks: torch.Tensor, spec: TensorSpec, tokens_last: bool) -> QuantizedBlocks:
    """Quantize closed blocks.

    Args:
        blocks: ``[B, K, n, G, D]``, any float dtype; G a multiple of ``spec.tokens_per_group`` and of 8.
        spec: how.
        tokens_last: key layout (tokens innermost) instead of value layout.

    Source: min-max codes as in KIVI (arXiv 2402.02750, section 3); the rounding of the metadata is ours.
    """
    fmt = spec.number_format
    if fmt.lossless:
        return QuantizedBlocks((blocks.contiguous(),))
    grouped = _grouped(blocks.float(), spec)
    stored = _ranges(grouped, spec)
    scale, zero = _scale_and_zero(stored)
    inverse = torch.where(scale >= torch.finfo(torch.float32).tiny, 1.0 / scale, torch.zeros_like(scale))
    units = (grouped if zero is None else grouped - _spread(zero)) * _spread(inverse)
    codes = fmt.encode(units, bool(spec.symmetric)).flatten(-4, -3).flatten(-2, -1)
    oriented = codes.transpose(-1, -2).contiguous() if tokens_last else codes
    stored.planes = pack(oriented, fmt.bits, -1 if tokens_last else -2)
    return stored


def dequantize(blocks: QuantizedBlocks, spec: TensorSpec, tokens_last: bool, out: torch.Tensor) -> None:
    """Write the tensor behind ``blocks`` into ``out`` ``[B, K, n, G, D]`` (any strides and float dtype; computed in
    fp32)."""
    step = max(1, CHUNK_ELEMENTS * out.shape[2] // max(1, out.numel()))
    for start in range(0, out.shape[2], step):
        piece = slice(start, start + step)
        _dequantize_piece(
            blocks.map(lambda tensor, piece=piece: tensor[:, :, piece]), spec, tokens_last, out[:, :, piece]
        )


def _dequantize_piece(blocks: QuantizedBlocks, spec: TensorSpec, tokens_last: bool, out: torch.Tensor) -> None:
    fmt = spec.number_format
    if fmt.lossless:
        out.copy_(blocks.planes[0])
        return
    planes = blocks.planes
    if tokens_last:
        # Turning the packed bytes is cheaper than turning the fp32 result: 0.69 against 1.27 ms (setting of
        # CHUNK_ELEMENTS).
        planes = tuple(plane.transpose(-1, -2).contiguous() for plane in planes)
    units = out if out.dtype == torch.float32 else torch.empty(out.shape, device=out.device)
    _decode_units(planes, fmt, units)
    scale, zero = _scale_and_zero(blocks)
    offset = fmt.offset(bool(spec.symmetric))
    if offset:
        zero = scale * -offset
    grouped = _grouped(units, spec)
    grouped.mul_(_spread(scale))
    if zero is not None:
        grouped.add_(_spread(zero))
    if units is not out:
        out.copy_(units)


def _decode_units(planes: tuple[torch.Tensor, ...], fmt: NumberFormat, out: torch.Tensor) -> None:
    """Raw codes (affine) or table entries as floats, tokens along -2; one pass per run, no tensor of codes in
    between."""
    plane, *higher = planes
    if higher:
        out.copy_(unpack(planes, fmt.bits, -2))
        return
    if fmt.kind == "table":
        assert fmt.dtype is not None
        out.copy_(plane.view(fmt.dtype))
        return
    run, mask = plane.shape[-2], 2**fmt.bits - 1
    for index in range(8 // fmt.bits):
        out[..., index * run : (index + 1) * run, :].copy_((plane >> fmt.bits * index) & mask)


def _grouped(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """View ``[..., G, D]`` as ``[..., G/g, g, D/c, c]``."""
    channels = spec.channels_per_group(tensor.shape[-1])
    return tensor.unflatten(-1, (-1, channels)).unflatten(-3, (-1, spec.tokens_per_group))


def _spread(metadata: torch.Tensor) -> torch.Tensor:
    """``[..., G/g, D/c]`` -> broadcastable against a grouped tensor."""
    return metadata[..., :, None, :, None]


def _scale_and_zero(blocks: QuantizedBlocks) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Metadata as read back: fp32, exponent applied."""
    assert blocks.scale is not None
    scale, zero = blocks.scale.float(), None if blocks.zero is None else blocks.zero.float()
    if blocks.exponent is not None:
        power = torch.exp2(blocks.exponent.float())[..., None, None]
        scale, zero = scale * power, None if zero is None else zero * power
    return scale, zero


def _ranges(grouped: torch.Tensor, spec: TensorSpec) -> QuantizedBlocks:
    """Scale, zero point and exponent of every group, as stored; planes still empty."""
    dims = (1, -3, -1) if spec.axis == "tensor" else (-3, -1)
    low, high = (bound.squeeze(-1).squeeze(-2) for bound in (grouped.amin(dims, True), grouped.amax(dims, True)))
    limit = spec.number_format.unit_limit(bool(spec.symmetric))
    if spec.symmetric:
        zero, high = None, torch.maximum(-low, high)
    else:
        zero = low
    if spec.scale_dtype == torch.float32:
        return QuantizedBlocks((), _step(high, zero, limit), zero)
    exponent = _exponent(_step(high, zero, limit), zero)
    power = torch.exp2(-exponent)[..., None, None]
    zero = None if zero is None else _half_down(zero * power)
    scale = -_half_down(-_step(high * power, None if zero is None else zero.float(), limit))
    return QuantizedBlocks((), scale, zero, exponent.to(torch.int8))


def _step(high: torch.Tensor, zero: torch.Tensor | None, limit: float) -> torch.Tensor:
    """Scale that reaches from the zero point to ``high``; divided before subtracting, since max - min may overflow."""
    return high / limit if zero is None else high / limit - zero / limit


def _exponent(scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """``[B, K, n]``: the power of two that brings a block's largest finite metadata just below the fp16 maximum."""
    magnitude = scale if zero is None else torch.maximum(scale, zero.abs())
    largest = torch.where(magnitude.isfinite(), magnitude, 0.0).amax((-2, -1))
    exponent = torch.frexp(largest).exponent.float() - 16
    exponent = exponent + (largest * torch.exp2(-exponent) > _FP16_TARGET).float()
    return torch.where(largest > 0, exponent.clamp(*_EXPONENT_RANGE), 0.0)


def _half_down(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> the largest fp16 not above (for |x| up to the fp16 maximum; exact where representable)."""
    nearest = x.half()
    # Half to one fp16 spacing below x: rounds to the neighbour below ``nearest`` where that lies above x.
    below = (x - x.abs() * 2.0**-11 - 2.0**-25).half()
    return torch.where(nearest.float() > x, below, nearest)
