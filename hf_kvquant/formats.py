"""Number formats: what one code means, before any scale or zero point.

Decision: a format maps a *unit value* u to a code and back; a group of values x is stored as ``x = u * scale + zero``.
The quantizer, the storage and the kernels know only two kinds of decoding, never a format's name:

- ``affine``: u is the code itself (asymmetric), the code minus half the code range (symmetric), or, on a mid-rise
  grid, ``(code - (2^b - 1) / 2) * step``, with no level at zero and the step that errs least for a normal distribution
  (Max 1960, "Quantizing for minimum distortion", table II): the scale is then the deviation of the group;
- ``table``: u is looked up by the code, in the 256 values of an 8-bit float (fp8) or in any increasing ``levels``.

``none`` keeps the tensor as delivered; it makes every cache operation testable bit for bit against ``DynamicCache``.
To add a format, add one entry to ``FORMATS``; tests run over the registry. An entry made at run time serves as well
(``notebooks/06_add_your_own_format.ipynb``).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from hf_kvquant.packing import PLANE_WIDTHS

KINDS = ("none", "affine", "table")


@dataclass(frozen=True)
class NumberFormat:
    """One number format.

    Attributes:
        name: key in ``FORMATS``.
        bits: stored bits of one code (0 for ``none``: the delivered dtype is stored).
        kind: "none", "affine" or "table".
        dtype: the 8-bit float behind a table format.
        levels: the 2^bits unit values of a table format without a float behind it, increasing.
        step: distance of neighbouring unit values (affine).
        midrise: levels at odd multiples of half a step.

    Raises:
        ValueError: an unknown ``kind``, ``bits`` that no planes hold, or a table without a float behind it whose
            ``levels`` are not 2^bits finite increasing numbers.

    Source: integers as in KIVI (Liu et al. 2024, arXiv 2402.02750); 8-bit floats from Micikevicius et al.
    2022, arXiv 2209.05433, table 1; mid-rise steps from Max 1960, "Quantizing for minimum distortion", table II.
    """

    name: str
    bits: int
    kind: str
    dtype: torch.dtype | None = None
    step: float = 1.0
    midrise: bool = False
    levels: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is not valid: choose one of {', '.join(KINDS)}")
        if self.kind != "none" and self.bits not in PLANE_WIDTHS:
            raise ValueError(f"bits={self.bits!r} is not valid: choose one of {', '.join(map(str, PLANE_WIDTHS))}")
        if self.kind != "table" or self.dtype is not None:
            return
        object.__setattr__(self, "levels", tuple(self.levels))
        numbers = all(isinstance(each, int | float) and math.isfinite(each) for each in self.levels)
        increasing = numbers and all(a < b for a, b in itertools.pairwise(self.levels))
        if len(self.levels) != 2**self.bits or not increasing:
            raise ValueError(
                f"levels={self.levels} is not valid: give 2^bits = {2**self.bits} finite increasing numbers"
            )

    @property
    def lossless(self) -> bool:
        """Whether tensors are kept as delivered."""
        return self.kind == "none"

    @property
    def only_symmetric(self) -> bool:
        """Whether the format has no use for a zero point."""
        return self.kind == "table" or self.midrise

    def offset(self, symmetric: bool) -> float:
        """Code of the unit value 0 where the range is ``symmetric`` (a half on a mid-rise grid); asymmetric codes start
        at 0."""
        if self.midrise:
            return (2**self.bits - 1) / 2
        return 2 ** (self.bits - 1) if symmetric and self.kind == "affine" else 0

    def unit_limit(self, symmetric: bool) -> float:
        """Largest unit value; scales are (range / unit_limit). ``symmetric`` ranges are restricted to +-(2^(bits-1) -
        1); the outer levels of a mid-rise grid stand for half a step more."""
        if self.midrise:
            return 2 ** (self.bits - 1) * self.step
        if self.kind == "table":
            return torch.finfo(self.dtype).max if self.dtype is not None else max(map(abs, self.levels))
        return float(2 ** (self.bits - 1) - 1 if symmetric else 2**self.bits - 1)

    def encode(self, units: torch.Tensor, symmetric: bool = False) -> torch.Tensor:
        """Codes (uint8) of ``units`` (fp32, any shape), under a ``symmetric`` range or not: nearest, saturating; NaN
        becomes unit value 0. Ties go to even, between ``levels`` to the lower one."""
        limit = self.unit_limit(symmetric)
        if self.levels:
            middles = [(a + b) / 2 for a, b in itertools.pairwise(self.levels)]
            edges = torch.tensor(middles, device=units.device)
            return torch.bucketize(units.nan_to_num(0.0).contiguous(), edges).to(torch.uint8)
        if self.kind == "table":
            assert self.dtype is not None
            return units.nan_to_num(0.0).clamp(-limit, limit).to(self.dtype).view(torch.uint8)
        if self.midrise:
            return (self._levels(units).nan_to_num_(0.0) + 2 ** (self.bits - 1)).to(torch.uint8)
        low = -limit if symmetric else 0.0
        return (units.round().clamp(low, limit).nan_to_num(0.0) + self.offset(symmetric)).to(torch.uint8)

    def _levels(self, units: torch.Tensor) -> torch.Tensor:
        """Cells of a mid-rise grid, counted from the middle."""
        half = 2 ** (self.bits - 1)
        return (units / self.step).sub_(0.5).round_().clamp_(-half, half - 1)

    def nearest(self, units: torch.Tensor, symmetric: bool = False) -> torch.Tensor:
        """``decode(encode(units, symmetric), symmetric)``; on a mid-rise grid without the way through bytes, and NaN
        stays NaN."""
        if self.midrise:
            return self._levels(units).add_(0.5).mul_(self.step)
        return self.decode(self.encode(units, symmetric), symmetric)

    def decode(self, codes: torch.Tensor, symmetric: bool = False) -> torch.Tensor:
        """Unit values (fp32) of ``codes`` (uint8, any shape) under a ``symmetric`` range or not; exact."""
        if self.levels:
            return torch.tensor(self.levels, device=codes.device)[codes.int()]
        if self.kind == "table":
            assert self.dtype is not None
            return codes.view(self.dtype).float()
        units = codes.float() - self.offset(symmetric)
        return units * self.step if self.midrise else units


# Bits -> step of the mid-rise grid of 2^b levels with the least squared error for N(0, 1).
MIDRISE_STEPS = {1: 1.5956, 2: 0.9954, 3: 0.5862, 4: 0.3351, 5: 0.1881, 6: 0.1040, 8: 0.0310}


FORMATS: dict[str, NumberFormat] = {
    fmt.name: fmt
    for fmt in (
        NumberFormat("none", 0, "none"),
        NumberFormat("int2", 2, "affine"),
        NumberFormat("int3", 3, "affine"),
        NumberFormat("int4", 4, "affine"),
        NumberFormat("int8", 8, "affine"),
        NumberFormat("fp8_e4m3", 8, "table", torch.float8_e4m3fn),
        NumberFormat("fp8_e5m2", 8, "table", torch.float8_e5m2),
        *(NumberFormat(f"midrise{b}", b, "affine", step=step, midrise=True) for b, step in MIDRISE_STEPS.items()),
    )
}
"""Name -> number format: what ``TensorSpec.format`` may name."""
