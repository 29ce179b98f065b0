"""Blocks of full-precision tensors -> codes, scales, zero points; and back. Pure functions.

Decision: one code path for every axis. A block ``[..., G, D]`` is viewed as ``[..., G/g, g, D/c, c]`` (token groups,
tokens per group, channel groups, channels per group) and every axis is a choice of g and c, so ranges are one
reduction and the inverse is one broadcast. Codes are chosen with the scale and zero point *as stored*, so rounding the
metadata never adds an unseen error. Channels of one spec may differ in width: a spec is a list of segments, each a
number format and a run of channels, and its codes lie in the planes that :mod:`hf_kvquant.planes` describes.

Stored per block (``n`` blocks, ``[B, K, n, ...]``), for a plane of C channels and w bits::

    key planes   [B, K, n, C, G*w/8]   tokens innermost: a per-channel scale is a constant of a row
    value planes [B, K, n, G*w/8, C]   channels innermost
    metadata     as drawn in hf_kvquant.scales; K = 1 for axis "tensor"

fp16 metadata relative to the block's exponent keeps every fp16 constant exactly, and a bf16 one above 2^-30 of the
largest magnitude in its block and head; it costs 8 bits per block and head, 0.002 bits per element at 64 x 64. With
zero points rounded down and scales up the error stays within half a step; for keys with a bias of 300 and a range of 6
that widens the step by 4 % at most. NaN and Inf stay inside the group they arrive in, which reads back as NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hf_kvquant.blocks import QuantizedBlocks
from hf_kvquant.formats import NumberFormat
from hf_kvquant.packing import PLANE_WIDTHS, pack, unpack
from hf_kvquant.planes import planes_of
from hf_kvquant.ranges import choose, read_scale, read_zero, spread, units_of
from hf_kvquant.spec import TensorSpec

# Elements of the past dequantized at a time: bounds the temporaries (codes, fp32 of a bf16 result) at about 10 MB.
# Measured on one core, 126 blocks of 3 x 64 x 64 int4: 0.38 ms at once, 0.50 / 0.78 / 1.19 ms in pieces of 32 / 8 / 4
# blocks.
CHUNK_ELEMENTS = 2**21


def quantize(
    blocks: torch.Tensor, spec: TensorSpec, tokens_last: bool, importance: torch.Tensor | None = None
) -> QuantizedBlocks:
    """Quantize closed blocks.

    Args:
        blocks: ``[B, K, n, G, D]``, any float dtype, channels in stored order; G a multiple of
            ``spec.tokens_per_group`` and of 8.
        spec: how.
        tokens_last: key layout (tokens innermost) instead of value layout.
        importance: ``[B, K, D]`` weights of the squared error in the search for scales; None: equal.

    Source: min-max codes as in KIVI (arXiv 2402.02750, section 3); the rounding of the metadata is ours.
    """
    if spec.number_format.lossless:
        return QuantizedBlocks((blocks.contiguous(),))
    segments = spec.segments(blocks.shape[-1])
    grouped = _grouped(blocks.float(), spec)
    in_group = (
        tuple((fmt, slice(start, stop)) for fmt, start, stop in segments)
        if spec.widths
        else ((spec.number_format, slice(None)),)
    )
    stored = choose(grouped, spec, in_group, importance)
    units = (
        units_of(grouped, read_scale(stored, spec, blocks.device), read_zero(stored, spec))
        .flatten(-4, -3)
        .flatten(-2, -1)
    )
    packed: dict[int, list[torch.Tensor]] = {}
    for fmt, start, stop in segments:
        codes = fmt.encode(units[..., start:stop], bool(spec.symmetric))
        oriented = codes.transpose(-1, -2).contiguous() if tokens_last else codes.contiguous()
        for width, part in zip(
            PLANE_WIDTHS[fmt.bits], pack(oriented, fmt.bits, -1 if tokens_last else -2), strict=True
        ):
            packed.setdefault(width, []).append(part)
    channels = -2 if tokens_last else -1
    stored.planes = tuple(
        packed[width][0] if len(packed[width]) == 1 else torch.cat(packed[width], channels)
        for width in sorted(packed, reverse=True)
    )
    return stored


def dequantize(blocks: QuantizedBlocks, spec: TensorSpec, tokens_last: bool, out: torch.Tensor) -> None:
    """Write the tensor behind ``blocks`` into ``out`` ``[B, K, n, G, D]`` (any strides and float dtype; computed in
    fp32)."""
    step = max(1, CHUNK_ELEMENTS * out.shape[2] // max(1, out.numel()))
    if step >= out.shape[2]:
        _dequantize_piece(blocks, spec, tokens_last, out)
        return
    for start in range(0, out.shape[2], step):
        piece = slice(start, start + step)
        _dequantize_piece(
            blocks.map(lambda tensor, piece=piece: tensor[:, :, piece]), spec, tokens_last, out[:, :, piece]
        )


def _dequantize_piece(blocks: QuantizedBlocks, spec: TensorSpec, tokens_last: bool, out: torch.Tensor) -> None:
    if spec.number_format.lossless:
        out.copy_(blocks.planes[0])
        return
    units = out if out.dtype == torch.float32 else torch.empty(out.shape, device=out.device)
    scale, zero = read_scale(blocks, spec, out.device), read_zero(blocks, spec)
    covered = 0
    # Turning the packed bytes is cheaper than turning the fp32 result: 0.69 against 1.27 ms (as at CHUNK_ELEMENTS).
    stored = [plane.transpose(-1, -2).contiguous() if tokens_last else plane for plane in blocks.planes]
    for segment, (start, stop), planes in _segment_planes(stored, spec, out.shape[-1]):
        _decode_units(planes, segment, units[..., start:stop])
        if spec.widths:
            units[..., start:stop].sub_(segment.offset(True)).mul_(segment.step)
        covered = stop
    if spec.widths:
        units[..., covered:].zero_()
    else:  # one grid for all channels: its step and offset fold into scale and zero point, which saves a pass
        fmt = spec.number_format
        offset = fmt.offset(bool(spec.symmetric))
        scale = scale * fmt.step
        zero = scale * -offset if offset else zero
    grouped = _grouped(units, spec)
    grouped.mul_(spread(scale))
    if zero is not None:
        grouped.add_(spread(zero))
    if units is not out:
        copy_saturating(out, units)


def copy_saturating(out: torch.Tensor, values: torch.Tensor) -> None:
    """Copy fp32 ``values``, which it may change, into ``out`` of any float dtype. What fp16 cannot hold becomes its
    largest value: a level of a searched range may lie above the largest element."""
    if out.dtype == torch.float16:
        limit = torch.finfo(torch.float16).max
        values.clamp_(-limit, limit)
    out.copy_(values)


def _segment_planes(
    planes: list[torch.Tensor], spec: TensorSpec, head_dim: int
) -> Iterator[tuple[NumberFormat, tuple[int, int], tuple[torch.Tensor, ...]]]:
    """Each segment with its channels of the ``planes [..., tokens, channels]`` that hold it, low bits first."""
    layout = list(zip(planes_of(spec, head_dim), planes, strict=True))
    for fmt, start, stop in spec.segments(head_dim):
        parts = [(part, tensor) for plane, tensor in layout for part in plane.parts if part.start == start]
        ordered = sorted(parts, key=lambda found: found[0].shift)
        yield fmt, (start, stop), tuple(tensor[..., part.span] for part, tensor in ordered)


def _decode_units(planes: tuple[torch.Tensor, ...], fmt: NumberFormat, out: torch.Tensor) -> None:
    """Raw codes (affine) or table entries as floats, tokens along -2; one pass per run, no tensor of codes in
    between."""
    plane, *higher = planes
    if higher or fmt.levels:
        codes = unpack(planes, fmt.bits, -2)
        out.copy_(fmt.decode(codes) if fmt.levels else codes)
        return
    if fmt.kind == "table":
        _decode_float8(plane, fmt, out)
        return
    run, mask = plane.shape[-2], 2**fmt.bits - 1
    for index in range(8 // fmt.bits):
        out[..., index * run : (index + 1) * run, :].copy_((plane >> fmt.bits * index) & mask)


def _decode_float8(plane: torch.Tensor, fmt: NumberFormat, out: torch.Tensor) -> None:
    """An 8-bit float's bits are those of an fp16 number: e5m2 is its upper byte; e4m3 has its mantissa three bits
    lower and an exponent smaller by 8. Exact for every finite code, which is all that ``encode`` writes, and 3 to 6
    times as fast as torch's own conversion."""
    if fmt.dtype == torch.float8_e5m2:
        out.copy_((plane.to(torch.int16) << 8).view(torch.float16))
        return
    # Sign-extended and shifted, the sign stands in bits 15 and 14; the exponent has only bits 13 to 10.
    out.copy_(((plane.view(torch.int8).to(torch.int16) << 7) & ~(1 << 14)).view(torch.float16))
    out.mul_(256.0)


def _grouped(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """View ``[..., G, D]`` as ``[..., G/g, g, D/c, c]``."""
    channels = spec.channels_per_group(tensor.shape[-1])
    return tensor.unflatten(-1, (-1, channels)).unflatten(-3, (-1, spec.tokens_per_group))
