"""Which scale and zero point a group gets: ranges, clipping, and their search; all with the metadata *as stored*.

Decision: every rule is a list of candidates ``(low, high)``. Min-max and percentile are lists of one; "mse" tries a few
and keeps, per group, the one that reads back with the smallest squared error after its metadata has been rounded. On a
mid-rise grid the candidates are multiples of the group's root mean square ("gain search"), otherwise the min-max range
shrunk about its middle.

Ranges and scales are computed in fp32, errors relative to a group's own scale, so that magnitudes from 1e-30 to 1e38
give the same codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from hf_kvquant.blocks import QuantizedBlocks
from hf_kvquant.exact import power_of_two, tree_mean, tree_sum
from hf_kvquant.formats import NumberFormat
from hf_kvquant.scales import SCALE_FORMATS, largest_finite, round_down
from hf_kvquant.spec import TensorSpec

Segments = tuple[tuple[NumberFormat, slice], ...]
Range = tuple[torch.Tensor | None, torch.Tensor]  # low (None: symmetric) and high, [B, K, n, G/g, D/c]

_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
# Multiples of the root mean square tried for one scale: per channel of equal width, and per token of mixed widths,
# where a few large channels may stick out of their narrow grids.
_GAINS_UNIFORM = (0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2)
_GAINS_MIXED = (0.7, 0.8, 0.9, 1.0, 1.12, 1.25, 1.4, 1.6, 2.0)


def choose(
    grouped: torch.Tensor, spec: TensorSpec, segments: Segments, importance: torch.Tensor | None
) -> QuantizedBlocks:
    """Metadata of every group (planes still empty).

    Args:
        grouped: ``[B, K, n, G/g, g, D/c, c]``, fp32.
        spec: how.
        segments: number formats and the channels of a group that they serve.
        importance: ``[B, K, D]`` weights of the squared error in the search, or None for equal weights.
    """
    if spec.scale_format == "static":
        return QuantizedBlocks(())
    searches_gain = spec.number_format.midrise and spec.clip == "mse"
    limit, ranges = _gains(grouped, spec) if searches_gain else _ranges(grouped, spec)
    stored = list(_stored(ranges, limit, not searches_gain, spec))
    if len(stored) == 1:
        return stored[0]
    return _best(grouped, stored, spec, segments, importance)


def read_scale(blocks: QuantizedBlocks, spec: TensorSpec, device: torch.device, computed: bool = False) -> torch.Tensor:
    """Scales as read back, fp32 ``[B, K, n, G/g, D/c]`` (static: broadcastable to it); ``computed``: see
    :meth:`ScaleFormat.decode`."""
    if spec.scale_format == "static":
        return torch.tensor(spec.static_scales, device=device)[:, None, None, None]
    assert blocks.scale is not None
    scale, power = SCALE_FORMATS[spec.scale_format].decode(blocks.scale, computed), _power(blocks.exponent)
    return scale if power is None else scale * power


def read_zero(blocks: QuantizedBlocks, spec: TensorSpec) -> torch.Tensor | None:
    """Zero points as read back, fp32; None where the format has none."""
    if blocks.zero is None:
        return None
    if spec.zero_format == "int8":
        assert blocks.zero_range is not None
        return blocks.zero.float() * (blocks.zero_range / 127)[..., None, None]
    power = _power(blocks.exponent if _share_exponent(spec) else blocks.zero_exponent)
    return blocks.zero.float() if power is None else blocks.zero.float() * power


def units_of(grouped: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Elements in units of the format: ``(x - zero) / scale``, 0 where the scale is 0."""
    inverse = torch.where(scale >= torch.finfo(torch.float32).tiny, 1.0 / scale, torch.zeros_like(scale))
    return (grouped if zero is None else grouped - spread(zero)) * spread(inverse)


def spread(metadata: torch.Tensor) -> torch.Tensor:
    """``[..., G/g, D/c]`` -> broadcastable against a grouped tensor."""
    return metadata[..., :, None, :, None]


# -------------------------------------------------------------------- candidates


def _gains(grouped: torch.Tensor, spec: TensorSpec) -> tuple[float, list[Range]]:
    """Gains to try, as ranges that end at unit value 1."""
    rms = _root_mean_square(grouped, _group_dims(spec))
    return 1.0, [(None, rms * gain) for gain in (_GAINS_MIXED if spec.widths else _GAINS_UNIFORM)]


def _ranges(grouped: torch.Tensor, spec: TensorSpec) -> tuple[float, list[Range]]:
    """Ranges to try and the unit value that their upper end stands for."""
    low, high = _bounds(grouped, spec)
    limit = spec.number_format.unit_limit(bool(spec.symmetric))
    shrink = _SHRINK if spec.clip == "mse" else (1.0,)
    if spec.symmetric:
        bound = torch.maximum(-low, high)
        return limit, [(None, bound * factor) for factor in shrink]
    inner, outer = [(1 - factor) / 2 for factor in shrink], [(1 + factor) / 2 for factor in shrink]
    return limit, [(low * o + high * i, high * o + low * i) for i, o in zip(inner, outer, strict=True)]


def _group_dims(spec: TensorSpec) -> tuple[int, ...]:
    return (1, -3, -1) if spec.axis == "tensor" else (-3, -1)


def _bounds(grouped: torch.Tensor, spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor]:
    dims = _group_dims(spec)
    low, high = (bound.squeeze(-1).squeeze(-2) for bound in (grouped.amin(dims, True), grouped.amax(dims, True)))
    if isinstance(spec.clip, str):
        return low, high
    poison = 0 * (low + high)  # NaN where the group holds NaN or Inf, which a percentile would pass over
    flat = grouped.transpose(-3, -2).flatten(-2)
    flat = flat if spec.axis != "tensor" else flat.movedim(1, -2).flatten(-2)[:, None]
    ordered = flat.sort(-1).values
    tail = (1 - float(spec.clip or 1.0)) / 2
    return _quantile(ordered, tail) + poison, _quantile(ordered, 1 - tail) + poison


def _quantile(ordered: torch.Tensor, share: float) -> torch.Tensor:
    """Between the two elements next to ``share`` of the way through ``ordered [..., n]``, linearly."""
    place = share * (ordered.shape[-1] - 1)
    below = min(int(place), ordered.shape[-1] - 2) if ordered.shape[-1] > 1 else 0
    upper = ordered[..., min(below + 1, ordered.shape[-1] - 1)]
    return ordered[..., below] * (1 - (place - below)) + upper * (place - below)


def _root_mean_square(grouped: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Relative to the largest magnitude first: squares of 1e38 or 1e-30 leave the range of fp32."""
    largest = grouped.abs().amax(dims, True)
    mean = (grouped / torch.where(largest > 0, largest, 1.0)).square()
    for dim in dims:
        mean = tree_mean(mean, dim)
    return (mean.sqrt() * largest).squeeze(-1).squeeze(-2)


# -------------------------------------------------------------------- storing


def _stored(ranges: list[Range], limit: float, up: bool, spec: TensorSpec) -> Iterator[QuantizedBlocks]:
    """Every candidate as it would be stored, all under the same exponents: zero points first, then the scales that
    reach from them to the upper end. ``up``: scales may not be rounded down."""
    head, scale_format = QuantizedBlocks(()), SCALE_FORMATS[spec.scale_format]
    zeros = [low for low, _ in ranges if low is not None]
    if zeros:
        _prepare_zeros(head, _maximum([largest_finite(low.abs()) for low in zeros]), ranges, limit, spec)
    stored = [head if low is None else replace(head, zero=_stored_zero(low, head, spec)) for low, _ in ranges]
    if scale_format.headroom is not None and not _share_exponent(spec):
        steps = [_step(high, read_zero(each, spec), limit) for (_, high), each in zip(ranges, stored, strict=True)]
        head.exponent = scale_format.exponent(_maximum([largest_finite(step) for step in steps]))
    for (_, high), each in zip(ranges, stored, strict=True):
        each = replace(each, exponent=head.exponent)
        each.scale = _stored_scale(high, each, limit, up, spec)
        yield each


def _prepare_zeros(
    head: QuantizedBlocks, largest: torch.Tensor, ranges: list[Range], limit: float, spec: TensorSpec
) -> None:
    """What the zero points of a block are stored relative to."""
    if _share_exponent(spec):
        scales = _maximum([largest_finite(_step(high, low, limit)) for low, high in ranges])
        head.exponent = SCALE_FORMATS["fp16"].exponent(torch.maximum(scales, largest))
    elif spec.zero_format == "int8":
        head.zero_range = largest
    elif spec.zero_format == "fp16":
        head.zero_exponent = SCALE_FORMATS["fp16"].exponent(largest)


def _stored_zero(low: torch.Tensor, head: QuantizedBlocks, spec: TensorSpec) -> torch.Tensor:
    """Rounded down, so that the range still begins below its smallest element."""
    if spec.zero_format == "int8":
        assert head.zero_range is not None
        unit = (head.zero_range / 127)[..., None, None]
        code = torch.where(unit > 0, low / unit, 0.0).floor().clamp(-127, 127)
        return code.nan_to_num(0.0).to(torch.int8)
    if spec.zero_format == "fp32":
        return low
    power = _power(head.exponent if _share_exponent(spec) else head.zero_exponent)
    assert power is not None
    return round_down(low / power, torch.float16)


def _stored_scale(
    high: torch.Tensor, blocks: QuantizedBlocks, limit: float, up: bool, spec: TensorSpec
) -> torch.Tensor:
    """From the zero point as stored to ``high``, both divided by the block's power of two before they are subtracted:
    max - min may overflow."""
    zero, power = read_zero(blocks, spec), _power(blocks.exponent)
    if power is not None:
        high, zero = high / power, None if zero is None else zero / power
    return SCALE_FORMATS[spec.scale_format].encode(_step(high, zero, limit), up)


def _share_exponent(spec: TensorSpec) -> bool:
    return spec.scale_format == "fp16" and spec.zero_format == "fp16"


def _step(high: torch.Tensor, zero: torch.Tensor | None, limit: float) -> torch.Tensor:
    """Scale that reaches from the zero point to ``high``; divided before subtracting, since max - min may overflow."""
    return high / limit if zero is None else high / limit - zero / limit


def _maximum(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).amax(0)


def _power(exponent: torch.Tensor | None) -> torch.Tensor | None:
    return None if exponent is None else power_of_two(exponent)[..., None, None]


# -------------------------------------------------------------------- search


def _best(
    grouped: torch.Tensor,
    stored: list[QuantizedBlocks],
    spec: TensorSpec,
    segments: Segments,
    importance: torch.Tensor | None,
) -> QuantizedBlocks:
    """Per group the candidate of smallest squared error; the first of equals."""
    weights = None if importance is None else importance.unflatten(-1, grouped.shape[-2:])[:, :, None, None, None]
    reference = read_scale(stored[0], spec, grouped.device)
    best, error = stored[0], None
    for blocks in stored:
        scale = read_scale(blocks, spec, grouped.device)
        missed = _missed(units_of(grouped, scale, read_zero(blocks, spec)), segments, bool(spec.symmetric)).square_()
        summed = missed if weights is None else missed.mul_(weights)
        for dim in _group_dims(spec):
            summed = tree_sum(summed, dim)
        ratio = torch.where(reference > 0, scale / reference, 0.0)
        found = summed.squeeze(-1).squeeze(-2) * ratio.square()
        if error is None:
            error = found
            continue
        better = found < error
        error = torch.where(better, found, error)
        for name in ("scale", "zero"):
            old, new = getattr(best, name), getattr(blocks, name)
            if old is not None:
                best = replace(best, **{name: _where(better, new, old)})
    return best


def _where(condition: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """float8 has no torch.where: its bytes have."""
    if old.dtype == torch.float8_e4m3fn:
        return torch.where(condition, new.view(torch.uint8), old.view(torch.uint8)).view(old.dtype)
    return torch.where(condition, new, old)


def _missed(units: torch.Tensor, segments: Segments, symmetric: bool) -> torch.Tensor:
    """Nearest unit value minus unit value; channels without bits read as 0."""
    nearest = torch.zeros_like(units)
    for fmt, channels in segments:
        nearest[..., channels] = fmt.nearest(units[..., channels], symmetric)
    return nearest.sub_(units)
