"""Packing is a bijection with the layout drawn in the module, and wastes no bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvquant.packing import PLANE_WIDTHS, pack, unpack


@given(
    bits=st.sampled_from(sorted(PLANE_WIDTHS)),
    groups=st.integers(1, 9),
    rows=st.integers(1, 5),
    dim=st.sampled_from([0, 1, -1, -2]),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip_and_exact_size(bits, groups, rows, dim, seed) -> None:
    shape = [rows, rows]
    shape[dim] = 8 * groups
    codes = torch.randint(2**bits, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    planes = pack(codes, bits, dim)
    assert torch.equal(unpack(planes, bits, dim), codes)
    assert sum(plane.numel() for plane in planes) * 8 == codes.numel() * bits


@pytest.mark.parametrize("bits", sorted(PLANE_WIDTHS))
def test_every_byte_decodes_to_its_own_codes(bits) -> None:
    """Bijection from the other side: all 256 values of each plane survive unpack and pack."""
    everything = torch.arange(256).to(torch.uint8)
    widths = PLANE_WIDTHS[bits]
    planes = tuple(everything.repeat(width // min(widths)) if width > min(widths) else everything for width in widths)
    again = pack(unpack(planes, bits, 0), bits, 0)
    assert all(torch.equal(a, b) for a, b in zip(planes, again, strict=True))


def test_layout_by_hand() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    (four,) = pack(codes, 4, 0)
    assert four.tolist() == [j | (j + 8) << 4 for j in range(8)]
    (two,) = pack(codes % 4, 2, 0)
    assert two.tolist() == [sum(((j + 4 * i) % 4) << (2 * i) for i in range(4)) for j in range(4)]
    low, high = pack(codes % 8, 3, 0)
    assert low.tolist() == [sum(((j + 4 * i) % 8 & 3) << (2 * i) for i in range(4)) for j in range(4)]
    assert high.tolist() == [sum((((j + 2 * i) % 8) >> 2) << i for i in range(8)) for j in range(2)]


def test_packing_does_not_alias_its_input() -> None:
    codes = torch.full((8,), 200, dtype=torch.uint8)
    (plane,) = pack(codes, 8, 0)
    codes.zero_()
    assert plane.tolist() == [200] * 8
