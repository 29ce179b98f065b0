"""Packed codes as the loops of decode attention read them: runs of tokens in planes of bits, converted to fp32.

Decision: nothing is dequantized where algebra allows it. A stored element is ``scale * (code * step - offset) + zero``,
so for a query q and softmax weights p

    keys     scale per channel:  q . k = (q * scale) . codes + q . zero'          folded once per block
             scale per token:    q . k = scale * (q . codes) + zero' * sum(q)     applied once after the sum
    values   scale per token:    sum p v = sum (p * scale) codes + sum p zero'    folded into the weight
             scale per channel:  sum p v = scale * sum p codes + zero' * sum p    applied once per block

and the inner loops (:mod:`hf_kvquant.attention.keys`, :mod:`hf_kvquant.attention.values`) multiply integers, converted
to fp32, with numbers that are constant along the vectorized axis: tokens for keys, channels for values.

The query heads that share a KV head are unrolled in Python. torch.compile then fuses their loops into one that loads
and converts every code once; as a broadcast dimension they cost 2.5 times as much (prototype of the design).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hf_kvquant.blocks import QuantizedBlocks
from hf_kvquant.formats import NumberFormat
from hf_kvquant.planes import Plane, planes_of
from hf_kvquant.ranges import read_scale, read_zero
from hf_kvquant.spec import TensorSpec


@dataclass(frozen=True)
class Codes:
    """Closed blocks of keys or values, with what every loop over them needs.

    Attributes:
        spec: how they are stored.
        head_dim: D.
        length: G, tokens in a block.
        layout: which bits of which channels each plane holds.
        planes: ``[B, K, n, C, G*w/8]`` (keys) or ``[B, K, n, G*w/8, C]`` (values).
        scale, zero: fp32 ``[B, K, n, G/g, D/c]`` (static scales: broadcastable to it).
    """

    spec: TensorSpec
    head_dim: int
    length: int
    layout: tuple[Plane, ...]
    planes: tuple[torch.Tensor, ...]
    scale: torch.Tensor
    zero: torch.Tensor | None

    @classmethod
    def of(cls, blocks: QuantizedBlocks, spec: TensorSpec, head_dim: int, length: int) -> Codes:
        """Of a lossy format."""
        scale = read_scale(blocks, spec, blocks.planes[0].device, computed=True)
        return cls(spec, head_dim, length, planes_of(spec, head_dim), blocks.planes, scale, read_zero(blocks, spec))

    @property
    def fmt(self) -> NumberFormat:
        return self.spec.number_format

    @property
    def offset(self) -> float:
        return offset_of(self.fmt, self.spec)

    @property
    def channel_groups(self) -> list[slice]:
        """The channels that share a scale, group by group."""
        size = self.spec.channels_per_group(self.head_dim)
        return [slice(start, start + size) for start in range(0, self.head_dim, size)]

    def kept(self) -> Codes:
        """With scales and zero points computed once (:func:`written`)."""
        return replace(self, scale=written(self.scale), zero=None if self.zero is None else written(self.zero))

    def runs(self, *widths: int, tokens_per_group: int = 1) -> Iterator[list[Run]]:
        return runs_of(widths, self.length, tokens_per_group)


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


def floats(plane: Plane, stored: torch.Tensor, run: Run, dim: int) -> torch.Tensor:
    """The codes of a run of one plane as fp32; table formats looked up."""
    fmt = plane.parts[0].fmt
    if fmt.kind == "table":
        return _float8(stored.narrow(dim, run.start, run.size), fmt)
    return _bits(plane, stored, run, dim).to(torch.float32)


def joint_floats(
    planes: tuple[Plane, ...], stored: tuple[torch.Tensor, ...], runs: list[Run], dim: int
) -> torch.Tensor:
    """Codes of a run as fp32, put together from all planes of a uniform format: one multiplication per code and head
    instead of one per plane."""
    if len(planes) == 1:
        return floats(planes[0], stored[0], runs[0], dim)
    parts = [
        _bits(plane, tensor, run, dim) << plane.parts[0].shift
        for plane, tensor, run in zip(planes, stored, runs, strict=True)
    ]
    return functools.reduce(torch.bitwise_or, parts).to(torch.float32)


def _bits(plane: Plane, stored: torch.Tensor, run: Run, dim: int) -> torch.Tensor:
    part = stored.narrow(dim, run.start, run.size)
    if run.shift:
        part = part >> run.shift
    return part & (2**plane.width - 1) if run.shift + plane.width < 8 else part


def _float8(part: torch.Tensor, fmt: NumberFormat) -> torch.Tensor:
    """An 8-bit float's exponent and mantissa moved to their place in an fp32 number, whose exponent counts from
    another bias; exact for every finite code, subnormal ones included."""
    mantissa, bias = (2, 15) if fmt.dtype == torch.float8_e5m2 else (3, 7)
    code = part.to(torch.int32)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << (23 - mantissa))
    return bits.view(torch.float32) * 2.0 ** (127 - bias)


def offset_of(fmt: NumberFormat, spec: TensorSpec) -> float:
    """What is subtracted from ``code * step``."""
    return fmt.offset(bool(spec.symmetric)) * fmt.step


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, parts)


def written(x: torch.Tensor) -> torch.Tensor:
    """``x`` kept in memory. Inductor would compute a cheap expression anew wherever it is read, which here may be once
    per code. A view by explicit strides needs a buffer to look at."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())
