"""Scales and zero points <-> stored metadata.

Decision: metadata is stored relative to one power of two per block and head (``exponent``), chosen so that the largest
of them just fits. That makes narrow formats independent of the size of the tensor: keys of 6e4 do not overflow, values
of 1e-6 do not underflow. ``n`` blocks, ``groups`` = ``[G/g, D/c]``::

    scale          [B, K, n, groups]  fp16 | fp32 | fp8 (e4m3) | log2_16, log2_8 (int8) | static: nothing stored
    zero           [B, K, n, groups]  fp16 | fp32 | int8
    exponent       [B, K, n]          int8, with all scale formats but fp32 and static
    zero_exponent  [B, K, n]          int8, with fp16 zero points beside scales that are not fp16
    zero_range     [B, K, n]          fp32, with int8 zero points: the magnitude of code 127

``log2_N`` holds ``2^(exponent + (code - 127) / N)``: N steps per octave, so all blocks share one grid of scales and
254 / N octaves below the largest scale of the block are told apart; code -128 is 0, code -127 NaN. Where ranges are
covered (min-max), scales are rounded up and zero points down, so the stored range holds the true one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvquant.exact import constant, power_of_two

_EXPONENT_RANGE = (-100, 127)
_LOG_ZERO, _LOG_NAN, _LOG_LOW, _LOG_HIGH = -128, -127, -126, 127


@dataclass(frozen=True)
class ScaleFormat:
    """How a scale is stored.

    Attributes:
        name: key in ``SCALE_FORMATS``.
        dtype: of the stored tensor; None: nothing is stored (static).
        steps: codes per octave of a logarithmic format, else 0.
        headroom: magnitudes are brought below ``2**headroom`` by the block's exponent; None: no exponent.
    """

    name: str
    dtype: torch.dtype | None
    steps: int = 0
    headroom: int | None = None

    def exponent(self, largest: torch.Tensor) -> torch.Tensor:
        """int8 exponents, shaped as ``largest`` (finite magnitudes), that bring them just below the largest stored
        value, with room for rounding up twice."""
        assert self.headroom is not None
        exponent = (torch.frexp(largest).exponent - self.headroom).clamp(*_EXPONENT_RANGE)
        if not self.steps:
            assert self.dtype is not None
            limit = torch.finfo(self.dtype).max * 127 / 128
            exponent = exponent + (largest / power_of_two(exponent) > limit).int()
        return torch.where(largest > 0, exponent.clamp(*_EXPONENT_RANGE), 0).to(torch.int8)

    def encode(self, scale: torch.Tensor, up: bool) -> torch.Tensor:
        """What is stored of ``scale``, fp32 of any shape and already divided by the block's power of two: the nearest,
        or with ``up`` the nearest that is not below."""
        assert self.dtype is not None
        if self.steps:
            bounds = _log_levels(self.steps, 0.0 if up else 0.5, scale.device)
            code = torch.bucketize(scale.contiguous(), bounds).clamp_max(_LOG_HIGH - _LOG_LOW) + _LOG_LOW
            tiny = scale <= (0.0 if up else bounds[0] / 2)  # nearer to 0 than to the lowest scale
            code = torch.where(tiny, _LOG_ZERO, code)
            return torch.where(scale.isfinite(), code, _LOG_NAN).to(torch.int8)
        if self.dtype == torch.float32:
            return scale
        return (-round_down(-scale, self.dtype).float()).to(self.dtype) if up else scale.to(self.dtype)

    def decode(self, stored: torch.Tensor, computed: bool = False) -> torch.Tensor:
        """Inverse of ``encode``: fp32 scales of what is ``stored``. ``computed``: logarithmic scales by an exponential
        instead of a table, which compiled code can vectorize; the last bit may differ."""
        if not self.steps:
            return stored.float()
        if computed:
            code = stored.float()
            scale = torch.exp2((code - _LOG_HIGH) / self.steps)
            return torch.where(code == _LOG_ZERO, 0.0, torch.where(code == _LOG_NAN, torch.nan, scale))
        levels = _log_levels(self.steps, 0.0, stored.device)
        special = torch.tensor([0.0, torch.nan], device=stored.device)
        return torch.cat([special, levels])[stored.int() - _LOG_ZERO]


SCALE_FORMATS: dict[str, ScaleFormat] = {
    fmt.name: fmt
    for fmt in (
        ScaleFormat("fp16", torch.float16, headroom=16),
        ScaleFormat("fp32", torch.float32),
        ScaleFormat("fp8", torch.float8_e4m3fn, headroom=9),
        ScaleFormat("log2_16", torch.int8, steps=16, headroom=0),
        ScaleFormat("log2_8", torch.int8, steps=8, headroom=0),
        ScaleFormat("static", None),
    )
}
"""Name -> scale format: what ``TensorSpec.scale_format`` may name."""
ZERO_FORMATS = ("fp16", "fp32", "int8")
"""What ``TensorSpec.zero_format`` may name."""


def _log_levels(steps: int, above: float, device: torch.device) -> torch.Tensor:
    """The scales of codes -126 .. 127, or what lies ``above`` steps above them, computed in double precision."""

    def build() -> torch.Tensor:
        codes = range(_LOG_LOW, _LOG_HIGH + 1)
        return torch.tensor([2.0 ** ((code - _LOG_HIGH + above) / steps) for code in codes])

    return constant(("log levels", steps, above), device, build)


def largest_finite(magnitude: torch.Tensor) -> torch.Tensor:
    """``[B, K, n, groups] -> [B, K, n]``."""
    return torch.where(magnitude.isfinite(), magnitude, 0.0).amax((-2, -1))


def round_down(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 -> the largest ``dtype`` value not above (for |x| up to its maximum; exact where representable)."""
    nearest = x.to(dtype)
    info = torch.finfo(dtype)
    # Half to one spacing below x: rounds to the neighbour below ``nearest`` where that lies above x.
    below = (x - x.abs() * (info.eps / 2) - info.smallest_normal * info.eps * 0.5).to(dtype)
    # float8 has no torch.where
    return torch.where(nearest.float() > x, below.float(), nearest.float()).to(dtype)
