"""b-bit codes <-> bytes, a bijection without padding: planes of 1, 2, 4 or 8 bits.

Layout of one plane of width w over G codes, p = 8 / w codes in a byte, run = G / p bytes::

    byte j:   | code j + (p-1)*run | ... | code j + run | code j |     (code j in the lowest w bits)

so that unpacking ``(byte >> w*i) & mask`` yields codes ``i*run .. (i+1)*run``, one contiguous run of tokens per shift
(interleaving neighbours would make every load a strided one). Widths that are no power of two are several planes, low
bits first: 3 bits = a 2-bit plane (bits 0 and 1) + a 1-bit plane (bit 2), exactly 3 bits per code. Rejected: ten
3-bit codes in a 32-bit word, which wastes 2 bits of 32 and needs a division to find a code.
"""

from __future__ import annotations

import torch

PLANE_WIDTHS: dict[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}

# The narrowest plane holds 8 codes in a byte, so every multiple of 8 packs at every width.
PACK_MULTIPLE = 8


def pack(codes: torch.Tensor, bits: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Pack uint8 codes along ``dim``.

    Args:
        codes: uint8, any shape, values below ``2**bits``; size along ``dim`` a multiple of 8.
        bits: 1, 2, 3, 4 or 8.
        dim: axis to pack.

    Returns:
        One uint8 tensor per plane, size ``G * width / 8`` along ``dim``.
    """
    planes, shift = [], 0
    for width in PLANE_WIDTHS[bits]:
        part = (codes >> shift) & (2**width - 1) if len(PLANE_WIDTHS[bits]) > 1 else codes
        planes.append(_pack_plane(part, width, dim))
        shift += width
    return tuple(planes)


def unpack(planes: tuple[torch.Tensor, ...], bits: int, dim: int) -> torch.Tensor:
    """Inverse of :func:`pack`: uint8 codes of size G along ``dim``."""
    codes, shift = None, 0
    for width, plane in zip(PLANE_WIDTHS[bits], planes, strict=True):
        part = _unpack_plane(plane, width, dim)
        codes = part if codes is None else codes | (part << shift)
        shift += width
    assert codes is not None
    return codes


def _pack_plane(codes: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    runs = codes.chunk(8 // width, dim)
    packed = runs[0].clone(memory_format=torch.contiguous_format)
    for index, run in enumerate(runs[1:], start=1):
        packed |= run << (width * index)
    return packed


def _unpack_plane(plane: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    if width == 8:
        return plane
    mask = 2**width - 1
    return torch.cat([(plane >> (width * index)) & mask for index in range(8 // width)], dim)
