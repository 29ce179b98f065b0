"""Quantizer against an independent reference in NumPy, and the promises of its docstring."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvquant import TensorSpec
from hf_kvquant.config import AXES
from hf_kvquant.formats import FORMATS
from hf_kvquant.quantizer import QuantizedBlocks, dequantize, quantize
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
    tokens = [slice(t, t + spec.group_size) for t in range(0, length, spec.group_size)]
    outer = [(b, k, n) for b in range(batch) for k in range(heads) for n in range(blocks)]
    if spec.axis == "channel":
        return [(*o, t, d) for o in outer for t in tokens for d in range(head_dim)]
    if spec.axis == "token":
        size = max(s for s in range(1, min(spec.group_size, head_dim) + 1) if head_dim % s == 0)
        return [(*o, t, slice(d, d + size)) for o in outer for t in range(length) for d in range(0, head_dim, size)]
    if spec.axis == "head":
        return [(*o, t, slice(None)) for o in outer for t in tokens]
    return [(b, slice(None), n, t, slice(None)) for b in range(batch) for n in range(blocks) for t in tokens]


def reference(x: np.ndarray, spec: TensorSpec) -> tuple[np.ndarray, np.ndarray]:
    """Nearest representable value and step of every element, float64, metadata not rounded."""
    fmt = spec.number_format
    out, step = np.empty_like(x), np.empty_like(x)
    grid = np.unique(fmt.decode(torch.arange(256).to(torch.uint8)).double().numpy()) if fmt.kind == "table" else None
    for index in groups_of(x, spec):
        group = x[index]
        if grid is not None:
            scale = np.abs(group).max() / fmt.unit_limit(True)
            finite = grid[np.isfinite(grid)]
            near = finite[np.abs(group[..., None] / scale - finite).argmin(-1)] if scale else np.zeros_like(group)
            out[index], step[index] = (
                near * scale,
                2.0 ** -(3 if fmt.name == "fp8_e4m3" else 2) * np.abs(group) + scale * 2**-8,
            )
        else:
            levels = 2 ** (fmt.bits - 1) - 1 if spec.symmetric else 2**fmt.bits - 1
            zero = 0.0 if spec.symmetric else group.min()
            scale = (np.abs(group).max() if spec.symmetric else group.max() - zero) / levels
            out[index] = np.round((group - zero) / scale) * scale + zero if scale else zero
            step[index] = scale
    return out, step


@settings(max_examples=60)
@given(specs(), st.booleans(), st.sampled_from([1, 7, 40, 64, 80]), st.integers(0, 2**31))
def test_matches_the_reference(spec, tokens_last, head_dim, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    length = 64 if spec.axis == "token" else spec.group_size
    x = torch.randn(2, 3, 2, length, head_dim, generator=generator) * torch.rand(head_dim, generator=generator) * 10
    got = round_trip(x, spec, tokens_last)
    if spec.number_format.lossless:
        assert torch.equal(got, x)
        return
    expected, step = (torch.from_numpy(a) for a in reference(x.double().numpy(), spec))
    # fp16 metadata widens the stored range by at most an fp16 spacing of the zero point and of the scale.
    spacing = 0.0 if spec.scale_format == "fp32" else 2.0**-10
    slack = TOLERANCES["half_step_ulp"] * x.abs().amax()
    assert bool(((got - x).abs() <= (step / 2) * (1 + 2 * spacing) + spacing * x.abs().amax() / 3 + slack).all())
    if spec.scale_format == "fp32":
        assert float(((got - expected).abs() > slack * 4).float().mean()) < 0.01  # other side of a rounding tie


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
@given(specs(), st.booleans(), st.integers(0, 2**31))
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
