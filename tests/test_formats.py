"""Number formats against hand-written tables and bit-level definitions."""

import math

import pytest
import torch

from hf_kvquant.formats import FORMATS

AFFINE = [fmt for fmt in FORMATS.values() if fmt.kind == "affine"]
TABLES = [fmt for fmt in FORMATS.values() if fmt.kind == "table"]
# name -> (bits, unit values of the codes in order), symmetric; the restricted range leaves the lowest code unused.
SYMMETRIC_UNITS = {
    "int2": [-2, -1, 0, 1],
    "int3": [-4, -3, -2, -1, 0, 1, 2, 3],
    "int4": [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7],
    "int8": list(range(-128, 128)),
}
FLOAT_FIELDS = {"fp8_e4m3": (4, 3, 7, False), "fp8_e5m2": (5, 2, 15, True)}


def float8_value(code: int, exponent_bits: int, mantissa_bits: int, bias: int, ieee: bool) -> float:
    """The value of one 8-bit float from its bits (OCP 8-bit floating point specification, section 5)."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    if ieee and exponent == 2**exponent_bits - 1:
        return math.nan if mantissa else sign * math.inf
    if not ieee and code & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def all_codes(bits: int) -> torch.Tensor:
    return torch.arange(2**bits, dtype=torch.uint8) if bits < 8 else torch.arange(256).to(torch.uint8)


def test_registry_names_and_bits() -> None:
    bits = {name: fmt.bits for name, fmt in FORMATS.items()}
    assert bits == {"none": 0, "int2": 2, "int3": 3, "int4": 4, "int8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8}


@pytest.mark.parametrize("fmt", AFFINE, ids=lambda f: f.name)
def test_affine_tables(fmt) -> None:
    codes = all_codes(fmt.bits)
    assert fmt.decode(codes, symmetric=True).tolist() == SYMMETRIC_UNITS[fmt.name]
    assert fmt.decode(codes, symmetric=False).tolist() == list(range(2**fmt.bits))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("fmt", AFFINE, ids=lambda f: f.name)
def test_affine_encode_inverts_decode(fmt, symmetric) -> None:
    codes = all_codes(fmt.bits)[1 if symmetric else 0 :]
    assert torch.equal(fmt.encode(fmt.decode(codes, symmetric), symmetric), codes)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("fmt", AFFINE, ids=lambda f: f.name)
def test_affine_midpoints_saturation_and_nan(fmt, symmetric) -> None:
    limit = fmt.unit_limit(symmetric)
    low = -limit if symmetric else 0.0
    units = torch.tensor([0.5, 1.5, 1e9, -1e9, math.inf, -math.inf, math.nan])
    expected = torch.tensor([0.0, min(2.0, limit), limit, low, limit, low, 0.0])
    assert torch.equal(fmt.decode(fmt.encode(units, symmetric), symmetric), expected)


@pytest.mark.parametrize("fmt", TABLES, ids=lambda f: f.name)
def test_float8_table(fmt) -> None:
    expected = torch.tensor([float8_value(code, *FLOAT_FIELDS[fmt.name]) for code in range(256)])
    assert torch.equal(fmt.decode(all_codes(8)).nan_to_num(123.0), expected.nan_to_num(123.0))
    assert fmt.unit_limit(True) == max(v for v in expected.tolist() if math.isfinite(v))


@pytest.mark.parametrize("fmt", TABLES, ids=lambda f: f.name)
def test_float8_encode_inverts_decode_and_rounds_to_nearest(fmt) -> None:
    values = fmt.decode(all_codes(8))
    finite = all_codes(8)[values.isfinite()]
    assert torch.equal(fmt.encode(fmt.decode(finite)), finite)
    grid = fmt.decode(finite).unique()
    below, above = grid[:-1], grid[1:]
    for share, nearest in ((0.49, below), (0.51, above)):
        got = fmt.decode(fmt.encode(below + share * (above - below)))
        assert torch.equal(got, nearest)


@pytest.mark.parametrize("fmt", TABLES, ids=lambda f: f.name)
def test_float8_saturation_and_nan(fmt) -> None:
    limit = fmt.unit_limit(True)
    got = fmt.decode(fmt.encode(torch.tensor([1e9, -1e9, math.nan])))
    assert got.tolist() == [limit, -limit, 0.0]
