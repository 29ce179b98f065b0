"""Quantizer against an independent reference in NumPy, and the promises of its docstring."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvquant import TensorSpec
from hf_kvquant.blocks import QuantizedBlocks
from hf_kvquant.formats import FORMATS
from hf_kvquant.quantizer import dequantize, quantize
from hf_kvquant.spec import AXES
from tests.test_config import specs
from tests.tolerances import TOLERANCES

LOSSY = [name for name, fmt in FORMATS.items() if not fmt.lossless]
INTEGERS = [name for name in LOSSY if name.startswith("int")]


def round_trip(
    x: torch.Tensor, spec: TensorSpec, tokens_last: bool = True, dtype: torch.dtype | None = None
) -> torch.Tensor:
    out = torch.full(x.shape, math.nan, dtype=dtype or x.dtype)
    dequantize(quantize(x, spec, tokens_last), spec, tokens_last, out)
    return out


def groups_of(x: np.ndarray, spec: TensorSpec) -> list[tuple]:
    """Index tuples of every group, written out from the definition of the axes."""
    batch, heads, blocks, length, head_dim = x.shape
    outer = [(b, k, n) for b in range(batch) for k in range(heads) for n in range(blocks)]
    if spec.axis == "token":
        limit = head_dim if spec.group_size is None else min(spec.group_size, head_dim)
        size = max(s for s in range(1, limit + 1) if head_dim % s == 0)
        return [(*o, t, slice(d, d + size)) for o in outer for t in range(length) for d in range(0, head_dim, size)]
    assert spec.group_size is not None
    tokens = [slice(t, t + spec.group_size) for t in range(0, length, spec.group_size)]
    if spec.axis == "channel":
        return [(*o, t, d) for o in outer for t in tokens for d in range(head_dim)]
    if spec.axis == "head":
        return [(*o, t, slice(None)) for o in outer for t in tokens]
    return [(b, slice(None), n, t, slice(None)) for b in range(batch) for n in range(blocks) for t in tokens]


def reference(x: np.ndarray, spec: TensorSpec) -> tuple[np.ndarray, np.ndarray]:
    """Nearest representable value and step of every element over the range of its group, float64, metadata not
    rounded."""
    fmt = spec.number_format
    out, step = np.empty_like(x), np.empty_like(x)
    grid = np.unique(fmt.decode(torch.arange(256).to(torch.uint8)).double().numpy()) if fmt.kind == "table" else None
    for index in groups_of(x, spec):
        group = x[index]
        low, high = group.min(), group.max()
        if isinstance(spec.clip, float):
            low, high = np.quantile(group, (1 - spec.clip) / 2), np.quantile(group, (1 + spec.clip) / 2)
        bound = max(-low, high)
        if grid is not None:
            scale = bound / fmt.unit_limit(True)
            finite = grid[np.isfinite(grid)]
            near = finite[np.abs(group[..., None] / scale - finite).argmin(-1)] if scale else np.zeros_like(group)
            spacing = 2.0 ** -(3 if fmt.name == "fp8_e4m3" else 2)
            out[index], step[index] = near * scale, spacing * np.abs(group) + scale * 2**-8
        elif fmt.midrise:
            half = 2 ** (fmt.bits - 1)
            scale = bound / half
            level = np.clip(np.floor(group / scale), -half, half - 1) + 0.5 if scale else np.zeros_like(group)
            out[index], step[index] = level * scale, scale
        else:
            levels = 2 ** (fmt.bits - 1) - 1 if spec.symmetric else 2**fmt.bits - 1
            zero, scale = (0.0, bound / levels) if spec.symmetric else (low, (high - low) / levels)
            code = np.clip(np.round((group - zero) / scale), -levels if spec.symmetric else 0, levels) if scale else 0
            out[index], step[index] = code * scale + zero, scale
    return out, step


# Relative rounding of a stored scale, and of a stored zero point relative to the largest of its block.
SCALE_ROUNDING = {
    "fp32": 0.0,
    "fp16": 2.0**-10,
    "fp8": 2.0**-3,
    "log2_16": 2 ** (1 / 16) - 1,
    "log2_8": 2 ** (1 / 8) - 1,
}
ZERO_ROUNDING = {None: 0.0, "fp32": 0.0, "fp16": 2.0**-10, "int8": 1 / 127}


@settings(max_examples=100)
@given(specs(plain=True), st.booleans(), st.sampled_from([1, 7, 40, 64, 80]), st.integers(0, 2**31))
def test_matches_the_reference(spec, tokens_last, head_dim, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    length = 64 if spec.axis == "token" else spec.group_size
    x = torch.randn(2, 3, 2, length, head_dim, generator=generator) * torch.rand(head_dim, generator=generator) * 10
    got = round_trip(x, spec, tokens_last)
    if spec.number_format.lossless:
        assert torch.equal(got, x)
        return
    if spec.clip == "mse":
        return
    expected, step = (torch.from_numpy(a) for a in reference(x.double().numpy(), spec))
    scale, zero, largest = SCALE_ROUNDING[spec.scale_format], ZERO_ROUNDING[spec.zero_format], x.abs().amax()
    slack = TOLERANCES["half_step_ulp"] * largest
    # 8-bit scales tell 15 octaves apart: below them a scale is as coarse as 2^-15 of the largest.
    finest = 2.0**-15 * largest if scale > 2.0**-10 else 0.0
    bound = (step / 2) * (1 + 2 * scale) + zero * largest / 3 + slack + finest
    missed = (expected - x).abs() if isinstance(spec.clip, float) else 0.0  # what clipping itself costs
    assert bool(((got - x).abs() <= bound + missed).all())
    if spec.scale_format == "fp32" and zero == 0.0:
        assert float(((got - expected).abs() > slack * 4).float().mean()) < 0.01  # other side of a rounding tie


@settings(max_examples=60)
@given(specs(plain=True), st.integers(0, 2**31))
def test_searched_range_errs_no_more_than_the_whole_one(spec, seed) -> None:
    """clip="mse" against "minmax", per group, with the metadata as stored: the whole range is one of its candidates.
    On a mid-rise grid the candidates are others; there the error is that of the best gain, found by hand, with scales
    that are not rounded (rounded gains: tests/test_recipe.py)."""
    if spec.number_format.lossless:
        return
    if spec.number_format.midrise:
        spec = replace(spec, scale_format="fp32")
    length = 64 if spec.axis == "token" else spec.group_size
    x = torch.randn(1, 2, 1, length, 40, generator=torch.Generator().manual_seed(seed)) ** 3
    searched = (round_trip(x, replace(spec, clip="mse")) - x).double().square().numpy()
    if spec.number_format.midrise:
        compared = _best_gain(x.double().numpy(), spec)
    else:
        compared = (round_trip(x, replace(spec, clip="minmax")) - x).double().square().numpy()
    for index in groups_of(x.numpy(), spec):
        rounding = TOLERANCES["half_step_ulp"] * np.linalg.norm(x.double().numpy()[index])
        assert np.sqrt(searched[index].sum()) <= np.sqrt(compared[index].sum()) + rounding


def _best_gain(x: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Squared error of every element at the best of the nine gains per group."""
    half, step = 2 ** (spec.number_format.bits - 1), spec.number_format.step
    error = np.zeros_like(x)
    for index in groups_of(x, spec):
        group, tried = x[index], []
        for multiple in (0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2):
            gain = np.sqrt((group**2).mean()) * multiple
            level = np.clip(np.floor(group / gain / step), -half, half - 1) + 0.5
            tried.append((level * step * gain - group) ** 2)
        error[index] = tried[int(np.argmin([each.sum() for each in tried]))]
    return error


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("scale_format", ["fp16", "fp32"])
@pytest.mark.parametrize("fmt", INTEGERS)
def test_error_within_half_of_the_stored_step(fmt, axis, scale_format) -> None:
    """The bound holds with the step as stored, for a large bias as well: rounding the metadata never clips."""
    spec = TensorSpec(fmt, axis, 64, None, scale_format)
    x = torch.randn(2, 2, 3, 64, 64, generator=torch.Generator().manual_seed(1)) + 300 * (torch.arange(64) % 8 == 0)
    blocks = quantize(x, spec, True)
    assert blocks.scale is not None
    power = 1.0 if blocks.exponent is None else torch.exp2(blocks.exponent.float())[..., None, None]
    step = (blocks.scale.float() * power)[..., None, :, None]
    error = (round_trip(x, spec) - x).abs().unflatten(-1, (-1, spec.channels_per_group(64)))
    error = error.unflatten(-3, (-1, spec.tokens_per_group))
    assert bool((error <= step / 2 + TOLERANCES["half_step_ulp"] * x.abs().max()).all())


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("fmt", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_zeros_are_exact_and_size_does_not_matter(fmt, axis, dtype) -> None:
    """Values 2^-20 (about 1e-6) times as large give the same codes: nothing underflows, with fp16 scales as well."""
    for scale_format in ("fp16", "fp32"):
        spec = TensorSpec(fmt, axis, 64, scale_format=scale_format)
        zeros = torch.zeros(1, 2, 1, 64, 40, dtype=dtype)
        assert torch.equal(round_trip(zeros, spec), zeros)
        x = torch.randn(1, 2, 1, 64, 40, generator=torch.Generator().manual_seed(2)).to(dtype)
        assert torch.equal(round_trip(x * 2.0**-20, spec), round_trip(x, spec) * 2.0**-20)


def _relative_rms(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("fmt", INTEGERS)
def test_fp16_subnormals_keep_their_grid(fmt) -> None:
    """fp16 values near 1e-6 are multiples of 2^-24 below 2^-18; read back in fp16 they are within half a step plus
    half that spacing."""
    spec = TensorSpec(fmt, "channel", 64)
    x = (torch.randn(1, 1, 1, 64, 40, generator=torch.Generator().manual_seed(3)) * 1e-6).half()
    step = (x.float().amax(-2) - x.float().amin(-2)) / spec.number_format.unit_limit(False)
    assert bool(((round_trip(x, spec).float() - x.float()).abs() <= step[..., None, :] * 0.51 + 2.0**-25).all())


@pytest.mark.parametrize("constant", [1.0, 0.1, -3.7, 1e-6, 6e4, -6e4, 1 / 3, 300.0])
@pytest.mark.parametrize("fmt", INTEGERS)
def test_constant_groups(fmt, constant) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((1, 1, 1, 64, 40), constant, dtype=dtype)
        if dtype == torch.float16 or abs(constant) > 1e-3:
            x[..., 3] = 60000.0
        assert torch.equal(round_trip(x, TensorSpec(fmt, "channel", 64)), x)
    x = torch.full((1, 1, 1, 64, 40), constant)
    assert torch.equal(round_trip(x, TensorSpec(fmt, "channel", 64, scale_format="fp32")), x)
    error = (round_trip(x, TensorSpec(fmt, "channel", 64)) - x).abs().max()
    assert float(error) <= TOLERANCES["fp32_constant_in_fp16_metadata"] * abs(constant)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("fmt", LOSSY)
def test_range_of_fp16_and_far_beyond(fmt, axis) -> None:
    """Differences that overflow fp16 (or fp32) and magnitudes far from 1: finite, and as exact as at size 1."""
    x = torch.rand(1, 2, 1, 64, 64, generator=torch.Generator().manual_seed(4)) * 2 - 1
    expected = _relative_rms(round_trip(x, TensorSpec(fmt, axis, 64)), x)
    for size in (1e-30, 1e-6, 6e4, 1e9, 1e38):
        got = round_trip(x * size, TensorSpec(fmt, axis, 64))
        assert bool(got.isfinite().all())
        assert _relative_rms(got / size, x) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("fmt", LOSSY)
def test_non_finite_values_stay_in_their_group(fmt, axis, value) -> None:
    spec = TensorSpec(fmt, axis, 32)
    x = torch.randn(2, 2, 2, 64, 64, generator=torch.Generator().manual_seed(5))
    clean = round_trip(x, spec)
    x[1, 0, 1, 40, 7] = value
    got = round_trip(x, spec)
    touched = torch.zeros(x.shape, dtype=torch.bool)
    index = next(i for i in groups_of(np.empty(x.shape), spec) if _contains(i, (1, 0, 1, 40, 7)))
    touched[index] = True
    assert bool(got[touched].isnan().all())
    assert torch.equal(got[~touched], clean[~touched])


def _contains(index: tuple, position: tuple) -> bool:
    return all(
        (i == p) if isinstance(i, int) else (i.start or 0) <= p < (i.stop if i.stop is not None else p + 1)
        for i, p in zip(index, position, strict=True)
    )


@settings(max_examples=30)
@given(specs(plain=True), st.booleans(), st.integers(0, 2**31))
def test_rows_blocks_and_heads_do_not_see_each_other(spec, tokens_last, seed) -> None:
    length = 64 if spec.axis == "token" else spec.group_size
    x = torch.randn(2, 2, 2, length, 40, generator=torch.Generator().manual_seed(seed))
    whole = round_trip(x, spec, tokens_last)
    alone = round_trip(x[1:, :, 1:].clone(), spec, tokens_last)
    assert torch.equal(whole[1:, :, 1:], alone)
    if spec.axis != "tensor":
        assert torch.equal(whole[:, 1:], round_trip(x[:, 1:].clone(), spec, tokens_last))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_layouts_give_the_same_values_and_any_output(fmt, dtype) -> None:
    """Key and value layout, contiguous and strided output, one piece and many: the same numbers."""
    spec = TensorSpec(fmt, "channel", 64)
    x = torch.randn(1, 2, 3, 64, 80, generator=torch.Generator().manual_seed(6)).to(dtype)
    one = round_trip(x, spec, True)
    assert torch.equal(one, round_trip(x, spec, False))
    strided = torch.full((1, 3, 64, 2, 80), math.nan, dtype=dtype).permute(0, 3, 1, 2, 4)
    dequantize(quantize(x, spec, True), spec, True, strided)
    assert torch.equal(one, strided)


def test_pieces_equal_the_whole(monkeypatch) -> None:
    spec = TensorSpec("int3", "channel", 64)
    x = torch.randn(1, 2, 9, 64, 40, generator=torch.Generator().manual_seed(7))
    whole = round_trip(x, spec)
    monkeypatch.setattr("hf_kvquant.quantizer.CHUNK_ELEMENTS", 2 * 64 * 40 * 2)
    assert torch.equal(round_trip(x, spec), whole)


def test_named_round_trip() -> None:
    blocks = quantize(torch.randn(1, 1, 1, 64, 8), TensorSpec("int3"), True)
    again = QuantizedBlocks.from_named(blocks.named())
    assert all(torch.equal(a, b) for a, b in zip(blocks.named().values(), again.named().values(), strict=True))
    assert list(again.named()) == ["planes.0", "planes.1", "scale", "zero", "exponent"]


def test_sizes_are_the_documented_bits() -> None:
    """64 x 64 int4: 4 bits of code, 16 + 16 bits of scale and zero per 64 elements, 8 bits of exponent per 4,096."""
    blocks = quantize(torch.randn(1, 1, 1, 64, 64), TensorSpec("int4"), True)
    bits = {name: 8 * tensor.nbytes / 4096 for name, tensor in blocks.named().items()}
    assert bits == {"planes.0": 4.0, "scale": 0.25, "zero": 0.25, "exponent": 8 / 4096}


@pytest.mark.parametrize("fmt", [name for name in LOSSY if FORMATS[name].kind == "table"])
def test_float8_bits_are_read_as_torch_reads_them(fmt) -> None:
    """Every finite code, sign of zero included."""
    form = FORMATS[fmt]
    codes = torch.arange(256).to(torch.uint8)
    codes = codes[form.decode(codes).isfinite()]
    codes = torch.nn.functional.pad(codes, (0, 256 - len(codes)))
    spec = TensorSpec(fmt, "head", 64, scale_format="static", scale=1.0)
    out = torch.empty(1, 1, 1, 64, 4)
    dequantize(QuantizedBlocks((codes.view(1, 1, 1, 64, 4),)), spec, False, out)
    assert torch.equal(out.view(torch.int32), form.decode(codes.view(1, 1, 1, 64, 4)).view(torch.int32))
