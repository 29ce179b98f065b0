"""Dot products and weighted sums that run on the packed codes.

Decision: nothing is dequantized where algebra allows it. A stored element is ``scale * (code * step - offset) + zero``,
so for a query q and softmax weights p

    keys     scale per channel:  q . k = (q * scale) . codes + q . zero'          folded once per block
             scale per token:    q . k = scale * (q . codes) + zero' * sum(q)     applied once after the sum
    values   scale per token:    sum p v = sum (p * scale) codes + sum p zero'    folded into the weight
             scale per channel:  sum p v = scale * sum p codes + zero' * sum p    applied once per block

and the inner loops multiply integers, converted to fp32, with numbers that are constant along the vectorized axis:
tokens for keys, channels for values. A code in several planes is the sum of its parts, so every plane is a loop of its
own. Only keys stored before RoPE are dequantized, in registers, because their rotation differs from token to token.

The query heads that share a KV head are unrolled in Python. torch.compile then fuses their loops into one that loads
and converts every code once; as a broadcast dimension they cost 2.5 times as much (measured, see the benchmarks).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_kvquant.blocks import QuantizedBlocks
from hf_kvquant.formats import NumberFormat
from hf_kvquant.planes import Plane, planes_of
from hf_kvquant.ranges import read_scale, read_zero
from hf_kvquant.rotary import RotaryLayout
from hf_kvquant.spec import TensorSpec

# Numbers in a vector register (AVX-512, fp32).
VECTOR = 16


@dataclass(frozen=True)
class Run:
    """Consecutive tokens ``token .. token + size`` of a block, in one token group and in the same bits of their bytes:
    rows ``start .. start + size`` of a plane, shifted by ``shift`` bits."""

    token: int
    size: int
    start: int
    shift: int
    group: int

    @property
    def tokens(self) -> slice:
        return slice(self.token, self.token + self.size)


def runs_of(widths: tuple[int, ...], length: int, tokens_per_group: int) -> Iterator[list[Run]]:
    """The longest runs of tokens that are runs in planes of all ``widths``: one :class:`Run` per plane."""
    sizes = [length * width // 8 for width in widths]
    group = tokens_per_group if tokens_per_group > 1 else length
    edges = {edge for size in (*sizes, group) for edge in range(0, length, size)}
    ordered = [*sorted(edges), length]
    for first, stop in itertools.pairwise(ordered):
        size = stop - first
        yield [
            Run(first, size, first % run, width * (first // run), first // group)
            for width, run in zip(widths, sizes, strict=True)
        ]


def floats(plane: torch.Tensor, width: int, run: Run, dim: int, fmt: NumberFormat) -> torch.Tensor:
    """The codes of a run as fp32; table formats looked up."""
    if fmt.kind == "table":
        return _float8(plane.narrow(dim, run.start, run.size), fmt)
    return _bits(plane, width, run, dim).to(torch.float32)


def _bits(plane: torch.Tensor, width: int, run: Run, dim: int) -> torch.Tensor:
    part = plane.narrow(dim, run.start, run.size)
    if run.shift:
        part = part >> run.shift
    return part & (2**width - 1) if run.shift + width < 8 else part


def _whole(planes: tuple[Plane, ...], stored: tuple[torch.Tensor, ...], runs: list[Run], dim: int) -> torch.Tensor:
    """Codes of a run as fp32, put together from all planes of a uniform format: one multiplication per code and head
    instead of one per plane."""
    if len(planes) == 1:
        return floats(stored[0], planes[0].width, runs[0], dim, planes[0].parts[0].fmt)
    code = None
    for plane, tensor, run in zip(planes, stored, runs, strict=True):
        part = _bits(tensor, plane.width, run, dim) << plane.parts[0].shift
        code = part if code is None else code | part
    assert code is not None
    return code.to(torch.float32)


def _float8(part: torch.Tensor, fmt: NumberFormat) -> torch.Tensor:
    """An 8-bit float's exponent and mantissa moved to their place in an fp32 number, whose exponent counts from
    another bias; exact for every finite code, subnormal ones included."""
    mantissa, bias = (2, 15) if fmt.dtype == torch.float8_e5m2 else (3, 7)
    code = part.to(torch.int32)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << (23 - mantissa))
    return bits.view(torch.float32) * 2.0 ** (127 - bias)


def _offset(fmt: NumberFormat, spec: TensorSpec) -> float:
    """What is subtracted from ``code * step``."""
    return fmt.offset(bool(spec.symmetric)) * fmt.step


def _total(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _per_token(metadata: torch.Tensor, tokens_per_group: int) -> torch.Tensor:
    """``[..., G/g]`` -> ``[..., G]``, or 1 where a block is one group."""
    several = tokens_per_group > 1 and metadata.shape[-1] > 1
    return metadata.repeat_interleave(tokens_per_group, -1) if several else metadata


def written(x: torch.Tensor) -> torch.Tensor:
    """``x`` kept in memory. Inductor would compute a cheap expression anew wherever it is read, which here is once per
    code: gains by an exponential then take 2.5 of 2.9 ms. A view by explicit strides needs a buffer to look at."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


# -------------------------------------------------------------------- keys


def key_scores(query: torch.Tensor, blocks: QuantizedBlocks, spec: TensorSpec, length: int) -> torch.Tensor:
    """Scores of every cached token.

    Args:
        query: ``[B, K, R, D]``, fp32, folded: as it meets the channels in stored order.
        blocks: keys ``[B, K, n, C, G*w/8]`` and their metadata.
        spec: how they are stored.
        length: G.

    Returns:
        ``[B, K, R, n, G]``, fp32.
    """
    heads = query.unbind(2)
    if spec.number_format.lossless:
        keys = blocks.planes[0].float()
        return torch.stack([(keys * head[:, :, None, None]).sum(-1) for head in heads], 2)
    scale, zero = written(read_scale(blocks, spec, query.device, True)), read_zero(blocks, spec)
    if spec.channels_per_group(query.shape[-1]) == 1 and spec.tokens_per_group > 1:
        return torch.stack([_folded_scores(head, blocks, spec, length, scale, zero) for head in heads], 2)
    return torch.stack([_scaled_scores(head, blocks, spec, length, scale, zero) for head in heads], 2)


def _folded_scores(
    head: torch.Tensor,
    blocks: QuantizedBlocks,
    spec: TensorSpec,
    length: int,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
) -> torch.Tensor:
    """One scale per channel: it goes into the query ``[B, K, D]``."""
    fmt, spread = spec.number_format, head[:, :, None, None]
    weights = written(spread * scale)  # [B, K, n, G/g, D]
    scores = []
    for plane, stored in zip(planes_of(spec, head.shape[-1]), blocks.planes, strict=True):
        factor = fmt.step * 2 ** plane.parts[0].shift
        pieces = [
            (floats(stored, plane.width, run, -1, fmt) * weights[:, :, :, run.group, :, None]).sum(-2)
            for (run,) in runs_of((plane.width,), length, spec.tokens_per_group)
        ]
        scores.append(torch.cat(pieces, -1) * factor)
    constant = weights.sum(-1) * -_offset(fmt, spec)
    if zero is not None:
        constant = constant + (spread * zero).sum(-1)
    return _total(scores) + _per_token(constant, spec.tokens_per_group)


def _scaled_scores(
    head: torch.Tensor,
    blocks: QuantizedBlocks,
    spec: TensorSpec,
    length: int,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
) -> torch.Tensor:
    """Scales of tokens: applied to the sum over the channels that share them."""
    size = spec.channels_per_group(head.shape[-1])
    layout = planes_of(spec, head.shape[-1])
    scores = []
    for group in range(head.shape[-1] // size):
        channels = slice(group * size, (group + 1) * size)
        dots = []
        for plane, stored in zip(layout, blocks.planes, strict=True):
            codes = stored if spec.widths else stored[..., channels, :]
            dots.append(_plane_dots(_plane_query(head, plane, channels), codes, plane, length))
        own = scale[..., min(group, scale.shape[-1] - 1)]
        score = (_total(dots) - _offset_term(head, spec, channels)) * _per_token(own, spec.tokens_per_group)
        if zero is not None:
            total = head[..., channels].sum(-1)[:, :, None, None]
            score = score + total * _per_token(zero[..., group], spec.tokens_per_group)
        scores.append(score)
    return _total(scores)


def _plane_dots(weights: torch.Tensor, codes: torch.Tensor, plane: Plane, length: int) -> torch.Tensor:
    """Weights ``[B, K, C]`` times the codes of a plane ``[B, K, n, C, G*w/8]``: ``[B, K, n, G]``."""
    rows, fmt = codes.shape[-1], plane.parts[0].fmt
    # Planes of one bit have runs of 8 tokens, half a vector: two channels at a time fill it (cm3 keys: 22 -> 10 ms).
    lanes = VECTOR // rows if rows < VECTOR and codes.shape[-2] % (VECTOR // rows) == 0 else 1
    if lanes > 1:
        codes = codes.flatten(-2).unflatten(-1, (-1, lanes * rows))
        weights = written(weights[..., None].expand(-1, -1, -1, rows)).flatten(-2).unflatten(-1, (-1, lanes * rows))
    spread = weights[:, :, None, :, None] if lanes == 1 else weights[:, :, None]
    pieces = []
    for (run,) in runs_of((plane.width,), length, 1):
        wide = Run(run.token, lanes * run.size, run.start, run.shift, run.group)
        dots = (floats(codes, plane.width, wide, -1, fmt) * spread).sum(-2)
        pieces.append(dots.unflatten(-1, (lanes, rows)).sum(-2) if lanes > 1 else dots)
    return torch.cat(pieces, -1)


def _plane_query(head: torch.Tensor, plane: Plane, channels: slice) -> torch.Tensor:
    """The query ``[B, K, C]`` as it meets the codes of a plane."""
    if len(plane.parts) == 1 and plane.parts[0].stop - plane.parts[0].start == head.shape[-1]:
        part = plane.parts[0]
        return head[..., channels] * (part.fmt.step * 2**part.shift)
    parts = [head[..., part.start : part.stop] * (part.fmt.step * 2**part.shift) for part in plane.parts]
    return torch.cat(parts, -1)


def _offset_term(head: torch.Tensor, spec: TensorSpec, channels: slice) -> torch.Tensor:
    """``[B, K, 1, 1]``: the part of the dot product that the offsets of the codes make."""
    if not spec.widths:
        return (head[..., channels].sum(-1) * _offset(spec.number_format, spec))[:, :, None, None]
    segments = spec.segments(head.shape[-1])
    terms = [head[..., start:stop].sum(-1) * _offset(fmt, spec) for fmt, start, stop in segments]
    return _total(terms)[:, :, None, None]


def rotated_scores(
    query: torch.Tensor,
    blocks: QuantizedBlocks,
    spec: TensorSpec,
    length: int,
    layout: RotaryLayout,
    tables: tuple[torch.Tensor, torch.Tensor],
    mean: torch.Tensor | None,
) -> torch.Tensor:
    """Scores of keys stored before RoPE: each is dequantized and rotated once for all its query heads.

    Args:
        query, blocks, spec, length: as for :func:`key_scores`; the query is the delivered one.
        layout: of the rotation.
        tables: cos and sin ``[B or 1, h, n, G]`` of the cached tokens.
        mean: ``[B, K, D]`` that was subtracted from the keys, or None.

    Returns:
        ``[B, K, R, n, G]``, fp32.
    """
    scale, zero = read_scale(blocks, spec, query.device, True), read_zero(blocks, spec)
    planes = planes_of(spec, query.shape[-1])
    cos, sin = (table.float().transpose(1, 2)[:, None] for table in tables)  # [B or 1, 1, n, h, G]
    (first_queries, second_queries), rest_queries = layout.parts(query), layout.rest(query)
    pieces: list[torch.Tensor] = []
    for runs in runs_of(tuple(plane.width for plane in planes), length, spec.tokens_per_group):
        codes = _whole(planes, blocks.planes, runs, -1)
        keys = _dequantized(codes, spec, runs[0], scale, zero)
        if mean is not None:
            keys = keys + mean[:, :, None, :, None]
        turned = _turned(keys, layout, cos[..., runs[0].tokens], sin[..., runs[0].tokens])
        rest = layout.rest(keys.transpose(-1, -2)).transpose(-1, -2)
        heads = []
        for index in range(query.shape[2]):
            one, other = (each[:, :, index, None, :, None] for each in (first_queries, second_queries))
            score = (turned[0] * one + turned[1] * other).sum(-2)
            if rest.shape[-2]:
                score = score + (rest * rest_queries[:, :, index, None, :, None]).sum(-2)
            heads.append(score)
        pieces.append(torch.stack(heads, 2))
    return torch.cat(pieces, -1)


def _dequantized(
    codes: torch.Tensor, spec: TensorSpec, run: Run, scale: torch.Tensor, zero: torch.Tensor | None
) -> torch.Tensor:
    """Codes ``[B, K, n, D, tokens]`` of a run -> keys."""
    fmt = spec.number_format
    units = codes * fmt.step - _offset(fmt, spec)
    chosen = run.tokens if spec.tokens_per_group == 1 else slice(run.group, run.group + 1)

    def spread(metadata: torch.Tensor) -> torch.Tensor:
        own = metadata if metadata.shape[-2] == 1 else metadata[..., chosen, :]
        each = spec.channels_per_group(codes.shape[-2])
        several = 1 < metadata.shape[-1] < codes.shape[-2]
        return (own.repeat_interleave(each, -1) if several else own).transpose(-1, -2)

    keys = units * spread(scale)
    return keys if zero is None else keys + spread(zero)


def _turned(
    keys: torch.Tensor, layout: RotaryLayout, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and second channels of all pairs of keys ``[..., D, tokens]``, rotated."""
    first, second = (part.transpose(-1, -2) for part in layout.parts(keys.transpose(-1, -2)))
    sin = sin * layout.sign
    return first * cos - second * sin, second * cos + first * sin


# -------------------------------------------------------------------- values


def weighted_values(
    weights: torch.Tensor, blocks: QuantizedBlocks, spec: TensorSpec, head_dim: int, length: int
) -> torch.Tensor:
    """Sum of the stored values by weight, in stored order.

    Args:
        weights: ``[B, K, R, n, G]``, fp32, not necessarily of sum 1.
        blocks: values ``[B, K, n, G*w/8, C]`` and their metadata.
        spec: how they are stored.
        head_dim: of the values.
        length: G.

    Returns:
        ``[B, K, R, D]``, fp32.
    """
    heads = weights.unbind(2)
    if spec.number_format.lossless:
        values = blocks.planes[0].float()
        return torch.stack([(values * head[..., None]).sum(3).sum(2) for head in heads], 2)
    scale, zero = read_scale(blocks, spec, weights.device, True), read_zero(blocks, spec)
    weigh = _values_by_group
    if spec.tokens_per_group == 1:  # tokens innermost, as the weights have them
        weigh, scale = _values_by_token, scale.transpose(-1, -2)
        zero = None if zero is None else written(zero.transpose(-1, -2))
    scale = written(scale)
    return torch.stack([weigh(head, blocks, spec, head_dim, length, scale, zero) for head in heads], 2)


def _values_by_token(
    head: torch.Tensor,
    blocks: QuantizedBlocks,
    spec: TensorSpec,
    head_dim: int,
    length: int,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
) -> torch.Tensor:
    """One scale per token (and group of channels): it goes into the weight ``[B, K, n, G]``; ``scale, zero [B, K, n,
    D/c, G]``."""
    size = spec.channels_per_group(head_dim)
    sums = []
    for group in range(head_dim // size):
        weights = written(head * scale[..., group, :])
        channels = slice(group * size, (group + 1) * size)
        total = _unit_sums(weights, blocks, spec, channels, head_dim, length, 0, 1)
        if zero is not None:  # block by block, where it nearly cancels the codes: their sums are far larger
            total = total + (head * zero[..., group, :]).sum(-1)[..., None]
        sums.append(total.sum(2))
    return torch.cat(sums, -1) if len(sums) > 1 else sums[0]


def _values_by_group(
    head: torch.Tensor,
    blocks: QuantizedBlocks,
    spec: TensorSpec,
    head_dim: int,
    length: int,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
) -> torch.Tensor:
    """Scales of several tokens: applied to the sum over them."""
    size, groups = spec.tokens_per_group, length // spec.tokens_per_group
    sums = []
    for group in range(groups):
        units = _unit_sums(head, blocks, spec, slice(0, head_dim), head_dim, length, group, size)
        total = units * scale[..., min(group, scale.shape[-2] - 1), :]
        if zero is not None:
            weight = head[..., group * size : (group + 1) * size].sum(-1)[..., None]
            total = total + weight * zero[..., min(group, zero.shape[-2] - 1), :]
        sums.append(total.sum(2))
    return _total(sums)


def _unit_sums(
    weights: torch.Tensor,
    blocks: QuantizedBlocks,
    spec: TensorSpec,
    channels: slice,
    head_dim: int,
    length: int,
    group: int,
    tokens_per_group: int,
) -> torch.Tensor:
    """Weighted sums of the unit values ``[B, K, n, channels]`` over the tokens of one token group of each block."""
    layout = planes_of(spec, head_dim)
    if spec.widths:
        together = [((plane,), (stored,)) for plane, stored in zip(layout, blocks.planes, strict=True)]
    else:
        together = [(layout, tuple(stored[..., channels] for stored in blocks.planes))]
    sums = [_weighted_sum(weights, *each, length, group, tokens_per_group) for each in together]
    span = length if tokens_per_group == 1 else tokens_per_group
    mass = weights[..., group * span : (group + 1) * span].sum(-1)[..., None]
    if spec.widths:
        return _joined(sums, layout, spec, head_dim, mass)
    fmt = spec.number_format
    return sums[0] * fmt.step + mass * (_middle(layout) * fmt.step - _offset(fmt, spec))


def _weighted_sum(
    weights: torch.Tensor,
    planes: tuple[Plane, ...],
    stored: tuple[torch.Tensor, ...],
    length: int,
    group: int,
    tokens_per_group: int,
) -> torch.Tensor:
    """Weighted sums of the codes in ``planes``, less their middle, over the tokens of one token group of each block.
    Values vary about zero and codes about their middle: sums of thousands of codes as they are would lose to rounding
    what the offset takes away again (relative RMS 1.4e-5 instead of 3e-6 at 16,384 tokens)."""
    middle = _middle(planes)
    pieces = [
        (_whole(planes, stored, runs, -2) - middle) * weights[..., runs[0].tokens, None]
        for runs in runs_of(tuple(plane.width for plane in planes), length, tokens_per_group)
        if runs[0].group == group
    ]
    alike = len({piece.shape[-2] for piece in pieces}) == 1
    return _total(pieces).sum(-2) if alike else _total([piece.sum(-2) for piece in pieces])


def _middle(planes: tuple[Plane, ...]) -> float:
    """Half the range of the codes that ``planes`` hold together; 0 for tables."""
    if planes[0].parts[0].fmt.kind == "table":
        return 0.0
    return 2.0 ** (sum(plane.width for plane in planes) - 1)


def _joined(
    sums: list[torch.Tensor], layout: tuple[Plane, ...], spec: TensorSpec, head_dim: int, mass: torch.Tensor
) -> torch.Tensor:
    """The sums over each plane's codes -> sums of unit values for mixed widths, channels of 0 bits as zeros."""
    columns, covered = [], 0
    for fmt, start, stop in spec.segments(head_dim):
        parts = [
            (each[..., part.span] + mass * _middle((plane,))) * (fmt.step * 2**part.shift)
            for each, plane in zip(sums, layout, strict=True)
            for part in plane.parts
            if part.start == start
        ]
        columns.append(_total(parts) - mass * _offset(fmt, spec))
        covered = stop
    if covered < head_dim:
        columns.append(torch.zeros_like(columns[0][..., :1]).expand(*columns[0].shape[:-1], head_dim - covered))
    return torch.cat(columns, -1)
