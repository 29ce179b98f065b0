"""Number formats against hand-written tables and bit-level definitions."""

import itertools
import math

import pytest
import torch
from scipy import optimize, stats

from hf_kvquant import QuantizedKVCache
from hf_kvquant.formats import FORMATS, NumberFormat
from tests import tiny
from tests.tolerances import TOLERANCES

AFFINE = [fmt for fmt in FORMATS.values() if fmt.kind == "affine" and not fmt.midrise]
MIDRISE = [fmt for fmt in FORMATS.values() if fmt.midrise]
TABLES = [fmt for fmt in FORMATS.values() if fmt.kind == "table" and fmt.dtype is not None]
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
    integers = {"int2": 2, "int3": 3, "int4": 4, "int8": 8}
    midrise = {"midrise1": 1, "midrise2": 2, "midrise3": 3, "midrise4": 4, "midrise5": 5, "midrise6": 6, "midrise8": 8}
    assert bits == {"none": 0, "fp8_e4m3": 8, "fp8_e5m2": 8} | integers | midrise


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


# name -> unit values of the codes in order: odd multiples of half a step, the step of Max 1960, table II.
MIDRISE_UNITS = {
    "midrise1": [-0.7978, 0.7978],
    "midrise2": [-1.4931, -0.4977, 0.4977, 1.4931],
    "midrise3": [-2.0517, -1.4655, -0.8793, -0.2931, 0.2931, 0.8793, 1.4655, 2.0517],
    "midrise4": [step * 0.16755 for step in range(-15, 16, 2)],
    "midrise5": [step * 0.09405 for step in range(-31, 32, 2)],
    "midrise6": [step * 0.052 for step in range(-63, 64, 2)],
    "midrise8": [step * 0.0155 for step in range(-255, 256, 2)],
}


@pytest.mark.parametrize("fmt", MIDRISE, ids=lambda f: f.name)
def test_midrise_table_and_inverse(fmt) -> None:
    units = fmt.decode(all_codes(fmt.bits))
    assert units.tolist() == pytest.approx(MIDRISE_UNITS[fmt.name], rel=1e-6)
    assert torch.equal(fmt.encode(units), all_codes(fmt.bits))
    assert torch.equal(units, -units.flip(0))


@pytest.mark.parametrize("fmt", MIDRISE, ids=lambda f: f.name)
def test_midrise_rounds_to_nearest_and_saturates(fmt) -> None:
    units = fmt.decode(all_codes(fmt.bits))
    for share, nearest in ((0.49, units[:-1]), (0.51, units[1:])):
        assert torch.equal(fmt.decode(fmt.encode(units[:-1] + share * fmt.step)), nearest)
    ends = fmt.decode(fmt.encode(torch.tensor([1e9, -1e9, math.inf, -math.inf])))
    assert ends.tolist() == [units[-1], units[0], units[-1], units[0]]
    assert fmt.unit_limit(True) == pytest.approx(float(units[-1]) + fmt.step / 2)


@pytest.mark.parametrize("fmt", MIDRISE, ids=lambda f: f.name)
def test_midrise_step_errs_least_for_a_normal_distribution(fmt) -> None:
    """The distortion at the step of the table is within 0.1 % of the best over all steps (integrated by scipy)."""
    best = optimize.minimize_scalar(lambda step: distortion(step, fmt.bits), bounds=(0.01, 2.0), method="bounded")
    assert distortion(fmt.step, fmt.bits) <= best.fun * 1.001


def distortion(step: float, bits: int) -> float:
    """Mean squared error of a mid-rise grid for N(0, 1), from the moments of the normal density over each cell."""
    half = 2 ** (bits - 1)
    edges = [-math.inf, *(step * level for level in range(1 - half, half)), math.inf]
    total = 0.0
    for index, (low, high) in enumerate(itertools.pairwise(edges)):
        level = step * (index - half + 0.5)
        mass = stats.norm.cdf(high) - stats.norm.cdf(low)
        first = stats.norm.pdf(low) - stats.norm.pdf(high)
        ends = [0.0 if math.isinf(x) else x * stats.norm.pdf(x) for x in (low, high)]
        total += (mass + ends[0] - ends[1]) - 2 * level * first + level**2 * mass
    return total


# Bits -> uneven levels with no symmetry and none at zero.
LEVELS = {bits: tuple(-1.0 + 0.1 * i + 0.02 * i**2 for i in range(2**bits)) for bits in (1, 2, 3, 4, 5)}


@pytest.mark.parametrize("bits", LEVELS)
def test_levels_are_looked_up_and_rounded_to_the_nearest(bits) -> None:
    fmt = NumberFormat("own", bits, "table", levels=LEVELS[bits])
    codes = all_codes(bits)
    assert fmt.decode(codes).tolist() == pytest.approx(LEVELS[bits])
    assert torch.equal(fmt.encode(fmt.decode(codes)), codes)
    units = torch.linspace(-2, 30, 4001)
    distance = (units[:, None] - torch.tensor(LEVELS[bits])).abs()
    assert torch.allclose((fmt.nearest(units) - units).abs(), distance.amin(1), atol=1e-6)
    assert fmt.unit_limit(True) == max(abs(level) for level in LEVELS[bits])
    assert fmt.encode(torch.tensor([math.inf, -math.inf, math.nan])).tolist() == [
        2**bits - 1,
        0,
        int(torch.tensor(LEVELS[bits]).abs().argmin()),
    ]


@pytest.mark.parametrize(
    "levels",
    [
        (),
        (0.0, 1.0, 2.0),
        (0.0, 1.0, 1.0, 2.0),
        (3.0, 2.0, 1.0, 0.0),
        (0.0, 1.0, 2.0, math.nan),
        (-math.inf, 0.0, 1.0, 2.0),
        ("a", "b", "c", "d"),
    ],
)
def test_levels_that_are_none(levels) -> None:
    with pytest.raises(ValueError, match=r"levels=.* is not valid: give 2\^bits = 4 finite increasing numbers"):
        NumberFormat("own", 2, "table", levels=levels)


@pytest.mark.parametrize(
    ("bits", "kind", "message"), [(4, "tabel", "kind='tabel'"), (7, "affine", "bits=7"), (0, "table", "bits=0")]
)
def test_formats_that_are_none(bits, kind, message) -> None:
    with pytest.raises(ValueError, match=f"{message} is not valid: choose one of"):
        NumberFormat("own", bits, kind)


def test_a_format_added_anew_is_read_with_its_new_levels(monkeypatch) -> None:
    """Decode attention is compiled for what a name stands for, not for the name."""
    model, ids = tiny.load("llama"), tiny.prompt(1, 300)
    for step in (0.3, 0.6):
        monkeypatch.setitem(FORMATS, "own", NumberFormat("own", 4, "affine", step=step, midrise=True))
        config = tiny.alike("own", "token", 16, residual=16, sinks=4)
        logits = []
        for backend in ("auto", "full"):
            cache = QuantizedKVCache(model.config, config, backend=backend)
            tiny.forward(model, ids, cache)
            logits.append(tiny.forward(model, ids[:, :1], cache))
        assert tiny.relative_error(*logits) <= TOLERANCES["attention_fp32"]


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_a_format_added_at_run_time_serves_a_cache(bits, axis, monkeypatch, tmp_path) -> None:
    """Codes of the asked width, every element on a level of its group, decode steps like those over full tensors, and a
    file that is only read where the format is known."""
    monkeypatch.setitem(FORMATS, "own", NumberFormat("own", bits, "table", levels=LEVELS[bits]))
    config = tiny.alike("own", axis, 32, residual=16, sinks=4, scale_format="fp32")
    model, ids = tiny.load("llama"), tiny.prompt(1, 300)
    outputs = []
    for backend in ("auto", "full"):
        cache = QuantizedKVCache(model.config, config, backend=backend)
        tiny.forward(model, ids, cache)
        outputs.append(tiny.forward(model, ids[:, :1], cache))
    assert torch.equal(*outputs)
    whole = cache.memory_report().sum
    assert 8 * whole.codes == bits * whole.packed_elements
    stored = cache.layers[0].values[0, 0, 4:36, 0] if axis == "channel" else cache.layers[0].values[0, 0, 4]
    assert len(stored.unique()) <= 2**bits
    cache.save(tmp_path / "own.safetensors")
    again = QuantizedKVCache.load(tmp_path / "own.safetensors", model.config)
    assert torch.equal(again.layers[0].keys, cache.layers[0].keys)
    monkeypatch.delitem(FORMATS, "own")
    with pytest.raises(
        ValueError, match=r"own\.safetensors holds codes of the format 'own', which is not in FORMATS here; add it"
    ):
        QuantizedKVCache.load(tmp_path / "own.safetensors", model.config)
