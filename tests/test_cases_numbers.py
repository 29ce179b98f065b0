"""Cases about numbers: how far from the delivered tensors closed blocks read back, and what attention sees of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_kvquant import PRESETS, KVQuantConfig, TensorSpec
from hf_kvquant.formats import FORMATS
from tests.tiny import alike, filled, relative_error, states
from tests.tolerances import TOLERANCES

AXES = ("channel", "token", "head", "tensor")
LOSSY = tuple(name for name, fmt in FORMATS.items() if not fmt.lossless)
# Without a zero point a constant other than 0 need not be a level: mid-rise grids and floats are within their step.
WITH_ZERO_POINT = tuple(name for name in LOSSY if not FORMATS[name].only_symmetric)

# -------------------------------------------------------------------- 6: outlier channels, as attention sees them


def total_variation(config: KVQuantConfig, bias: torch.Tensor, dtype: torch.dtype, seed: int) -> float:
    """Mean over 256 queries N(0, 1) and 2 heads of the total variation distance between softmax(q.k / sqrt(D)) with the
    delivered keys and with those read back; keys N(0, 1) plus ``bias`` on 8 of 128 channels, 512 tokens."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = states(1, 2, 512, 128, seed=seed)
    keys[..., torch.randperm(128, generator=generator)[:8]] += bias
    keys, values = keys.to(dtype), values.to(dtype)
    queries = torch.randn(1, 2, 256, 128, generator=generator) / 128**0.5
    cached = filled(config, (keys, values)).materialize()[0]
    exact, seen = (torch.softmax(queries @ k.float().mT, -1) for k in (keys, cached))
    return float((exact - seen).abs().sum(-1).mul(0.5).mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [torch.full((8,), 300.0), torch.linspace(-300, 300, 8), torch.arange(8.0) * 40])
def test_case_06_outlier_channels_leave_attention_alone(bias: torch.Tensor, dtype: torch.dtype) -> None:
    for seed in range(3):
        default = KVQuantConfig()
        assert default == PRESETS["k4v4"].config
        assert total_variation(default, bias, dtype, seed) <= TOLERANCES["attention_total_variation"]
        bare = KVQuantConfig(default.key, default.value, residual_length=0, sink_length=0)
        assert total_variation(bare, bias, dtype, seed) <= TOLERANCES["attention_total_variation"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_06_centred_keys_do_not_see_the_bias(dtype: torch.dtype) -> None:
    """cr4 meets the limit of 4 bits without window and sinks as well; cm3 and cm2 have fewer bits for keys of a flat
    spectrum, which suit them least, but the outlier channels cost them nothing."""
    for preset in ("cr4", "cm3", "cm2"):
        config = replace(PRESETS[preset].config, residual_length=0, sink_length=0)
        plain = total_variation(config, torch.zeros(8), dtype, 0)
        for bias in (torch.full((8,), 300.0), torch.linspace(-300, 300, 8)):
            seen = total_variation(config, bias, dtype, 0)
            assert seen == pytest.approx(plain, rel=0.03)
            assert preset != "cr4" or seen <= TOLERANCES["attention_total_variation"]


def test_case_06_keys_per_token_would_fail() -> None:
    """The same measure sees the damage that peers do, even behind the default window: 0.4 to 0.97."""
    per_token = KVQuantConfig(TensorSpec("int4", "token", 64), PRESETS["k4v4"].config.value)
    for bias in (torch.full((8,), 300.0), torch.linspace(-300, 300, 8)):
        assert total_variation(per_token, bias, torch.float32, 0) > 0.3


# -------------------------------------------------------------------- 7, 8: magnitudes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("fmt", LOSSY)
def test_case_07_ranges_beyond_fp16(fmt: str, axis: str, dtype: torch.dtype) -> None:
    keys, values = ((torch.rand_like(t) * 2 - 1).mul(6e4).to(dtype) for t in states(2, 2, 64, 40))
    keys[0, 0, 0], keys[0, 0, 1] = 6e4, -6e4
    form = FORMATS[fmt]
    largest = float(keys.abs().max())
    levels: int = 2**form.bits - (0 if form.midrise else 1)
    step = {"fp8_e4m3": 32 / 448, "fp8_e5m2": 8192 / 57344}.get(fmt, 2 / levels) * largest
    rounding = largest * torch.finfo(dtype).eps / 2
    config = alike(fmt, axis, clip="minmax")
    for got, right in zip(filled(config, (keys, values)).materialize(), (keys, values), strict=True):
        assert bool(got.isfinite().all())
        error = (got.double() - right.double()).abs().amax()
        assert error <= step / 2 * (1 + TOLERANCES["metadata_rounding"]) + rounding


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("fmt", LOSSY)
def test_case_08_tiny_values_as_exact_as_ordinary_ones(fmt: str, axis: str, dtype: torch.dtype) -> None:
    config = alike(fmt, axis)
    ordinary = tuple(tensor.to(dtype) for tensor in states(2, 2, 64, 40))
    errors = [relative_error(got, x) for got, x in zip(filled(config, ordinary).materialize(), ordinary, strict=True)]
    small = tuple((tensor.double() * 1e-6).to(dtype) for tensor in ordinary)
    for got, right, error in zip(filled(config, small).materialize(), small, errors, strict=True):
        own_grid = 0.3 * TOLERANCES["fp16_subnormal_spacing"] / 1e-6 if dtype == torch.float16 else 0.0
        assert relative_error(got, right) <= error * (1 + TOLERANCES["other_mantissas"]) + own_grid
    if dtype != torch.float16:
        scaled = filled(config, (ordinary[0] * 2.0**-20, ordinary[1] * 2.0**-20)).materialize()
        for got, right in zip(scaled, filled(config, ordinary).materialize(), strict=True):
            assert torch.equal(got, right * 2.0**-20)


# -------------------------------------------------------------------- 9: degenerate groups


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("fmt", LOSSY)
def test_case_09_zeros_and_constants(fmt: str, axis: str, dtype: torch.dtype) -> None:
    zeros = torch.zeros(1, 2, 32, 24, dtype=dtype)
    assert all(torch.equal(got, zeros) for got in filled(alike(fmt, axis), (zeros, zeros)).materialize())
    if fmt not in WITH_ZERO_POINT:
        return
    limit = TOLERANCES["fp32_constant_in_fp16_metadata"] if dtype == torch.float32 else 0.0
    for constant in (1.0, -1.0, 0.1, -300.3, 1e-6, 6e4, 3.1415927):
        same = torch.full((1, 2, 32, 24), constant, dtype=dtype)
        for got in filled(alike(fmt, axis), (same, same)).materialize():
            torch.testing.assert_close(got, same, rtol=limit, atol=0)
        for got in filled(alike(fmt, axis, scale_format="fp32"), (same, same)).materialize():
            assert torch.equal(got, same)


@pytest.mark.parametrize("fmt", WITH_ZERO_POINT)
def test_case_09_groups_of_one_and_constant_channels(fmt: str) -> None:
    """A group of one channel of one token is a constant; a channel that never changes is one among others that do."""
    keys, values = states(1, 2, 32, 24, dtype=torch.bfloat16)
    for got, right in zip(filled(alike(fmt, "token", 1), (keys, values)).materialize(), (keys, values), strict=True):
        assert torch.equal(got, right)
    keys[..., 5] = 17.5
    assert bool((filled(alike(fmt, "channel"), (keys, values)).materialize()[0][..., 5] == 17.5).all())
    lone = filled(alike(fmt, "channel"), (keys[:, :, :1], values[:, :, :1]))
    assert torch.equal(lone.materialize()[0], keys[:, :, :1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("fmt", LOSSY)
def test_case_09_one_huge_channel_leaves_the_others(fmt: str, dtype: torch.dtype) -> None:
    keys, values = states(1, 2, 64, 40, dtype=dtype)
    ordinary = filled(alike(fmt, "channel"), (keys, values)).materialize()[0]
    keys[..., 7] = 60000
    huge = filled(alike(fmt, "channel"), (keys, values)).materialize()[0]
    others = torch.arange(40) != 7
    assert torch.equal(huge[..., others], ordinary[..., others])
    torch.testing.assert_close(huge[..., 7], keys[..., 7], rtol=_constant_error(fmt), atol=0)


def _constant_error(fmt: str) -> float:
    """Relative error of a constant group: none with a zero point; the largest fp8 value is a level; on a mid-rise grid
    the searched gain leaves at most half a step of the levels next to the deviation."""
    if FORMATS[fmt].midrise:
        return FORMATS[fmt].step / 2
    return 2.0**-10 if "fp8" in fmt else 0.0


# -------------------------------------------------------------------- 20: NaN and Inf

TOUCHED = {
    "channel": (1, 1, slice(16, 32), 5),
    "token": (1, 1, 19, slice(0, 8)),
    "head": (1, 1, slice(16, 32), slice(None)),
    "tensor": (1, slice(None), slice(16, 32), slice(None)),
}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("fmt", LOSSY)
def test_case_20_nan_and_inf_stay_in_their_group(fmt: str, axis: str, bad: float) -> None:
    """Group of tokens 16 to 31, channels 0 to 7, of row 1 and head 1; tokens in the window are exact in any case."""
    config = alike(fmt, axis, 8 if axis == "token" else 16, residual=10)
    keys, values = states(3, 2, 100, 24)
    clean = filled(config, (keys, values)).materialize()
    dirty_keys, dirty_values = keys.clone(), values.clone()
    for tensor in (dirty_keys, dirty_values):
        tensor[1, 1, 19, 5] = tensor[2, 0, 99, 0] = bad
    for got, right in zip(filled(config, (dirty_keys, dirty_values), chunk=7).materialize(), clean, strict=True):
        touched = torch.zeros_like(right, dtype=torch.bool)
        touched[TOUCHED[axis]] = True
        assert bool(got[touched].isnan().all())
        assert not bool(got[2, 0, 99, 0].isfinite())
        touched[2, 0, 99, 0] = True
        assert torch.equal(got[~touched], right[~touched])
